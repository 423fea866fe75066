"""What a data set's targets look like, in one pass: for normalisers and for data cards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Dataset

from flt_mol.data.loading.batching import make_loader
from flt_mol.moments import Moments
from flt_mol.structures import Structures

__all__ = ["TargetStatistics", "target_statistics"]

MAX_ATOMIC_NUMBER = 118
_AT_ONCE = 256


@dataclass(frozen=True)
class TargetStatistics:
    """Of the targets of a data set.

    Attributes:
        energies: count, mean and population standard deviation, eV.
        lowest: eV.
        highest: eV.
        elements: atomic numbers that occur, ascending.
    """

    energies: Moments
    lowest: float
    highest: float
    elements: tuple[int, ...]


def target_statistics(
    dataset: Dataset[Structures] | Sequence[Structures],
    num_workers: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> TargetStatistics:
    """Mean, spread and range of the targets and the elements of a data set, read once in batches.

    Args:
        dataset: of single systems, or a list of them.
        num_workers: processes that read.
        progress: called with the systems seen so far and their number.

    Raises:
        ValueError: no systems, a record that cannot be read, or a system without a target or
            with one that is not finite, by its sid.

    Example:
        >>> atoms = [Structures.single([z], [[0, 0, 0]], energy=float(z)) for z in (1, 8)]
        >>> target_statistics(atoms)
        TargetStatistics(energies=Moments(count=2, mean=4.5, std=3.5), lowest=1.0, highest=8.0,
        elements=(1, 8))
    """
    energies, lowest, highest = Moments(), math.inf, -math.inf
    atoms = torch.zeros(MAX_ATOMIC_NUMBER + 1, dtype=torch.int64)
    total = len(dataset)  # type: ignore[arg-type]
    for batch in make_loader(dataset, _AT_ONCE, num_workers=num_workers):
        if batch.energy is None:
            start = energies.count
            raise ValueError(_without_target(dataset[i] for i in range(start, start + len(batch))))
        _refuse_odd(batch.energy, batch.sid)
        energies += Moments.of(batch.energy)
        low, high = batch.energy.aminmax()
        lowest, highest = min(lowest, low.item()), max(highest, high.item())
        atoms += torch.bincount(batch.atomic_numbers, minlength=len(atoms))
        if progress is not None:
            progress(energies.count, total)
    return TargetStatistics(energies, lowest, highest, tuple(atoms.nonzero().flatten().tolist()))


def _without_target(systems: Iterable[Structures]) -> str:
    # Of systems of which one lacks its target, a batch keeps none.
    names = [str(system.sid[0]) for system in systems if system.energy is None]
    more = f" (and {len(names) - 1} more near it)" if len(names) > 1 else ""
    return f"sid {names[0]}{more} has no target: leave it out, or give its relaxed energy"


def _refuse_odd(energy: Tensor, sid: Sequence[int | str]) -> None:
    sound = energy.isfinite()
    if not bool(sound.all()):
        at = int((~sound).nonzero()[0])
        raise ValueError(f"the target of sid {sid[at]} is {energy[at].item()} eV: leave it out")
