"""Relaxations by a model that gives forces, with ASE's optimisers, many systems at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import write
from ase.optimize import BFGS, FIRE, LBFGS

from flt_mol.data import from_ase, to_ase
from flt_mol.files import temporary_path
from flt_mol.prediction.energies import evaluating, prepared
from flt_mol.prediction.members import Members, load_members
from flt_mol.structures import Structures

OPTIMIZERS = {"bfgs": BFGS, "lbfgs": LBFGS, "fire": FIRE}
SUFFIXES = (".traj", ".extxyz")
"""Of the files that :func:`relax_structures` writes."""


@dataclass(frozen=True)
class Relaxation:
    """The relaxation of one system.

    Args:
        name: its sid.
        frames: ASE atoms of each step, the initial ones first, with the model's energy and forces.
        force: largest force on a free atom at the end, eV/Å.
        converged: whether it is below the limit.
    """

    name: str
    frames: tuple[Any, ...]
    force: float
    converged: bool

    @property
    def energies(self) -> list[float]:
        """Of each frame, eV."""
        return [float(frame.get_potential_energy()) for frame in self.frames]


def relax_structures(
    model: Any,
    structures: Iterable[Structures],
    output: str | Path | None = None,
    *,
    optimizer: str = "bfgs",
    fmax: float = 0.05,
    steps: int = 300,
    batch_size: int = 32,
    last: bool = False,
    progress: Callable[[int], None] | None = None,
) -> list[Relaxation]:
    """Relax systems until all forces on free atoms are below `fmax`, eV/Å.

    Each system has an optimiser of ASE of its own; those of a batch share the model's calls, one a
    step. Cells are kept.

    Args:
        model: as of :func:`~flt_mol.prediction.members.load_members`, with the output "forces".
        structures: batches of any number of systems.
        output: ``.traj`` or ``.extxyz`` with all frames, with ``info["sid"]`` and ``info["step"]``;
            it appears complete or not at all.
        optimizer: ``"bfgs"``, ``"lbfgs"`` or ``"fire"``.
        fmax: eV/Å.
        steps: at most; a system that needs more is not converged.
        batch_size: systems relaxed together.
        last: `output` gets only the last frame of each system.
        progress: called with the number of systems done after each batch.

    Raises:
        ValueError: a model without forces, or forces that are not finite, naming the sid; another
            optimiser.
    """
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer is {optimizer!r}, expected {', '.join(OPTIMIZERS)}")
    members = load_members(model)
    singles = (system for batch in structures for system in batch)
    found: list[Relaxation] = []
    with ExitStack() as stack:
        for member in members.models:
            stack.enter_context(evaluating(member))
        while systems := list(islice(singles, batch_size)):
            found += _relax(members, systems, OPTIMIZERS[optimizer], fmax, steps)
            if progress is not None:
                progress(len(found))
    if output is not None:
        with temporary_path(output) as temporary:
            write(temporary, [frame for x in found for frame in x.frames[-1 if last else 0 :]])
    return found


def _relax(
    members: Members, systems: Sequence[Structures], kind: Any, fmax: float, steps: int
) -> list[Relaxation]:
    """One batch: a call of the model, then a step of each optimiser whose forces are too large."""
    atoms = [to_ase(system) for system in systems]
    frames: list[list[Atoms]] = [[] for _ in atoms]
    force = [np.inf] * len(atoms)
    active = {b: kind(one, logfile=None) for b, one in enumerate(atoms)}
    for step in range(steps + 1):
        _calculate(members, [atoms[b] for b in active])
        for b in active:
            frames[b].append(_frame(atoms[b], step))
            force[b] = float(np.linalg.norm(atoms[b].get_forces(), axis=1).max(initial=0.0))
        active = {b: own for b, own in active.items() if force[b] >= fmax}
        if not active or step == steps:
            break
        for own in active.values():
            own.step()
    return [
        Relaxation(str(system.sid[0]), tuple(frames[b]), force[b], force[b] < fmax)
        for b, system in enumerate(systems)
    ]


def _calculate(members: Members, atoms: Sequence[Atoms]) -> None:
    """Give each its energy and forces, of an ensemble the mean."""
    batch = Structures.cat(
        [from_ase(x.copy(), sid=x.info["sid"], ignore_energy=True) for x in atoms]
    )
    with torch.no_grad():
        outputs = [model(prepared(model, batch)) for model in members.models]
    for out, label in zip(outputs, members.labels, strict=True):
        if "forces" not in out:
            raise ValueError(f"{label} gives no forces: train with model.outputs=[energy,forces]")
    energy, forces = (
        np.mean([out[name].double().cpu().numpy() for out in outputs], axis=0)
        for name in ("energy", "forces")
    )
    each = np.split(forces, batch.ptr[1:-1].tolist())
    for one, own_energy, own_forces in zip(atoms, energy.tolist(), each, strict=True):
        if not np.isfinite(own_forces).all():
            raise ValueError(f"the model's forces on {one.info['sid']} are not finite")
        one.calc = SinglePointCalculator(one, energy=own_energy, forces=own_forces)


def _frame(atoms: Atoms, step: int) -> Atoms:
    frame: Atoms = atoms.copy()
    frame.info["step"] = step
    frame.calc = SinglePointCalculator(frame, **atoms.calc.results)
    return frame
