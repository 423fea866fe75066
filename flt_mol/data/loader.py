"""Batches for training: which systems, in which order, prepared for a model.

Orders are drawn from the seed and the epoch: the same on every rank, independent of other draws.
"""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, Sampler, Subset, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from flt_mol.structures import Structures, known_forces

Systems = Dataset[Structures] | Sequence[Structures]
Integers = NDArray[np.int64]

_CHUNK = 256  # systems read together for statistics


def collate(parts: Structures | Sequence[Structures]) -> Structures:
    """All systems of `parts`, in order, in one batch; sids and further values come out as stored.

    Raises:
        ValueError: parts that are not `Structures`.
    """
    return parts if isinstance(parts, Structures) else Structures.cat(_checked(parts))


# So that a plain DataLoader(dataset, batch_size=…) makes batches of our data sets as well.
default_collate_fn_map[Structures] = lambda parts, *, collate_fn_map=None: collate(parts)


class BatchSampler(Sampler[list[int]]):
    """Batches whose sizes sum up to no more than `limit`, each epoch in another order.

    Every epoch holds each system once over all ranks, in as many batches on every rank. Shuffled
    systems of different sizes are assigned, largest first, each to the smallest batch so far
    (Graham, SIAM J. Appl. Math. 17, 416 (1969)); else batches are consecutive. Iterating again goes
    to the next epoch.

    Args:
        sizes: (n,) size of each system; ones for batches of `limit` systems.
        limit: largest sum of sizes of a batch.
        shuffle: whether the order of systems is drawn for each epoch, or is theirs.
        seed: of the orders.
        rank: which of the `world_size` processes this is; batches are dealt out in turn.
        world_size: processes that share the epoch.

    Raises:
        ValueError: fewer systems than ranks, one larger than `limit`, a limit below 1.

    Examples:
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
    ) -> None:
        self.sizes = np.maximum(np.asarray(sizes, np.int64), 1)
        self.limit, self.shuffle, self.seed = limit, bool(shuffle), seed
        self.rank, self.world_size = rank, world_size
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise ValueError(f"a batch may hold {limit!r}, expected a whole number from 1")
        n = len(self.sizes)
        if not 0 <= rank < world_size <= n:
            raise ValueError(f"rank {rank} of {world_size} ranks cannot share {n} systems")
        if (largest := self.sizes.max()) > limit:
            raise ValueError(f"a system has size {largest}, more than a batch may hold ({limit})")
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

    def digest(self) -> int:
        """A number that differs between samplers that make other batches."""
        order = (self.shuffle, self.seed if self.shuffle else 0)
        settings = f"{self.limit, order, self.world_size}".encode()
        return zlib.crc32(self.sizes.astype("<i8").tobytes(), zlib.crc32(settings))

    def plan(self, epoch: int) -> list[list[int]]:
        """All batches of an epoch, of all ranks; those of a rank are every `world_size`-th."""
        if not self.shuffle:
            return self._consecutive(np.arange(len(self.sizes)))
        generator = np.random.default_rng((self.seed % 2**64, epoch))
        order = generator.permutation(len(self.sizes))
        if not self._dealt:
            return self._consecutive(order)
        batches = self._deal(order, self._count)
        return [batches[i] for i in generator.permutation(len(batches))]

    def _consecutive(self, order: Integers) -> list[list[int]]:
        """In the given order, as large as they may be; the largest are halved for all ranks."""
        total, ends = np.cumsum(self.sizes[order]), [0]
        while ends[-1] < len(order):
            before = total[ends[-1] - 1] if ends[-1] else 0
            ends.append(int(np.searchsorted(total, before + self.limit, side="right")))
        batches = [part.tolist() for part in np.split(order, ends[1:-1])]
        while len(batches) % self.world_size:
            i = max(range(len(batches)), key=lambda i: len(batches[i]))
            half = (len(batches[i]) + 1) // 2
            batches[i : i + 1] = [batches[i][:half], batches[i][half:]]
            if not batches[i + 1]:
                raise ValueError(self._uneven())
        return batches

    def _deal(self, order: Integers, count: int) -> list[list[int]]:
        """`count` batches; how full each is does not depend on the order."""
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
        share = f"{len(self.sizes)} systems cannot be distributed over {self.world_size} ranks"
        return f"{share} equally, in batches up to {self.limit}: allow larger batches"


class Window(NamedTuple):
    """What the batches of one optimiser step hold: systems, free atoms, those of known forces."""

    systems: int
    atoms: int
    forces: int

    @classmethod
    def of(cls, batches: Sequence[Structures]) -> Window:
        """Of these batches."""
        free = sum(int((~batch.fixed).sum()) for batch in batches)
        known = sum(int(known_forces(batch).sum()) for batch in batches)
        return cls(sum(map(len, batches)), free, known)


class Loader(DataLoader[Any]):
    """torch's DataLoader with a state within the epoch, as `make_loader` returns it.

    Each iteration is an epoch: the next one after the last, finished or not, or the one that
    `set_epoch` chose. `len` is its number of batches, the same for all epochs. With `window`
    so many batches are read together, and come with what all of them hold, (batch, Window).

    Examples:
        >>> water = Structures.single([8, 1, 1], [[0, 0, 0], [0.96, 0, 0], [-0.24, 0.93, 0]])
        >>> loader = make_loader([water] * 5, max_atoms=6)
        >>> [batch.natoms.tolist() for batch in loader]
        [[3, 3], [3, 3], [3]]
    """

    batch_sampler: BatchSampler
    window: int | None = None
    _next: tuple[int, int] | None = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # Before workers are started: they ask for batches immediately.
        epoch, position = self.batch_sampler.epoch, self.batch_sampler.position
        ahead: list[Structures] = []
        for batch in super().__iter__():
            if isinstance(batch, ValueError):
                raise batch
            ahead.append(batch)
            if len(ahead) < (self.window or 1) and position + len(ahead) < len(self):
                continue
            for one in ahead:
                position += 1
                self._next = (epoch, position) if position < len(self) else (epoch + 1, 0)
                yield one if self.window is None else (one, Window.of(ahead))
            ahead = []

    def set_epoch(self, epoch: int) -> None:
        """Iterate over this epoch next, from its first batch."""
        self.batch_sampler.set_epoch(epoch)
        self._next = None

    def state_dict(self) -> dict[str, int]:
        """The epoch, and how many of its batches were given out: for `load_state_dict`.

        Batches that workers have read ahead do not count.
        """
        sampler = self.batch_sampler
        epoch, position = self._next or (sampler.epoch, sampler.position)
        return {"batches": sampler.digest(), "epoch": epoch, "position": position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration gives the rest of that epoch; later ones what would follow.

        Raises:
            ValueError: the state of a loader that makes other batches.
        """
        sampler = self.batch_sampler
        if state.get("batches") != sampler.digest() or not 0 <= state["position"] < len(sampler):
            raise ValueError(f"the saved state {dict(state)} is of a loader with different batches")
        sampler.epoch, sampler.position, self._next = state["epoch"], state["position"], None


