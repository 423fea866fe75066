"""The parser of `flt-mol data inspect | convert | split | download | verify`."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from flt_mol import data_commands

__all__ = ["add_data_commands", "count"]

_SOURCE = "LMDB file or folder, anything ASE reads, or a data set (with --split)"


def count(text: str) -> int:
    """A whole number from 1 on, for argparse."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from 1 on")
    return number


def add_data_commands(commands: Any) -> None:
    """Add them to the subparsers of `flt-mol data`; each sets ``run``."""
    _add_inspect(commands)
    _add_convert(commands)
    _add_split(commands)
    _add_download(commands)
    _add_verify(commands)


def _add_inspect(commands: Any) -> None:
    parser = commands.add_parser("inspect", help="what a file or folder of records holds")
    _add_source(parser)
    parser.add_argument("--json", action="store_true", help="print as JSON, with a count")
    parser.add_argument(
        "--limit", type=count, metavar="N", help="look at N records, spread evenly (default: all)"
    )
    parser.set_defaults(run=data_commands.run_inspect)


def _add_convert(commands: Any) -> None:
    parser = commands.add_parser(
        "convert",
        help="records to a flat file, .aselmdb or .extxyz",
        description="Write records, without their stored graphs, to a flat file (.safetensors), an "
        "ASE LMDB (.aselmdb) or .extxyz, and compare what was written with its source.",
    )
    _add_source(parser)
    parser.add_argument(
        "output", type=Path, help="file ending in .safetensors, .aselmdb or .extxyz"
    )
    _add_writing(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace OUTPUT if it exists")
    parser.add_argument(
        "--references",
        metavar="TABLE|KEY|none",
        help="SOURCE is a relaxation's trajectory, or a folder of them: first frame initial, last "
        "frame relaxed; reference energies (eV) are in a .csv or .json TABLE of sid and energy, "
        "or under KEY in each file, or 'none' for adsorption energies",
    )
    parser.add_argument(
        "--fmax", type=float, default=0.05, help="eV/Å; warn of trajectories that end above it"
    )
    parser.set_defaults(run=data_commands.run_convert)


def _add_split(commands: Any) -> None:
    parser = commands.add_parser(
        "split",
        help="divide records into train, validation, test",
        description="Put every system into one of several files, at random, in a new folder that "
        "`flt-mol train` takes as a data set.",
    )
    _add_source(parser)
    parser.add_argument("output", type=Path, help="folder, new or empty")
    parser.add_argument(
        "--shares",
        nargs="+",
        type=_share,
        metavar="NAME=SHARE",
        default=[("train", 0.8), ("val_id", 0.1), ("test", 0.1)],
        help="fractions, as train=0.9, or numbers of systems, as val_id=500; one may be 'rest' "
        "(default: train=0.8 val_id=0.1 test=0.1)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random draw (default: 0)")
    parser.add_argument(
        "--group-by",
        metavar="FIELD",
        help="keep together what has the same FIELD; composition, adsorbate and slab are worked "
        "out from elements and tags where they are not stored",
    )
    _add_writing(parser)
    parser.set_defaults(run=data_commands.run_split)


def _share(text: str) -> tuple[str, float | int | None]:
    name, _, share = text.partition("=")
    if not name or not re.fullmatch(r"rest|\d+|\d*\.\d+(e-?\d+)?", share):
        raise argparse.ArgumentTypeError(
            f"'{text}' is no NAME=SHARE, as in train=0.8, train=1000 or train=rest"
        )
    return name, None if share == "rest" else int(share) if share.isdigit() else float(share)


def _add_download(commands: Any) -> None:
    parser = commands.add_parser(
        "download",
        help="get a published data set",
        description="Fetch a data set, check it, and unpack the splits asked for. Stopped and run "
        "again, it goes on where it was.",
    )
    parser.add_argument("name", help="of a data set, e.g. oc20-is2re")
    _add_splits(parser)
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="default: $FLT_MOL_DATA/NAME")
    parser.add_argument("--mirror", metavar="URL", help="folder of another server")
    parser.add_argument(
        "--remove-archive", action="store_true", help="when all is unpacked (default: keep it)"
    )
    parser.set_defaults(run=data_commands.run_download)


def _add_verify(commands: Any) -> None:
    parser = commands.add_parser(
        "verify", help="compare a data set's files with its recipe: bytes, hash, count"
    )
    parser.add_argument("name", help="of a data set, or a folder with dataset.yaml")
    _add_splits(parser)
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.set_defaults(run=data_commands.run_verify)


def _add_source(parser: Any) -> None:
    parser.add_argument("source", metavar="SOURCE", help=_SOURCE)
    parser.add_argument("--split", help="split, when SOURCE is a data set")
    parser.add_argument(
        "--energy",
        default="y_relaxed",
        metavar="KEY",
        help="name of the stored target, eV; 'calculator' for the energy that ASE files hold "
        "(default: y_relaxed)",
    )
    parser.add_argument(
        "--energy-initial",
        default="y_init",
        metavar="KEY",
        help="name of the energy before relaxation, eV, if there is one (default: y_init)",
    )
    parser.add_argument(
        "--positions-relaxed",
        default="pos_relaxed",
        metavar="KEY",
        help="name of the relaxed positions, Å, if there are any (default: pos_relaxed)",
    )


def _add_splits(parser: Any) -> None:
    parser.add_argument("--split", action="append", help="may be repeated (default: all)")


def _add_writing(parser: Any) -> None:
    parser.add_argument("--forces", action="store_true", help="keep stored forces")
    parser.add_argument(
        "--skip-bad", action="store_true", help="leave bad records out (default: refuse them)"
    )
