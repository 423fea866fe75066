"""One writer in a folder at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["locked_folder"]

_HELD: set[IO[bytes]] = set()


def _let_go() -> None:
    """In a forked worker: a lock would last as long as the last process that has it open."""
    for file in _HELD:
        file.close()
    _HELD.clear()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_let_go)


@contextmanager
def locked_folder(folder: Path, doing: str) -> Iterator[None]:
    """Hold a folder, made if need be, for one process at a time.

    The lock goes with its process, however that ends. Where the system or the file system has no
    locks, nothing is held.

    Args:
        folder: to hold.
        doing: for the message to who comes second, e.g. "download".

    Raises:
        ValueError: another process holds it; it cannot be written.
    """
    path = folder / f".{doing}.lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        what = "a link to nothing" if folder.is_symlink() and not folder.exists() else "a file"
        raise ValueError(f"cannot make the folder {folder}: {what} has that name") from error
    except OSError as error:
        raise ValueError(f"cannot make the folder {folder}: {error.strerror or error}") from error
    try:
        file = _acquire(path)
    except BlockingIOError as error:
        raise ValueError(
            f"another {doing} into {folder} is running; wait until it has ended"
        ) from error
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}") from error
    _HELD.add(file)
    try:
        yield
    finally:
        _HELD.discard(file)
        with suppress(OSError):
            path.unlink(missing_ok=True)
        file.close()


def _acquire(path: Path) -> IO[bytes]:
    while True:
        file = path.open("ab")
        if fcntl is None:
            return file
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise
        except OSError:  # a file system without locks
            return file
        # Who held it before may have removed the file between our open and our lock.
        with suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(file.fileno())):
                return file
        file.close()
