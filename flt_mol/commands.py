"""What the commands of `flt-mol` do, each with its parsed options."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flt_mol.data.options import OnError
from flt_mol.outputs import check_file, check_folder, printable, say, say_files, writing


def run_train(options: argparse.Namespace) -> None:
    """`flt-mol train`."""
    with _terminable():
        from rich.console import Console

        from flt_mol.training.config import load_run_config
        from flt_mol.training.run import train

        logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
        console = Console()
        start = [] if options.finetune is None else [f"finetune.checkpoint={options.finetune}"]
        config = load_run_config(options.config, [*start, *options.overrides])
        result = train(config, name=Path(options.config).stem, console=console)
        best = result.best
        console.print(
            f"best epoch {int(best['epoch'])}: {config.data.validation} "
            f"MAE {best['val/mae']:.4f} eV, EwT {100 * best['val/ewt']:.2f} %"
        )
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


def run_evaluate(options: argparse.Namespace) -> None:
    """`flt-mol evaluate`."""
    from rich.console import Console
    from rich.progress import Progress

    from flt_mol.data.splits import open_splits, skipped_message
    from flt_mol.evaluation import report
    from flt_mol.evaluation.plots import parity
    from flt_mol.evaluation.splits import evaluate_splits
    from flt_mol.training.checkpoints import find_checkpoint, load_model, read_checkpoint

    checkpoint = find_checkpoint(options.checkpoint)
    folder = options.output or _evaluation_folder(checkpoint)
    check_folder(folder, "--output FOLDER")
    model = load_model(checkpoint, map_location=options.device)
    trained_on = read_checkpoint(checkpoint).get("config", {}).get("data", {})
    on_error: OnError = "skip" if options.skip_bad else "raise"
    splits, baselines = open_splits(
        options.data, options.split, trained_on, on_error, options.energy
    )
    for data in splits.values():
        if data.skipped:
            say(f"flt-mol: {skipped_message(data)}", sys.stderr)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = {split: bar.add_task(split, total=len(data)) for split, data in splits.items()}
        results = evaluate_splits(
            model,
            splits,
            options.batch_size,
            progress=lambda split, done, total: bar.update(task[split], completed=done),
        )

    def write() -> None:
        with writing(folder):
            name = str(options.checkpoint)
            json_file = report.write_json(
                results, folder / "results.json", baselines, checkpoint=name
            )
            csv_file = report.write_csv(results, folder / "predictions.csv")
            files = (json_file, csv_file, parity(results, folder / "parity.png"))
        if options.json:
            print(json_file.read_text(encoding="utf-8"), end="")
        else:
            say_files(files)

    _show_then("" if options.json else report.table(results, baselines), write)


def run_predict(options: argparse.Namespace) -> None:
    """`flt-mol predict`."""
    from flt_mol.predict import predict_files, write_predictions
    from flt_mol.training.checkpoints import load_model

    check_file(options.output, (".csv", ".json"), "-o FILE")
    model = load_model(options.checkpoint, map_location=options.device)
    predictions = predict_files(model, options.files, options.batch_size, skip_bad=options.skip_bad)
    names = [printable(p.name) for p in predictions]
    width = max(map(len, names))
    lines = [
        f"{name:<{width}}  {p.energy:12.6f} eV" for name, p in zip(names, predictions, strict=True)
    ]

    def write() -> None:
        write_predictions(predictions, options.output)
        say_files([options.output])

    _show_then("\n".join(lines), write)


def _show_then(text: str, write: Callable[[], None]) -> None:
    """Print the results, so that a full disk does not lose them; a closed pipe loses no file."""
    try:
        if text:
            say(text)
        sys.stdout.flush()
    finally:
        write()


def _evaluation_folder(checkpoint: Path) -> Path:
    """Beside the run; shipped models lie where one should not write."""
    from flt_mol import resources

    if resources.folder("models") in checkpoint.parents:
        return Path("runs") / f"{checkpoint.parent.name}-evaluation"
    return checkpoint.parent / "evaluation"
