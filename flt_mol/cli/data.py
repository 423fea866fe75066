"""The commands `flt-mol data inspect | convert | split | download | verify`."""

from __future__ import annotations

import csv
import json
import math
import re
import warnings
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from flt_mol.cli import console
from flt_mol.cli.console import SkipBad, Variadic, check_output, progress_bars, say, say_files
from flt_mol.files import listed

app = typer.Typer(no_args_is_help=True)

Source = Annotated[str, typer.Argument(help="File or folder of records, or a data set's name.")]
Split = Annotated[str | None, typer.Option("--split", help="Split, when SOURCE is a data set.")]
Splits = Annotated[list[str] | None, typer.Option("--split", help="Repeatable (default: all).")]
Energy = Annotated[
    str, typer.Option(metavar="KEY", help="Name of the target, eV; 'calculator' for ASE's own.")
]
Forces = Annotated[bool, typer.Option("--forces", help="Keep forces, and take frames' energies.")]
References = Annotated[
    str | None,
    typer.Option(
        metavar="TABLE|KEY|none",
        help="SOURCE holds relaxations; reference energies in a TABLE of sid and energy, or a KEY.",
    ),
]
Shares = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=SHARE...", help="Fractions, or counts; one may be 'rest'."),
]
Drop = Annotated[str | None, typer.Option(metavar="SID,...", help='Drop systems; "A,B" is one.')]
MaxEnergy = Annotated[
    float | None,
    typer.Option(
        "--max-abs-energy", metavar="EV", min=0, help="Drop systems with energies beyond ±EV."
    ),
]
GroupBy = Annotated[
    str | None,
    typer.Option(metavar="FIELD", help="Keep systems of the same FIELD (or slab, …) together."),
]


@app.command()
def inspect(
    source: Source,
    split: Split = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Read only N records, evenly spaced.")
    ] = None,
    energy: Energy = "y_relaxed",
) -> None:
    """Show what a file or folder of records holds."""
    from flt_mol.data import inspection
    from flt_mol.data.recipes import open_source

    try:
        dataset = open_source(source, split, energy=energy)
    except ValueError:  # perhaps of one record: the others can be looked at all the same
        dataset = open_source(source, split, energy=energy, on_error="skip")
    with progress_bars() as bars:
        progress = partial(bars, "inspecting")
        summary = inspection.inspect(dataset, limit=limit, progress=progress)
    say(json.dumps(summary, indent=2, allow_nan=False) if as_json else inspection.render(summary))
    looked_at = summary["looked_at"]
    if looked_at and summary["counts"]["problems"] == looked_at:
        first = summary["problems"][0]
        raise ValueError(f"all {looked_at} records looked at are invalid; the first: {first}")


@app.command()
def convert(
    source: Source,
    output: Annotated[Path, typer.Argument(help="File to write; its suffix sets the format.")],
    split: Split = None,
    forces: Forces = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUTPUT if it exists.")
    ] = False,
    references: References = None,
    energy: Energy = "y_relaxed",
    tag_slab: console.TagSlab = False,
    adsorbate: console.Adsorbate = None,
    surface: console.Surface = None,
    drop: Drop = None,
    max_energy: MaxEnergy = None,
    skip_bad: SkipBad = False,
) -> None:
    """Convert records to a flat file (.safetensors), .aselmdb or .extxyz.

    The written file is compared with its source. Stored graphs are not kept.
    """
    from flt_mol.data import convert as convert_data
    from flt_mol.data import from_trajectories
    from flt_mol.data.tags import slab_tagger

    check_output(output.absolute().parent, "OUTPUT")
    options: dict[str, Any] = {"on_error": "skip" if skip_bad else "raise"}
    console.check_tagging(tag_slab, adsorbate, surface)
    if tag_slab and surface is None:
        raise ValueError("--tag-slab needs --surface: half for the shipped models, oc20 for OC20")
    if tag_slab:
        options["tag_slab"] = slab_tagger(adsorbate, surface, "--surface")
    if references is None:
        dataset = _open_to_write(source, split, energy=energy, forces=forces, **options)
    elif split is not None or forces or energy != "y_relaxed":
        raise ValueError("--references excludes --split, --forces and --energy")
    else:
        dataset = from_trajectories(source, references=references, **options)
    _drop(dataset, drop, max_energy)
    with progress_bars() as bars:
        progress = partial(bars, "converting")
        result = convert_data(dataset, output, overwrite=overwrite, progress=progress)
    each = f"{result.bytes_per_system:,.0f} a system"
    say(f"{result.systems:,} systems in {result.bytes:,} bytes, {each}")
    if result.skipped:
        say(listed("invalid records skipped", result.skipped))
    say_files([result.output])


