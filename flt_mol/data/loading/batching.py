"""Batches of structures, and the loader that makes them: by count, or by a budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader
from torch.utils.data._utils.collate import default_collate_fn_map

from flt_mol.arguments import whole_number
from flt_mol.data.loading.pair_cache import PairCache, cache_name
from flt_mol.data.loading.pair_writer import write_cache
from flt_mol.data.loading.samplers import BatchSampler
from flt_mol.data.loading.systems import (
    Failure,
    Source,
    Systems,
    atoms_of_each,
    collate,
    need_systems,
    shown_system,
)
from flt_mol.data.loading.transport import Packed
from flt_mol.structures import Structures

__all__ = ["Loader", "cached_pairs", "collate", "make_loader"]

_CACHED_AT_ONCE = 64
_OURS = {
    "sampler": "systems are dealt to batches by shuffle, seed, rank and world_size",
    "batch_sampler": "batches are made by batch_size, max_atoms or max_pairs",
    "drop_last": "every system comes once in each epoch: none is dropped",
    "collate_fn": "batches come as Structures: change them afterwards, or change the data set",
    "generator": "orders are drawn from seed",
    "in_order": "batches come in their order: state_dict counts them",
}


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
            elif isinstance(batch, Failure):
                raise batch.error from RuntimeError(f"in a worker:\n{batch.traceback}")
            position += 1
            self._given = (epoch, position) if position < len(self) else (epoch + 1, 0)
            yield batch

    def set_epoch(self, epoch: int) -> None:
        """Iterate over this epoch next, from its first batch."""
        self.batch_sampler.set_epoch(epoch)
        self._given = None

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and how many of its batches were given out: for :meth:`load_state_dict`.

        Batches that workers have read ahead do not count.
        """
        epoch, position = self._given or self.batch_sampler.upcoming()
        return {**self.batch_sampler.state_dict(), "epoch": epoch, "position": position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration gives what is left of that epoch; later ones what would follow.

        Raises:
            ValueError: the state of a loader that makes other batches, or of one beyond the epoch's
                last.
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
    pair_cache: PairCache | str | Path | None = None,
    rank: int = 0,
    world_size: int = 1,
    **options: Any,
) -> Loader:
    """Batches by count or by a budget, each system once in every epoch: none is dropped.

    Args:
        dataset: of single systems, or a list of them (:func:`flt_mol.data.open_dataset` makes one
            of a list of ASE Atoms or PyG Data).
        batch_size: systems per batch; either this, or `max_atoms`, or `max_pairs`.
        shuffle: a new order in each epoch, drawn from `seed`.
        seed: of the orders; torch's global random state is neither used nor changed.
        num_workers: processes that read, and search pairs; they live as long as the loader, or with
            ``persistent_workers=False`` for an epoch.
        max_atoms: atoms per batch at most.
        max_pairs: pairs per batch at most; needs `pair_cache`, which knows their numbers.
        cutoff: Å; batches come with their pairs (:meth:`Structures.with_pairs`).
        pair_cache: what :func:`cached_pairs` gave for this data set; or a folder of caches: pairs
            are searched once, now, with `num_workers` processes, and read from then on. One folder
            may serve any number of data sets and cutoffs.
        rank: which of the processes that train together this one is; see :class:`BatchSampler`.
        world_size: how many there are: every system goes to one of them, and all make as many
            steps. Lightning's Trainer needs ``use_distributed_sampler=False`` then.
        options: further arguments of `torch.utils.data.DataLoader`, such as pin_memory,
            prefetch_factor or multiprocessing_context; not those that say what batches are.

    Raises:
        ValueError: none or several of the three sizes, or one that is no whole number from 1; an
            option of torch's that this loader sets itself; an empty data set, or one
            with fewer systems than ranks; a system larger than the budget, by name; a folder of
            caches without cutoff, or that cannot be written; a cache of another cutoff or data set;
            a list of anything but :class:`Structures`.
    """
    limits = {"batch_size": batch_size, "max_atoms": max_atoms, "max_pairs": max_pairs}
    unit, limit = _only(limits)
    for name, why in _OURS.items():
        if name in options:
            raise ValueError(f"make_loader takes no {name}: {why}")
    need_systems(dataset)
    if len(dataset) == 0:  # type: ignore[arg-type]
        raise ValueError("the data set has no systems to make batches of")
    cache = None
    if isinstance(pair_cache, PairCache):
        cache = _fitting(pair_cache, dataset, cutoff)
    elif pair_cache is not None:
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
        unit="systems" if unit == "batch_size" else unit.removeprefix("max_"),
        name=partial(shown_system, dataset),
    )
    return Loader(
        Source(dataset, cutoff, cache),
        batch_sampler=sampler,
        num_workers=num_workers,
        collate_fn=_same,
        generator=torch.Generator().manual_seed(seed),
        **{"persistent_workers": num_workers > 0, **options},
    )


