"""What the commands of `flt-mol` do, each with its parsed options."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flt_mol.outputs import check_file, say, say_files, show_then

_QUIET = 60.0  # s, after which people ask themselves whether anything happens


def run_train(options: argparse.Namespace) -> None:
    """`flt-mol train`."""
    with _terminable():
        from rich.console import Console

        from flt_mol.training.config import load_run_config, run_name, run_yaml
        from flt_mol.training.run import closing_lines, train

        console = Console()
        start = [] if options.finetune is None else [f"finetune.checkpoint={options.finetune}"]
        overrides = [*start, *options.overrides]
        config = load_run_config(options.config, overrides)
        if options.print_config:
            say(run_yaml(config).rstrip())
            return
        result = train(config, name=run_name(options.config), console=console)
        if result.was_finished or not result.files:  # another process of this run writes, and tells
            return
        for line in closing_lines(config, result.best):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        say_files(result.files)


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends in an orderly way, with the status that it has by custom."""
    owner = os.getpid()

    def stop(number: int, frame: Any) -> None:
        if os.getpid() != owner:  # a process that loads data has nothing to put in order
            os._exit(128 + number)
        # While Lightning trains it has put its own handler around this one, and stops at the end of
        # the batch: an exception amid a logger's queue could lock the program up.
        if signal.getsignal(number) is stop:
            raise SystemExit(128 + number)

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # outside the main thread signals are not ours
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _predicting() -> Iterator[Callable[[int, int | None], None]]:
    """A bar on a terminal; elsewhere a line a minute."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    said = time.monotonic()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("predicting")

        def progress(done: int, total: int | None) -> None:
            nonlocal said
            bar.update(task, completed=done, total=total)
            if not console.is_terminal and time.monotonic() - said >= _QUIET:
                said = time.monotonic()
                say(f"{done} of {total} structures predicted", sys.stderr)

        yield progress


def run_predict(options: argparse.Namespace) -> None:
    """`flt-mol predict`."""
    from flt_mol.predict_cli import lines, summary, tagger
    from flt_mol.prediction.files import StructureFiles, predict_files
    from flt_mol.prediction.members import load_members
    from flt_mol.prediction.table import SUFFIXES, write_predictions

    if options.output is not None:
        check_file(options.output, SUFFIXES, "-o FILE")
        if any(Path(file).resolve() == options.output.resolve() for file in options.files):
            raise ValueError(
                f"{options.output} is one of the files to predict, and would be overwritten; "
                "give another with -o FILE"
            )
    prepare = tagger(options)
    several = [options.checkpoint, *options.ensemble]
    members = load_members(several if options.ensemble else options.checkpoint, options.device)
    files = StructureFiles(
        options.files,
        skip_bad=options.skip_bad,
        prepare=prepare,
        check=members.check,
        layer_numbers=options.tag_slab,
    )
    with _predicting() as progress:
        predictions = predict_files(members, files, options.batch_size, progress=progress)
    if prepare is not None:
        prepare.tell()
    energies = "\n".join(lines(predictions, prepare))
    text = energies if options.output is None else "\n".join(summary(predictions, prepare))

    def write() -> None:
        if options.output is None:
            return
        try:
            write_predictions(predictions, options.output, files)
        except (OSError, ValueError):  # a full disk loses no work of hours
            say(energies)
            raise
        say_files([options.output])

    show_then(text, write)
