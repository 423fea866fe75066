"""Data that would spoil a run without a word: energies far off all others, data that changed."""

from __future__ import annotations

import warnings
import zlib
from typing import Any

import numpy as np

from flt_mol.data.schema import far_off_message

__all__ = ["data_digest", "warn_far_off"]


def warn_far_off(systems: Any, split: str) -> None:
    """Warn of energies :func:`~flt_mol.data.schema.far_off` in a split held in memory, by sid.

    Args:
        systems: as :func:`load_split` gave them.
        split: its name.

    Warns:
        UserWarning: how many there are, and the first three.
    """
    if not isinstance(systems, list):
        return
    energies = np.array([float(one.energy) for one in systems])
    message = far_off_message(energies, [one.sid[0] for one in systems], split, "the loss")
    if message is not None:
        warnings.warn(message, UserWarning, stacklevel=3)


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
