"""Compact files are written whole or not at all, and the same records give the same bytes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lmdb

from flt_mol.data.compact.blocks import Table
from flt_mol.files import temporary_path

__all__ = ["FORMAT", "VERSION", "block_key", "block_number", "write_compact"]

VERSION = 1
FORMAT = b"flt_mol compact "  # and the version
_DIGITS = 8
_CHUNK = 1 << 24  # bytes written in one transaction
_MAP = 1 << 26  # bytes of a new file's map


def block_key(number: int) -> bytes:
    """The LMDB key of a block: its number with 8 digits, so that LMDB's order is theirs."""
    return b"%0*d" % (_DIGITS, number)


def block_number(key: bytes) -> int:
    """The number of a block; -1 for the key of something else."""
    return int(key) if len(key) == _DIGITS and key.isdigit() else -1


def write_compact(
    path: str | Path,
    blocks: Iterable[bytes],
    length: int | None = None,
    metadata: Mapping[str, Any] | None = None,
    *,
    chunk: int = _CHUNK,
) -> int:
    """Write a compact file; return how many records it holds.

    It is written under other names beside `path` and renamed once it is on disk, so that whoever
    looks finds the whole file, the one before, or none. The same blocks and metadata give the
    same bytes, however they came.

    Args:
        path: the file, `.lmdb`; one that is there is replaced.
        blocks: what `pack` made; one chunk of them is held in memory.
        length: records that they must hold in all; None: as many as there are.
        metadata: whatever JSON can say about the file: its source, what was left out.
        chunk: bytes after which a transaction is written to disk.

    Raises:
        ValueError: no blocks, a damaged one, another number of records than `length`, metadata
            that JSON cannot hold. `path` is then as it was before.
    """
    path = Path(path)
    try:
        about = json.dumps(dict(metadata or {}), sort_keys=True, allow_nan=False)
    except TypeError as error:
        raise ValueError(f"{path}: metadata that JSON cannot hold ({error})") from error
    items = _Items(blocks, length, about.encode("ascii"))
    with temporary_path(path) as final:
        loose = final.with_name(f"{final.name}.loose")
        final.unlink(missing_ok=True)
        loose.unlink(missing_ok=True)
        try:
            _write_loose(loose, final, items, chunk)
        except lmdb.Error as error:
            raise ValueError(f"{path} cannot be written: {error}") from error
        finally:
            loose.unlink(missing_ok=True)
        _sync(final)
    _sync(path.parent)
    return items.count


class _Items:
    """Keys and values of a file, in LMDB's order; `count` of the records that have come."""

    def __init__(self, blocks: Iterable[bytes], length: int | None, about: bytes) -> None:
        self.blocks = blocks
        self.length = length
        self.about = about
        self.count = 0

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        tables: list[bytes] = []
        for number, block in enumerate(self.blocks):
            table = Table.read(block)
            if not table.sound:
                raise ValueError(f"block {number} is none that `pack` made, or is damaged")
            self.count += len(table.natoms)
            tables.append(block[: table.offsets[0]])
            yield block_key(number), block
        if not self.count or self.length not in (None, self.count):
            expected = self.length or "at least one"
            raise ValueError(f"{self.count} records came of {expected} expected")
        yield b"format", FORMAT + b"%d" % VERSION
        yield b"index", b"".join(tables)
        yield b"length", b"%d" % self.count
        yield b"metadata", self.about


def _write_loose(loose: Path, final: Path, items: _Items, chunk: int) -> None:
    """Fill `loose`, then copy its pages in order, without the free ones, to `final`."""
    waiting: list[tuple[bytes, bytes]] = []
    size = total = 0
    for key, value in items:
        waiting.append((key, value))
        size += len(value)
        total += len(value)
        if size >= chunk:
            _put(loose, waiting, total)
            waiting, size = [], 0
    _put(loose, waiting, total)
    # The size of the map is written down in the file: one that does not depend on the chunks.
    with _open(loose, 2 * total) as environment:
        environment.copy(str(final), compact=True)


def _open(loose: Path, room: int) -> lmdb.Environment:
    return lmdb.open(str(loose), subdir=False, lock=False, sync=False, map_size=_MAP + room)


def _put(loose: Path, items: Sequence[tuple[bytes, bytes]], total: int) -> None:
    """One transaction, up to `total` bytes in the file; its map grows until it has room.

    The file is opened anew for each: as long as it is open, LMDB uses pages again with what was
    on them before, and the file would depend on the chunks.
    """
    with _open(loose, total) as environment:
        while True:
            try:
                with environment.begin(write=True) as transaction:
                    for key, value in items:
                        transaction.put(key, value, append=True)
                return
            except lmdb.MapFullError:
                environment.set_mapsize(2 * environment.info()["map_size"])


def _sync(path: Path) -> None:
    """Have the disk hold a file, or the names in a folder."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:  # of folders on Windows
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
