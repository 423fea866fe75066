"""One function that opens whatever holds structures."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from flt_mol.data.aselmdb.dataset import AseLmdbDataset
from flt_mol.data.aselmdb.json_values import head_of
from flt_mol.data.compact.dataset import CompactDataset, is_compact
from flt_mol.data.dataset import Notes, StructuresDataset
from flt_mol.data.joined import JoinedDataset
from flt_mol.data.lmdb.dataset import LmdbDataset, ShardedDataset
from flt_mol.data.lmdb.file import Environment, is_lmdb
from flt_mol.data.options import OnError, ReadOptions
from flt_mol.files import natural_key, readable
from flt_mol.structures import Structures

__all__ = ["open_dataset"]

_LMDB_SUFFIXES = (".lmdb", ".aselmdb", ".mdb")
_RECIPE = "dataset.yaml"
_SHOWN = 5  # names in a message
_TRIED = 8  # records looked at
_PICKLES = (b"\x80", b"(", b"c", b"}", b"]")  # first bytes, of protocols 0 and 1 too


def open_dataset(
    source: Any,
    *,
    require_energy: bool = False,
    ignore_energy: bool = False,
    on_error: OnError = "raise",
    energy: str = "y_relaxed",
    energy_initial: str = "y_init",
    positions_relaxed: str = "pos_relaxed",
    check: Callable[[Structures], None] | None = None,
    layer_numbers: bool = False,
) -> StructuresDataset:
    """The systems in a file, a folder or in memory, as a data set of single :class:`Structures`.

    Read are: an LMDB file of OC20 records (pickles), of ASE's rows (`.aselmdb`) or of the compact
    format, known by its contents whatever it is called; LMDB's folder form (`data.mdb` inside);
    any file that ASE reads, with all its frames; a folder of LMDB files, else of files that ASE
    reads, in the order of the numbers in their names. And objects in memory: `ase.Atoms`,
    torch_geometric's `Data`, `Batch` and data sets, :class:`Structures`, mappings with OC20's
    names, each or a list of them.

    Args:
        source: path of a file or folder (text or any `os.PathLike`), or objects in memory.
        require_energy: systems without the target are errors.
        ignore_energy: targets and relaxed positions are not read, so that bad ones do no harm.
        on_error: "raise": a bad record raises ValueError when it is read. "skip": all records are
            read once now, the bad ones left out and listed in `dataset.skipped`.
        energy: name under which the target is stored, eV: a field, a name in ASE's `info`,
            data or key-value pairs, or "calculator" for the energy that a calculator found.
        energy_initial: name of the energy before relaxation, eV.
        positions_relaxed: name of the relaxed positions, Å; a field, or a name in ASE's `arrays`.
        check: called with the systems that are read, one or many; what it raises ValueError for is
            a bad record, such as one too large for a model
            (``partial(flt_mol.models.geometry.check_systems, model.config)``).
        layer_numbers: tags that are the layers' numbers of `ase.build` are read as none, for
            :func:`flt_mol.data.tag_slab` to set them, in place of being refused or warned of.

    Raises:
        ValueError: a path that does not exist or cannot be read, naming it and the reason; the
            folder or name of a data set of several splits; no records; with require_energy, no
            targets.

    Warns:
        UserWarning: defaults taken for missing fields, files passed over; each kind once.
    """
    options = ReadOptions(
        require_energy,
        ignore_energy,
        on_error,
        energy,
        energy_initial,
        positions_relaxed,
        check,
        layer_numbers,
    )
    if isinstance(source, str | os.PathLike):
        name = os.fsdecode(source)
        if not name:
            raise ValueError("the path is empty; give that of a file or folder (. for this one)")
        return _open_path(Path(name), options)
    from flt_mol.data.memory import MemoryDataset

    return MemoryDataset(source, options)


def _open_path(path: Path, options: ReadOptions) -> StructuresDataset:
    with readable(path):
        if not path.exists():
            text = f"{path} does not exist (looked in {path.absolute().parent})"
            raise ValueError(f"{text}{_known(str(path))}")
        if not (path.is_dir() or path.is_file()):
            raise ValueError(f"{path} is no regular file; copy its contents into one")
        _refuse_splits(path)
        if path.is_dir() and not (path / "data.mdb").is_file():
            return _open_folder(path, options)
        return (_open_lmdb if _is_shard(path) else _open_with_ase)(path, options)


def _known(name: str) -> str:
    """How to open the data set that has this name."""
    from flt_mol.data.catalog import known_name, recipe

    with suppress(OSError):  # the shipped recipes are missing
        if known_name(name) is not None:
            splits = recipe(name).splits
            split = "val_id" if "val_id" in splits else next(iter(splits))
            return (
                f"; it is the name of a data set: open a split of it by "
                f'flt_mol.data.catalog.recipe("{name}").open("{split}"); its splits are: '
                f"{', '.join(splits)}"
            )
    return ""


def _refuse_splits(path: Path) -> None:
    """A data set's folder, whose splits would be mixed, or its `dataset.yaml`."""
    from flt_mol.data.catalog import Recipe, recipe

    folder = path.parent if path.name == _RECIPE else path
    if not (folder / _RECIPE).is_file():
        return
    found: Recipe | None = None
    with suppress(ValueError):  # somebody else's dataset.yaml
        found = recipe(folder)
    if found is not None:
        split = next(iter(found.splits))
        raise ValueError(
            f"{path} is a data set with the splits {', '.join(found.splits)}; open one of them: "
            f'flt_mol.data.catalog.recipe("{folder}").open("{split}"), or the file of one, '
            f"{found.splits[split]}; in commands: --split {split}"
        )


