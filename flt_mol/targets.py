"""Targets that cannot be meant: no energies of structures, or no kin of the others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["LARGEST_ENERGY", "far_off", "far_off_message"]

LARGEST_ENERGY = 1e9  # eV; squares and sums of these are finite
_FAR, _TIMES = 20.0, 50.0  # eV; median distances


def far_off(energies: NDArray[np.float64]) -> NDArray[np.int64]:
    """Which energies are no kin of the others, the farthest first.

    Those farther from the median than 20 eV and than 50 times the median distance: a total energy
    among adsorption energies, which would set the scale of all the others.

    Example:
        >>> far_off(np.array([-1.0, -1.5, -5332.0, -0.5]))
        array([2])
    """
    distance = np.abs(energies - np.median(energies))
    far = np.flatnonzero(distance > max(_FAR, _TIMES * float(np.median(distance))))
    return far[np.argsort(-distance[far], kind="stable")]


def far_off_message(
    energies: NDArray[np.float64], sid: Sequence[int | str], split: str, what: str
) -> str | None:
    """What to say of those that are :func:`far_off`; None where there are none.

    Args:
        energies: (S,) targets, eV.
        sid: S names.
        split: its name.
        what: whose scale they set.
    """
    far = far_off(energies)
    if not len(far):
        return None
    named = ", ".join(f"sid {sid[i]}: {energies[i]:.6g} eV" for i in far[:3])
    return (
        f"split '{split}': {len(far)} of {len(energies)} energies are far off the others "
        f"({named}; median {np.median(energies):.6g} eV), as total energies among adsorption "
        f"energies are. They set the scale of {what}: mend them, or leave them out"
    )
