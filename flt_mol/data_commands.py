"""What the commands `flt-mol data …` do, each with its parsed options."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from flt_mol.outputs import check_beside, printable, say, say_files

if TYPE_CHECKING:
    from flt_mol.data import StructuresDataset
    from flt_mol.data.conversion import ConvertResult

Bars = Callable[[str, int, int | None], None]
_SHOWN = 20  # records left out


def run_inspect(options: argparse.Namespace) -> None:
    """`flt-mol data inspect`."""
    from flt_mol.data import inspection

    try:
        source = _source(options)
    except ValueError:  # perhaps of one record: the others can be looked at all the same
        options.skip_bad = True
        source = _source(options)
    with _bars() as bars:
        summary = inspection.inspect(source, limit=options.limit, progress=_one(bars, "inspecting"))
    say(
        json.dumps(summary, indent=2, allow_nan=False)
        if options.json
        else inspection.render(summary)
    )
    looked_at = summary["looked_at"]
    if looked_at and summary["counts"]["problems"] == looked_at:
        first = summary["problems"][0]
        raise ValueError(f"each of the {looked_at} records looked at is bad; the first: {first}")


def run_convert(options: argparse.Namespace) -> None:
    """`flt-mol data convert`."""
    from flt_mol.data import convert

    check_beside(options.output, "OUTPUT")  # before all records are read
    if options.references is None:
        source = _source(options)
        _warn_without_targets(source)
    else:
        source = _trajectories(options)
    with _bars() as bars:
        result = convert(
            source,
            options.output,
            on_error="skip" if options.skip_bad else "raise",
            forces=options.forces,
            overwrite=options.overwrite,
            progress=_one(bars, "converting"),
        )
    _say_converted(result)
    say_files([result.output])


def run_split(options: argparse.Namespace) -> None:
    """`flt-mol data split`."""
    from flt_mol.data import split

    names = [name for name, _ in options.shares]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"--shares names {twice} more than once; give each split one share")
    check_beside(options.output, "OUTPUT")
    source = _source(options)
    _warn_without_targets(source)
    with _bars() as bars:
        result = split(
            source,
            options.output,
            dict(options.shares),
            seed=options.seed,
            group_by=options.group_by,
            on_error="skip" if options.skip_bad else "raise",
            forces=options.forces,
            progress=_one(bars, "splitting"),
        )
    for name, part in result.splits.items():
        say(f"{name}: {part.systems:,} systems, {part.bytes:,} bytes")
    _say_skipped(result.skipped)
    say_files(sorted(path for path in result.folder.iterdir() if path.is_file()))


def run_download(options: argparse.Namespace) -> None:
    """`flt-mol data download`."""
    from flt_mol.data.remote import download

    with _bars(lines=True) as bars:
        result = download(
            options.name,
            options.split,
            to=options.to,
            keep_archive=not options.remove_archive,
            base_url=options.mirror,
            progress=bars,
        )
    for split, file in result.files.items():
        state = "unpacked" if split in result.unpacked else "was there"
        say(f"{split}: {state}, {printable(str(file))}")
    if options.to is not None:
        say(f"to use it by its name: export FLT_MOL_DATA={printable(str(result.folder))}")


def run_verify(options: argparse.Namespace) -> None:
    """`flt-mol data verify`."""
    from flt_mol.data.recipes import recipe
    from flt_mol.data.remote import verify

    found = recipe(options.name)
    with _bars(lines=True) as bars:
        rows = verify(found, options.split, progress=bars)
    if options.json:
        content = [
            {
                "split": row.split,
                "file": None if row.file is None else str(row.file),
                "status": row.status,
                "expected": dict(row.expected),
                "found": dict(row.found),
                "message": row.message,
            }
            for row in rows
        ]
        say(json.dumps(content, indent=2))
    else:
        width = max(len(row.split) for row in rows)
        for row in rows:
            say(f"{row.split:<{width}}  {row.status}{f': {row.message}' if row.message else ''}")
    wrong = [row.split for row in rows if not row.ok]
    if wrong:
        text = f"{len(wrong)} of {len(rows)} splits are not as they should be"
        missing = [row.split for row in rows if row.status == "missing"]
        mend = found.how_to_get(missing) if missing else ""
        raise ValueError("; ".join(filter(None, (text, mend))))


def _source(options: argparse.Namespace) -> Any:
    """The records to work on."""
    from flt_mol.data.recipes import open_source

    return open_source(
        options.source,
        options.split,
        on_error="skip" if getattr(options, "skip_bad", False) else "raise",
        energy=options.energy,
        energy_initial=options.energy_initial,
        positions_relaxed=options.positions_relaxed,
    )


def _warn_without_targets(source: StructuresDataset) -> None:
    """Whoever writes records without targets most likely did not name them."""
    text = source.without_targets()
    if text is not None:
        warnings.warn(f"{source.path}: {text}", UserWarning, stacklevel=3)


def _trajectories(options: argparse.Namespace) -> StructuresDataset:
    """The relaxations to work on.

    Raises:
        ValueError: options that choose what trajectories do not have.
    """
    from flt_mol.data.ase.trajectories import from_trajectories

    names = {"energy": "y_relaxed", "energy_initial": "y_init", "positions_relaxed": "pos_relaxed"}
    for name, default in {"split": None, **names}.items():
        if getattr(options, name) != default:
            raise ValueError(
                f"--{name.replace('_', '-')} does not go with --references, which takes energies "
                "and relaxed positions from the trajectories; leave one of the two out"
            )

    return from_trajectories(
        options.source,
        references=options.references,
        fmax=options.fmax,
        on_error="skip" if options.skip_bad else "raise",
    )


def _say_converted(result: ConvertResult) -> None:
    say(
        f"{result.systems:,} systems in {result.bytes:,} bytes, {result.bytes_per_system:,.0f} a "
        f"system, {result.seconds:.1f} s"
    )
    if result.left_out:
        say(f"left out: {', '.join(result.left_out)}")
    _say_skipped(result.skipped)


def _say_skipped(messages: tuple[str, ...]) -> None:
    if messages:
        say(f"bad records left out: {len(messages)}")
        for message in messages[:_SHOWN]:
            say(f"  {message}")
        if len(messages) > _SHOWN:
            say(f"  … and {len(messages) - _SHOWN} more")


def _one(bars: Bars, label: str) -> Callable[[int, int | None], None]:
    return lambda done, total: bars(label, done, total)


@contextmanager
def _bars(lines: bool = False) -> Iterator[Bars]:
    """One bar for each label, on a terminal; elsewhere each label once if `lines`, else nothing."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(file=sys.stderr)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeRemainingColumn(),
    )
    tasks: dict[str, Any] = {}
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as shown:

        def show(label: str, done: int, total: int | None) -> None:
            if label not in tasks:
                tasks[label] = shown.add_task(printable(label), total=total)
                if lines and not console.is_terminal:
                    say(printable(label), sys.stderr)
            shown.update(tasks[label], completed=done, total=total)

        yield show
