"""One function that opens everything that holds structures, in files or in memory."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flt_mol.data.ase import AseDataset, atoms_record, holds_structures
from flt_mol.data.dataset import Notes, StructuresDataset
from flt_mol.data.flat import FlatDataset
from flt_mol.data.lmdb import LmdbDataset, data_file, is_lmdb
from flt_mol.data.pyg import is_collated, is_pyg, pyg_records
from flt_mol.data.schema import OnError, ReadOptions, Record, Tagger, decoded
from flt_mol.data.tags import layer_note
from flt_mol.data.unpickle import read_saved
from flt_mol.files import natural_key, readable, shipped_folder, some
from flt_mol.structures import Structures

_LMDB_SUFFIXES = (".lmdb", ".aselmdb", ".mdb")
_SAVED = (".pt", ".pth", ".pkl", ".pickle")
_SAVED_HEADS = (b"PK\3\4", *(bytes([0x80, protocol]) for protocol in range(2, 6)))
_EXPECTED = "ASE Atoms, PyG Data or Batch, Structures, or mappings with OC20's names"


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
    frames: str | None = "all",
    forces: bool = False,
    tag_slab: Tagger | None = None,
) -> StructuresDataset:
    """The systems in a file, a folder or in memory, as a data set of single `Structures`.

    Supported: an LMDB file of OC20 records (pickles) or of ASE's rows (`.aselmdb`), known by its
    contents under any name; LMDB's folder form (`data.mdb` inside); flat files
    (`.safetensors`); files of `torch.save` or `pickle.dump` with PyG objects; any file that ASE
    reads, with all its frames; a folder of LMDB or flat files, else of files that ASE reads, in
    the order of the numbers in their names. And objects in memory: `ase.Atoms`, torch_geometric's
    `Data`, `Batch` and data sets, `Structures`, mappings with OC20's names, each or several.

    Args:
        source: path of a file or folder (text or any `os.PathLike`), a list of them, or objects in
            memory.
        require_energy: systems without the target are errors.
        ignore_energy: targets and relaxed positions are not read, so invalid ones do not matter.
        on_error: "raise": an invalid record raises ValueError when it is read. "skip": all records
            are read once now, the invalid ones skipped and listed in `dataset.skipped`.
        energy: name under which the target is stored, eV: a field, a name in ASE's `info`,
            data or key-value pairs, or "calculator" for the energy that a calculator found.
        energy_initial: name of the energy before relaxation, eV.
        positions_relaxed: name of the relaxed positions, Å; a field, or a name in ASE's `arrays`.
        check: called with the systems that are read, one or many; what it raises ValueError for is
            an invalid record. Picklable, where other processes read.
        frames: of a file that ASE reads, "all", "first" or "last"; ASE's ``relax.traj@-1`` and
            ``@2:9`` do, too. None takes the first of a relaxation and all of others; a relaxation
            has frames with an energy of a calculator each, of the same atoms, cell and pbc.
        forces: forces are read, too, eV/Å: `force`, `forces`, or what a calculator found; NaN where
            there are none. By default the target then is the energy of the same positions, `y` of
            OC20's S2EF or "calculator", if stored. Numeric sids get a frame's `fid`: ``"7#12"``.
        tag_slab: of `flt_mol.data.tags.slab_tagger`, tags systems whose tags are all 0, or
            layer numbers of `ase.build`; frames of a relaxation get those of the first.

    Raises:
        ValueError: a path that cannot be read, naming it and the reason; the folder or name of a
            data set of several splits; no records; with require_energy, no targets.

    Warns:
        UserWarning: defaults taken for missing fields, files ignored; each kind once.
    """
    names = energy, energy_initial, positions_relaxed
    options = ReadOptions(
        require_energy, ignore_energy, on_error, *names, check, frames, forces, tag_slab
    )
    if isinstance(source, str | os.PathLike):
        return _open_path(source, options)
    if isinstance(source, list | tuple) and source and isinstance(source[0], str | os.PathLike):
        if len(source) == 1:
            return _open_path(source[0], options)
        return FolderDataset(f"{len(source)} files", options, files=source)
    return MemoryDataset(source, options)


def _open_path(
    source: str | os.PathLike[str], options: ReadOptions, notes: Notes | None = None
) -> StructuresDataset:
    if not os.fspath(source):
        raise ValueError("the path is empty; give that of a file or folder (. for this one)")
    path, index = split_index(Path(os.fsdecode(source)))
    with readable(path):
        _refuse_splits(path)
        if not path.exists():
            raise ValueError(f"{path} does not exist (looked in {path.absolute().parent})")
        if index is not None:
            try:
                options = replace(options, frames=index)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
        elif path.is_dir() and data_file(path).name != "data.mdb":
            return FolderDataset(path, options, notes=notes)
        return _open_file(path, options, notes or Notes(str(path)))


def split_index(path: Path) -> tuple[Path, str | None]:
    """ASE's ``file@0``, ``file@-1``, ``file@:`` as file and index, if that file exists."""
    name, _, index = path.name.rpartition("@")
    file = path.with_name(name) if name else path
    return (path, None) if path.exists() or not (name and file.exists()) else (file, index)


