"""LMDB files: what a file is before it is opened, and one shared environment for each file.

py-lmdb 3 refuses to open a file twice in a process, forked children included. So all data sets
of a process share one environment per file; a forked child closes what it inherited.
"""

from __future__ import annotations

import os
import struct
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import lmdb

__all__ = ["Environment", "check_file", "is_lmdb", "stamp"]

# Layout of LMDB's meta page (lmdb 0.9, mdb.c): page header, magic, version, address, map size,
# two MDB_db structs of 48 bytes (the first begins with the page size), last page, transaction.
_MAGIC = 0xBEEFC0DE
_META = struct.Struct("<16x I I Q Q I 44x 48x Q Q")
_OTHER_KINDS = {
    b"\x1f\x8b": "a gzip archive; unpack it first",
    b"PK\x03\x04": "a zip archive; unpack it first",
    b"BZh": "a bzip2 archive; unpack it first",
    b"\xfd7zXZ": "an xz archive; unpack it first",
    b"\x28\xb5\x2f\xfd": "a zstd archive; unpack it first",
    b"7z\xbc\xaf": "a 7z archive; unpack it first",
    b"version https://git-lfs": "a git-lfs pointer; run `git lfs pull` to get the data",
    b"<": "a web page or XML; the download went wrong",
    b"\x89HDF": "an HDF5 file",
    b"SQLite format 3": "an SQLite database",
    b"\x93NUMPY": "a numpy array",
    b"\x80": "a pickle",
    b"{": "JSON",
}


def is_lmdb(path: Path) -> bool:
    """Whether the file begins as an LMDB file does."""
    with path.open("rb") as file:
        head = file.read(24)
    return len(head) == 24 and struct.unpack_from("<I", head, 16)[0] == _MAGIC


def check_file(path: Path) -> None:
    """Refuse a file that LMDB could not read, or could read only until the process is killed.

    LMDB maps the file into memory: pages beyond its end end the process with SIGBUS.

    Raises:
        ValueError: an empty file, another kind of file (saying which), or a truncated one.
    """
    size = path.stat().st_size
    if size == 0:
        raise ValueError(f"{path} is empty (0 bytes); download or write it again")
    with path.open("rb") as file:
        head = file.read(512)
        if not is_lmdb(path):
            raise ValueError(f"{path} is no LMDB file; it looks like {_kind(head)}")
        if len(head) < _META.size:
            raise ValueError(f"{path} is truncated: {size} bytes; download or write it again")
        page_size = _META.unpack_from(head)[4]
        file.seek(page_size)
        second = file.read(_META.size)
    metas = [_META.unpack_from(page) for page in (head, second) if len(page) >= _META.size]
    last_page = max(metas, key=lambda meta: meta[6])[5]
    needed = max(last_page + 1, 2) * page_size
    if size < needed:
        raise ValueError(
            f"{path} is truncated: {size} bytes of at least {needed}; download or write it again"
        )


def _kind(head: bytes) -> str:
    if head[257:262] == b"ustar":
        return "a tar archive; unpack it first"
    for magic, kind in _OTHER_KINDS.items():
        if head.startswith(magic):
            return kind
    if not head.strip(b"\0"):
        return "zeros: an interrupted download"
    if all(byte in b"\t\n\r" or 32 <= byte < 127 for byte in head):
        return f"text, beginning with {head[:40].decode('ascii')!r}"
    return f"something else, beginning with the bytes {head[:8].hex(' ')}"


class Environment:
    """A read-only LMDB file, open in this process; made by :meth:`of`, closed with its last user.

    It writes nothing: no lock file, no change to the data.
    """

    def __init__(self, path: Path) -> None:
        check_file(path)
        try:
            self._env = lmdb.open(
                str(path), subdir=False, readonly=True, lock=False, readahead=False, meminit=False
            )
        except lmdb.Error as error:
            mend = (
                "; another part of this program holds it open: close that one first"
                if "already open" in str(error)
                else ""
            )
            raise ValueError(f"{path} cannot be opened: {error}{mend}") from error
        self.path = path
        self.stamp = stamp(path)
        self._pid = os.getpid()
        self._close = weakref.finalize(self, self._env.close)

    @staticmethod
    def of(path: Path) -> Environment:
        """The environment of a file, shared by everyone in this process who reads it."""
        with _LOCK:
            identity = stamp(path)[:2]
            environment = _OPEN.get(identity)
            if environment is not None and (
                not environment.usable or environment.stamp != stamp(path)
            ):
                # Inherited by a fork, or of contents that have been overwritten.
                environment.close()
                environment = None
            if environment is None:
                environment = _OPEN[identity] = Environment(path)
            return environment

    @property
    def usable(self) -> bool:
        """Whether it was opened by this process and is open still."""
        return self._pid == os.getpid() and self._close.alive

    def keys(self) -> Iterator[bytes]:
        """All keys, in LMDB's order."""
        try:
            with self._env.begin() as transaction:
                yield from transaction.cursor().iternext(keys=True, values=False)
        except lmdb.Error as error:
            raise ValueError(f"{self.path} is damaged: {error}; download it again") from error

    def get(self, key: bytes) -> bytes | None:
        """The value of a key."""
        try:
            with self._env.begin() as transaction:
                value: bytes | None = transaction.get(key)
        except lmdb.Error as error:
            raise ValueError(f"{self.path}, key {key.decode()}: {error}") from error
        return value

    def close(self) -> None:
        """Close it; data sets that still use it open the file again."""
        self._close()


def stamp(path: Path) -> tuple[int, int, int, int]:
    """Device, inode, size and time of change of a file: which one it is, in which state.

    Raises:
        ValueError: a file that is not there.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


_OPEN: weakref.WeakValueDictionary[tuple[int, int], Environment] = weakref.WeakValueDictionary()
_LOCK = threading.Lock()


def _fresh_lock() -> None:
    global _LOCK
    _LOCK = threading.Lock()


if hasattr(os, "register_at_fork"):
    # The lock may be held by a thread that a forked child does not have.
    os.register_at_fork(after_in_child=_fresh_lock)
