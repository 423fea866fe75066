"""Where each record of a compact file lies, kept as arrays: about 8 bytes a record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import lmdb
import numpy as np
from numpy.typing import NDArray

from flt_mol.data.compact.blocks import Table
from flt_mol.data.compact.writing import block_key, block_number
from flt_mol.data.lmdb.file import Environment

__all__ = ["Index"]


@dataclass(frozen=True, eq=False)
class Index:
    """The tables of all K blocks.

    Args:
        numbers: (K,) of the blocks, ascending.
        ends: (K,) records up to the end of each block.
        offsets: (count + K,) first byte of each record in its block, and the end of each block.
        natoms: (count,) atoms of each record; 0 in a damaged block.
        damaged: numbers of the blocks whose table is damaged, where the file has no good copy.
    """

    numbers: NDArray[np.int64]
    ends: NDArray[np.int64]
    offsets: NDArray[np.uint32]
    natoms: NDArray[np.uint32]
    damaged: frozenset[int]

    @staticmethod
    def read(environment: Environment) -> Index:
        """The index of a file.

        Raises:
            ValueError: LMDB finds the file damaged, or there are no blocks; naming the file.
        """
        every = environment.keys()
        keys = [(number, key) for key in every if (number := block_number(key)) >= 0]
        if not keys:
            raise ValueError(f"no records in {environment.path}: it holds no blocks of records")
        tables = Table.read_all(environment.get(b"index") or b"")
        if tables is None or len(tables) != len(keys):
            tables = _tables_of_blocks(environment, [key for _, key in keys])
        numbers = [number for number, _ in keys]
        return Index(
            numbers=np.array(numbers, dtype=np.int64),
            ends=np.cumsum([len(table.natoms) for table in tables], dtype=np.int64),
            offsets=np.concatenate([table.offsets for table in tables]),
            natoms=np.concatenate([table.natoms for table in tables]),
            damaged=frozenset(
                number for number, t in zip(numbers, tables, strict=True) if not t.sound
            ),
        )

    def __len__(self) -> int:
        return len(self.natoms)

    @property
    def absent(self) -> int:
        """How many blocks are missing between the first and the last."""
        return int(self.numbers[-1]) + 1 - len(self.numbers)

    def block(self, place: int) -> int:
        """The number of the block that holds the record at `place`."""
        return int(self.numbers[np.searchsorted(self.ends, place, side="right")])

    def read_records(self, environment: Environment, places: NDArray[np.int64]) -> list[bytes]:
        """The bytes of the records at `places`; none of one in a damaged block.

        Raises:
            ValueError: the file is damaged, or is not the one of this index; naming it.
        """
        rows = np.searchsorted(self.ends, places, side="right")
        starts = self.offsets[places + rows].tolist()
        ends = self.offsets[places + rows + 1].tolist()
        keys = map(block_key, self.numbers[rows].tolist())
        try:
            with environment.reading() as value:
                return [
                    bytes(value(key)[start:end])
                    for key, start, end in zip(keys, starts, ends, strict=True)
                ]
        except (lmdb.Error, KeyError) as error:
            raise ValueError(f"{environment.path} is damaged, or has changed: {error}") from error


def _tables_of_blocks(environment: Environment, keys: Sequence[bytes]) -> list[Table]:
    """The table of each block, out of the block."""
    try:
        with environment.reading() as value:
            return [Table.read(value(key)) for key in keys]
    except lmdb.Error as error:
        raise ValueError(f"{environment.path} is damaged: {error}") from error
