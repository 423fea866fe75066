"""What batches are made of: a data set of single systems, or a list of them."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset, get_worker_info

from flt_mol.data.loading.pair_cache import PairCache
from flt_mol.data.loading.transport import Packed
from flt_mol.data.memory import is_object
from flt_mol.structures import Structures

__all__ = [
    "Failure",
    "Source",
    "Systems",
    "atoms_of_each",
    "checked",
    "collate",
    "need_systems",
    "shown_system",
]

Systems = Dataset[Structures] | Sequence[Structures]


def need_systems(dataset: Any) -> None:
    """Refuse what is no data set of :class:`Structures`, and say how to make one of it.

    A list is looked at whole; of other data sets systems are checked when they are read.

    Raises:
        ValueError: paths, ASE Atoms, PyG Data, mappings, or a list of such.
    """
    if isinstance(dataset, Structures):
        return
    if isinstance(dataset, list | tuple):
        checked(dataset)
    elif isinstance(dataset, str) or is_object(dataset) or not hasattr(dataset, "__getitem__"):
        _refuse(dataset, "it")


def checked(systems: Sequence[Any]) -> Sequence[Structures]:
    """The systems, of which each has to be a :class:`Structures`.

    Raises:
        ValueError: one that is something else, with its place.
    """
    for place, system in enumerate(systems):
        if not isinstance(system, Structures):
            _refuse(system, f"its system {place}")
    return systems


def atoms_of_each(dataset: Systems) -> NDArray[np.int64]:
    """(n,) atoms of each system."""
    known = getattr(dataset, "natoms", None)
    if callable(known):
        return np.asarray(known(), np.int64)
    if isinstance(dataset, Structures):
        return dataset.natoms.cpu().numpy()
    count = len(dataset)  # type: ignore[arg-type]
    return np.array([checked([dataset[i]])[0].num_atoms for i in range(count)], np.int64)


def shown_system(dataset: Systems, index: int) -> str:
    """The sid of a system, and where it is stored."""
    where = getattr(dataset, "where", None)
    place = f" ({where(index)})" if where is not None else ""
    return f"the system of sid {dataset[index].sid[0]}{place}"


def collate(parts: Structures | Sequence[Structures]) -> Structures:
    """All systems of `parts`, in order, in one flat batch; ids and tags come out as stored.

    Raises:
        ValueError: parts that are no :class:`Structures`.
    """
    return parts if isinstance(parts, Structures) else Structures.cat(checked(parts))


@dataclass(frozen=True)
class Failure:
    """An error on its way from a worker."""

    error: ValueError
    traceback: str


class Source(Dataset[Structures]):
    """A data set that is asked for batches, and puts pairs to them."""

    def __init__(self, systems: Systems, cutoff: float | None, cache: PairCache | None) -> None:
        self.systems, self.cutoff, self.cache = systems, cutoff, cache

    def __len__(self) -> int:
        return len(self.systems)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Structures:
        return self._batch([index])

    def __getitems__(self, indices: list[int]) -> Structures | Packed | Failure:
        if get_worker_info() is None:
            return self._batch(indices)
        try:
            return Packed.of(self._batch(indices))
        except ValueError as error:
            # torch would bury the message in that of an exception of its own.
            return Failure(error, traceback.format_exc())

    def _batch(self, indices: list[int]) -> Structures:
        fetch = getattr(self.systems, "__getitems__", None)
        parts = fetch(indices) if fetch else [self.systems[i] for i in indices]
        batch = collate(parts)
        if self.cache is not None:
            return self.cache.attach(batch, indices)
        return batch if self.cutoff is None else batch.with_pairs(self.cutoff)


def _refuse(value: Any, subject: str) -> NoReturn:
    raise ValueError(
        f"batches are made of a data set of Structures, and {subject} is a {type(value).__name__}; "
        "open_dataset makes one of paths, ASE Atoms, PyG Data and records, and of lists of them: "
        "make_loader(open_dataset(…), …)"
    )
