"""Writing LMDB files: whole or not at all, the same bytes for the same records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

import lmdb

from flt_mol.files import temporary_path

__all__ = ["write_lmdb"]

_CHUNK = 1000  # records in one commit
_FIRST_MAP = 1 << 24  # bytes; doubled as needed


def write_lmdb(path: str | Path, items: Iterable[tuple[bytes, bytes]]) -> None:
    """Write keys and values into one LMDB file, which has its name only when it is whole.

    The map grows by itself, and records are committed in chunks, so that memory and file stay
    small.

    Args:
        path: the file; overwritten at the end.
        items: keys and values; of equal keys the last counts.

    Raises:
        ValueError: LMDB or the disk refuses, naming the file.
    """
    with temporary_path(path) as temporary:
        try:
            # Without a lock, no lock file is left beside; nobody else knows the file.
            environment = lmdb.open(
                str(temporary), subdir=False, lock=False, map_size=_FIRST_MAP, map_async=True
            )
            with environment:
                rest = iter(items)
                while chunk := list(islice(rest, _CHUNK)):
                    _put(environment, chunk)
                environment.sync(True)
        except lmdb.Error as error:
            raise ValueError(f"{path} cannot be written: {error}") from error


def _put(environment: lmdb.Environment, chunk: Sequence[tuple[bytes, bytes]]) -> None:
    """Commit a chunk, in a larger map where it does not fit."""
    while True:
        try:
            with environment.begin(write=True) as transaction:
                for key, value in chunk:
                    transaction.put(key, value)
        except lmdb.MapFullError:
            environment.set_mapsize(2 * environment.info()["map_size"])
        else:
            return
