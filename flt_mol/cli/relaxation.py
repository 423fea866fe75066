"""The command `flt-mol relax`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flt_mol.cli import console
from flt_mol.cli.prediction import (
    Adsorbate,
    Files,
    Frames,
    Surface,
    TagSlab,
    check_written,
    tagger_of,
)

if TYPE_CHECKING:
    from flt_mol.prediction.relaxation import Relaxation

app = typer.Typer()

Output = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", metavar="FILE", help=".traj or .extxyz with all steps; overwritten."
    ),
]


@app.command()
def relax(
    checkpoint: console.Checkpoint,
    files: Files,
    output: Output = None,
    last: Annotated[bool, typer.Option("--last", help="Write relaxed structures only.")] = False,
    optimizer: Annotated[str, typer.Option(help="ASE's bfgs, lbfgs or fire.")] = "bfgs",
    fmax: Annotated[float, typer.Option(min=0.0, help="Largest force at the end, eV/Å.")] = 0.05,
    steps: Annotated[int, typer.Option(min=0, help="At most, for each structure.")] = 300,
    frames: Frames = None,
    tag_slab: TagSlab = False,
    adsorbate: Adsorbate = None,
    surface: Surface = None,
    batch_size: console.BatchSize = 32,
    device: console.Device = "cpu",
    skip_bad: console.SkipBad = False,
) -> None:
    """Relax all structures in files by the forces of a model that was trained on forces."""
    from flt_mol.prediction import relaxation
    from flt_mol.prediction.members import load_members
    from flt_mol.prediction.table import StructureFiles

    check_written(output, relaxation.SUFFIXES, files)
    tagger = tagger_of([checkpoint], tag_slab, adsorbate, surface)
    members = load_members(checkpoint, device)
    options: dict[str, Any] = {"check": members.check, "layer_numbers": tag_slab, "frames": frames}
    opened = StructureFiles(files, skip_bad=skip_bad, prepare=tagger, **options)
    with console.progress_bars() as bars:
        found = relaxation.relax_structures(
            members,
            (structure for structure, *_ in opened),
            output,
            optimizer=optimizer,
            fmax=fmax,
            steps=steps,
            batch_size=batch_size,
            last=last,
            progress=lambda done: bars("relaxing", done, len(opened)),
        )
    if tagger is not None and tagger.untagged:
        tagger.explain()
    console.say("\n".join(_lines(found)))
    if output is not None:
        console.say_files([output])


def _lines(found: list[Relaxation]) -> list[str]:
    """A line for each system: energies before and after."""
    width = max((len(x.name) for x in found), default=0)
    return [
        f"{x.name:<{width}}  {x.energies[0]:10.4f} → {x.energies[-1]:10.4f} eV  "
        f"{len(x.frames) - 1:4d} steps  {x.force:.3f} eV/Å"
        f"{'' if x.converged else '  not converged'}"
        for x in found
    ]
