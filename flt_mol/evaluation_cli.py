"""The parser of `flt-mol evaluate`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from flt_mol import evaluation_commands
from flt_mol.data_cli import count

__all__ = ["add_evaluate_command", "add_running"]


CHECKPOINT = "a .ckpt or .safetensors file, the folder of a run or an export, or a shipped model"


def add_evaluate_command(commands: Any) -> None:
    """Add it to the subparsers of `flt-mol`; it sets ``run``."""
    parser = commands.add_parser(
        "evaluate",
        help="errors of a checkpoint, or of predictions in a file",
        description="Energy MAE, EwT (error below 0.02 eV), RMSE and median error with bootstrap "
        "intervals, on each split: of a checkpoint, or of predictions that some program wrote. "
        "Writes results.json, predictions.csv, parity.png and report.html.",
    )
    parser.add_argument("checkpoint", nargs="?", help=CHECKPOINT)
    parser.add_argument(
        "--predictions",
        type=Path,
        metavar="FILE",
        help="instead of a checkpoint: .csv or .json with sid, energy and perhaps split",
    )
    parser.add_argument(
        "--targets",
        type=Path,
        metavar="FILE",
        help=".csv (or .csv.gz) with sid, target or y_relaxed or energy, and perhaps split "
        "(default: the column target of the predictions)",
    )
    parser.add_argument(
        "--data",
        help="name in datasets/, a folder with dataset.yaml, or a file or folder of records "
        "(default: the data set of the checkpoint's training, or what that held out of its file)",
    )
    parser.add_argument(
        "--split", action="append", help="split of the data set; may be repeated (default: all val)"
    )
    parser.add_argument(
        "--held-out",
        action="store_true",
        help="only the systems that training held out, under whatever names --data has them",
    )
    parser.add_argument(
        "--energy", metavar="KEY", help="name of the stored target (default: as in training)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="folder for results (default: evaluation, or evaluation-2 and so on for further "
        "evaluations, in the run's folder; FOLDER-evaluation beside that of an export; of "
        "--predictions none is written)",
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--no-report", action="store_true", help="write no report.html")
    add_running(parser)
    parser.set_defaults(run=evaluation_commands.run_evaluate)


def add_running(parser: argparse.ArgumentParser) -> None:
    """Options of all commands that run a model over records."""
    parser.add_argument("--batch-size", type=count, default=64, help="systems per step")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, mps")
    parser.add_argument(
        "--skip-bad", action="store_true", help="leave bad records out (default: refuse them)"
    )
