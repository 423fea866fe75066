"""ASE's atoms, and the files and databases that ASE reads."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from flt_mol.data.dataset import StructuresDataset
from flt_mol.data.decoding import decode
from flt_mol.data.schema import ReadOptions, Record
from flt_mol.data.tags import layer_note
from flt_mol.files import foreign
from flt_mol.structures import Structures

if TYPE_CHECKING:
    from ase import Atoms

_OF_ATOMS = ("numbers", "positions", "tags")  # arrays that are fields under other names
# Formats of structures that a folder may hold; of others ASE guesses by suffix alone, such as a
# README.md for CASTEP's.
_OF_FOLDERS = {"traj", "extxyz", "xyz", "db", "cif", "vasp", "vasp-xdatcar", "vasp-out", "vasp-xml"}
_OF_FOLDERS |= {"proteindatabank", "xsf", "gen", "res", "aims", "lammps-data", "lammps-dump-text"}
_DATABASES = ("db", "json")  # whose rows are no frames
_INDEX = {"first": "0", "last": "-1", "all": ":"}
_SAME_CELL = 1e-4  # Å: what text formats round off
_HEAD = 4096  # bytes
_WAL = "in WAL mode? PRAGMA journal_mode=delete, or copy it to a writable folder"
_COLUMNS = {"numbers", "positions", "cell", "pbc", "tags", "constraints", "energy", "forces"}
_COLUMNS |= {"key_value_pairs", "data"}


def from_ase(
    atoms: Atoms, sid: int | str | None = None, *, ignore_energy: bool = False
) -> Structures:
    """ASE atoms as a batch of B = 1.

    Fixed are the atoms that `FixAtoms`, or `FixCartesian` and `FixScaled` in all three directions,
    hold. The energy of a calculator is never taken for the target: only `atoms.info["y_relaxed"]`
    is, an adsorption energy in eV; likewise "y_init". Relaxed positions are those of
    `atoms.arrays["pos_relaxed"]`.

    Args:
        atoms: the structure, with cell and pbc.
        sid: its name; None takes `atoms.info["sid"]`, else 0.
        ignore_energy: targets and relaxed positions are not read, valid or not.

    Raises:
        ValueError: as `flt_mol.data.decoding.decode`.

    Examples:
        >>> from ase.build import molecule
        >>> from_ase(molecule("H2O"), sid="water")
        Structures(1 systems, 3 atoms)
    """
    record = atoms_record(atoms) | ({} if sid is None else {"sid": sid})
    options = ReadOptions(ignore_energy=ignore_energy)
    return decode([record], options, where=lambda _: "ASE atoms")


def to_ase(structures: Structures, index: int = 0) -> Atoms:
    """System `index` as ASE atoms: tags, `FixAtoms`, and sid and targets in `info`.

    Forces are those of a `SinglePointCalculator`, which has no energy.
    """
    from ase import Atoms
    from ase.calculators.singlepoint import SinglePointCalculator
    from ase.constraints import FixAtoms

    system = structures[index].to("cpu")
    targets = {"y_relaxed": system.energy, "y_init": system.energy_initial}
    known = {name: float(value[0]) for name, value in targets.items() if value is not None}
    atoms = Atoms(
        numbers=system.atomic_numbers.numpy(),
        positions=system.positions.double().numpy(),
        cell=system.cell[0].double().numpy(),
        pbc=system.pbc[0].numpy(),
        tags=system.tags.numpy(),
        info={"sid": system.sid[0], **known},
    )
    if system.fixed.any():
        atoms.set_constraint(FixAtoms(mask=system.fixed.numpy()))
    if system.forces is not None and not system.forces.isnan().all():
        atoms.calc = SinglePointCalculator(atoms, forces=system.forces.double().numpy())
    return atoms


def atoms_record(atoms: Any) -> dict[str, Any]:
    """The atoms in the names of the OC20 schema.

    Further fields are, by name: `info`, a database row's data and its key-value pairs (the first
    that holds a name counts), and vectors per atom of `arrays`. What a calculator has found for
    these positions is in "calculator" (energy, eV) and "forces" (eV/Å).
    """
    info = dict(atoms.info)
    record: dict[str, Any] = {
        name: array
        for name, array in atoms.arrays.items()
        if name not in _OF_ATOMS and array.ndim == 2 and array.dtype.kind in "biuf"
    }
    record |= _merged(info.pop("key_value_pairs", {}), info.pop("data", {}))
    record |= {name: value for name, value in info.items() if isinstance(name, str)}
    if isinstance(sid := record.get("sid"), str):
        record["sid"] = sid.strip() or None
    record.pop("unique_id", None)
    record.pop("calculator", None)
    if not getattr(atoms.calc, "check_state", lambda _: [])(atoms):  # results of other positions
        found = getattr(atoms.calc, "results", {})
        if found.get("energy") is not None:
            record["calculator"] = float(found["energy"])
        if found.get("forces") is not None:
            record["forces"] = np.asarray(found["forces"])
    return record | {
        "pos": atoms.get_positions(),
        "atomic_numbers": atoms.get_atomic_numbers(),
        "cell": np.asarray(atoms.get_cell()),
        "pbc": np.asarray(atoms.get_pbc()),
        "tags": np.asarray(atoms.get_tags()),
        "fixed": _fixed_atoms(atoms),
        "natoms": len(atoms),
    }


def _fixed_atoms(atoms: Atoms) -> NDArray[np.bool_]:
    from ase.constraints import FixAtoms, FixCartesian, FixScaled

    held = np.zeros((len(atoms), 3), dtype=bool)
    for constraint in atoms.constraints:
        if isinstance(constraint, FixAtoms | FixCartesian | FixScaled):
            try:
                held[constraint.index] |= getattr(constraint, "mask", True)
            except IndexError as error:
                raise ValueError(f"a {type(constraint).__name__} holds atoms: {error}") from error
    return np.asarray(held.all(axis=1))


class AseDataset(StructuresDataset):
    """All frames of a file that ASE reads, kept in memory; invalid frames are found immediately.

    The sid of a frame is its `info["sid"]`, else the file's name, with #0, #1, … if there are
    several; a relaxation is named by `relaxation_name`. Further fields are those of
    `atoms_record`.
    """

    def _open(self) -> int:
        kind = _format_of(self.path)
        self.kind = f"ASE {kind}"
        try:
            self._items.extend(frames_of(self.path))
        except ValueError as error:
            if self.options.on_error == "raise" or not self._items:
                raise
            self.skipped.append(str(error))
        if not self._items:
            raise ValueError(f"no records in {self.path}: ASE finds no structures in it")
        are_frames = kind not in _DATABASES
        self.is_relaxation = are_frames and _is_relaxation(self._items)
        index = self.options.frames or ("first" if self.is_relaxation else "all")
        self._index = _INDEX[index if are_frames else "all"] if index in _INDEX else index
        name = relaxation_name(self.path) if self.is_relaxation else self.path.name
        alone = len(self._items) == 1 or (self.is_relaxation and ":" not in self._index)
        for row, record in enumerate(self._items):
            if record.get("sid") is None:
                self._items[row] = {**record, "sid": name if alone else f"{name}#{row}"}
        return len(self._items)

    def _finish(self, count: int) -> None:
        super()._finish(count)
        self.read_through()
        for row in self._rows if self.options.tag_slab is None else ():
            self.notes.add(layer_note(self._items[row]))

    def _where(self, row: int) -> str:
        return f"{self.path}#{row}" if len(self._items) > 1 else str(self.path)


def relaxation_name(path: Path) -> str:
    """X of ``X.traj`` and of ``X/relax.traj``."""
    return path.absolute().parent.name if path.stem == "relax" else path.stem


def _is_relaxation(frames: Sequence[Record]) -> bool:
    return len(frames) > 1 and all(
        frame.get("calculator") is not None
        and str(frame.get("sid")) == str(frames[0].get("sid"))
        and not what_changes(frames[0], frame)
        for frame in frames
    )


def what_changes(first: Record, frame: Record) -> str:
    """What no relaxation changes, but these two frames do not share; empty if they do."""
    if not np.array_equal(first["atomic_numbers"], frame["atomic_numbers"]):
        return "other atoms than the first, or another order"
    change = np.abs(first["cell"] - frame["cell"]).max()
    if not change <= _SAME_CELL or not np.array_equal(first["pbc"], frame["pbc"]):
        return f"another cell (by {change:.3g} Å) or pbc than the first: relax in a fixed cell"
    return ""


def frames_of(path: Path) -> Iterator[dict[str, Any]]:
    """All frames of a file by OC20's names, read one by one where the format allows it.

    Raises:
        ValueError: a file that ASE cannot read, or not to its end; naming file and reason.
    """
    import ase.io

    kind = _format_of(path)
    count = 0
    try:
        if kind in _DATABASES:
            frames = _rows(path, kind)
        else:
            frames = ase.io.iread(str(path), index=":", do_not_split_by_at_sign=True)
        for atoms in frames:
            yield atoms_record(atoms)
            count += 1
        if path.suffix.lower() in (".xyz", ".extxyz"):
            _check_end(path)
    except Exception as error:  # of any kind
        before = f" beyond its first {count} frames" if count else ""
        hint = _WAL if isinstance(error, sqlite3.OperationalError) else foreign(path)
        found = "; ".join(filter(None, (hint, _named(error))))
        raise ValueError(f"ASE cannot read {path}{before} ({found})") from error


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)!r:.200}"  # repr of some holds a whole file


def _check_end(path: Path) -> None:
    """Refuse frames after a blank line, at which ASE stops; a comment may be blank."""
    before, last = "0", ""
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if line.strip().isdigit() and not (last.strip() or before.strip().isdigit()):
                raise ValueError(f"line {number - 1} is blank and frames follow it: remove it")
            before, last = last, line


def _rows(path: Path, kind: str) -> Iterator[Any]:
    import ase.db

    if kind == "db":
        # ase.db would write its tables into any file of that name.
        where = f"file:{quote(str(path.absolute()))}?mode=ro"
        with closing(sqlite3.connect(where, uri=True)) as connection:
            tables = "SELECT name FROM sqlite_master WHERE name = 'systems'"
            if not connection.execute(tables).fetchall():
                raise ValueError("it is an SQLite database, but none of ASE's (no table systems)")
    with ase.db.connect(str(path), type=kind, serial=True, use_lock_file=False) as database:
        for row in database.select():
            yield row.toatoms(add_additional_information=True)


def holds_structures(path: Path) -> bool:
    """Whether a file among others in a folder is one of structures, by name and first bytes."""
    try:
        return _format_of(path) in _OF_FOLDERS
    except ValueError:  # an empty one is an invalid file of the folder, not another one
        return path.suffix.lower() in (".traj", ".extxyz", ".xyz", ".db", ".cif")


def _format_of(path: Path) -> str:
    from ase.io.formats import filetype, ioformats

    with path.open("rb") as file:
        head = file.read(_HEAD)
    if head.startswith(b"SQLite format 3\0"):
        return "db"
    if not head.strip(b"\0"):
        raise ValueError(f"{path}: {foreign(path)}")
    kind = ""
    with suppress(Exception):  # ASE raises anything
        kind = str(filetype(str(path)))
    if kind not in ioformats:
        raise ValueError(
            f"{path}: {foreign(path) or 'unknown format'} (it begins with {head[:8]!r}): "
            "LMDB files, and what ASE reads under its usual suffix, are supported"
        )
    return kind


def _merged(pairs: Any, data: Any) -> dict[str, Any]:
    """The further fields of a row: those of `data`, then those of `key_value_pairs`."""
    if not isinstance(pairs, Mapping) or not isinstance(data, Mapping):
        raise ValueError("data or key_value_pairs are not names with values")
    fields = {**pairs, **{name: value for name, value in data.items() if value is not None}}
    for name, value in pairs.items():
        found, plain = fields[name], str | int | float
        if isinstance(found, plain) and isinstance(value, plain) and found != value:
            text = f"{found!r:.40}, of key_value_pairs {value!r:.40}"
            raise ValueError(f"{name} of data is {text}: keep one")
    return fields


def row_record(row: Any) -> dict[str, Any]:
    """A row of ASE's database, as it is stored in JSON, as `atoms_record`.

    Raises:
        ValueError: no such row, or constraints that hold atoms that are not there.
    """
    from ase.db.row import AtomsRow

    try:
        content = {name: row[name] for name in _COLUMNS if name in row}
        stored = AtomsRow({"unique_id": "", **content})
        return atoms_record(stored.toatoms(add_additional_information=True))
    except Exception as error:  # of any kind
        raise ValueError(f"not a row of ASE's database ({_named(error)})") from error
