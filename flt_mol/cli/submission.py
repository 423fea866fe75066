"""The commands `flt-mol submission make | check`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from flt_mol.cli.console import BatchSize, Device, SkipBad, check_output, say, say_files

app = typer.Typer()

_SPLITS = ("id", "ood_ads", "ood_cat", "ood_both")


Energies = typer.Option(
    metavar="FILE", help="Sid and energy (.csv, .json, .npz); with --checkpoint its records."
)
Data = Annotated[
    str | None, typer.Option(metavar="NAME", help="Data set whose splits have the expected ids.")
]
Ids = Annotated[
    Path | None, typer.Option(metavar="FILE", help=".csv of expected sid and split (test_id, …).")
]


@app.command()
def make(
    output: Annotated[Path, typer.Argument(help="File to write, ending in .npz.")],
    id: Annotated[Path, Energies],
    ood_ads: Annotated[Path, Energies],
    ood_cat: Annotated[Path, Energies],
    ood_both: Annotated[Path, Energies],
    checkpoint: Annotated[str | None, typer.Option(help="Predict with this model first.")] = None,
    data: Data = None,
    ids: Ids = None,
    batch_size: BatchSize = 64,
    device: Device = "cpu",
    skip_bad: SkipBad = False,
) -> None:
    """Four splits' energies in the .npz that the leaderboard takes."""
    from flt_mol.evaluation.submission import check_submission, energy_lines, write_submission
    from flt_mol.evaluation.tables import read_energies, table_of
    from flt_mol.prediction import load_members, predict_files

    check_output(output, "OUTPUT", (".npz",))
    expected = _expected(data, ids)
    paths = dict(zip(_SPLITS, (id, ood_ads, ood_cat, ood_both), strict=True))
    if checkpoint is None:
        tables = {split: read_energies(path) for split, path in paths.items()}
    else:
        members, tables = load_members(checkpoint, device), {}
        for split, path in paths.items():
            found = predict_files(members, path, batch_size, skip_bad=skip_bad)
            rows = [{"sid": p.name, "energy": p.energy} for p in found]
            tables[split] = table_of(path, enumerate(rows, start=1))
    write_submission(tables, output, expected)
    say("\n".join(energy_lines(check_submission(output, expected))))
    say_files([output])


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="The .npz.")], data: Data = None, ids: Ids = None
) -> None:
    """Whether a .npz is complete and valid."""
    from flt_mol.evaluation.submission import check_submission, energy_lines

    say("\n".join(energy_lines(check_submission(file, _expected(data, ids)))))
    say(f"{file} is complete and valid")


def _expected(data: str | None, ids: Path | None) -> dict[str, list[str]] | None:
    """The sids of each split, where they are known."""
    if data is not None and ids is not None:
        raise ValueError("--data and --ids exclude each other")
    if ids is not None:
        from flt_mol.evaluation.tables import read_ids

        by_split = read_ids(ids)
        return {split: by_split[x] for split, x in _names(list(by_split), str(ids)).items()}
    if data is None:
        return None
    from flt_mol.data.recipes import find_recipe

    found = find_recipe(data)
    if found is None:
        raise ValueError(f"{data} is not a data set with splits; give its name, or --ids FILE")
    return {
        split: [str(system.sid[0]) for system in found.open(stored, ignore_energy=True)]
        for split, stored in _names(list(found.splits), data).items()
    }


def _names(known: Sequence[str], where: str) -> dict[str, str]:
    """{split of the leaderboard: its name there}: test_id, val_id or id."""
    for prefix in ("test_", "val_", ""):
        names = {split: f"{prefix}{split}" for split in _SPLITS}
        if all(name in known for name in names.values()):
            return names
    wanted = ", ".join(f"test_{split}" for split in _SPLITS)
    raise ValueError(f"{where} has the splits {', '.join(known)}; expected {wanted}")
