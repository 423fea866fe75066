"""Files: written completely or not at all; shipped folders; natural order of names."""

from __future__ import annotations

import csv
import errno
import os
import re
import shutil
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

VERSION = "0.2.0"
"""Of the package; stored in the files that it writes."""

_PACKAGE = Path(__file__).resolve().parent
_FOREIGN = {
    b"\x1f\x8b": "it is a gzip archive; unpack it first",
    b"\xfd7zXZ": "it is an xz archive; unpack it first",
    b"BZh": "it is a bzip2 archive; unpack it first",
    b"version https://git-lfs": "it is a git-lfs pointer; run `git lfs pull` to get the data",
    b"<": "it is a web page or XML; the download went wrong",
    b"\xef\xbb\xbf": "it begins with a byte-order mark; save it as UTF-8 without one",
    b"\xff\xfe": "it is UTF-16 text; save it as UTF-8",
    b"\0" * 16: "it begins with zeros: an interrupted download",
}


class NoteWarning(UserWarning):
    """``PATH: what was taken for what is missing``; commands print each text once, not per file."""


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a ValueError that names the file."""
    try:
        yield
    except OSError as error:
        text = f"{error.filename or path} cannot be read: {error.strerror or error}"
        raise ValueError(text) from error


def foreign(path: Path) -> str:
    """What a file is instead of one that can be read, by its first bytes; empty if unknown."""
    with suppress(OSError), path.open("rb") as file:
        if not (head := file.read(32)):
            return "it is empty (0 bytes); download or write it again"
        return next((text for start, text in _FOREIGN.items() if head.startswith(start)), "")
    return ""


@contextmanager
def temporary_path(path: str | Path, durable: bool = False) -> Iterator[Path]:
    """A temporary name beside `path`, renamed to `path` at the end, removed on an error.

    Readers of `path` see the complete new file or the previous one. Missing folders are created.

    Args:
        path: the final name.
        durable: flush to the disk before renaming, so that this holds after a power cut, too, and
            first remove what killed processes left of the same file.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if durable and os.name == "posix":
        _remove_leftovers(path)
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


def _remove_leftovers(path: Path) -> None:
    for leftover in path.parent.glob(f".{path.name}.*.tmp{path.suffix}"):
        process = leftover.name.removeprefix(f".{path.name}.").partition(".")[0]
        try:
            os.kill(int(process), 0)  # sends nothing
        except ProcessLookupError:
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink(missing_ok=True)
        except (OSError, ValueError):  # of somebody else, or no number
            continue


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_suffix(path: Path, suffixes: Sequence[str]) -> str:
    """The suffix of a file to write, in lower case; ValueError if it is none of `suffixes`."""
    if (suffix := path.suffix.lower()) not in suffixes:
        raise ValueError(f"cannot write {path}: use a name ending in {' or '.join(suffixes)}")
    return suffix


def write_rows(path: str | Path, rows: Iterable[Sequence[Any]]) -> Path:
    """Write rows as CSV; names of files in them may hold bytes that are not UTF-8."""
    with (
        temporary_path(path) as temporary,
        temporary.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file,
    ):
        csv.writer(file, lineterminator="\n").writerows(rows)
    return Path(path)


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """The known name nearest to a wrong one, or all that there are, for messages.

    Examples:
        >>> nearest("trian", ["train", "test"]), nearest("x", ["train", "test"])
        ('did you mean train?', 'there are: train, test')
    """
    known = list(known)
    if near := get_close_matches(name, known, n=1):
        return f"did you mean {prefix}{near[0]}?"
    return f"there are: {', '.join(known) or 'none'}"


def some(items: Sequence[Any], shown: int = 5) -> str:
    """The first of `items`, and how many more there are.

    Examples:
        >>> some(range(7))
        '0, 1, 2, 3, 4 and 2 more'
    """
    more = f" and {len(items) - shown} more" if len(items) > shown else ""
    return ", ".join(map(str, items[:shown])) + more


def listed(head: str, items: Sequence[Any], count: int = 0) -> str:
    """A head with the `count` of items, the first of them, a line each, and how many more.

    Example:
        >>> print(listed("skipped", ["a", "b"]))
        skipped: 2
          a
          b
    """
    count, shown = count or len(items), items[:20]
    more = [f"… and {count - 20} more"] if count > 20 else []
    return "\n  ".join([f"{head}: {count}", *map(str, shown), *more])


def natural_key(path: Path) -> list[tuple[int, int, str]]:
    """Sort key that orders the numbers in file names by value: 2 before 10."""
    parts = re.split(r"([0-9]+)", path.name)
    return [(0, int(part), "") if i % 2 else (1, 0, part) for i, part in enumerate(parts)]


def shipped_folder(kind: str) -> Path:
    """The folder of the shipped ``datasets``, ``models`` or ``configs``.

    A checkout beside the package comes first, then ``share/flt_mol`` in a folder above it, where
    pip puts a wheel's data (also with ``--user``, ``--target``, ``--prefix``).

    Raises:
        FileNotFoundError: neither exists; the installation is incomplete.
    """
    checkout = _PACKAGE.parent
    if (checkout / "pyproject.toml").is_file() and (checkout / kind).is_dir():
        return checkout / kind
    for above in (*_PACKAGE.parents, Path(sysconfig.get_path("data"))):
        if (folder := above / "share" / "flt_mol" / kind).is_dir():
            return folder
    text = f"share/flt_mol/{kind} in a folder above"
    raise FileNotFoundError(f"neither {checkout / kind} nor {text} exists; reinstall flt_mol")


def find_shipped(name: str, pattern: str) -> Path:
    """The shipped file of a name, as ``models/*/model.yaml`` has it; "-" and "_" are alike.

    Raises:
        ValueError: none of that name, with the nearest, or all.
    """
    kind, _, inside = pattern.partition("/")
    files = sorted(shipped_folder(kind).glob(inside))
    known = {x.parent.name if "/" in inside else x.stem: x for x in files}
    for stem, file in known.items():
        if stem.replace("_", "-") == name.replace("_", "-"):
            return file
    raise ValueError(f"no '{name}' among the shipped {pattern}: {nearest(name, known)}")
