"""Batches of structures, and the loader that makes them: by count, or by a budget."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, get_worker_info

from flt_mol.data.loading.pair_cache import PairCache, cache_name, write_cache
from flt_mol.data.loading.samplers import BatchSampler
from flt_mol.data.loading.transport import Packed
from flt_mol.structures import Structures

__all__ = ["Loader", "cached_pairs", "collate", "make_loader"]

Systems = Dataset[Structures] | Sequence[Structures]

_CACHED_AT_ONCE = 64


def collate(parts: Structures | Sequence[Structures]) -> Structures:
    """All systems of `parts`, in order, in one flat batch; ids and tags come out as stored."""
    return parts if isinstance(parts, Structures) else Structures.cat(parts)


class Loader(DataLoader[Structures]):
    """What :func:`make_loader` gives: torch's DataLoader, which knows where in which epoch it is.

    Each iteration is an epoch: the next one after the last, finished or not, or the one that
    :meth:`set_epoch` chose. `len` is its number of batches, the same for all epochs. A ValueError
    of a worker arrives as it was raised there, with the worker's traceback as its cause.

    Example:
        >>> water = Structures.single([8, 1, 1], [[0, 0, 0], [0.96, 0, 0], [-0.24, 0.93, 0]])
        >>> loader = make_loader([water] * 5, max_atoms=6)
        >>> [batch.natoms.tolist() for batch in loader]
        [[3, 3], [3, 3], [3]]
    """

    batch_sampler: BatchSampler
    _given: tuple[int, int] | None = None

    def __iter__(self) -> Iterator[Structures]:  # type: ignore[override]
        # Before workers are started: they ask for batches at once.
        epoch, position = self.batch_sampler.upcoming()
        for batch in super().__iter__():
            if isinstance(batch, Packed):
                batch = batch.unpack()
            elif isinstance(batch, _Failure):
                raise batch.error from RuntimeError(f"in a worker:\n{batch.traceback}")
            position += 1
            self._given = (epoch, position) if position < len(self) else (epoch + 1, 0)
            yield batch

    def set_epoch(self, epoch: int) -> None:
        """Iterate over this epoch next, from its first batch."""
        self.batch_sampler.set_epoch(epoch)
        self._given = None

    def state_dict(self) -> dict[str, int]:
        """The epoch, and how many of its batches were given out: for :meth:`load_state_dict`.

        Batches that workers have read ahead do not count.
        """
        epoch, position = self._given or self.batch_sampler.upcoming()
        return {**self.batch_sampler.state_dict(), "epoch": epoch, "position": position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """The next iteration gives what is left of that epoch; later ones what would follow.

        Raises:
            ValueError: the state of a loader that makes other batches.
        """
        self.batch_sampler.load_state_dict(state)
        self._given = None


def make_loader(
    dataset: Systems,
    batch_size: int | None = None,
    shuffle: bool = False,
    seed: int = 0,
    num_workers: int = 0,
    *,
    max_atoms: int | None = None,
    max_pairs: int | None = None,
    cutoff: float | None = None,
    pair_cache: str | Path | None = None,
    rank: int = 0,
    world_size: int = 1,
    **options: Any,
) -> Loader:
    """Batches by count or by a budget, each system once in every epoch: none is dropped.

    Args:
        dataset: of single systems, or a list of them.
        batch_size: systems per batch; either this, or `max_atoms`, or `max_pairs`.
        shuffle: a new order in each epoch, drawn from `seed`.
        seed: of the orders; torch's global random state is neither used nor changed.
        num_workers: processes that read, and search pairs; they live as long as the loader.
        max_atoms: atoms per batch at most.
        max_pairs: pairs per batch at most; needs `pair_cache`, which knows their numbers.
        cutoff: Å; batches come with their pairs (:meth:`Structures.with_pairs`).
        pair_cache: folder of caches: pairs are searched once, now, with `num_workers` processes,
            and read from then on. One folder may serve any number of data sets and cutoffs.
        rank: which of the processes that train together this one is; see :class:`BatchSampler`.
        world_size: how many there are: every system goes to one of them, and all make as many
            steps. Lightning's Trainer needs ``use_distributed_sampler=False`` then.
        options: further arguments of `torch.utils.data.DataLoader`, such as pin_memory,
            prefetch_factor or multiprocessing_context.

    Raises:
        ValueError: none or several of the three sizes, or one below 1; an empty data set, or one
            with fewer systems than ranks; a system larger than the budget, by name; a cache without
            cutoff, or that cannot be written.
    """
    limits = {"batch_size": batch_size, "max_atoms": max_atoms, "max_pairs": max_pairs}
    unit, limit = _only(limits)
    if len(dataset) == 0:  # type: ignore[arg-type]
        raise ValueError("the data set has no systems to make batches of")
    cache = None
    if pair_cache is not None:
        if cutoff is None:
            raise ValueError("pair_cache needs cutoff, the one that pairs are searched within")
        cache = cached_pairs(dataset, cutoff, pair_cache, num_workers)
    elif max_pairs is not None:
        raise ValueError("max_pairs needs cutoff and pair_cache, which knows how many there are")
    sampler = BatchSampler(
        _sizes(dataset, unit, cache),
        limit,
        shuffle=shuffle,
        seed=seed,
        rank=rank,
        world_size=world_size,
        unit=unit.removeprefix("max_"),
        name=partial(_name, dataset),
    )
    return Loader(
        _Source(dataset, cutoff, cache),
        batch_sampler=sampler,
        num_workers=num_workers,
        collate_fn=_same,
        generator=torch.Generator().manual_seed(seed),
        persistent_workers=num_workers > 0,
        **options,
    )


def cached_pairs(
    dataset: Systems, cutoff: float, folder: str | Path, num_workers: int = 0
) -> PairCache:
    """The pairs of a data set within `cutoff` Å: those in `folder`, or searched and put there.

    A cache that is damaged, or of a data set that has changed since, is not used.

    Raises:
        ValueError: a record that cannot be read, or a folder that cannot be written to.
    """
    path = Path(folder) / cache_name(dataset, _natoms(dataset), cutoff)
    try:
        return PairCache(path)
    except ValueError:
        batches = make_loader(dataset, _CACHED_AT_ONCE, num_workers=num_workers, cutoff=cutoff)
        write_cache(path, batches, cutoff)
        return PairCache(path)


@dataclass(frozen=True)
class _Failure:
    """An error on its way from a worker."""

    error: ValueError
    traceback: str


class _Source(Dataset[Structures]):
    """A data set that is asked for batches, and puts pairs to them."""

    def __init__(self, systems: Systems, cutoff: float | None, cache: PairCache | None) -> None:
        self.systems, self.cutoff, self.cache = systems, cutoff, cache

    def __len__(self) -> int:
        return len(self.systems)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Structures:
        return self._batch([index])

    def __getitems__(self, indices: list[int]) -> Structures | Packed | _Failure:
        if get_worker_info() is None:
            return self._batch(indices)
        try:
            return Packed.of(self._batch(indices))
        except ValueError as error:
            # torch would bury the message in that of an exception of its own.
            return _Failure(error, traceback.format_exc())

    def _batch(self, indices: list[int]) -> Structures:
        fetch = getattr(self.systems, "__getitems__", None)
        parts = fetch(indices) if fetch else [self.systems[i] for i in indices]
        batch = collate(parts)
        if self.cache is not None:
            return self.cache.attach(batch, indices)
        return batch if self.cutoff is None else batch.with_pairs(self.cutoff)


def _same(batch: Any) -> Any:
    return batch


def _only(limits: Mapping[str, int | None]) -> tuple[str, int]:
    """The one limit that is given, and its name."""
    given = {name: limit for name, limit in limits.items() if limit is not None}
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise ValueError(f"one of {', '.join(limits)} says how large batches are; given: {found}")
    ((name, limit),) = given.items()
    if limit < 1:
        raise ValueError(f"{name} must be at least 1, got {limit}")
    return name, limit


def _sizes(dataset: Systems, unit: str, cache: PairCache | None) -> NDArray[np.int64]:
    if unit == "max_pairs" and cache is not None:
        return cache.counts()
    if unit == "max_atoms":
        return _natoms(dataset)
    return np.ones(len(dataset), np.int64)  # type: ignore[arg-type]


def _natoms(dataset: Systems) -> NDArray[np.int64]:
    """(n,) atoms of each system."""
    known = getattr(dataset, "natoms", None)
    if callable(known):
        return np.asarray(known(), np.int64)
    count = len(dataset)  # type: ignore[arg-type]
    return np.array([dataset[i].num_atoms for i in range(count)], np.int64)


def _name(dataset: Systems, index: int) -> str:
    """The sid of a system, and where it is stored."""
    where = getattr(dataset, "where", None)
    place = f" ({where(index)})" if where is not None else ""
    return f"the system of sid {dataset[index].sid[0]}{place}"
