"""The parser of `flt-mol submission make | check`, and what these commands do."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flt_mol.evaluation_cli import add_running
from flt_mol.outputs import check_file, say, say_files, writing

if TYPE_CHECKING:
    from flt_mol.evaluation.energy_tables import EnergyTable

__all__ = ["add_submission_commands"]

_OPTIONS = {"id": "--id", "ood_ads": "--ood-ads", "ood_cat": "--ood-cat", "ood_both": "--ood-both"}


def add_submission_commands(commands: Any) -> None:
    """Add them to the subparsers of `flt-mol`; each sets ``run``."""
    parser = commands.add_parser(
        "submission", help="make or check a file for OC20's IS2RE leaderboard"
    )
    inner = parser.add_subparsers(required=True, metavar="COMMAND")
    make = inner.add_parser(
        "make",
        help="four splits' energies in one .npz",
        description="Write the .npz that the leaderboard takes, out of four files that flt-mol "
        "predict wrote, or with --checkpoint out of the four test splits' records.",
    )
    make.add_argument("output", type=Path, help="file to write, ending in .npz")
    for split, option in _OPTIONS.items():
        make.add_argument(
            option,
            dest=split,
            type=Path,
            required=True,
            metavar="FILE",
            help=f"sid and energy of test_{split} (.csv, .json); with --checkpoint its records",
        )
    make.add_argument("--checkpoint", help="predict with this model first")
    _add_reference(make)
    add_running(make)
    make.set_defaults(run=_run_make)
    check = inner.add_parser("check", help="whether a .npz is complete and sound")
    check.add_argument("file", type=Path, help="the .npz")
    _add_reference(check)
    check.set_defaults(run=_run_check)


def _add_reference(parser: argparse.ArgumentParser) -> None:
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--data",
        metavar="NAME",
        help="data set whose splits test_… (or val_…) hold exactly the ids that are expected",
    )
    group.add_argument(
        "--ids",
        type=Path,
        metavar="FILE",
        help=".csv with sid and split (test_id, …) that are expected (default: OC20's numbers of "
        "systems)",
    )


def _run_make(options: argparse.Namespace) -> None:
    """`flt-mol submission make`."""
    from flt_mol.evaluation.submission import check_submission, write_submission

    check_file(options.output, (".npz",), "OUTPUT")
    expected = _expected(options)
    paths = {split: getattr(options, split) for split in _OPTIONS}
    tables = _read(paths) if options.checkpoint is None else _predict(options, paths)
    with writing(options.output):
        write_submission(tables, options.output, expected)
    check_submission(options.output, expected)
    _say_energies(options.output)
    say_files([options.output])


def _run_check(options: argparse.Namespace) -> None:
    """`flt-mol submission check`."""
    from flt_mol.evaluation.submission import check_submission

    check_submission(options.file, _expected(options))
    _say_energies(options.file)
    say(f"{options.file} is complete and sound")


def _say_energies(path: Path) -> None:
    from flt_mol.submission_energies import energy_ranges, warnings_of

    ranges = energy_ranges(path)
    for split, found in ranges.items():
        say(f"{split:<8}  {found}")
    for text in warnings_of(ranges):
        warnings.warn(text, UserWarning, stacklevel=2)


def _read(paths: Mapping[str, Path]) -> dict[str, EnergyTable]:
    from flt_mol.evaluation.energy_tables import read_energies

    tables = {split: read_energies(path) for split, path in paths.items()}
    for table in tables.values():
        if table.repeated:
            say(
                f"flt-mol: {table.path}: dropped {table.repeated} lines that repeat an id with the "
                "same energy",
                sys.stderr,
            )
    return tables


def _predict(options: argparse.Namespace, paths: Mapping[str, Path]) -> dict[str, EnergyTable]:
    from flt_mol.evaluation.energy_tables import table_of
    from flt_mol.predict import predict_files
    from flt_mol.training.checkpoints import load_model

    model = load_model(options.checkpoint, map_location=options.device)
    tables = {}
    for split, path in paths.items():
        predictions = predict_files(model, path, options.batch_size, skip_bad=options.skip_bad)
        rows = ({"sid": p.name, "energy": p.energy} for p in predictions)
        tables[split] = table_of(path, enumerate(rows, start=1))
    return tables


def _expected(options: argparse.Namespace) -> dict[str, list[str]] | None:
    """The sids of each split, where something tells them.

    Raises:
        ValueError: a split that the data set, or the file, lacks.
    """
    if options.data is not None:
        return _ids_of_data(options.data)
    if options.ids is None:
        return None
    from flt_mol.evaluation.energy_tables import read_ids

    by_split = read_ids(options.ids)
    names = _names(list(by_split), str(options.ids))
    return {split: by_split[name] for split, name in names.items()}


def _ids_of_data(name: str) -> dict[str, list[str]]:
    from flt_mol.data.recipes import find_recipe

    found = find_recipe(name)
    if found is None:
        raise ValueError(f"{name} is no data set with splits; give its name, or --ids FILE")
    expected = {}
    for split, stored in _names(list(found.splits), name).items():
        data = found.open(stored, ignore_energy=True)
        expected[split] = [str(sid) for i in range(len(data)) for sid in data[i].sid]
    return expected


def _names(known: Sequence[str], where: str) -> dict[str, str]:
    """{split of the leaderboard: what `where` calls it}: test_id, val_id or id."""
    for prefix in ("test_", "val_", ""):
        names = {split: f"{prefix}{split}" for split in _OPTIONS}
        if all(name in known for name in names.values()):
            return names
    wanted = ", ".join(f"test_{split}" for split in _OPTIONS)
    raise ValueError(f"{where} has the splits {', '.join(known)}; expected {wanted}")