def make_loader(
    dataset: Systems,
    batch_size: int | None = None,
    shuffle: bool = False,
    seed: int = 0,
    num_workers: int = 0,
    *,
    max_atoms: int | None = None,
    prepare: Callable[[Structures], Structures] | None = None,
    rank: int = 0,
    world_size: int = 1,
    **options: Any,
) -> Loader:
    """Batches by count or by a budget of atoms, each system once in every epoch.

    Args:
        dataset: of single systems, or a list of them (of ASE Atoms or PyG Data,
            `flt_mol.data.open_dataset` makes one).
        batch_size: systems per batch; either this or `max_atoms`.
        shuffle: a new order in each epoch, drawn from `seed`.
        seed: of the orders.
        num_workers: processes that read and prepare; they live as long as the loader, or with
            ``persistent_workers=False`` for an epoch.
        max_atoms: atoms per batch at most.
        prepare: called with each batch, by the workers, as `EnergyModel.prepare_batch`.
        rank: which of the processes that train together this one is.
        world_size: how many there are: every system goes to one of them, and all make as many
            steps. Lightning's Trainer needs ``use_distributed_sampler=False`` then.
        options: further arguments of `torch.utils.data.DataLoader`, such as pin_memory,
            prefetch_factor or multiprocessing_context.

    Raises:
        ValueError: none or both of the two sizes; fewer systems than ranks; a system larger than
            the budget, by sid; a list of anything but `Structures`.
    """
    if (batch_size is None) == (max_atoms is None):
        raise ValueError(f"batch_size is {batch_size}, max_atoms {max_atoms}: give one of them")
    if isinstance(dataset, list | tuple):
        _checked(dataset)
    elif isinstance(dataset, str) or not hasattr(dataset, "__getitem__"):
        _checked([dataset])
    if not (count := len(dataset)):  # type: ignore[arg-type]
        raise ValueError("the data set has no systems to make batches of")
    limit, sizes = batch_size, np.ones(count, np.int64)
    if max_atoms is not None:
        limit, sizes = max_atoms, sizes_of(dataset)
        if sizes.max() > limit:
            sid = dataset[int(sizes.argmax())].sid[0]
            text = "max_atoms (training.batch_atoms) is"
            raise ValueError(f"sid {sid} has {sizes.max()} atoms, {text} {limit}")
    sampler = BatchSampler(
        sizes, cast(int, limit), shuffle=shuffle, seed=seed, rank=rank, world_size=world_size
    )
    return Loader(
        _Source(dataset, prepare),
        batch_sampler=sampler,
        num_workers=num_workers,
        collate_fn=_same,
        generator=torch.Generator().manual_seed(seed),
        **{"persistent_workers": num_workers > 0, **options},
    )


