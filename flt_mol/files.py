"""Files: written completely or not at all; shipped folders; natural order of names."""

from __future__ import annotations

import errno
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VERSION = "0.2.0"
"""Of the package; stored in the files that it writes."""

_PACKAGE = Path(__file__).resolve().parent


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a ValueError that names the file."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error


@contextmanager
def temporary_path(path: str | Path, durable: bool = False) -> Iterator[Path]:
    """A temporary name beside `path`, renamed to `path` at the end, removed on an error.

    Readers of `path` see the complete new file or the previous one. Missing folders are created.

    Args:
        path: the final name.
        durable: flush to the disk before renaming, so that this holds after a power cut, too.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp{path.suffix}")
    try:
        yield temporary
        if durable:
            _flush(temporary)
        temporary.replace(path)
        if durable and os.name == "posix":  # elsewhere folders cannot be opened
            _flush(path.parent)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error  # it did not say where
    finally:
        temporary.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def some(items: Sequence[Any], shown: int = 5) -> str:
    """The first of `items`, and how many more there are.

    Example:
        >>> some(range(7))
        '0, 1, 2, 3, 4 and 2 more'
    """
    more = f" and {len(items) - shown} more" if len(items) > shown else ""
    return ", ".join(map(str, items[:shown])) + more


def natural_key(path: Path) -> list[tuple[int, int, str]]:
    """Sort key that orders the numbers in file names by value.

    Example:
        >>> sorted([Path("data.10.lmdb"), Path("data.2.lmdb")], key=natural_key)[0].name
        'data.2.lmdb'
    """
    parts = re.split(r"([0-9]+)", path.name)
    return [(0, int(part), "") if i % 2 else (1, 0, part) for i, part in enumerate(parts)]


def shipped_folder(kind: str) -> Path:
    """The folder of the shipped ``datasets``, ``models`` or ``configs``.

    A checkout beside the package comes first, then ``share/flt_mol`` in a folder above it, where
    pip puts a wheel's data (also with ``--user``, ``--target``, ``--prefix``).

    Raises:
        FileNotFoundError: neither exists; the installation is incomplete.

    Example:
        >>> shipped_folder("configs").name
        'configs'
    """
    checkout = _PACKAGE.parent
    if (checkout / "pyproject.toml").is_file() and (checkout / kind).is_dir():
        return checkout / kind
    for above in (*_PACKAGE.parents, Path(sysconfig.get_path("data"))):
        if (folder := above / "share" / "flt_mol" / kind).is_dir():
            return folder
    raise FileNotFoundError(
        f"the folder '{kind}' of flt_mol is missing (expected {checkout / kind}, or "
        f"share/flt_mol/{kind} in a folder above); reinstall"
    )