@app.command(cls=Variadic)
def split(
    source: Source,
    output: Annotated[Path, typer.Argument(help="New or empty folder.")],
    part: Split = None,
    shares: Shares = None,
    seed: Annotated[int, typer.Option(help="Seed of the random split.")] = 0,
    group_by: GroupBy = None,
    forces: Forces = False,
    energy: Energy = "y_relaxed",
    drop: Drop = None,
    max_energy: MaxEnergy = None,
    skip_bad: SkipBad = False,
) -> None:
    """Split records at random into files in a new folder, for `flt-mol train data.name=FOLDER`."""
    from flt_mol.data import split as split_data

    wanted = [_share(text) for text in shares or ("train=0.8", "val_id=0.1", "test=0.1")]
    if len(dict(wanted)) < len(wanted):
        raise ValueError("--shares names a split more than once; give each split one share")
    check_output(output.absolute().parent, "OUTPUT")
    on_error = "skip" if skip_bad else "raise"
    dataset = _open_to_write(source, part, energy=energy, forces=forces, on_error=on_error)
    _drop(dataset, drop, max_energy)
    with progress_bars() as bars:
        options: Any = {"seed": seed, "group_by": group_by, "progress": partial(bars, "splitting")}
        result = split_data(dataset, output, dict(wanted), **options)
    for name, found in result.splits.items():
        say(f"{name}: {found.systems:,} systems, {found.bytes:,} bytes")
    if result.skipped:
        say(listed("invalid records skipped", result.skipped))
    say_files(sorted(path for path in result.folder.iterdir() if path.is_file()))


@app.command()
def download(
    name: Annotated[str, typer.Argument(help="Name of a data set, e.g. oc20-is2re.")],
    splits: Splits = None,
    to: Annotated[Path | None, typer.Option(help="Folder (default: $FLT_MOL_DATA/NAME).")] = None,
    mirror: Annotated[str | None, typer.Option(metavar="URL", help="Other server.")] = None,
    remove_archive: Annotated[
        bool, typer.Option("--remove-archive", help="Delete the archive after unpacking.")
    ] = False,
) -> None:
    """Download, check and unpack a published data set; an interrupted download resumes."""
    from flt_mol.data.remote import download as fetch

    with progress_bars(lines=True) as progress:
        options: Any = {"keep_archive": not remove_archive, "base_url": mirror}
        result = fetch(name, splits, to=to, progress=progress, **options)
    for split, file in result.files.items():
        say(f"{split}: {'unpacked' if split in result.unpacked else 'was present'}, {file}")
    if to is not None:
        say(f"to use it by its name: export FLT_MOL_DATA={result.folder}")


@app.command()
def verify(
    name: Annotated[str, typer.Argument(help="Name of a data set, or a folder with dataset.yaml.")],
    splits: Splits = None,
) -> None:
    """Compare a data set's files with its recipe: bytes, hash, count."""
    from flt_mol.data.recipes import recipe
    from flt_mol.data.remote import verify as compare

    found = recipe(name)
    with progress_bars(lines=True) as progress:
        rows = compare(found, splits, progress=progress)
    width = max(len(row.split) for row in rows)
    for row in rows:
        say(f"{row.split:<{width}}  {row.status}{f': {row.message}' if row.message else ''}")
    if wrong := [row for row in rows if not row.ok]:
        text = f"{len(wrong)} of {len(rows)} splits do not agree with the recipe"
        missing = [row.split for row in wrong if row.status == "missing"]
        raise ValueError(f"{text}; {found.how_to_get(missing)}" if missing else text)


def _share(text: str) -> tuple[str, float | int | None]:
    name, _, share = text.partition("=")
    if not name or not re.fullmatch(r"rest|\d+|\d*\.\d+(e-?\d+)?", share):
        raise ValueError(f"--shares: '{text}' is not NAME=SHARE, such as train=0.8, 1000 or rest")
    return name, None if share == "rest" else int(share) if share.isdigit() else float(share)


def _open_to_write(source: str, split: str | None, **options: Any) -> Any:
    from flt_mol.data.recipes import open_source

    dataset = open_source(source, split, **options)
    if relaxations := [file for file in dataset.files() if file.is_relaxation]:
        each = f"each of their {sum(map(len, relaxations)):,} frames is a system, energies as they"
        say(f"{len(relaxations):,} relaxations: {each} stand; --references makes IS2RE systems")
    if text := dataset.without_targets():  # most likely they were not named
        warnings.warn(f"{dataset.path}: {text}", stacklevel=2)
    return dataset


def _drop(dataset: Any, drop: str | None, max_energy: float | None) -> None:
    from flt_mol.data.conversion import drop_systems

    sids = [sid.strip() for sid in next(csv.reader([drop or ""])) if sid.strip()]
    if sids or max_energy is not None:
        largest = math.inf if max_energy is None else max_energy
        if dropped := drop_systems(dataset, sids, largest):
            say(listed("systems dropped", dropped))
