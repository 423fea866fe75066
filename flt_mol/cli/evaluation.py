"""The command `flt-mol evaluate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from flt_mol.cli import console

app = typer.Typer()

Run = Annotated[str | None, typer.Argument(help=console.CHECKPOINT)]
Predictions = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Instead of a checkpoint: .csv, .json or .npz.")
]
Targets = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|NAME",
        help="Targets: a table, structures or a data set (default: column of --predictions).",
    ),
]
CommonIds = Annotated[
    bool, typer.Option("--common-ids", help="Only ids that predictions and targets both have.")
]
Data = Annotated[
    str | None, typer.Option(help="Data set, file or folder of records (default: as in training).")
]
Split = Annotated[list[str] | None, typer.Option(help="Repeatable (default: validation).")]
HeldOut = Annotated[bool, typer.Option("--held-out", help="Only systems held out of training.")]
Energy = Annotated[
    str | None, typer.Option(metavar="KEY", help="Name of the target (default: as in training).")
]
Output = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Default: evaluation/ in the run's folder.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the results as JSON.")]
NoReport = Annotated[bool, typer.Option("--no-report", help="Write no report.html.")]


@app.command(cls=console.Variadic)
def evaluate(
    checkpoint: Run = None,
    ensemble: console.Ensemble = None,
    predictions: Predictions = None,
    targets: Targets = None,
    common_ids: CommonIds = False,
    data: Data = None,
    split: Split = None,
    held_out: HeldOut = False,
    energy: Energy = None,
    output: Output = None,
    as_json: Json = False,
    no_report: NoReport = False,
    batch_size: console.BatchSize = 64,
    device: console.Device = "cpu",
    skip_bad: console.SkipBad = False,
) -> None:
    """Evaluate a checkpoint, or predictions in a file, on each split.

    Energy MAE, EwT (error below 0.02 eV), RMSE and median error with bootstrap intervals. Writes
    results.json, predictions.csv, parity.png and report.html.
    """
    from flt_mol.data.recipes import find_recipe
    from flt_mol.evaluation import checkpoint as evaluation
    from flt_mol.evaluation import score_files, summarise
    from flt_mol.evaluation.summary import constant_maes, stated_maes

    if (checkpoint is None) == (predictions is None):
        raise ValueError("give either a checkpoint, or --predictions FILE")
    if checkpoint is not None:
        if targets or common_ids:
            raise ValueError("--targets and --common-ids go with --predictions")
        output = output or evaluation.evaluation_folder(checkpoint)
    elif data or energy or held_out or ensemble:
        raise ValueError("--data, --energy, --held-out and --ensemble go with a checkpoint")
    if output is not None:
        console.check_output(output, "--output FOLDER")
        if (output / "parity.png").exists() and not (output / "results.json").exists():
            raise ValueError(f"{output} holds other results: give --output another folder")
    if checkpoint is not None:
        with console.progress_bars() as progress:
            options: Any = {"batch_size": batch_size, "device": device, "progress": progress}
            options |= {"held_out": held_out, "energy": energy, "skip_bad": skip_bad}
            several = [checkpoint, *ensemble] if ensemble else checkpoint
            summary, results = evaluation.evaluate_checkpoint(several, data, split or (), **options)
    else:
        results = score_files(str(predictions), targets, split, common_ids=common_ids)
        recipe = None if targets is None or common_ids else find_recipe(targets)
        baselines = stated_maes(recipe, results) or {"own median": constant_maes(results)}
        named = {"predictions": str(predictions)} | ({"targets": targets} if targets else {})
        summary = summarise(results, baselines, **named)
    _show_and_write(summary, results, output, as_json, not no_report)


def _show_and_write(
    summary: dict[str, Any], results: Any, folder: Path | None, as_json: bool, page: bool
) -> None:
    from flt_mol.evaluation import report
    from flt_mol.evaluation.plots import parity

    notes = report.notes(summary)
    kinds = ("held_out", "displacement", "constant")
    text = "\n".join([report.table(summary), *(line for kind in kinds for line in notes[kind])])

    def write() -> None:
        if folder is None:
            return
        if (folder / "results.json").exists() and not as_json:
            console.say(f"flt-mol: results in {folder} are replaced", error=True)
        files = [
            report.write_json(summary, folder / "results.json"),
            report.write_csv(results, folder / "predictions.csv"),
            parity(results, folder / "parity.png"),
        ]
        if page:
            files.append(report.write_html(summary, results, folder / "report.html"))
        if not as_json:
            console.say_files(files)

    console.show_then(json.dumps(summary, indent=1) if as_json else text, write)
