"""LMDB files: what a file is before it is opened, and one shared environment for each file.

py-lmdb 3 refuses to open a file twice in a process, forked children included. So all data sets
of a process share one environment per file; a forked child closes what it inherited.
"""

from __future__ import annotations

import os
import stat
import struct
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb

from flt_mol.data.lmdb.pages import MAGIC, META_SIZE, check_tree, follow, read_metas
from flt_mol.files import readable

__all__ = ["Environment", "check_file", "is_lmdb", "stamp"]

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
    with readable(path), path.open("rb") as file:
        head = file.read(24)
    return len(head) == 24 and struct.unpack_from("<I", head, 16)[0] == MAGIC


def check_file(path: Path) -> None:
    """Refuse a file that LMDB could not read, or could read only until the process is killed.

    LMDB maps the file into memory and trusts it: a page beyond the end, or of other contents than
    expected, ends the process.

    Raises:
        ValueError: no regular file, an empty one, another kind of file (saying which), a
            truncated one, or one with a damaged page.
    """
    with readable(path):
        status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is no regular file; copy its contents into one")
    size = status.st_size
    if size == 0:
        raise ValueError(f"{path} is empty (0 bytes); download or write it again")
    with readable(path), path.open("rb") as file:
        head = file.read(512)
        if not is_lmdb(path):
            raise ValueError(f"{path} is no LMDB file; it looks like {_kind(head)}")
        metas = read_metas(file)
    sound = [meta for meta in metas if meta.valid]
    needed = max((max(m.last_page + 1, 2) * m.page_size for m in sound), default=META_SIZE)
    if size < needed:
        raise ValueError(
            f"{path} is truncated: {size} bytes of at least {needed}; download or write it again"
        )
    if len(sound) < 2 or sound[0].page_size != sound[1].page_size:
        raise ValueError(
            f"{path} is damaged: page {int(metas[0].valid)} describes no LMDB file; "
            "download or write it again"
        )
    if not follow(metas):
        raise ValueError(
            f"{path} is damaged: its transactions {metas[0].transaction} and "
            f"{metas[1].transaction} do not follow each other; download or write it again"
        )
    check_tree(path, max(metas, key=lambda meta: meta.transaction))


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
                for other in list(_OPEN.values()):
                    if other.path == path:  # of a file that had the name before
                        other.close()
                environment = _OPEN[identity] = Environment(path)
            return environment

    @property
    def overwritten(self) -> bool:
        """Whether the file itself was written to since it was opened; reading could end Python.

        A file that was removed, or replaced by another one, is read on as it was.
        """
        try:
            now = stamp(self.path)
        except ValueError:
            return False
        return now[:2] == self.stamp[:2] and now != self.stamp

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

    @contextmanager
    def reading(self) -> Iterator[Callable[[bytes], memoryview]]:
        """A function that gives views of values: they lie in the file, and end with the context.

        Raises:
            lmdb.Error: the function finds the file damaged.
            KeyError: a key that is not there.
        """
        with self._env.begin(buffers=True) as transaction:

            def view(key: bytes) -> memoryview:
                value: memoryview | None = transaction.get(key)
                if value is None:
                    raise KeyError(key)
                return value

            yield view

    def close(self) -> None:
        """Close it; data sets that still use it open the file again."""
        self._close()


def stamp(path: Path) -> tuple[int, int, int, int]:
    """Device, inode, size and time of change of a file: which one it is, in which state.

    Raises:
        ValueError: a file that is not there.
    """
    with readable(path):
        status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


_OPEN: weakref.WeakValueDictionary[tuple[int, int], Environment] = weakref.WeakValueDictionary()
_LOCK = threading.Lock()


def _fresh_lock() -> None:
    global _LOCK
    _LOCK = threading.Lock()


if hasattr(os, "register_at_fork"):
    # The lock may be held by a thread that a forked child does not have.
    os.register_at_fork(after_in_child=_fresh_lock)
