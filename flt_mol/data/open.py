"""One function that opens whatever holds structures."""

from __future__ import annotations

import re
from pathlib import Path

from flt_mol.data.dataset import Notes, StructuresDataset
from flt_mol.data.lmdb import LmdbDataset, ShardedDataset
from flt_mol.data.lmdb_file import is_lmdb
from flt_mol.data.options import OnError, ReadOptions

__all__ = ["open_dataset"]

_LMDB_SUFFIXES = (".lmdb", ".aselmdb", ".mdb")
_SHOWN = 5  # names in a message


def open_dataset(
    path: str | Path,
    *,
    require_energy: bool = False,
    ignore_energy: bool = False,
    on_error: OnError = "raise",
    energy: str = "y_relaxed",
    energy_initial: str = "y_init",
    positions_relaxed: str = "pos_relaxed",
) -> StructuresDataset:
    """The systems in a file or folder, as a data set of single :class:`Structures`.

    Read are: an LMDB file of OC20 records; a folder of such files `*.lmdb`, in the order of the
    numbers in their names; LMDB's folder form (`data.mdb` inside); and any file that ASE reads,
    with all its frames.

    Args:
        path: file or folder.
        require_energy: systems without the target y_relaxed are errors.
        ignore_energy: y_relaxed, y_init and pos_relaxed are not read, so that bad ones do no harm.
        on_error: "raise": a bad record raises ValueError when it is read. "skip": all records are
            read once now, the bad ones left out and listed in `dataset.skipped`.
        energy: name under which the target is stored, eV.
        energy_initial: name of the energy before relaxation, eV.
        positions_relaxed: name of the relaxed positions, Å.

    Raises:
        ValueError: a path that does not exist or cannot be read, naming it and the reason; no
            records; with require_energy, no targets.

    Warns:
        UserWarning: defaults taken for missing fields, files passed over; each kind once.
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(f"{path} does not exist (looked in {path.absolute().parent})")
    if not (path.is_dir() or path.is_file()):
        raise ValueError(f"{path} is no regular file; copy its contents into one")
    options = ReadOptions(
        require_energy, ignore_energy, on_error, energy, energy_initial, positions_relaxed
    )
    if path.is_dir() and not (path / "data.mdb").is_file():
        return _folder(path, options)
    if path.is_dir() or path.suffix.lower() in _LMDB_SUFFIXES or is_lmdb(path):
        return LmdbDataset(path, options)
    from flt_mol.data.ase import AseDataset

    return AseDataset(path, options)


def _folder(path: Path, options: ReadOptions) -> StructuresDataset:
    """All `*.lmdb` of a folder as one data set."""
    shards: list[Path] = []
    others: list[str] = []
    for entry in path.iterdir():
        if entry.suffix.lower() == ".lmdb":
            shards.append(entry)
        elif not (entry.name.startswith(".") or entry.name.endswith(("-lock", "lock.mdb"))):
            others.append(entry.name)
    if not shards:
        raise ValueError(f"no *.lmdb was found in {path}{_hint(path, others)}")
    notes = Notes(str(path))
    if others:
        notes.add({"others": f"passed over, as they are no *.lmdb: {_names(others)}"})
    shards.sort(key=_natural)
    return ShardedDataset(path, shards, options, notes=notes)


def _natural(path: Path) -> list[tuple[int, int, str]]:
    """Sort key with numbers by value: data.2.lmdb before data.10.lmdb."""
    parts = re.split(r"(\d+)", path.name)
    return [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in parts]


def _hint(path: Path, others: list[str]) -> str:
    inside = sorted({found.parent for found in path.glob("*/*.lmdb")})
    if inside:
        return f"; folders inside that have some: {_names([p.name for p in inside])}"
    return f"; it holds {_names(others)}" if others else "; the folder is empty"


def _names(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(sorted(names)[:_SHOWN]) + more
