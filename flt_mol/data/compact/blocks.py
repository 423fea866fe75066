"""Blocks: many records in one LMDB value, so that little of a page is left empty.

crc      u32, zlib.crc32 of the rest of the table
count    u32, records, at least 1
offsets  u32 (count + 1), where each record begins in the block, and where the last one ends
natoms   u32 (count), atoms of each record
records  one after the other, without gaps
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from flt_mol.data.compact import layout

__all__ = ["BLOCK", "Table", "in_blocks", "pack"]

BLOCK = 64  # about 100 kB, of which LMDB's pages leave 2 kB empty
_HEAD = struct.Struct("<II")
_LARGEST = 2**32 - 1
_SMALLEST_RECORD = layout.HEADER.itemsize


def pack(payloads: Sequence[bytes]) -> bytes:
    """A block of records that `encode` made.

    Raises:
        ValueError: no records, one that is none, or 4 GiB of them.

    Example:
        >>> from flt_mol.data.compact.encoding import encode
        >>> record = encode({"pos": [[0, 0, 0.5]], "atomic_numbers": [29]}, "example")
        >>> len(record), len(pack([record, record]))
        (106, 240)
    """
    if not payloads:
        raise ValueError("a block needs at least one record")
    if min(map(len, payloads)) < _SMALLEST_RECORD:
        raise ValueError(f"a record has at least {_SMALLEST_RECORD} bytes")
    count = len(payloads)
    ends = np.cumsum([_table_size(count), *map(len, payloads)])
    if ends[-1] > _LARGEST:
        raise ValueError(f"{count} records have {ends[-1]} bytes, too many for one block")
    heads = b"".join(payload[:_SMALLEST_RECORD] for payload in payloads)
    natoms = np.frombuffer(heads, dtype=layout.HEADER)["natoms"]
    table = struct.pack("<I", count) + ends.astype("<u4").tobytes() + natoms.tobytes()
    return b"".join([zlib.crc32(table).to_bytes(4, "little"), table, *payloads])


def in_blocks(payloads: Iterable[bytes], count: int = BLOCK) -> Iterator[bytes]:
    """Blocks of `count` records, the last of what is left.

    Raises:
        ValueError: as :func:`pack`; `count` below 1.
    """
    if count < 1:
        raise ValueError(f"a block needs at least one record, got count = {count}")
    payloads = iter(payloads)
    while block := list(islice(payloads, count)):
        yield pack(block)


@dataclass(frozen=True)
class Table:
    """What the head of a block says.

    Args:
        offsets: (count + 1,) uint32, first byte of each record, and the end of the last.
        natoms: (count,) uint32.
        sound: whether that agrees with itself; otherwise all zeros.
    """

    offsets: NDArray[np.uint32]
    natoms: NDArray[np.uint32]
    sound: bool = True

    @staticmethod
    def read(block: bytes | memoryview) -> Table:
        """The table of a block. Of a damaged one, the count alone is believed, if it can be."""
        count = _HEAD.unpack_from(block)[1] if len(block) >= _HEAD.size else 0
        if not 1 <= count <= len(block) // (_SMALLEST_RECORD + 8):
            return _damaged(1)
        table = _parse(bytes(block[: _table_size(count)]), count)
        if table is None or table.offsets[-1] != len(block):
            return _damaged(count)
        return table

    @staticmethod
    def read_all(tables: bytes) -> list[Table] | None:
        """Many tables, one after the other; None where one is damaged."""
        found = []
        start = 0
        while start < len(tables):
            count = int.from_bytes(tables[start + 4 : start + 8], "little")
            end = start + _table_size(count)
            table = _parse(tables[start:end], count) if 1 <= count < len(tables) else None
            if table is None:
                return None
            found.append(table)
            start = end
        return found


def _parse(data: bytes, count: int) -> Table | None:
    """A table, if it is whole and agrees with itself."""
    if len(data) != _table_size(count) or zlib.crc32(data[4:]) != _HEAD.unpack_from(data)[0]:
        return None
    numbers = np.frombuffer(data, dtype="<u4", offset=_HEAD.size).astype(np.uint32)
    offsets, natoms = numbers[: count + 1], numbers[count + 1 :]
    if offsets[0] != len(data) or (offsets[1:] < offsets[:-1]).any():
        return None
    return Table(offsets, natoms)


def _damaged(count: int) -> Table:
    return Table(np.zeros(count + 1, np.uint32), np.zeros(count, np.uint32), sound=False)


def _table_size(count: int) -> int:
    return _HEAD.size + 4 * (count + 1) + 4 * count