def _is_shard(path: Path) -> bool:
    """Whether it is to be an LMDB file, by name or contents."""
    if path.is_dir():
        return path.suffix.lower() in _LMDB_SUFFIXES or (path / "data.mdb").is_file()
    return path.suffix.lower() in _LMDB_SUFFIXES or (path.is_file() and is_lmdb(path))


def _open_lmdb(
    path: Path, options: ReadOptions, notes: Notes | None = None, prefix: str = ""
) -> StructuresDataset:
    # Kept open meanwhile, so that the file is not checked a second time.
    environment, kind = _lmdb_kind(path)
    dataset = kind(path, options, notes=notes, prefix=prefix)
    del environment
    return dataset


def _lmdb_kind(path: Path) -> tuple[Environment, type[LmdbDataset] | type[CompactDataset]]:
    """What an LMDB file holds: compact blocks, ASE's rows, or pickles."""
    inside = path / "data.mdb"
    # realpath does not mind links that lead in a circle: opening them tells.
    file = Path(os.path.realpath(inside if inside.is_file() else path))
    try:
        environment = Environment.of(file)
    except ValueError as error:
        # A link is named as it was given, too.
        raise (error if str(path) in str(error) else ValueError(f"{path}: {error}")) from None
    if is_compact(file):
        return environment, CompactDataset
    return environment, AseLmdbDataset if _holds_rows(environment, path) else LmdbDataset


def _holds_rows(environment: Environment, path: Path) -> bool:
    """Whether the first sound record is JSON; without one the file's name and keys count."""
    for key in list(islice(filter(bytes.isdigit, environment.keys()), _TRIED)):
        head = head_of(environment.get(key) or b"").lstrip()[:1]
        if head == b"{":
            return True
        if head in _PICKLES:
            return False
    return environment.get(b"nextid") is not None or path.suffix.lower() == ".aselmdb"


def _open_with_ase(
    path: Path, options: ReadOptions, notes: Notes | None = None, prefix: str = ""
) -> StructuresDataset:
    from flt_mol.data.ase.dataset import AseDataset

    return AseDataset(path, options, notes=notes)


def _open_folder(path: Path, options: ReadOptions) -> StructuresDataset:
    """All LMDB files of a folder as one data set; without any, all files that ASE reads."""
    entries = [
        entry
        for entry in sorted(path.iterdir(), key=natural_key)
        if not (entry.name.startswith(".") or entry.name.endswith(("-lock", "lock.mdb")))
    ]
    shards = [entry for entry in entries if _is_shard(entry)]
    kind, opener = "*.lmdb", _open_lmdb
    if not shards:
        from flt_mol.data.ase.files import holds_structures

        shards = [entry for entry in entries if entry.is_file() and holds_structures(entry)]
        kind, opener = "files of structures", _open_with_ase
    others = [entry.name for entry in entries if entry not in shards]
    if not shards:
        raise ValueError(f"no *.lmdb was found in {path}{_hint(path, others)}")
    notes = Notes(str(path))
    if others:
        notes.add({"others": f"passed over, as they are no {kind}: {_names(others)}"})
    # Kept open meanwhile, so that no file is checked a second time.
    opened = [_tried(shard) for shard in shards] if opener is _open_lmdb else []
    if opened and all(kind is LmdbDataset for _, kind in opened):
        return ShardedDataset(path, shards, options, notes=notes)
    return JoinedDataset(path, shards, opener, options, notes=notes)


def _tried(
    path: Path,
) -> tuple[Environment | None, type[LmdbDataset] | type[CompactDataset]]:
    """As `_lmdb_kind`; a bad file is left to whoever opens it in earnest."""
    try:
        return _lmdb_kind(path)
    except ValueError:
        return None, LmdbDataset


def _hint(path: Path, others: list[str]) -> str:
    inside = sorted({found.parent for found in path.glob("*/*.lmdb")})
    if inside:
        return f"; folders inside that have some: {_names([p.name for p in inside])}"
    return f"; it holds {_names(others)}" if others else "; the folder is empty"


def _names(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(sorted(names)[:_SHOWN]) + more
