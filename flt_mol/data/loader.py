"""Batches for training: which systems, in which order, with their neighbour pairs.

Orders are drawn from the seed and the epoch: the same on every rank, independent of other draws.
"""

from __future__ import annotations

import heapq
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, Sampler, Subset, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from flt_mol.structures import Structures

__all__ = [
    "BatchSampler",
    "Chosen",
    "Loader",
    "Moments",
    "TargetStatistics",
    "collate",
    "make_loader",
    "target_statistics",
    "trained_on",
]

Systems = Dataset[Structures] | Sequence[Structures]
Integers = NDArray[np.int64]

_AT_ONCE = 256  # systems read together for statistics


def collate(parts: Structures | Sequence[Structures]) -> Structures:
    """All systems of `parts`, in order, in one batch; sids and further values come out as stored.

    Raises:
        ValueError: parts that are not :class:`Structures`.
    """
    return parts if isinstance(parts, Structures) else Structures.cat(_checked(parts))


# So that a plain DataLoader(dataset, batch_size=…) makes batches of our data sets as well.
default_collate_fn_map[Structures] = lambda parts, *, collate_fn_map=None: collate(parts)


class BatchSampler(Sampler[list[int]]):
    """Batches whose sizes sum up to no more than `limit`, each epoch in another order.

    Every epoch holds each system once, over all ranks together, and has the same number of batches,
    the same on every rank. Shuffled systems of different sizes are dealt, the largest first, each
    to the smallest batch so far (Graham, SIAM J. Appl. Math. 17, 416 (1969)); else batches are
    consecutive. Iterating again goes to the next epoch, whether or not the last was finished.

    Args:
        sizes: (n,) size of each system; ones for batches of `limit` systems.
        limit: largest sum of sizes of a batch.
        shuffle: whether the order of systems is drawn for each epoch, or is theirs.
        seed: of the orders.
        rank: which of the `world_size` processes this is; batches are dealt out in turn.
        world_size: processes that share the epoch.
        name: how errors call system i.

    Raises:
        ValueError: fewer systems than ranks, one larger than `limit` (by name), a limit below 1.

    Example:
        >>> sampler = BatchSampler(np.array([4, 3, 2, 1]), limit=5)
        >>> list(sampler), len(sampler)
        ([[0], [1, 2], [3]], 3)
    """

    def __init__(
        self,
        sizes: Integers,
        limit: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        name: Callable[[int], str] = "system {}".format,
    ) -> None:
        self.sizes = np.maximum(np.asarray(sizes, np.int64), 1)
        self.limit, self.shuffle, self.seed = limit, bool(shuffle), seed
        self.rank, self.world_size = rank, world_size
        self._check(name)
        self._dealt = self.shuffle and self.sizes.min() != self.sizes.max()
        self._count = self._count_dealt() if self._dealt else len(self.plan(0))
        self.epoch, self.position = 0, 0  # the next one, and how many of its batches are done

    def __len__(self) -> int:
        """Batches of this rank in an epoch, the same in each."""
        return self._count // self.world_size

    def __iter__(self) -> Iterator[list[int]]:
        epoch, position = self.epoch, self.position
        self.set_epoch(epoch + 1)
        yield from self.plan(epoch)[self.rank :: self.world_size][position:]

    def set_epoch(self, epoch: int) -> None:
        """Iterate over this epoch next, from its first batch."""
        self.epoch, self.position = epoch, 0

    def settings(self) -> dict[str, Any]:
        """What decides which batches there are, as plain values."""
        return {
            "systems": len(self.sizes),
            "sizes_crc32": zlib.crc32(self.sizes.astype("<i8").tobytes()),
            "limit": self.limit,
            "shuffle": self.shuffle,
            "seed": self.seed if self.shuffle else 0,
            "world_size": self.world_size,
        }

    def plan(self, epoch: int) -> list[list[int]]:
        """All batches of an epoch, of all ranks; those of a rank are every `world_size`-th."""
        if not self.shuffle:
            return self._even(self._consecutive(np.arange(len(self.sizes))))
        generator = np.random.default_rng((self.seed % 2**64, epoch))
        order = generator.permutation(len(self.sizes))
        if not self._dealt:
            return self._even(self._consecutive(order))
        batches = self._deal(order, self._count)
        return [batches[i] for i in generator.permutation(len(batches))]

    def _consecutive(self, order: Integers) -> list[list[int]]:
        """In the given order, each batch as large as it may be."""
        total, ends = np.cumsum(self.sizes[order]), [0]
        while ends[-1] < len(order):
            before = total[ends[-1] - 1] if ends[-1] else 0
            ends.append(int(np.searchsorted(total, before + self.limit, side="right")))
        return [part.tolist() for part in np.split(order, ends[1:-1])]

    def _even(self, batches: list[list[int]]) -> list[list[int]]:
        """As many for each rank: the batches of most systems are halved."""
        while len(batches) % self.world_size:
            i = max(range(len(batches)), key=lambda i: len(batches[i]))
            half = (len(batches[i]) + 1) // 2
            if half == len(batches[i]):
                raise ValueError(self._uneven())
            batches[i : i + 1] = [batches[i][:half], batches[i][half:]]
        return batches

    def _deal(self, order: Integers, count: int) -> list[list[int]]:
        """`count` batches, which the order does not change in how full they are."""
        heap = [(0, i) for i in range(count)]
        batches: list[list[int]] = [[] for _ in range(count)]
        for system in order[np.argsort(-self.sizes[order], kind="stable")].tolist():
            load, i = heap[0]
            batches[i].append(system)
            heapq.heapreplace(heap, (load + int(self.sizes[system]), i))
        return batches

    def _count_dealt(self) -> int:
        """The fewest batches, or nearly, that hold all, and are as many for each rank."""
        ranks, order = self.world_size, np.arange(len(self.sizes))
        most = len(order) // ranks * ranks
        count = -(-int(self.sizes.sum()) // self.limit)
        while count <= most:
            count = -(-count // ranks) * ranks
            batches = self._deal(order, count)
            if max(int(self.sizes[batch].sum()) for batch in batches) <= self.limit:
                return count
            count += max(1, min(count // 200, most - count))
        raise ValueError(self._uneven())

    def _uneven(self) -> str:
        return (
            f"{len(self.sizes)} systems cannot be dealt to {self.world_size} ranks in batches up "
            f"to {self.limit}, each as many: allow larger batches or fewer ranks"
        )

    def _check(self, name: Callable[[int], str]) -> None:
        n, worst = len(self.sizes), int(self.sizes.argmax())
        if isinstance(self.limit, bool) or not isinstance(self.limit, int) or self.limit < 1:
            raise ValueError(f"a batch may hold {self.limit!r}, expected a whole number from 1")
        if not 0 <= self.rank < self.world_size <= n:
            raise ValueError(
                f"rank {self.rank} of {self.world_size} ranks cannot share {n} systems"
            )
        if self.sizes[worst] > self.limit:
            raise ValueError(
                f"{name(worst)} has {self.sizes[worst]} atoms, more than a batch may hold "
                f"({self.limit}): allow more, or leave it out"
            )


class Loader(DataLoader[Structures]):
    """What :func:`make_loader` gives: torch's DataLoader, which knows where in which epoch it is.

    Each iteration is an epoch: the next one after the last, finished or not, or the one that
    :meth:`set_epoch` chose. `len` is its number of batches, the same for all epochs.

    Example:
        >>> water = Structures.single([8, 1, 1], [[0, 0, 0], [0.96, 0, 0], [-0.24, 0.93, 0]])
        >>> loader = make_loader([water] * 5, max_atoms=6)
        >>> [batch.natoms.tolist() for batch in loader]
        [[3, 3], [3, 3], [3]]
    """

    batch_sampler: BatchSampler
    _next: tuple[int, int] | None = None

    def __iter__(self) -> Iterator[Structures]:  # type: ignore[override]
        # Before workers are started: they ask for batches immediately.
        epoch, position = self.batch_sampler.epoch, self.batch_sampler.position
        for batch in super().__iter__():
            if isinstance(batch, ValueError):
                raise batch
            position += 1
            self._next = (epoch, position) if position < len(self) else (epoch + 1, 0)
            yield batch

    def set_epoch(self, epoch: int) -> None:
        """Iterate over this epoch next, from its first batch."""
        self.batch_sampler.set_epoch(epoch)
        self._next = None

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and how many of its batches were given out: for :meth:`load_state_dict`.

        Batches that workers have read ahead do not count.
        """
        sampler = self.batch_sampler
        epoch, position = self._next or (sampler.epoch, sampler.position)
        return {**sampler.settings(), "epoch": epoch, "position": position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration gives what is left of that epoch; later ones what would follow.

        Raises:
            ValueError: the state of a loader that makes other batches.
        """
        sampler = self.batch_sampler
        other = {k: v for k, v in sampler.settings().items() if state.get(k) != v}
        if other or not 0 <= state["position"] < len(sampler):
            raise ValueError(f"these are not the batches of the saved state {state}: {other}")
        sampler.epoch, sampler.position, self._next = state["epoch"], state["position"], None


def make_loader(
    dataset: Systems,
    batch_size: int | None = None,
    shuffle: bool = False,
    seed: int = 0,
    num_workers: int = 0,
    *,
    max_atoms: int | None = None,
    cutoff: float | None = None,
    rank: int = 0,
    world_size: int = 1,
    **options: Any,
) -> Loader:
    """Batches by count or by a budget of atoms, each system once in every epoch.

    Args:
        dataset: of single systems, or a list of them (of ASE Atoms or PyG Data,
            :func:`flt_mol.data.open_dataset` makes one).
        batch_size: systems per batch; either this or `max_atoms`.
        shuffle: a new order in each epoch, drawn from `seed`.
        seed: of the orders.
        num_workers: processes that read, and search pairs; they live as long as the loader, or with
            ``persistent_workers=False`` for an epoch.
        max_atoms: atoms per batch at most.
        cutoff: Å; batches come with their pairs (:meth:`Structures.with_pairs`).
        rank: which of the processes that train together this one is.
        world_size: how many there are: every system goes to one of them, and all make as many
            steps. Lightning's Trainer needs ``use_distributed_sampler=False`` then.
        options: further arguments of `torch.utils.data.DataLoader`, such as pin_memory,
            prefetch_factor or multiprocessing_context.

    Raises:
        ValueError: none or both of the two sizes; fewer systems than ranks; a system larger than
            the budget, by name; a list of anything but :class:`Structures`.
    """
    if (batch_size is None) == (max_atoms is None):
        raise ValueError(f"batch_size is {batch_size}, max_atoms {max_atoms}: give one of them")
    if isinstance(dataset, list | tuple):
        _checked(dataset)
    elif isinstance(dataset, str) or not hasattr(dataset, "__getitem__"):
        _checked([dataset])
    if not (count := len(dataset)):  # type: ignore[arg-type]
        raise ValueError("the data set has no systems to make batches of")
    sampler = BatchSampler(
        np.ones(count, np.int64) if max_atoms is None else _atoms_of_each(dataset),
        cast(int, batch_size if max_atoms is None else max_atoms),
        shuffle=shuffle,
        seed=seed,
        rank=rank,
        world_size=world_size,
        name=partial(_shown_system, dataset),
    )
    return Loader(
        _Source(dataset, cutoff),
        batch_sampler=sampler,
        num_workers=num_workers,
        collate_fn=_same,
        generator=torch.Generator().manual_seed(seed),
        **{"persistent_workers": num_workers > 0, **options},
    )


def _same(batch: Any) -> Any:
    return batch


class _Source(Dataset[Structures]):
    """A data set that is asked for batches, and adds their pairs."""

    def __init__(self, systems: Systems, cutoff: float | None) -> None:
        self.systems, self.cutoff = systems, cutoff

    def __getitems__(self, indices: list[int]) -> Structures | ValueError:
        fetch = getattr(self.systems, "__getitems__", None)
        try:
            batch = collate(fetch(indices) if fetch else [self.systems[i] for i in indices])
            return batch if self.cutoff is None else batch.with_pairs(self.cutoff)
        except ValueError as error:
            if get_worker_info() is None:
                raise
            return error  # as a value: torch would bury its message in one of its own


def _checked(systems: Sequence[Any]) -> Sequence[Structures]:
    for place, system in enumerate(systems):
        if not isinstance(system, Structures):
            kind = type(system).__name__
            raise ValueError(
                f"system {place} is a {kind}, expected Structures: see flt_mol.data.open_dataset"
            )
    return systems


def _atoms_of_each(dataset: Any) -> Integers:
    if hasattr(dataset, "natoms"):
        return np.asarray(dataset.natoms(), np.int64)
    return np.array([_checked([dataset[i]])[0].num_atoms for i in range(len(dataset))], np.int64)


def _shown_system(dataset: Any, index: int) -> str:
    place = f" ({dataset.where(index)})" if hasattr(dataset, "where") else ""
    return f"the system of sid {dataset[index].sid[0]}{place}"


class Chosen(Subset[Structures]):
    """Some systems of a data set of :func:`flt_mol.data.open_dataset`, as a data set.

    Args:
        dataset: the whole.
        indices: of its systems, in the order wanted.
    """

    dataset: Any

    def where(self, index: int) -> str:
        """File and key of system `index`, for errors."""
        return str(self.dataset.where(self.indices[index]))

    def natoms(self) -> Integers:
        """Atoms of each system (len,)."""
        return np.asarray(self.dataset.natoms()[self.indices], np.int64)


@dataclass(frozen=True)
class Moments:
    """Count, mean and population standard deviation of numbers."""

    count: int
    mean: float
    std: float


@dataclass(frozen=True)
class TargetStatistics:
    """Of a data set.

    Attributes:
        energies: count, mean and population standard deviation, eV.
        median: eV; of an even number of targets, between the two in the middle.
        most_atoms: of the largest system.
        elements: atomic numbers that occur, ascending.
        energies_initial: as `energies`, before relaxation; None unless asked for.
    """

    energies: Moments
    median: float
    most_atoms: int
    elements: tuple[int, ...]
    energies_initial: Moments | None = None


def target_statistics(
    dataset: Systems,
    num_workers: int = 0,
    *,
    initial: bool = False,
) -> TargetStatistics:
    """What the targets, sizes and elements of a data set are, read once in batches.

    Args:
        dataset: of single systems, or a list of them.
        num_workers: processes that read.
        initial: whether energies before relaxation are targets as well.

    Raises:
        ValueError: no systems, or one that cannot be read, or whose target is missing or not
            finite, by its sid.

    Example:
        >>> atoms = [Structures.single([z], [[0, 0, 0]], energy=float(z)) for z in (1, 8)]
        >>> target_statistics(atoms)
        TargetStatistics(energies=Moments(count=2, mean=4.5, std=3.5), median=4.5, most_atoms=1,
        elements=(1, 8), energies_initial=None)
    """
    fields = ("energy", "energy_initial")[: 2 if initial else 1]
    targets: dict[str, list[NDArray[np.float64]]] = {field: [] for field in fields}
    most_atoms, elements, seen = 0, set[int](), 0
    for batch in make_loader(dataset, _AT_ONCE, num_workers=num_workers):
        for field, values in targets.items():
            values.append(_finite_targets(batch, field, dataset, range(seen, seen + len(batch))))
        most_atoms = max(most_atoms, int(batch.natoms.max()))
        elements.update(batch.atomic_numbers.unique().tolist())
        seen += len(batch)
    energy = np.concatenate(targets["energy"])
    return TargetStatistics(
        energies=_moments(energy),
        median=float(np.median(energy)),
        most_atoms=most_atoms,
        elements=tuple(sorted(elements)),
        energies_initial=_moments(np.concatenate(targets[fields[1]])) if initial else None,
    )


def _moments(values: NDArray[np.float64]) -> Moments:
    equal = bool((values == values[0]).all())  # of which rounding makes a mean that is not theirs
    mean, std = (values[0], 0.0) if equal else (values.mean(), values.std())
    return Moments(len(values), float(mean), float(std))


def _finite_targets(
    batch: Structures, field: str, dataset: Any, rows: range
) -> NDArray[np.float64]:
    energy = getattr(batch, field)
    if energy is None:  # as soon as one system of the batch lacks its target
        lacking = next(system for i in rows if getattr(system := dataset[i], field) is None)
        raise ValueError(f"sid {lacking.sid[0]} has no {field}: give it or skip it")
    for sid, value in zip(batch.sid, energy.tolist(), strict=True):
        if not math.isfinite(value):
            raise ValueError(f"sid {sid}: {field} is {value} eV: skip it")
    return np.asarray(energy.cpu(), np.float64)


def trained_on(
    statistics: TargetStatistics, before: Mapping[str, float] | None = None
) -> dict[str, float]:
    """What a model remembers of its training systems, and of those `before`: numbers by name."""
    return {
        "systems": statistics.energies.count,
        "energy_median": statistics.median,
        "most_atoms": max(statistics.most_atoms, (before or {}).get("most_atoms", 0)),
    }
