"""Structures that are in memory already, as a data set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from flt_mol.data.ase.records import atoms_record
from flt_mol.data.dataset import Notes, StructuresDataset
from flt_mol.data.options import ReadOptions
from flt_mol.data.pyg import is_pyg, pyg_records
from flt_mol.data.slabs.numbered import layer_note
from flt_mol.structures import Structures

__all__ = ["MemoryDataset", "is_object"]

_EXPECTED = "ASE Atoms, PyG Data or Batch, Structures, or mappings with OC20's names"


class MemoryDataset(StructuresDataset):
    """Systems out of objects in memory.

    Objects are one of, or a sequence of: `ase.Atoms`, torch_geometric's `Data` and `Batch`,
    :class:`Structures`, mappings with OC20's names. Of a list all are looked at when the data set
    is made, and those of several systems taken apart; of anything else that has a length and
    places, such as a data set of torch_geometric, each is fetched when it is asked for, and holds
    one system.

    Args:
        source: the objects.
        options: how they are read.
        notes: where warnings go.
        name: what errors call the data set, e.g. ``list of 3 Data``.

    Raises:
        ValueError: nothing to read, or objects of another kind, naming their place.
    """

    def __init__(
        self,
        source: Any,
        options: ReadOptions | None = None,
        *,
        notes: Notes | None = None,
        name: str | None = None,
    ) -> None:
        lazy = not is_object(source) and not isinstance(source, list | tuple)
        lazy = lazy and hasattr(source, "__len__") and hasattr(source, "__getitem__")
        name = _name(source) if name is None else name
        super().__init__(name, options, notes=Notes(name) if notes is None else notes)
        self._source = source
        self._items: list[Any] | None = None if lazy else self._taken_apart(source)
        self._places = np.arange(len(source) if self._items is None else len(self._items))
        if not len(self._places):
            reason = self.skipped[0] if self.skipped else "it is empty"
            raise ValueError(f"no records in {name}: {reason}")
        self._check()

    def __len__(self) -> int:
        return len(self._places)

    def record(self, index: int) -> Mapping[str, Any]:
        """The fields of system `index` by OC20's names.

        Raises:
            ValueError: an object of another kind, or of several systems, naming its place.
        """
        place = int(self._places[index])
        if self._items is not None:
            item = self._items[place]
        else:
            several = self._split(self._source[place], place)
            if len(several) != 1:
                raise ValueError(
                    f"{self.where(index)}: it holds {len(several)} systems, expected one; "
                    "give a list, of which those are taken apart"
                )
            item = several[0]
        if isinstance(item, Mapping):
            return item
        record = atoms_record(item)
        self.notes.add(layer_note(record, self.options.layer_numbers))
        return record

    def where(self, index: int) -> str:
        """The place of system `index`, for errors."""
        return f"{self.path}, system {int(self._places[index])}"

    def default_sid(self, index: int) -> int | str:
        """The place, for a system without sid."""
        return int(self._places[index])

    def _taken_apart(self, source: Any) -> list[Any]:
        """A mapping or `Atoms` for each system of all objects."""
        if not is_object(source) and not isinstance(source, Iterable):
            raise ValueError(
                f"{self.path}: a {type(source).__name__} holds no structures, expected a path, "
                f"or {_EXPECTED}"
            )
        items: list[Any] = []
        for place, obj in enumerate([source] if is_object(source) else source):
            try:
                items += self._split(obj, place)
            except ValueError as error:
                if self.options.on_error == "raise":
                    raise
                self.skipped.append(str(error))
        return items

    def _split(self, obj: Any, place: int) -> Sequence[Any]:
        kinds: dict[str, str] = {}
        try:
            if isinstance(obj, Structures):
                return [_of_structures(system) for system in obj]
            if _is_atoms(obj) or isinstance(obj, Mapping):
                return [obj]
            records = pyg_records(obj, kinds)
        except ValueError as error:
            raise ValueError(f"{self.path}, place {place}: {error} (or {_EXPECTED})") from error
        self.notes.add(kinds)
        return records

    def _keep(self, indices: list[int]) -> None:
        self._places = self._places[indices]


def is_object(value: Any) -> bool:
    """Whether it holds structures by itself."""
    return isinstance(value, Structures | Mapping) or _is_atoms(value) or is_pyg(value)


def _is_atoms(value: Any) -> bool:
    return any((c.__module__, c.__name__) == ("ase.atoms", "Atoms") for c in type(value).__mro__)


def _name(source: Any) -> str:
    kind = type(source).__name__
    if is_object(source) or not isinstance(source, list | tuple) or not source:
        return f"{kind} in memory"
    return f"{kind} of {len(source)} {type(source[0]).__name__}"


def _of_structures(system: Structures) -> dict[str, Any]:
    """A batch of one by OC20's names."""
    record = {
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
    }
    return {**{name: values[0] for name, values in system.info.items()}, **record}