def _same(batch: Any) -> Any:
    return batch


@dataclass(eq=False)
class _Source(Dataset[Structures]):
    systems: Systems
    prepare: Callable[[Structures], Structures] | None

    def __getitems__(self, indices: list[int]) -> Structures | ValueError:
        fetch = getattr(self.systems, "__getitems__", None)
        try:
            batch = collate(fetch(indices) if fetch else [self.systems[i] for i in indices])
            return batch if self.prepare is None else self.prepare(batch)
        except ValueError as error:
            if get_worker_info() is None:
                raise
            return error  # as a value: torch would bury its message in one of its own


def _checked(systems: Sequence[Any]) -> Sequence[Structures]:
    for place, system in enumerate(systems):
        if not isinstance(system, Structures):
            text = f"system {place} is a {type(system).__name__}, expected Structures"
            raise ValueError(f"{text}: see flt_mol.data.open_dataset")
    return systems


def sizes_of(dataset: Any) -> Integers:
    """Atoms of each system (len,), of a data set, a `Subset` of one, or a list of systems."""
    if isinstance(dataset, Subset):
        return sizes_of(dataset.dataset)[dataset.indices]
    if hasattr(dataset, "natoms"):
        return np.asarray(dataset.natoms(), np.int64)
    return np.array([_checked([dataset[i]])[0].num_atoms for i in range(len(dataset))], np.int64)


@dataclass(frozen=True)
class Moments:
    """Count, mean and population standard deviation of numbers."""

    count: int
    mean: float
    std: float


@dataclass(frozen=True)
class TargetStatistics:
    """Of a data set.

    Args:
        energies: of the targets, eV.
        median: eV; of an even number of targets, between the two in the middle.
        most_atoms: of the largest system.
        elements: atomic numbers that occur, ascending.
        energies_initial: as `energies`, before relaxation; None unless asked for.
        references: by field, "energy" and "energy_initial", energies of elements as of
            `fit_references`; moments are then of the rest. Empty unless asked for.
    """

    energies: Moments
    median: float
    most_atoms: int
    elements: tuple[int, ...]
    energies_initial: Moments | None = None
    references: Mapping[str, NDArray[np.float32]] = dataclass_field(
        default_factory=dict, repr=False
    )


