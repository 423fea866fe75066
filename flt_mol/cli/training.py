"""The commands `flt-mol train` and `flt-mol export`."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from flt_mol.cli.console import Checkpoint, check_output, say, say_files

app = typer.Typer()


@app.command()
def train(
    run: Annotated[str, typer.Argument(help="Name in configs/, or path to a .yaml file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="E.g. training.epochs=5.")
    ] = None,
    finetune: Annotated[
        str | None, typer.Option(metavar="CHECKPOINT", help="Start from these weights.")
    ] = None,
    tag_slab: Annotated[
        bool, typer.Option("--tag-slab", help="As data.tag_slab=true: tag untagged slabs.")
    ] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print all settings as yaml, without training.")
    ] = False,
) -> None:
    """Train the model of a run; writes checkpoints, logs and plots.

    docs/settings.md describes each setting.
    """
    with _terminable():
        from rich.console import Console

        from flt_mol.training.config import load_run_config, run_name, run_yaml
        from flt_mol.training.run import closing_lines, train

        start = [] if finetune is None else [f"finetune.checkpoint={finetune}"]
        start += ["data.tag_slab=true"] if tag_slab else []
        config = load_run_config(run, [*start, *(overrides or ())])
        if print_config:
            say(run_yaml(config).rstrip())
            return
        result = train(config, name=run_name(run), console=Console())
        if result.was_finished or not result.files:  # another process of this run writes
            return
        say("\n".join(closing_lines(config, result.best)))
        say_files(result.files)


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM raises SystemExit, with the conventional exit status."""
    owner = os.getpid()

    def stop(number: int, frame: Any) -> None:
        if os.getpid() != owner:  # a process that loads data has nothing to put in order
            os._exit(128 + number)
        # While Lightning trains it has put its own handler around this one, and stops at the end of
        # the batch: an exception amid a logger's queue could lock the program up.
        if signal.getsignal(number) is stop:
            raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@app.command()
def export(
    checkpoint: Checkpoint,
    folder: Annotated[Path, typer.Argument(help="Folder; an existing README.md is kept.")],
) -> None:
    """Export a checkpoint as a folder in Hugging Face's layout, for evaluate and predict."""
    from flt_mol.models.export import export_checkpoint

    check_output(folder, "FOLDER")
    say_files(export_checkpoint(checkpoint, folder))
