"""The commands `flt-mol predict | relax`."""

from __future__ import annotations

import warnings
from collections import Counter
from functools import partial
from itertools import repeat
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from flt_mol.cli import console
from flt_mol.cli.console import say

if TYPE_CHECKING:
    from flt_mol.data import StructuresDataset
    from flt_mol.data.schema import Tagger
    from flt_mol.prediction.members import Members
    from flt_mol.prediction.table import Prediction
    from flt_mol.structures import Structures

app = typer.Typer()

_SHOWN = 8  # kinds of tagged structures

Files = Annotated[list[Path], typer.Argument(help="Files of structures: LMDB, or a format of ASE.")]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help=".csv, .json, or .extxyz with the structures; overwritten (default: print).",
    ),
]
Trajectory = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", metavar="FILE", help=".traj or .extxyz with all steps; overwritten."
    ),
]
Frames = Annotated[
    str | None,
    typer.Option(
        metavar="first|last|all", help="Frames of each file (default: the first of relaxations)."
    ),
]
Compile = Annotated[
    bool, typer.Option("--compile", help="Compile the model first: for many structures.")
]
Relaxed = Annotated[
    bool, typer.Option("--relaxed", help="Write the predicted relaxed positions (to .extxyz).")
]
Embeddings = Annotated[
    Path | None, typer.Option(metavar="FILE.npz", help="Write an embedding of each structure, too.")
]


@app.command(cls=console.Variadic)
def predict(
    checkpoint: console.Checkpoint,
    files: Files,
    output: Output = None,
    ensemble: console.Ensemble = None,
    frames: Frames = None,
    tag_slab: console.TagSlab = False,
    adsorbate: console.Adsorbate = None,
    surface: console.Surface = None,
    batch_size: console.BatchSize = 64,
    device: console.Device = "cpu",
    skip_bad: console.SkipBad = False,
    compiled: Compile = False,
    relaxed: Relaxed = False,
    embeddings: Embeddings = None,
) -> None:
    """Predict energies (eV) of all structures in files.

    Models that were trained on forces write them to .extxyz, too.
    """
    from flt_mol.prediction import table
    from flt_mol.prediction.members import load_members

    _check_written(output, table.SUFFIXES, files)
    console.check_tagging(tag_slab, adsorbate, surface)
    to_structures = output is not None and output.suffix.lower() == ".extxyz"
    if relaxed and not to_structures:
        raise ValueError("--relaxed needs -o FILE.extxyz, for the positions")
    if embeddings is not None:
        console.check_output(embeddings, "--embeddings FILE", (".npz",))
        if ensemble:
            raise ValueError("--embeddings is for one model: those of members have no mean")
    members = load_members([checkpoint, *ensemble] if ensemble else checkpoint, device)
    if compiled and len(members.lacking("forces")) < len(members.labels):
        raise ValueError("--compile: a model gives forces, which compiled graphs do not")
    for model in members.models if compiled else ():
        model.compile(fullgraph=True, dynamic=True)
    tagger = _tagger(members, adsorbate, surface) if tag_slab else None
    opened = _open(files, members, frames, tagger, skip_bad)
    name = "displacement" if relaxed else "forces"
    lacking = members.lacking(name)
    if relaxed and lacking:
        raise ValueError(f"--relaxed: {lacking[0]} predicts no displacements")
    outputs = [name] if to_structures and not lacking else []
    outputs += [] if embeddings is None else ["system_embeddings"]
    with console.progress_bars() as bars:
        progress = partial(bars, "predicting")
        predictions = table.predict_files(
            members, opened, batch_size, outputs=outputs, progress=progress
        )
    shown = [] if tagger is None else [_tags_of(one) for one in opened]
    energies = _lines(predictions, shown)

    def write() -> None:
        try:
            if output is not None:
                table.write_predictions(predictions, output, opened)
            if embeddings is not None:
                table.write_embeddings(predictions, embeddings)
        except (OSError, ValueError):  # a full disk must not lose hours of work
            if output is not None:
                say(energies)
            raise
        if written := [file for file in (output, embeddings) if file is not None]:
            console.say_files(written)

    console.show_then(energies if output is None else _summary(predictions, shown), write)


