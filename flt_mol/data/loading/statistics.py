"""What a data set's targets look like, in one pass: for normalisers and for data cards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from flt_mol.data.loading.batching import make_loader
from flt_mol.moments import Moments
from flt_mol.structures import Structures

__all__ = ["TargetStatistics", "target_statistics", "trained_on"]

MAX_ATOMIC_NUMBER = 118
_AT_ONCE = 256
_NAMES = {
    "energy": ("target", "give its relaxed energy"),
    "energy_initial": ("energy before relaxation", "give it (y_init)"),
}


@dataclass(frozen=True)
class TargetStatistics:
    """Of the targets of a data set.

    Attributes:
        energies: count, mean and population standard deviation, eV.
        lowest: eV.
        highest: eV.
        median: eV; of an even number of targets, between the two in the middle.
        most_atoms: of the largest system.
        elements: atomic numbers that occur, ascending.
        energies_initial: as `energies`, before relaxation; None unless asked for.
    """

    energies: Moments
    lowest: float
    highest: float
    median: float
    most_atoms: int
    elements: tuple[int, ...]
    energies_initial: Moments | None = None


def trained_on(
    statistics: TargetStatistics, before: Mapping[str, float] | None = None
) -> dict[str, float]:
    """What a model remembers of the systems that it was trained on: plain numbers by name.

    Args:
        statistics: of them.
        before: what it remembers of an earlier training, whose largest system counts, too.
    """
    most = max(statistics.most_atoms, (before or {}).get("most_atoms", 0))
    return {
        "systems": statistics.energies.count,
        "energy_median": statistics.median,
        "most_atoms": most,
    }


def target_statistics(
    dataset: Dataset[Structures] | Sequence[Structures],
    num_workers: int = 0,
    progress: Callable[[int, int], None] | None = None,
    *,
    initial: bool = False,
) -> TargetStatistics:
    """What the targets, sizes and elements of a data set are, read once in batches.

    Args:
        dataset: of single systems, or a list of them.
        num_workers: processes that read.
        progress: called with the systems seen so far and their number.
        initial: whether energies before relaxation are targets as well.

    Raises:
        ValueError: no systems, a record that cannot be read, or a system without a target or
            with one that is not finite, by its sid.

    Example:
        >>> atoms = [Structures.single([z], [[0, 0, 0]], energy=float(z)) for z in (1, 8)]
        >>> target_statistics(atoms)
        TargetStatistics(energies=Moments(count=2, mean=4.5, std=3.5), lowest=1.0, highest=8.0,
        median=4.5, most_atoms=1, elements=(1, 8), energies_initial=None)
    """
    energies, lowest, highest = Moments(), math.inf, -math.inf
    before, most_atoms = Moments(), 0
    targets: list[Tensor] = []
    atoms = torch.zeros(MAX_ATOMIC_NUMBER + 1, dtype=torch.int64)
    total = len(dataset)  # type: ignore[arg-type]
    for batch in make_loader(dataset, _AT_ONCE, num_workers=num_workers):
        rows = range(energies.count, energies.count + len(batch))
        energy = _targets(batch, "energy", dataset, rows)
        if initial:
            before += Moments.of(_targets(batch, "energy_initial", dataset, rows))
        energies += Moments.of(energy)
        low, high = energy.aminmax()
        lowest, highest = min(lowest, low.item()), max(highest, high.item())
        targets.append(energy.to("cpu", torch.float64))
        most_atoms = max(most_atoms, int(batch.natoms.max()))
        atoms += torch.bincount(batch.atomic_numbers, minlength=len(atoms))
        if progress is not None:
            progress(energies.count, total)
    elements = tuple(atoms.nonzero().flatten().tolist())
    return TargetStatistics(
        energies,
        lowest,
        highest,
        float(np.median(torch.cat(targets).numpy())),
        most_atoms,
        elements,
        before if initial else None,
    )


def _targets(batch: Structures, field: str, dataset: Any, rows: range) -> Tensor:
    """(B,) finite energies, eV."""
    values: Tensor | None = getattr(batch, field)
    if values is None:
        raise ValueError(_without_target(field, (dataset[i] for i in rows)))
    _refuse_odd(_NAMES[field][0], values, batch.sid)
    return values


def _without_target(field: str, systems: Iterable[Structures]) -> str:
    # Of systems of which one lacks its target, a batch keeps none.
    names = [str(system.sid[0]) for system in systems if getattr(system, field) is None]
    more = f" (and {len(names) - 1} more near it)" if len(names) > 1 else ""
    what, mend = _NAMES[field]
    return f"sid {names[0]}{more} has no {what}: leave it out, or {mend}"


def _refuse_odd(what: str, energy: Tensor, sid: Sequence[int | str]) -> None:
    sound = energy.isfinite()
    if not bool(sound.all()):
        at = int((~sound).nonzero()[0])
        raise ValueError(f"the {what} of sid {sid[at]} is {energy[at].item()} eV: leave it out")