def _refuse_splits(path: Path) -> None:
    """Refuse the folder or name of a data set, whose splits would be mixed."""
    folder = path if path.exists() else shipped_folder("datasets") / path.name.replace("-", "_")
    if (path.exists() or len(path.parts) == 1) and (folder / "dataset.yaml").is_file():
        raise ValueError(
            f"{path} is a data set of several splits: give the file of one, or "
            f'flt_mol.data.recipes.recipe("{path}").open(SPLIT)'
        )


def _open_file(path: Path, options: ReadOptions, notes: Notes) -> StructuresDataset:
    suffix = path.suffix.lower()
    with readable(path):
        file = data_file(path)
        if not file.is_file():
            raise ValueError(f"{path} is not a regular file; copy its contents into one")
        if suffix == ".safetensors":
            return FlatDataset(path, options, notes=notes)
        with file.open("rb") as opened:
            by_content = opened.read(4).startswith(_SAVED_HEADS)
        if by_content or (suffix in _SAVED and not is_lmdb(file)):
            return MemoryDataset(read_saved(path), options, notes=notes, name=str(path))
        if suffix in _LMDB_SUFFIXES or is_lmdb(file):
            return LmdbDataset(path, options, notes=notes)
        return AseDataset(path, options, notes=notes)


class FolderDataset(StructuresDataset):
    """`files`; else all LMDB and flat files of a folder, in order, or all that ASE reads."""

    def __init__(
        self,
        path: str | Path,
        options: ReadOptions,
        *,
        notes: Notes | None = None,
        files: Sequence[str | os.PathLike[str]] = (),
    ) -> None:
        self._given = files
        super().__init__(path, options, notes=notes)

    def _open(self) -> int:
        opened: Callable[..., StructuresDataset] = _open_path if self._given else _open_file
        files = self._given or self._files()
        self.parts: list[StructuresDataset] = []
        for file in files:
            try:
                self.parts.append(opened(file, self.options, self.notes))
            except ValueError as error:
                if self.options.on_error == "raise":
                    raise
                self.skipped.append(str(error))
            else:
                self.skipped += self.parts[-1].skipped
        if not self.parts:
            raise ValueError(f"{self.path}: every file is invalid; the first: {self.skipped[0]}")
        for part in self.parts if len(self.parts) > 1 else ():
            part.prefix = f"{part.path.stem}:"
        self.options = replace(self.options, check=None, tag_slab=None)  # the parts do both
        self._starts = list(accumulate((len(part) for part in self.parts), initial=0))
        return self._starts[-1]

    def _files(self) -> list[Path]:
        entries = [
            entry
            for entry in sorted(self.path.iterdir(), key=natural_key)
            if not (entry.name.startswith(".") or entry.name.endswith(("-lock", "lock.mdb")))
        ]
        plain = [entry for entry in entries if entry.is_file()]
        for kind, found in {
            "*.lmdb": [entry for entry in entries if _is_shard(entry)],
            "files of structures": [entry for entry in plain if holds_structures(entry)],
            "files of torch.save": [entry for entry in plain if entry.suffix.lower() in _SAVED],
        }.items():
            others = some([entry.name for entry in entries if entry not in found])
            if found and others:
                self.notes.add({"others": f"ignored, as they are not {kind}: {others}"})
            if found:
                return found
        raise ValueError(f"no structures in {self.path}, which holds {others or 'no files'}")

    def _finish(self, count: int) -> None:
        """Each file has chosen its own."""
        self._rows = np.arange(count)

    def _locate(self, row: int) -> tuple[StructuresDataset, int]:
        part = bisect_right(self._starts, row) - 1
        return self.parts[part], row - self._starts[part]

    def files(self) -> list[StructuresDataset]:
        """The data set of each file."""
        return [file for part in self.parts for file in part.files()]

    def place(self, index: int) -> tuple[Path, int]:
        """As of `StructuresDataset`."""
        part, inside = self._locate(self._rows_of([index])[0])
        return part.place(inside)

    def _where(self, row: int) -> str:
        part, inside = self._locate(row)
        return part.where(inside)

    def _records(self, rows: Sequence[int]) -> list[Record]:
        return [part.record(inside) for part, inside in map(self._locate, rows)]

    def _systems(self, rows: Sequence[int], notes: dict[str, str]) -> Structures:
        places: dict[StructuresDataset, list[tuple[int, int]]] = {}
        for place, (part, inside) in enumerate(map(self._locate, rows)):
            places.setdefault(part, []).append((place, inside))
        batches = [part.batch([i for _, i in own]) for part, own in places.items()]
        joined = batches[0] if len(batches) == 1 else Structures.cat(batches)
        order = [place for own in places.values() for place, _ in own]
        return joined if order == sorted(order) else joined.select(np.argsort(order).tolist())

    def natoms(self) -> NDArray[np.int64]:
        """Atoms of each system (len,)."""
        return np.concatenate([part.natoms() for part in self.parts])


