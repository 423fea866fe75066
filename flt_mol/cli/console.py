"""What all commands share: options, printing, progress, and the check of outputs."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from flt_mol.files import check_suffix

CHECKPOINT = "A .ckpt or .safetensors file, the folder of a run or an export, or a shipped model."
Checkpoint = Annotated[str, typer.Argument(metavar="CHECKPOINT", help=CHECKPOINT)]
BatchSize = Annotated[int, typer.Option(min=1, help="Systems per batch.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps.")]
SkipBad = Annotated[
    bool, typer.Option("--skip-bad", help="Skip and count invalid records instead of stopping.")
]
Ensemble = Annotated[
    list[str] | None, typer.Option(metavar="CHECKPOINT...", help="Further members of an ensemble.")
]
TagSlab = Annotated[
    bool, typer.Option("--tag-slab", help="Tag structures whose tags are all 0, or layer numbers.")
]
Adsorbate = Annotated[
    str | None,
    typer.Option(metavar="WHAT", help="Formula, indices from 0 (12,13), or none (default: guess)."),
]
Surface = Annotated[
    str | None,
    typer.Option(
        metavar="RULE", help="oc20, half, or a number of layers (default: the model's, or oc20)."
    ),
]


class Variadic(typer.core.TyperCommand):
    """A command whose options --shares and --ensemble take several values: ``--shares a b c``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat the option before each of its values, as click wants it."""
        out: list[str] = []
        option = ""
        for arg in args:
            if arg.startswith("-"):
                option = arg if arg in ("--shares", "--ensemble") else ""
            elif option and out[-1] != option:
                out.append(option)
            out.append(arg)
        return super().parse_args(ctx, out)


def check_tagging(tag_slab: bool, adsorbate: str | None, surface: str | None) -> None:
    """ValueError where there are options of tagging without it."""
    if not tag_slab and (adsorbate is not None or surface is not None):
        raise ValueError("--adsorbate and --surface need --tag-slab")


def say(text: str, error: bool = False) -> None:
    """Print, with escapes for what a terminal must not be sent or the stream cannot encode."""
    stream: TextIO | None = sys.stderr if error else sys.stdout
    if stream is None:
        if error:
            return
        raise OSError("standard output is closed, nothing can be printed")
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
    """Refuse, before the work, an output that cannot be written later, by ValueError.

    A file, if there are `suffixes`, else a folder; `option` chooses another, for the message.
    """
    if suffixes:
        check_suffix(path, suffixes)
        if path.is_dir():
            raise ValueError(f"cannot write {path}: it is a folder")
    folder = path.parent if suffixes else path
    while not folder.exists():
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = f"{folder}: {error.strerror}"
        raise ValueError(f"cannot write {path}: {reason}; choose another with {option}") from error


@contextmanager
def progress_bars(lines: bool = False) -> Iterator[Callable[[str, int, int | None], None]]:
    """A bar for each label on a terminal; elsewhere nothing, or each label once with `lines`."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    tasks: dict[str, Any] = {}
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:

        def show(label: str, done: int, total: int | None) -> None:
            if label not in tasks:
                tasks[label] = bar.add_task(label, total=total)
                if lines and not console.is_terminal:
                    say(label, error=True)
            bar.update(tasks[label], completed=done, total=total)

        yield show
