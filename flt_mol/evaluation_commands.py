"""What `flt-mol evaluate` does."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flt_mol.outputs import check_folder, say, say_files, show_then, writing

if TYPE_CHECKING:
    from flt_mol.data.options import OnError
    from flt_mol.evaluation import SplitResult

_FILES = ("results.json", "predictions.csv", "parity.png", "report.html")


def run_evaluate(options: argparse.Namespace) -> None:
    """`flt-mol evaluate`.

    Raises:
        ValueError: options that do not go together, or whatever cannot be evaluated.
    """
    if (options.checkpoint is None) == (options.predictions is None):
        raise ValueError("give either a checkpoint, or --predictions FILE")
    if options.predictions is None:
        if options.targets is not None:
            raise ValueError("--targets goes with --predictions; the targets of a model's are data")
        _evaluate_checkpoint(options)
    else:
        if options.data is not None or options.energy is not None:
            raise ValueError("--data and --energy go with a checkpoint; give --targets FILE")
        if options.held_out:
            raise ValueError("--held-out goes with a checkpoint, which knows what was held out")
        _evaluate_predictions(options)


def _evaluate_predictions(options: argparse.Namespace) -> None:
    from flt_mol.evaluation.matching import median_baseline, score_files
    from flt_mol.evaluation.summary import summarise

    if options.output is not None:
        check_folder(options.output, "--output FOLDER", _FILES)
    results = score_files(options.predictions, options.targets, options.split)
    baselines = {"own median": median_baseline(results)}
    named: dict[str, str] = {}
    for name in ("predictions", "targets"):
        if (file := getattr(options, name)) is not None:
            named |= {name: str(file), f"{name}_file": str(file.resolve())}
    _show_and_write(options, options.output, summarise(results, baselines, **named), results)


def _evaluate_checkpoint(options: argparse.Namespace) -> None:
    from flt_mol.evaluation.earlier import free_folder
    from flt_mol.evaluation.report import trained_on_lines
    from flt_mol.evaluation.summary import summarise
    from flt_mol.evaluation_data import open_evaluated
    from flt_mol.evaluation_runs import Wanted
    from flt_mol.models.checkpoint import read_checkpoint
    from flt_mol.models.geometry import check_systems

    checkpoint, model = _load(options)
    beside = _evaluation_folder(checkpoint)
    check_folder(options.output or beside, "--output FOLDER", _FILES)
    on_error: OnError = "skip" if options.skip_bad else "raise"
    check = partial(check_systems, model.config)
    wanted = Wanted(options.data, options.split, options.energy, on_error, check, options.held_out)
    opened = open_evaluated(checkpoint, read_checkpoint(checkpoint), wanted)
    results = opened.with_columns(_run_model(model, opened.splits, options.batch_size))
    baselines = {**opened.baselines, **_own_baselines(model, results, opened.baselines)}
    summary = summarise(
        results,
        baselines,
        checkpoint=str(options.checkpoint),
        checkpoint_file=str(checkpoint.resolve()),
        energy=opened.energy,
        **opened.remarks(),
    )
    for line in trained_on_lines(summary):
        say(f"flt-mol: warning: {line}", sys.stderr)
    _show_and_write(options, options.output or free_folder(beside, summary), summary, results)


def _load(options: argparse.Namespace) -> tuple[Path, Any]:
    """The checkpoint's file, and its model; structures in its place are told from it."""
    from flt_mol.evaluation_data import holds_data
    from flt_mol.models.checkpoint import find_checkpoint, load_model

    try:
        checkpoint = find_checkpoint(options.checkpoint)
        return checkpoint, load_model(checkpoint, map_location=options.device)
    except ValueError as error:
        name = options.checkpoint
        if options.data is None and holds_data(name):
            raise ValueError(
                f"{name} is no checkpoint, but data: did you mean flt-mol evaluate CHECKPOINT "
                f"--data {name}?"
            ) from error
        raise


def _own_baselines(
    model: Any, results: Mapping[str, SplitResult], known: Mapping[str, Any]
) -> dict[str, dict[str, float]]:
    """Of data without a recipe that has them: what constants reach, to judge an MAE by."""
    from flt_mol.evaluation.matching import constant_baseline, median_baseline

    if known:
        return {}
    median = model.trained_on.get("energy_median")
    found = {} if median is None else {"constant": constant_baseline(results, median)}
    return {**found, "own median": median_baseline(results)}


def _run_model(model: Any, splits: Mapping[str, Any], batch_size: int) -> dict[str, SplitResult]:
    from rich.console import Console
    from rich.progress import Progress

    from flt_mol.evaluation.splits import evaluate_splits
    from flt_mol.evaluation.summary import WORST

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = {split: bar.add_task(split, total=len(data)) for split, data in splits.items()}
        return evaluate_splits(
            model,
            splits,
            batch_size,
            progress=lambda split, done, total: bar.update(task[split], completed=done),
            keep_worst=WORST,
        )


def _show_and_write(
    options: argparse.Namespace,
    folder: Path | None,
    summary: Mapping[str, Any],
    results: Mapping[str, SplitResult],
) -> None:
    """The table, or JSON; and the files, where there is a folder for them."""
    from flt_mol.evaluation import report
    from flt_mol.evaluation.earlier import neighbours, replaced

    text = "\n".join([report.table(summary), *report.held_out_lines(summary)])
    text = json.dumps(summary, indent=1) if options.json else text

    def write() -> None:
        if folder is None:
            return
        before = replaced(folder, summary)
        if before:
            say(f"flt-mol: warning: {folder} held an evaluation of {before}, replaced", sys.stderr)
        with writing(folder):
            files = _write_files(folder, summary, results, not options.no_report)
        if options.json:
            return
        say_files(files)
        others = [] if options.output is not None else neighbours(folder)
        if others:
            say("\n  ".join(["other evaluations beside it:", *others]))

    show_then(text, write)


def _write_files(
    folder: Path, summary: Mapping[str, Any], results: Mapping[str, SplitResult], page: bool
) -> list[Path]:
    from flt_mol.evaluation import report
    from flt_mol.evaluation.html_report import write_html
    from flt_mol.evaluation.plots import parity

    files = [
        report.write_json(summary, folder / "results.json"),
        report.write_csv(results, folder / "predictions.csv"),
        parity(results, folder / "parity.png"),
    ]
    if page:
        files.append(write_html(summary, results, folder / "report.html"))
    return files


def _evaluation_folder(checkpoint: Path) -> Path:
    """The first to take: in the run's folder.

    Shipped models lie where one should not write, and an export is a folder to be given away.
    """
    from flt_mol.files import shipped_folder
    from flt_mol.models.checkpoint import CONFIG_FILE, WEIGHTS_FILE

    if shipped_folder("models") in checkpoint.parents:
        return Path("runs") / f"{checkpoint.parent.name}-evaluation"
    folder = checkpoint.parent
    if checkpoint.name == WEIGHTS_FILE and (folder / CONFIG_FILE).is_file():
        folder = folder if folder.name else folder.resolve()
        return folder.with_name(f"{folder.name}-evaluation")
    return folder / "evaluation"