def _is_shard(entry: Path) -> bool:
    file = data_file(entry)
    named = entry.suffix.lower() in (*_LMDB_SUFFIXES, ".safetensors")
    return named or (file.is_file() and is_lmdb(file))


class MemoryDataset(StructuresDataset):
    """Systems from one or several objects in memory; kinds as in `open_dataset`.

    Args:
        source: the objects.
        options, notes: as of `StructuresDataset`.
        name: what errors call the data set.
        places: what they call each system.

    Raises:
        ValueError: nothing to read, or objects of another kind, naming their place.
    """

    kind = "in memory"

    def __init__(
        self,
        source: Any,
        options: ReadOptions | None = None,
        *,
        notes: Notes | None = None,
        name: str | None = None,
        places: Sequence[str] = (),
    ) -> None:
        self._source, self._places = source, places
        super().__init__(name or f"{type(source).__name__} in memory", options, notes=notes)

    def _open(self) -> int:
        source, self._items = self.__dict__.pop("_source"), []
        if not _is_object(source) and not isinstance(source, Iterable | Sized):
            found = type(source).__name__
            raise ValueError(f"{self.path}: a {found} holds no structures, expected {_EXPECTED}")
        objects = [source] if _is_object(source) else source
        named = isinstance(source, Mapping) and source and all(map(_is_object, source.values()))
        for place, obj in source.items() if named else enumerate(objects):
            try:
                records = self._split(obj, place)
                given = {"sid": place} if named and len(records) == 1 else {}
                self._items += [{**given, **record} for record in records]
            except ValueError as error:
                if self.options.on_error == "raise":
                    raise
                self.skipped.append(str(error))
        if not self._items:
            reason = self.skipped[0] if self.skipped else "it is empty"
            raise ValueError(f"no records in {self.path}: {reason}")
        return len(self._items)

    def _where(self, row: int) -> str:
        return self._places[row] if self._places else super()._where(row)

    def _split(self, obj: Any, place: Any) -> Sequence[Record]:
        kinds: dict[str, str] = {}
        try:
            if is_collated(obj):
                return pyg_records(obj[0], kinds, obj[1])
            if isinstance(obj, Structures):
                return [_of_structures(system) for system in obj]
            if _is_atoms(obj):
                records = [atoms_record(obj)]
                kinds = {} if self.options.tag_slab is not None else layer_note(records[0])
            else:
                found = [obj] if isinstance(obj, Mapping) else pyg_records(obj, kinds)
                # As arrays: values out of a saved file cannot be pickled as they are.
                records = [{name: decoded(v) for name, v in record.items()} for record in found]
        except ValueError as error:
            raise ValueError(f"{self.path}, place {place}: {error} (or {_EXPECTED})") from error
        self.notes.add(kinds)
        return records


def _is_object(value: Any) -> bool:
    known = isinstance(value, Structures | Mapping) or _is_atoms(value)
    return known or is_pyg(value) or is_collated(value)


def _is_atoms(value: Any) -> bool:
    return any((c.__module__, c.__name__) == ("ase.atoms", "Atoms") for c in type(value).__mro__)


def _of_structures(system: Structures) -> dict[str, Any]:
    """A batch of one by OC20's names."""
    return {name: values[0] for name, values in system.info.items()} | {
        "pos": system.positions,
        "atomic_numbers": system.atomic_numbers,
        "cell": system.cell,
        "pbc": system.pbc,
        "tags": system.tags,
        "fixed": system.fixed,
        "natoms": system.num_atoms,
        "sid": system.sid[0],
        "y_relaxed": system.energy,
        "y_init": system.energy_initial,
        "pos_relaxed": system.positions_relaxed,
        "forces": system.forces,
    }
