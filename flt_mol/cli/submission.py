"""The commands `flt-mol submission make | check`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from flt_mol.cli.console import check_output, say, say_files

app = typer.Typer(no_args_is_help=True)

_SPLITS = ("id", "ood_ads", "ood_cat", "ood_both")

Energies = typer.Option(metavar="FILE", help="Sid and energy, as predict -o writes them, or .npz.")
Data = Annotated[
    str | None, typer.Option(metavar="NAME", help="Data set whose splits have the expected ids.")
]
Ids = Annotated[
    Path | None, typer.Option(metavar="FILE", help=".csv of expected sid and split (test_id, …).")
]


@app.command(no_args_is_help=True)
def make(
    output: Annotated[Path, typer.Argument(help="File to write, ending in .npz.")],
    id: Annotated[Path, Energies],
    ood_ads: Annotated[Path, Energies],
    ood_cat: Annotated[Path, Energies],
    ood_both: Annotated[Path, Energies],
    data: Data = None,
    ids: Ids = None,
) -> None:
    """Write the .npz for the leaderboard from the energies of four splits."""
    from flt_mol.data.tables import read_energies
    from flt_mol.evaluation.submission import check_submission, energy_lines, write_submission

    check_output(output, "OUTPUT", (".npz",))
    expected = _expected(data, ids)
    files = zip(_SPLITS, (id, ood_ads, ood_cat, ood_both), strict=True)
    write_submission({split: read_energies(file) for split, file in files}, output, expected)
    say("\n".join(energy_lines(check_submission(output, expected))))
    say_files([output])


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="The .npz.")], data: Data = None, ids: Ids = None
) -> None:
    """Check whether a .npz is complete and valid."""
    from flt_mol.evaluation.submission import check_submission, energy_lines

    say("\n".join(energy_lines(check_submission(file, _expected(data, ids)))))
    say(f"{file} is complete and valid")


def _expected(data: str | None, ids: Path | None) -> dict[str, list[str]] | None:
    from flt_mol.data.recipes import recipe
    from flt_mol.data.tables import read_ids

    if data is not None and ids is not None:
        raise ValueError("--data and --ids exclude each other")
    if ids is not None:
        by_split = read_ids(ids)
        return {split: by_split[x] for split, x in _names(by_split, str(ids)).items()}
    if data is None:
        return None
    found = recipe(data)
    return {
        split: [str(system.sid[0]) for system in found.open(stored, ignore_energy=True)]
        for split, stored in _names(found.splits, data).items()
    }


def _names(known: Iterable[str], where: str) -> dict[str, str]:
    """{split of the leaderboard: its name there}: test_id, val_id or id."""
    for prefix in ("test_", "val_", ""):
        names = {split: f"{prefix}{split}" for split in _SPLITS}
        if set(names.values()) <= set(known):
            return names
    wanted = ", ".join(f"test_{split}" for split in _SPLITS)
    raise ValueError(f"{where} has the splits {', '.join(known)}; expected {wanted}")
