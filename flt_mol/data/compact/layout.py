"""What the bytes of one compact record mean; docs/compact.md tells it to readers without us.

header   80 bytes, `HEADER`: checksum, flags, sid, energies, cell, and the sizes of the rest
cell     (3, 3) float64, only where it is stored so; float32 ones are in the header
pos      (n, 3) float32 or float64
relaxed  (m, 3), the rows of pos_relaxed that differ from pos in any bit
force    (n, 3), only where asked for
atoms    (n, 2) uint8: atomic number; tag + 4 · fixed + 8 · (pos_relaxed differs)
sid      its text, where it is no number
extras   further values as JSON: a list of [name, value]
"""

from __future__ import annotations

import struct
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

# Both read the header: of one record, and of many at once.
HEADER_STRUCT = struct.Struct("<IIqdd9fIII")
HEADER = np.dtype(
    [
        ("crc", "<u4"),  # zlib.crc32 of all that follows it
        ("flags", "<u4"),
        ("sid", "<i8"),  # of a text: its bytes
        ("y_relaxed", "<f8"),
        ("y_init", "<f8"),
        ("cell", "<f4", (3, 3)),
        ("natoms", "<u4"),
        ("moved", "<u4"),
        ("extras", "<u4"),  # bytes
    ]
)

# Flags: what the record holds.
NATOMS = 1 << 0
SID_NUMBER = 1 << 1
SID_TEXT = 1 << 2
TAGS = 1 << 3
FIXED = 1 << 4
CELL = 1 << 5
PBC = 1 << 6
PBC_AXES = (1 << 7, 1 << 8, 1 << 9)  # which repeat, where pbc is stored
ENERGY = 1 << 10
ENERGY_INITIAL = 1 << 11
RELAXED = 1 << 12
FORCE = 1 << 13
# Flags: which arrays are float64, not float32.
POS_64 = 1 << 14
RELAXED_64 = 1 << 15
CELL_64 = 1 << 16
FORCE_64 = 1 << 17
KNOWN = (1 << 18) - 1

# The second byte of an atom.
TAG_BITS, FIXED_BIT, MOVED_BIT = 3, 4, 8

_Count = TypeVar("_Count", int, NDArray[np.int64])


def section_sizes(
    flags: int, natoms: _Count, moved: _Count, sid: _Count, extras: _Count
) -> list[_Count]:
    """Bytes of the seven sections after the header, in order, of one record or of many."""
    none: Any = 0 * natoms
    return [
        none + 72 * bool(flags & CELL_64),
        natoms * 3 * width(flags, POS_64),
        moved * 3 * width(flags, RELAXED_64),
        natoms * 3 * width(flags, FORCE_64) if flags & FORCE else none,
        natoms * 2,
        sid if flags & SID_TEXT else none,
        extras,
    ]


def width(flags: int, flag: int) -> int:
    """Bytes of one number of the array that `flag` is about."""
    return 8 if flags & flag else 4


def floats(flags: int, flag: int) -> str:
    """Numpy's name for the numbers of the array that `flag` is about, little-endian."""
    return f"<f{width(flags, flag)}"
