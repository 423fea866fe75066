"""One record of OC20's schema out of a string of bytes."""

from __future__ import annotations

import zlib
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flt_mol.data.compact import layout
from flt_mol.data.compact.values import from_json

__all__ = ["CompactRecord", "decode", "read_extras"]


class CompactRecord(dict[str, Any]):
    """The fields of one record, decoded. Further values are taken as they are, however long."""

    def describe(self, name: str) -> tuple[str, tuple[int, ...] | None]:
        """Type and shape of a field; the shape of plain values is None."""
        value = self[name]
        if isinstance(value, np.ndarray):
            return "array", value.shape
        return type(value).__name__, None


def decode(payload: bytes | memoryview, where: str) -> CompactRecord:
    """The fields of one record, by OC20's names; the arrays are its own copies.

    pos, pos_relaxed (n, 3) and cell (3, 3), Å, and force (n, 3), eV/Å, float32 or float64 as
    stored; atomic_numbers, tags (n,) uint8; fixed (n,) and pbc (3,) bool; natoms int; sid int or
    str; y_init, y_relaxed float, eV; further values as they were. Fields that are not stored are
    missing.

    Args:
        payload: what `encode` made.
        where: how errors name the record.

    Raises:
        ValueError: damage of any kind, naming `where`.

    Example:
        >>> from flt_mol.data.compact.encoding import encode
        >>> payload = encode({"pos": [[0, 0, 0.5]], "atomic_numbers": [29], "sid": "r7"}, "example")
        >>> decode(payload, "example")["sid"]
        'r7'
    """
    try:
        return _decode(memoryview(payload))
    except ValueError as error:
        raise ValueError(
            f"{where}: damaged record of {len(payload)} bytes ({error}); "
            "write or download the file again"
        ) from error


def read_extras(data: bytes | memoryview) -> dict[str, Any]:
    """Further values by name, from the last section of a record.

    Raises:
        ValueError: JSON of another kind.
    """
    if not len(data):
        return {}
    pairs = from_json(bytes(data))
    values = {}
    for pair in pairs if isinstance(pairs, list) else [None]:
        if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise ValueError("its further values are no list of [name, value]")
        values[pair[0]] = pair[1]
    return values


def _decode(data: memoryview) -> CompactRecord:
    if len(data) < layout.HEADER.itemsize:
        raise ValueError(f"a header alone has {layout.HEADER.itemsize} bytes")
    head = layout.HEADER_STRUCT.unpack_from(data)
    crc, flags, sid, energy, initial, *narrow_cell, natoms, moved, extras = head
    if crc != zlib.crc32(data[4:]):
        raise ValueError("its checksum does not agree")
    if flags & ~layout.KNOWN:
        raise ValueError(f"unknown flags {flags & ~layout.KNOWN:#x}")
    sizes = layout.section_sizes(flags, natoms, moved, sid, extras)
    cell, pos, rows, force, atoms, text, further = _sections(data, sizes)
    record = CompactRecord(pos=_vectors(pos, flags, layout.POS_64))
    if flags & layout.CELL_64:
        record["cell"] = _vectors(cell, flags, layout.CELL_64)
    elif flags & layout.CELL:
        record["cell"] = np.array(narrow_cell, dtype=np.float32).reshape(3, 3)
    if flags & layout.PBC:
        record["pbc"] = np.array([bool(flags & axis) for axis in layout.PBC_AXES])
    bits = _add_atoms(record, flags, np.frombuffer(atoms, dtype=np.uint8))
    if flags & layout.NATOMS:
        record["natoms"] = natoms
    if flags & layout.ENERGY_INITIAL:
        record["y_init"] = initial
    if flags & layout.ENERGY:
        record["y_relaxed"] = energy
    _add_relaxed(record, flags, _vectors(rows, flags, layout.RELAXED_64), bits)
    if flags & layout.FORCE:
        record["force"] = _vectors(force, flags, layout.FORCE_64)
    if flags & layout.SID_NUMBER:
        record["sid"] = sid
    elif flags & layout.SID_TEXT:
        record["sid"] = str(text, "utf-8", "surrogatepass")
    return _with_extras(record, further)


def _sections(data: memoryview, sizes: list[int]) -> list[memoryview]:
    """What follows the header, cut into its sections."""
    ends = list(accumulate(sizes, initial=layout.HEADER.itemsize))
    if min(sizes) < 0 or ends[-1] != len(data):
        raise ValueError(f"its header announces {ends[-1]} bytes")
    return [data[start:end] for start, end in pairwise(ends)]


def _vectors(data: memoryview, flags: int, wide: int) -> NDArray[Any]:
    """Vectors (k, 3) in the machine's own byte order."""
    stored = np.frombuffer(data, dtype=layout.floats(flags, wide)).reshape(-1, 3)
    return stored.astype(stored.dtype.newbyteorder("="))


def _add_atoms(record: CompactRecord, flags: int, atoms: NDArray[np.uint8]) -> NDArray[np.uint8]:
    record["atomic_numbers"], bits = atoms[0::2].copy(), atoms[1::2]
    if flags & layout.TAGS:
        record["tags"] = bits & layout.TAG_BITS
    if flags & layout.FIXED:
        record["fixed"] = (bits & layout.FIXED_BIT) != 0
    return bits


def _add_relaxed(
    record: CompactRecord, flags: int, rows: NDArray[Any], bits: NDArray[np.uint8]
) -> None:
    moved = (bits & layout.MOVED_BIT) != 0
    if moved.sum() != len(rows):
        raise ValueError(f"{len(rows)} relaxed positions for {moved.sum()} atoms that moved")
    if flags & layout.RELAXED:
        with np.errstate(invalid="ignore", over="ignore"):  # of numbers that are refused
            relaxed = record["pos"].astype(rows.dtype)
        relaxed[moved] = rows
        record["pos_relaxed"] = relaxed


def _with_extras(record: CompactRecord, data: memoryview) -> CompactRecord:
    values = read_extras(data)
    if not record.keys().isdisjoint(values):
        raise ValueError("a field is stored twice")
    record.update(values)
    return record
