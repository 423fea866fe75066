"""Whether results can be written, asked before the work; and text that any terminal can show."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO


def check_file(path: Path, suffixes: tuple[str, ...], option: str) -> None:
    """Refuse a file that cannot be written later. A file that is there is not touched.

    Args:
        path: the file; missing folders above it will be made.
        suffixes: those allowed.
        option: that chooses another, for the message.

    Raises:
        ValueError: another suffix, a folder of that name, or no place to write, with the mend.
    """
    if path.suffix.lower() not in suffixes:
        raise ValueError(f"cannot write {path}: use a name ending in {' or '.join(suffixes)}")
    if os.path.isdir(path):
        raise ValueError(f"cannot write {path}: it is a folder; give a file with {option}")
    if os.path.exists(path) and not os.access(path, os.W_OK):
        raise ValueError(f"cannot write {path}: no permission; choose another with {option}")
    _check_above(path, path.parent, [f".{path.name}.{os.getpid()}.tmp{path.suffix}"], option)


def check_folder(path: Path, option: str, files: Iterable[str] = ()) -> None:
    """Refuse a folder in which nothing can be written later; missing ones will be made.

    Args:
        path: the folder.
        option: that chooses another, for the message.
        files: names of those that will be written to it.

    Raises:
        ValueError: it is a file, or lies below one, or may not be written, or holds a folder by the
            name of one of `files`, with the mend.
    """
    _check_above(path, path, [], option)
    for name in files:
        if os.path.isdir(path / name):
            raise ValueError(
                f"cannot write {path / name}: it is a folder; move it, or give another place with "
                f"{option}"
            )


def check_beside(path: Path, option: str) -> None:
    """Refuse a file or folder, there or not, beside which nothing can be written.

    Raises:
        ValueError: as of :func:`check_folder`.
    """
    _check_above(path, path.parent, [path.name], option)


def _check_above(target: Path, folder: Path, names: list[str], option: str) -> None:
    """Whether `names` can be made in `folder`, and that itself where it is missing."""
    while not os.path.exists(folder) and folder != folder.parent:
        if os.path.islink(folder):
            raise ValueError(
                f"cannot write {target}: {folder} is a link to what does not exist; give another "
                f"with {option}"
            )
        names, folder = [*names, folder.name], folder.parent
    if not folder.is_dir():
        raise ValueError(f"cannot write {target}: {folder} is a file; give another with {option}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(
            f"cannot write {target}: no permission in {folder.absolute()}; "
            f"give another with {option}"
        )
    reason = _trouble(folder, names)
    if reason is not None:
        raise ValueError(f"cannot write {target}: {reason}; give another with {option}")


def _trouble(folder: Path, names: Iterable[str]) -> str | None:
    """What a file tells that is made in the folder, without a name where the system can do that.

    Permissions do not tell all: those of /proc allow everything, a disk may be full.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"0")
            file.flush()
    except OSError as error:
        return f"no file can be made in {folder.absolute()} ({error.strerror or error})"
    for name in names:
        try:
            os.lstat(folder / name)
        except FileNotFoundError:
            continue
        except OSError as error:
            return f"no file can have such a name ({error.strerror or error})"
    return None


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Errors of the system name `target`, not the temporary file beside it.

    Raises:
        OSError: what the system said.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or isinstance(error, BrokenPipeError):
            raise
        raise OSError(error.errno, error.strerror, str(target)) from error


def printable(text: str, encoding: str = "utf-8", keep: str = "") -> str:
    r"""`text` with control characters, and those that `encoding` lacks, as escapes.

    Example:
        >>> printable("caf\u00e9\x1b[0m.cif"), printable("é", "ascii")
        ('café\\x1b[0m.cif', '\\xe9')
    """
    shown = "".join(c if c.isprintable() or c in keep else _escape(c) for c in text)
    return shown.encode(encoding, "backslashreplace").decode(encoding)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def counted(number: int, noun: str) -> str:
    """A number and its noun, in the plural unless it is one.

    Example:
        >>> counted(1, "epoch"), counted(4020, "step")
        ('1 epoch', '4,020 steps')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


_STDOUT: Any = object()


def say(text: str, stream: TextIO | None = _STDOUT) -> None:
    """Print, with escapes for what a terminal must not be sent or `stream` cannot encode.

    Args:
        text: to print.
        stream: standard output if not given; None, as Python has `sys.stderr` where it was closed
            from the start, prints nothing.

    Raises:
        OSError: standard output is closed, so that the results would be lost.
    """
    if stream is _STDOUT:
        stream = sys.stdout
        if stream is None:
            raise OSError("standard output is closed, nothing can be printed")
    if stream is None:
        return
    print(printable(text, stream.encoding or "utf-8", keep="\n\t"), file=stream)


def say_files(files: Sequence[Path]) -> None:
    """Name the files that were written."""
    say("written:")
    for file in files:
        say(f"  {printable(str(file))}")


def show_then(text: str, write: Callable[[], None]) -> None:
    """Print the results, so that a full disk does not lose them; a closed pipe loses no file."""
    try:
        if text:
            say(text)
        sys.stdout.flush()
    finally:
        write()