@app.command()
def relax(
    checkpoint: console.Checkpoint,
    files: Files,
    output: Trajectory = None,
    last: Annotated[bool, typer.Option("--last", help="Write relaxed structures only.")] = False,
    optimizer: Annotated[str, typer.Option(help="ASE's bfgs, lbfgs or fire.")] = "bfgs",
    fmax: Annotated[float, typer.Option(min=0.0, help="Largest force at the end, eV/Å.")] = 0.05,
    steps: Annotated[int, typer.Option(min=0, help="At most, for each structure.")] = 300,
    frames: Frames = None,
    tag_slab: console.TagSlab = False,
    adsorbate: console.Adsorbate = None,
    surface: console.Surface = None,
    batch_size: console.BatchSize = 32,
    device: console.Device = "cpu",
    skip_bad: console.SkipBad = False,
) -> None:
    """Relax all structures in files by the forces of a model that was trained on forces."""
    from flt_mol.prediction import relaxation
    from flt_mol.prediction.members import load_members

    _check_written(output, relaxation.SUFFIXES, files)
    console.check_tagging(tag_slab, adsorbate, surface)
    members = load_members(checkpoint, device)
    tagger = _tagger(members, adsorbate, surface) if tag_slab else None
    opened = _open(files, members, frames, tagger, skip_bad)
    with console.progress_bars() as bars:
        found = relaxation.relax_structures(
            members,
            opened,
            output,
            optimizer=optimizer,
            fmax=fmax,
            steps=steps,
            batch_size=batch_size,
            last=last,
            progress=lambda done: bars("relaxing", done, len(opened)),
        )
    names = [str(path[0].info["sid"]) for path in found]
    for name, path in zip(names, found, strict=True):
        before, after = (path[k].get_potential_energy() for k in (0, -1))
        force = relaxation.largest_force(path[-1])
        end = f"{force:.3f} eV/Å{'' if force < fmax else '  not converged'}"
        change = f"{before:10.4f} → {after:10.4f} eV  {len(path) - 1:4d} steps"
        say(f"{name:<{max(map(len, names))}}  {change}  {end}")
    if output is not None:
        console.say_files([output])


def _check_written(output: Path | None, suffixes: tuple[str, ...], files: list[Path]) -> None:
    if output is not None:
        console.check_output(output, "-o FILE", suffixes)
        if any(file.resolve() == output.resolve() for file in files):
            raise ValueError(f"{output} is one of the files to read, and would be overwritten")


def _open(
    files: list[Path], members: Members, frames: str | None, tagger: Tagger | None, skip_bad: bool
) -> StructuresDataset:
    from flt_mol.prediction.energies import open_quietly

    on_error = "skip" if skip_bad else "raise"
    return open_quietly(files, frames, check=members.check, tag_slab=tagger, on_error=on_error)


def _tagger(members: Members, adsorbate: str | None, surface: str | None) -> Tagger:
    """Tags slabs by the rule given, or by that of the model, which is printed."""
    from flt_mol.data.tags import slab_tagger
    from flt_mol.prediction.members import surface_rule

    rule = surface or surface_rule(members.given)
    if rule is None:
        text = "--tag-slab takes the rule 'oc20': the model's own is not known; give --surface"
        warnings.warn(text, stacklevel=2)
    elif surface is None:
        text = f"--tag-slab takes the rule '{rule}', which the model's checkpoint names"
        say(f"flt-mol: {text}", error=True)
    return slab_tagger(adsorbate, rule or "oc20", "--surface")


def _tags_of(structures: Structures) -> str:
    from flt_mol.data.tags import adsorbate_formula

    below, surface, adsorbate = (structures.atomic_numbers[structures.tags == i] for i in range(3))
    formula = adsorbate_formula(adsorbate.tolist()) or "none"
    return f"below {len(below)}, surface {len(surface)}, adsorbate {formula}"


def _lines(predictions: list[Prediction], notes: list[str]) -> str:
    width = max((len(p.name) for p in predictions), default=0)
    lines = []
    for p, note in zip(predictions, notes or repeat(""), strict=False):
        deviation = "" if p.std is None else f" ± {p.std:.6f}"
        lines.append(f"{p.name:<{width}}  {p.energy:12.6f}{deviation} eV  {note}".rstrip())
    return "\n".join(lines)


def _summary(predictions: list[Prediction], notes: list[str]) -> str:
    """What is printed where the energies themselves go to a file."""
    lines = []
    if energies := [p.energy for p in predictions]:
        text = f"{min(energies):.3f} to {max(energies):.3f} eV, median {median(energies):.3f}"
        lines.append(f"{len(energies):,} structures: {text}")
    if deviations := [p.std for p in predictions if p.std is not None]:
        text = f"median {median(deviations):.3f} eV, up to {max(deviations):.3f}"
        lines.append(f"standard deviation of the members: {text}")
    lines += [f"  {count} × {kind}" for kind, count in Counter(notes).most_common(_SHOWN)]
    return "\n".join(lines)
