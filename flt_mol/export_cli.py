"""The command `flt-mol export`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from flt_mol.evaluation_cli import CHECKPOINT
from flt_mol.outputs import check_folder, say_files


def add_export(commands: Any) -> None:
    """Add the command to a parser's commands."""
    parser = commands.add_parser(
        "export",
        help="a checkpoint as a folder in Hugging Face's layout",
        description="Write the model of a checkpoint as config.json, model.safetensors and a "
        "README.md, the layout of Hugging Face's hub; evaluate and predict read such folders.",
    )
    parser.add_argument("checkpoint", help=CHECKPOINT)
    parser.add_argument("folder", type=Path, help="made if missing; a README.md in it is kept")
    parser.set_defaults(run=run_export)


def run_export(options: argparse.Namespace) -> None:
    """`flt-mol export`."""
    from flt_mol.models.checkpoint import export_checkpoint

    check_folder(options.folder, "FOLDER", ("config.json", "model.safetensors"))
    say_files(export_checkpoint(options.checkpoint, options.folder))
