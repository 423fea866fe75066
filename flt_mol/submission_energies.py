"""Whether the energies of a submission can be adsorption energies in eV, by their size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flt_mol.evaluation.submission import SPLITS

__all__ = ["EnergyRange", "energy_ranges", "warnings_of"]

_BEYOND = 50.0  # eV; OC20's adsorption energies lie within about 20


@dataclass(frozen=True)
class EnergyRange:
    """The energies of one split, eV.

    Attributes:
        count: how many there are.
        lowest: of them.
        median: of them.
        highest: of them.
        beyond: how many are farther than 50 eV from 0.
    """

    count: int
    lowest: float
    median: float
    highest: float
    beyond: int

    def __str__(self) -> str:
        """One line for people."""
        low, middle, high = (f"{x:.3f}" for x in (self.lowest, self.median, self.highest))
        return f"{self.count:6d} systems, {low} to {high} eV, median {middle}"


def energy_ranges(path: str | Path) -> dict[str, EnergyRange]:
    """{split: what its energies are like} of a file that passed `check_submission`."""
    found = {}
    with np.load(path, allow_pickle=False) as file:
        for split in SPLITS:
            energy = np.asarray(file[f"{split}_energy"], dtype=np.float64)
            if len(energy):
                low, high = float(energy.min()), float(energy.max())
                beyond = int((np.abs(energy) > _BEYOND).sum())
                middle = float(np.median(energy))
                found[split] = EnergyRange(len(energy), low, middle, high, beyond)
    return found


def warnings_of(ranges: dict[str, EnergyRange]) -> Iterator[str]:
    """A line for each split with energies that no adsorption has.

    Example:
        >>> next(warnings_of({"id": EnergyRange(4, -812.0, -600.0, -1.0, 3)})).split(":")[0]
        'id'
    """
    for split, found in ranges.items():
        if found.beyond:
            yield (
                f"{split}: {found.beyond} of {found.count} energies are beyond ±{_BEYOND:g} eV "
                f"(median {found.median:.6g}): those of adsorption in OC20 lie within about ±20; "
                "are these in eV, and adsorption energies, no total energies?"
            )
