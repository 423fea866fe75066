"""Writing files so that nothing is lost, and errors of reading that name them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of the system become a ValueError that names the file."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error


@contextmanager
def temporary_path(path: str | Path, durable: bool = False) -> Iterator[Path]:
    """A name beside `path` to write to, renamed to `path` at the end, or removed on an error.

    Whoever reads `path` finds the whole file or the one before. Missing folders are made.

    Args:
        path: where the file goes.
        durable: whether that holds after a power cut, too: the file is on the disk before its name.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(path)
    try:
        yield temporary
        if durable:
            _to_disk(temporary)
        temporary.replace(path)
        if durable and os.name == "posix":  # elsewhere folders cannot be opened
            _to_disk(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def temporary_name(path: Path) -> Path:
    """The name beside `path` that :func:`temporary_path` writes to."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp{path.suffix}")


def _to_disk(path: Path) -> None:
    # For files some systems want a descriptor that may write, for folders they allow none.
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
