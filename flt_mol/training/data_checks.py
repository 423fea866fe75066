"""Data that would spoil a run without a word: energies far off all others, data that changed."""

from __future__ import annotations

import warnings
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["data_digest", "far_off", "warn_far_off"]

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


def warn_far_off(systems: Any, split: str) -> None:
    """Warn of targets that are :func:`far_off`, by sid, in a split that is held in memory.

    Args:
        systems: as :func:`load_split` gave them.
        split: its name.

    Warns:
        UserWarning: how many there are, and the first three.
    """
    if not isinstance(systems, list):
        return
    energies = np.array([float(one.energy) for one in systems])
    far = far_off(energies)
    if len(far):
        named = ", ".join(f"sid {systems[i].sid[0]}: {energies[i]:.6g} eV" for i in far[:3])
        warnings.warn(
            f"split '{split}': {len(far)} of {len(energies)} energies are far off the others "
            f"({named}; median {np.median(energies):.6g} eV), as total energies among adsorption "
            "energies are. They set the scale of the loss: mend them, or leave them out",
            UserWarning,
            stacklevel=3,
        )


def data_digest(*splits: Any) -> int:
    """A number that changes with the data.

    Of small splits with any atom or energy, of large ones with the numbers of atoms.
    """
    crc = 0
    for split in splits:
        if isinstance(split, list):
            for system in split:
                for field in (system.atomic_numbers, system.positions, system.energy):
                    if field is not None:
                        crc = zlib.crc32(field.contiguous().numpy().tobytes(), crc)
        else:
            crc = zlib.crc32(np.asarray(split.natoms(), np.int64).tobytes(), crc)
    return crc
