"""Which systems make up a batch: so many of them, or as many as a budget of atoms or pairs holds.

All orders come from generators of their own, seeded, on the CPU: they are the same on every
machine and on every rank, and nobody's random state is used or changed.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Sampler

from flt_mol.arguments import whole_number
from flt_mol.data.loading.packing import Plan, best_fit, consecutive, halved, reordered

__all__ = ["BatchSampler"]

Integers = NDArray[np.int64]

_TRIALS = 2
_RETRIES = 8


class BatchSampler(Sampler[list[int]]):
    """Batches whose sizes sum up to no more than `limit`, each epoch in another order.

    Every epoch holds each system once, over all ranks together, and has the same number of steps,
    the same on every rank: where the number of batches falls short of that, the fullest are halved.
    Shuffled systems are packed by best fit: each into the batch that it fills up best. Without
    `shuffle`, or with sizes that are all equal, batches are consecutive.

    Iterating begins with the epoch set by :meth:`set_epoch` or :meth:`load_state_dict`, at first
    0; iterating again goes to the next epoch, whether or not the last one was finished.

    Args:
        sizes: (n,) size of each system; ones for batches of `limit` systems.
        limit: largest sum of sizes of a batch.
        shuffle: whether the order of systems is drawn anew for each epoch, or is theirs.
        seed: of the orders.
        rank: which of the `world_size` processes this is; batches are dealt out in turn.
        world_size: processes that share the epoch.
        unit: what sizes count, for errors.
        name: how errors call system i.

    Attributes:
        epoch: the one in progress, or to come.
        position: batches of this epoch handed out already.

    Raises:
        ValueError: no systems, fewer than ranks, one that is larger than `limit` (by name), a limit
            that is no whole number, or batches that cannot be split into equally many for each
            rank.

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
        unit: str = "systems",
        name: Callable[[int], str] = "system {}".format,
    ) -> None:
        self.sizes = np.maximum(np.asarray(sizes, np.int64), 1)
        self.limit = whole_number("limit", limit, 1)
        self.shuffle, self.seed, self.unit = bool(shuffle), seed, unit
        self.rank, self.world_size = rank, world_size
        self._check(name)
        self._consecutive = not shuffle or self.sizes.min() == self.sizes.max()
        self._batches = self._count()
        self._sizes_crc32 = zlib.crc32(self.sizes.astype("<i8").tobytes())
        self.epoch, self.position, self._begun = 0, 0, False

    def __len__(self) -> int:
        """Batches of this rank in an epoch, the same in each."""
        return self._batches // self.world_size

    def __iter__(self) -> Iterator[list[int]]:
        epoch, position = self.upcoming()
        self.epoch, self.position, self._begun = epoch, position, True
        order, ends = self.plan(epoch)
        starts = np.concatenate([[0], ends[:-1]])
        mine = slice(self.rank, None, self.world_size)
        for start, end in list(zip(starts[mine], ends[mine], strict=True))[position:]:
            self.position += 1
            yield order[start:end].tolist()
        self.set_epoch(epoch + 1)

    def upcoming(self) -> tuple[int, int]:
        """Epoch and batch that the next iteration begins with."""
        return (self.epoch + 1, 0) if self._begun else (self.epoch, self.position)

    def set_epoch(self, epoch: int) -> None:
        """Iterate over this epoch next, from its first batch."""
        self.epoch, self.position, self._begun = whole_number("epoch", epoch, 0), 0, False

    def state_dict(self) -> dict[str, Any]:
        """Epoch, batches of it that were handed out, and what must be alike to go on from there."""
        return {"epoch": self.epoch, "position": self.position, **self._alike()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration gives what is left of that epoch; later ones what would follow.

        Raises:
            ValueError: the state of a sampler that makes other batches, or of a batch that the
                epoch does not have.
        """
        other = {k: v for k, v in self._alike().items() if state.get(k) != v}
        if other:
            saved = {k: state.get(k) for k in other}
            raise ValueError(f"these are not the batches of the saved state: {other}, not {saved}")
        epoch, position = (
            whole_number(f"{name} of the saved state", state.get(name), 0)
            for name in ("epoch", "position")
        )
        if position > len(self):
            raise ValueError(
                f"position of the saved state is {position}, and an epoch has {len(self)} batches"
            )
        self.epoch, self.position, self._begun = epoch, position, False

    def _alike(self) -> dict[str, Any]:
        return {
            "systems": len(self.sizes),
            "sizes_crc32": self._sizes_crc32,
            "unit": self.unit,
            "limit": self.limit,
            "shuffle": self.shuffle,
            "seed": self.seed if self.shuffle else 0,
            "world_size": self.world_size,
        }

    def plan(self, epoch: int) -> Plan:
        """All batches of an epoch, of all ranks; those of a rank are every `world_size`-th."""
        order = np.arange(len(self.sizes))
        if self.shuffle:
            generator, order = _shuffled(len(order), self.seed, epoch)
        if self._consecutive:
            return halved(consecutive(self.sizes, order, self.limit), self._batches)
        plan = self._packed(order)
        for _ in range(_RETRIES):
            if len(plan.ends) <= self._batches:
                break
            plan = self._packed(torch.randperm(len(order), generator=generator).numpy())
        else:
            plan = self._packed(self._descending(order))
        # Batches begun last are the emptiest: they are not to come at the end of every epoch.
        which = torch.randperm(len(plan.ends), generator=generator).numpy()
        return halved(reordered(plan, which), self._batches)

    def _check(self, name: Callable[[int], str]) -> None:
        if len(self.sizes) == 0:
            raise ValueError("the data set has no systems to make batches of")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"rank is {self.rank} and world_size {self.world_size}, expected a rank from 0 to "
                "world_size − 1"
            )
        if len(self.sizes) < self.world_size:
            raise ValueError(
                f"{len(self.sizes)} systems cannot be shared by {self.world_size} ranks: each "
                "needs one; use fewer ranks"
            )
        large = np.flatnonzero(self.sizes > self.limit)
        if len(large):
            worst = int(large[self.sizes[large].argmax()])
            more = f" (and so have {len(large) - 1} more)" if len(large) > 1 else ""
            raise ValueError(
                f"{name(worst)} has {self.sizes[worst]} {self.unit}, more than a batch may hold, "
                f"{self.limit}{more}: allow at least {self.sizes[worst]}, or leave it out"
            )

    def _count(self) -> int:
        """Batches of an epoch, of all ranks: what packing needs, and a little more for luck."""
        order = np.arange(len(self.sizes))
        if self._consecutive:
            needed = wanted = len(consecutive(self.sizes, order, self.limit).ends)
        else:
            trials = [_shuffled(len(order), self.seed, epoch)[1] for epoch in range(_TRIALS)]
            counts = [len(self._packed(trial).ends) for trial in trials]
            needed = len(self._packed(self._descending(order)).ends)
            wanted = max(max(counts) + max(counts) // 300, needed)
        ranks = self.world_size
        batches = -(-wanted // ranks) * ranks
        if batches > len(order):
            batches = len(order) // ranks * ranks
        if batches < needed:
            raise ValueError(
                f"{len(order)} systems in {needed} batches cannot be dealt to {ranks} ranks, each "
                "as many: make batches larger, or use fewer ranks"
            )
        return batches

    def _packed(self, order: Integers) -> Plan:
        return best_fit(self.sizes, order, self.limit)

    def _descending(self, order: Integers) -> Integers:
        """Large systems first: that packs best, and into as many batches whatever the order was."""
        return order[np.argsort(-self.sizes[order], kind="stable")]


def _shuffled(count: int, seed: int, epoch: int) -> tuple[torch.Generator, Integers]:
    """The order of an epoch, and the generator for whatever else it draws.

    Orders are those of torch's own shuffling, which version 0.1 used: before each epoch it drew a
    seed for workers from the same generator, and after it an order that nobody saw.
    """
    generator = torch.Generator().manual_seed(seed)
    for draws in (*[2] * epoch, 1):
        torch.empty((), dtype=torch.int64).random_(generator=generator)
        for _ in range(draws):
            order = torch.randperm(count, generator=generator)
    return generator, order.numpy()
