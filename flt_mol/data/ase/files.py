"""Frames of the files that ASE reads, one after the other, and what was not read of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from flt_mol.data.ase.announced import check_counts, check_frames, open_text
from flt_mol.data.ase.compression import COMPRESSED, refuse_compressed, refuse_packing
from flt_mol.data.ase.database import database_rows
from flt_mol.data.ase.failures import what_failed
from flt_mol.data.ase.records import ALSO, atoms_record, occupancy_note
from flt_mol.data.ase.ulm import check_trajectory
from flt_mol.data.aselmdb.rows import Broken, Row

__all__ = ["IncompleteError", "MutableRecord", "holds_structures", "records_of"]

MutableRecord = dict[str, Any] | Row | Broken

# Formats of structures that a folder may hold; of others ASE guesses by suffix alone, such as a
# README.md for CASTEP's.
_OF_FOLDERS = {"traj", "extxyz", "xyz", "db", "cif", "vasp", "vasp-xdatcar", "vasp-out", "vasp-xml"}
_OF_FOLDERS |= {"proteindatabank", "xsf", "gen", "res", "aims", "lammps-data", "lammps-dump-text"}
_BY_NAME = (".traj", ".extxyz", ".xyz", ".db", ".cif")
_OF_LINES = {"extxyz", "xyz", "cif", "vasp", "vasp-xdatcar", "proteindatabank", "xsf", "gen"}
_HEAD = 4096  # bytes
_MOST_ATOMS = 10**8  # in a frame of a compressed file


class IncompleteError(ValueError):
    """A file that ends, or stops being readable, after some good frames."""


def records_of(path: Path, notes: dict[str, str] | None = None) -> Iterator[MutableRecord]:
    """All frames of a file by OC20's names, read one by one where the format allows it.

    Args:
        path: the file.
        notes: filled with doubts about the file, kind → text.

    Raises:
        ValueError: no regular file, an unknown format, or one that ASE cannot read, naming file
            and reason. It is an :class:`IncompleteError` where frames were read before; so no
            frames are lost unsaid.
    """
    if not path.is_file():
        raise ValueError(f"{path} is no regular file; copy its contents into one")
    notes = {} if notes is None else notes
    kind = _format_of(path)
    with path.open("rb") as file:
        refuse_packing(path, file.read(_HEAD), kind)
    count = 0
    try:
        _check_before(path, kind, notes)
        for record in _rows(path, kind) if kind in ("db", "json") else _images(path, notes):
            yield record
            count += 1
        reason = _unread(path, kind, count)
    except (Exception, MemoryError) as error:
        reason = what_failed(path, error)
        if not count:
            raise ValueError(f"ASE cannot read {path}: {reason}") from error
        raise IncompleteError(f"ASE reads {count} frames of {path}, then: {reason}") from error
    if reason:
        raise IncompleteError(f"ASE reads {count} frames of {path}: {reason}")


def holds_structures(path: Path) -> bool:
    """Whether a file among others in a folder is one of structures, by name and first bytes."""
    try:
        kind = _format_of(path)
    except ValueError:  # an empty one is a bad file of the folder, not another one
        return path.suffix.lower() in _BY_NAME
    if kind == "json":
        with path.open("rb") as file:
            head = file.read(_HEAD)
            file.seek(max(path.stat().st_size - _HEAD, 0))
            return all(name in head + file.read() for name in (b'"numbers"', b'"nextid"'))
    return kind in _OF_FOLDERS


def _format_of(path: Path) -> str:
    import ase.io.formats

    with path.open("rb") as file:
        head = file.read(_HEAD)
    if head.startswith(b"SQLite format 3\0"):
        return "db"
    if not head:
        raise ValueError(f"{path} is empty (0 bytes); download or write it again")
    if not head.strip(b"\0"):
        raise ValueError(f"{path} begins with zeros: an interrupted download; get it again")
    try:
        kind = ase.io.formats.filetype(str(path))
    except ase.io.formats.UnknownFileTypeError:
        kind = ""
    except Exception as error:
        refuse_packing(path, head, "")
        reason = str(error) or type(error).__name__
        raise ValueError(f"ASE cannot read {path}: {reason}") from error
    if kind not in ase.io.formats.ioformats:
        refuse_compressed(path, head)
        raise ValueError(
            f"{path} is of unknown format; read are LMDB files, and what ASE reads (traj, extxyz, "
            "cif, POSCAR, …) under its usual suffix"
        )
    return str(kind)


def _images(path: Path, notes: dict[str, str]) -> Iterator[MutableRecord]:
    import ase.io

    for atoms in ase.io.iread(path, index=":", do_not_split_by_at_sign=True):
        if "occupancy" not in notes:
            notes |= occupancy_note(atoms)
        yield atoms_record(atoms)


def _rows(path: Path, kind: str) -> Iterator[MutableRecord]:
    for row in database_rows(path, kind):
        for name, other in ALSO.items():
            if isinstance(row, Row):
                row.fill(name, row.get(other), other)
        yield row


def _check_before(path: Path, kind: str, notes: dict[str, str]) -> None:
    """What ASE would believe, or not tell of."""
    plain = path.suffix.lower() not in COMPRESSED
    if kind == "traj" and plain and not check_trajectory(path):
        notes[f"end of {path.name}"] = (
            f"{path.name} ends with a frame that was not written whole (left out)"
        )
    if kind in ("vasp", "vasp-xdatcar") and plain:
        check_counts(path)
    if kind in ("extxyz", "xyz"):
        most = path.stat().st_size if plain else _MOST_ATOMS
        check_frames(path, most, columns=kind == "extxyz")
    if kind in _OF_LINES and plain and path.stat().st_size:
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) not in b"\n\r":
                notes[f"end of {path.name}"] = (
                    f"{path.name} does not end with a line feed: its last number may be cut off"
                )


def _unread(path: Path, kind: str, count: int) -> str | None:
    """What ASE has passed over without a word, None where that is nothing."""
    checks: dict[str, Callable[[IO[str], int], str | None]] = {
        "extxyz": _after_blank,
        "cif": _blocks,
        "gen": _atoms_of_gen,
        "proteindatabank": _models,
    }
    check = checks.get(kind)
    if check is None or not count:
        return None
    with open_text(path) as file:
        return check(file, count)


def _after_blank(file: IO[str], count: int) -> str | None:
    """ASE stops at a blank line between frames."""
    lines = ((n, line) for n, line in enumerate(file, start=1) if not line.startswith("VEC"))
    for _ in range(count):
        _, line = next(lines, (0, "0"))
        for _ in range(int(line) + 1):
            next(lines, None)
    rest = next((n for n, line in lines if line.strip()), None)
    if rest is None:
        return None
    return f"it stops before line {rest}; remove the blank line there, or what is no frame"


def _atoms_of_gen(file: IO[str], count: int) -> str | None:
    """ASE takes as many atoms as there are, up to those announced, and no second structure."""
    words, _, *rest = (line.split() for line in file)
    announced = int(words[0])
    if len(rest) < announced:
        return f"{announced} atoms are announced, {sum(map(bool, rest))} are there"
    cell = 0 if words[1] == "C" else 4  # origin and vectors
    others = sum(map(bool, rest[announced + cell :]))
    if others:
        return f"{announced} atoms are announced, {others} more lines follow; remove them"
    return None


def _blocks(file: IO[str], count: int) -> str | None:
    blocks = sum(line.lower().startswith("data_") for line in file)
    if blocks <= count:
        return None
    return f"{blocks} blocks begin with data_; the others hold no whole structure: remove them"


def _models(file: IO[str], count: int) -> str | None:
    begun = ended = 0
    for line in file:
        begun += line.startswith("MODEL")
        ended += line.startswith("ENDMDL")
    return None if begun == ended else f"{begun} models begin, {ended} end; write the file again"