def target_statistics(
    dataset: Systems, num_workers: int = 0, *, initial: bool = False, composition: bool = False
) -> TargetStatistics:
    """What the targets, sizes and elements of a data set are, read once in batches.

    Args:
        dataset: of single systems, or a list of them.
        num_workers: processes that read.
        initial: whether energies before relaxation are targets as well.
        composition: whether reference energies of elements are fitted.

    Raises:
        ValueError: no systems, or one that cannot be read, or whose target is missing or not
            finite, by its sid.

    Examples:
        >>> atoms = [Structures.single([z], [[0, 0, 0]], energy=float(z)) for z in (1, 8)]
        >>> target_statistics(atoms)
        TargetStatistics(energies=Moments(count=2, mean=4.5, std=3.5), median=4.5, most_atoms=1,
        elements=(1, 8), energies_initial=None)
    """
    fields = ("energy", "energy_initial") if initial else ("energy",)
    targets: dict[str, list[float]] = {field: [] for field in fields}
    most_atoms, elements, seen, counts = 0, set[int](), 0, list[NDArray[np.int32]]()
    for batch in make_loader(dataset, _CHUNK, num_workers=num_workers):
        for field, values in targets.items():
            energy = getattr(batch, field)
            if energy is None or not energy.isfinite().all():
                _refuse(dataset, range(seen, seen + len(batch)), field)
            values += energy.tolist()
        most_atoms = max(most_atoms, int(batch.natoms.max()))
        elements.update(batch.atomic_numbers.unique().tolist())
        if composition:
            counts.append(element_counts(batch))
        seen += len(batch)
    rest = {name: np.array(values) for name, values in targets.items()}
    references: dict[str, NDArray[np.float32]] = {}
    for name in fields if composition else ():
        references[name], rest[name] = fit_references(np.concatenate(counts), rest[name])
    return TargetStatistics(
        energies=_moments(rest["energy"]),
        median=float(np.median(targets["energy"])),
        most_atoms=most_atoms,
        elements=tuple(sorted(elements)),
        energies_initial=_moments(rest["energy_initial"]) if initial else None,
        references=references,
    )


def element_counts(batch: Structures) -> NDArray[np.int32]:
    """Atoms of each system by atomic number, (B, 119)."""
    counts = np.zeros((len(batch), 119), np.int32)
    np.add.at(counts, (batch.system.numpy(), batch.atomic_numbers.numpy()), 1)
    return counts


def fit_references(
    counts: NDArray[np.int32], energies: NDArray[np.float64]
) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    r"""Energies r_z of elements that minimise Σ_s (E_s − Σ_z n_sz r_z)², and the rest.

    The shortest r, where the compositions allow several; 0 for elements that do not occur.

    Args:
        counts: n (S, 119), of `element_counts`.
        energies: E (S,), eV.

    Returns:
        r (119,) float32, eV, and E − n·r (S,).
    """
    there = counts.any(axis=0)
    reference = np.zeros(counts.shape[1], np.float32)
    reference[there] = np.linalg.lstsq(counts[:, there].astype(float), energies, rcond=None)[0]
    return reference, energies - counts @ reference.astype(float)


def _moments(values: NDArray[np.float64]) -> Moments:
    return Moments(len(values), float(values.mean()), float(values.std()))


def _refuse(systems: Systems, rows: Iterable[int], field: str) -> None:
    for system in (systems[i] for i in rows):
        energy = getattr(system, field)
        if energy is None or not energy.isfinite().all():
            text = f"{field} is missing or not finite: give it or skip the system"
            raise ValueError(f"sid {system.sid[0]}: {text}")