def cached_pairs(
    dataset: Systems, cutoff: float, folder: str | Path, num_workers: int = 0
) -> PairCache:
    """The pairs of a data set within `cutoff` Å: those in `folder`, or searched and put there.

    A cache that is damaged, or of a data set that has changed since, is not used: another is made.
    What cannot be seen without reading all of it, a changed pair or a changed system, is refused by
    a ValueError when that system is read, in a worker too: it says which folder to delete.

    Args:
        dataset: as of :func:`make_loader`.
        cutoff: Å.
        folder: of caches of any number of data sets and cutoffs; made if need be.
        num_workers: processes that search.

    Returns:
        The cache, a folder of its own inside `folder`. ``make_loader(dataset, …, pair_cache=…)``
        takes it, and takes `folder` (with cutoff) just as well.

    Raises:
        ValueError: a record that cannot be read, or a folder that cannot be written to.
    """
    need_systems(dataset)
    path = Path(folder) / cache_name(dataset, atoms_of_each(dataset), cutoff)
    try:
        return PairCache(path)
    except ValueError:
        batches = make_loader(dataset, _CACHED_AT_ONCE, num_workers=num_workers, cutoff=cutoff)
        write_cache(path, batches, cutoff)
        return PairCache(path)


def _same(batch: Any) -> Any:
    return batch


def _torchs_collate(
    parts: Structures | Sequence[Structures], *, collate_fn_map: Any = None
) -> Structures:
    return collate(parts)


# A plain DataLoader(dataset, batch_size=…) makes batches of our data sets as well.
default_collate_fn_map[Structures] = _torchs_collate


def _only(limits: Mapping[str, int | None]) -> tuple[str, int]:
    """The one limit that is given, and its name."""
    given = {name: limit for name, limit in limits.items() if limit is not None}
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise ValueError(f"one of {', '.join(limits)} says how large batches are; given: {found}")
    ((name, limit),) = given.items()
    return name, whole_number(name, limit, 1)


def _fitting(cache: PairCache, dataset: Systems, cutoff: float | None) -> PairCache:
    """The cache, if it is the one of this data set."""
    if cutoff is not None and cutoff != cache.cutoff:
        raise ValueError(f"{cache.path} holds pairs within {cache.cutoff:g} Å, not {cutoff:g} Å")
    if cache.path.name != cache_name(dataset, atoms_of_each(dataset), cache.cutoff):
        raise ValueError(
            f"{cache.path} is the cache of another data set, or of this one before it changed: "
            "give the folder of caches, and pairs are searched where need be"
        )
    return cache


def _sizes(dataset: Systems, unit: str, cache: PairCache | None) -> NDArray[np.int64]:
    if unit == "max_pairs" and cache is not None:
        return cache.counts()
    if unit == "max_atoms":
        return atoms_of_each(dataset)
    return np.ones(len(dataset), np.int64)  # type: ignore[arg-type]
