"""What all commands share: options, printing, progress, and the check of outputs."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

__all__ = [
    "BatchSize",
    "Checkpoint",
    "Device",
    "SkipBad",
    "Variadic",
    "check_output",
    "progress_bars",
    "say",
    "say_files",
    "show_then",
]

CHECKPOINT = "A .ckpt or .safetensors file, the folder of a run or an export, or a shipped model."
Checkpoint = Annotated[str, typer.Argument(metavar="CHECKPOINT", help=CHECKPOINT)]
BatchSize = Annotated[int, typer.Option(min=1, help="Systems per step.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps.")]
SkipBad = Annotated[
    bool, typer.Option("--skip-bad", help="Skip invalid records instead of refusing them.")
]
_STDOUT: Any = object()
_QUIET = 60.0  # s between lines of progress where there is no terminal


class Variadic(typer.core.TyperCommand):
    """A command whose options --shares and --ensemble take several values: ``--shares a b c``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat the option before each of its values, as click wants it."""
        out: list[str] = []
        option, empty = "", False
        for arg in [*args, "--"]:
            if option and (arg.startswith("-") or arg == "--"):
                out += [option] if empty else []
                option = ""
            if arg in ("--shares", "--ensemble"):
                option, empty = arg, True
            elif option:
                out += [option, arg]
                empty = False
            else:
                out.append(arg)
        return super().parse_args(ctx, out if "--" in args else out[:-1])


def say(text: str, stream: TextIO | None = _STDOUT) -> None:
    """Print, with escapes for what a terminal must not be sent or `stream` cannot encode.

    Raises:
        OSError: standard output is closed, so that the results would be lost.
    """
    if stream is _STDOUT:
        stream = sys.stdout
        if stream is None:
            raise OSError("standard output is closed, nothing can be printed")
    if stream is None:  # standard error was closed from the start
        return
    shown = "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
    encoding = stream.encoding or "utf-8"
    print(shown.encode(encoding, "backslashreplace").decode(encoding), file=stream)


def say_files(files: Iterable[Path]) -> None:
    """Name the files that were written."""
    say("\n  ".join(["written:", *map(str, files)]))


def show_then(text: str, write: Callable[[], None]) -> None:
    """Print the results, so that a full disk does not lose them; a closed pipe loses no file."""
    try:
        if text:
            say(text)
        sys.stdout.flush()
    finally:
        write()


def check_output(path: Path, option: str, suffixes: tuple[str, ...] = ()) -> None:
    """Refuse, before the work, an output that cannot be written later.

    Args:
        path: a file, if there are `suffixes`, else a folder; missing folders above are made later.
        option: that chooses another, for the message.
        suffixes: those allowed.

    Raises:
        ValueError: another suffix, a folder in place of a file or the other way round, or a folder
            that cannot be written to.
    """
    another = f"; choose another with {option}"
    if suffixes and path.suffix.lower() not in suffixes:
        raise ValueError(f"cannot write {path}: use a name ending in {' or '.join(suffixes)}")
    if suffixes and path.is_dir():
        raise ValueError(f"cannot write {path}: it is a folder{another}")
    if path.is_file() and (not suffixes or not os.access(path, os.W_OK)):
        raise ValueError(f"cannot write {path}: it is a read-only file, or no folder{another}")
    folder = path.parent if suffixes else path
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"cannot write {path}: {folder.absolute()}: {reason}{another}") from error


@contextmanager
def progress_bars(lines: bool = False) -> Iterator[Callable[[str, int, int | None], None]]:
    """A bar for each label on a terminal; elsewhere a line a minute, or a label with `lines`."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    tasks: dict[str, Any] = {}
    said = time.monotonic()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:

        def show(label: str, done: int, total: int | None) -> None:
            nonlocal said
            new = label not in tasks
            if new:
                tasks[label] = bar.add_task(label, total=total)
            bar.update(tasks[label], completed=done, total=total)
            if console.is_terminal:
                return
            if new and lines:
                say(label, sys.stderr)
            elif time.monotonic() - said >= _QUIET:
                said = time.monotonic()
                say(f"{label}: {done} of {total}", sys.stderr)

        yield show
