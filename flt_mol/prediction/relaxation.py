"""Relaxations by a model that gives forces, with ASE's optimisers, many systems at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
from flt_mol.prediction.energies import energies_of, evaluating, predict_structures, prepared
from flt_mol.prediction.members import load_members
from flt_mol.structures import Structures

OPTIMIZERS = {"bfgs": BFGS, "lbfgs": LBFGS, "fire": FIRE}
SUFFIXES = (".traj", ".extxyz")
"""Of the files that `relax_structures` writes."""


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
) -> list[list[Atoms]]:
    """Relax systems, in fixed cells, until all forces on free atoms are below `fmax`, eV/Å.

    Each system has an optimiser of its own; a batch has one call of the model a step. The result is
    the frames of each system: ASE atoms with the model's energy and forces, ``info["sid"]`` and
    ``info["step"]``, from the initial ones on. Where `steps` are too few, forces are larger.

    Args:
        model: a module or checkpoint of the output "forces".
        structures: batches of any number of systems.
        output: ``.traj`` or ``.extxyz`` with all frames; it appears complete or not at all.
        optimizer: ``"bfgs"``, ``"lbfgs"`` or ``"fire"``, of ASE.
        fmax: where to stop.
        steps: at most.
        batch_size: systems relaxed together.
        last: only the last frames are written.
        progress: called with the number of systems done.

    Raises:
        ValueError: a model without forces, forces that are not finite, another optimiser.

    Warns:
        UserWarning: as `flt_mol.predict`.
    """
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer is {optimizer!r}, expected {', '.join(OPTIMIZERS)}")
    members = load_members(model)
    if members.ensemble:
        raise ValueError("relaxations take one model, not an ensemble")
    singles = (system for batch in structures for system in batch)
    found: list[list[Atoms]] = []
    with evaluating(members.models[0]):
        while systems := list(islice(singles, batch_size)):
            predict_structures(members, systems, batch_size)  # which warns of unusual ones
            atoms = [to_ase(system) for system in systems]
            with torch.inference_mode():
                found += _relax(members.models[0], atoms, OPTIMIZERS[optimizer], fmax, steps)
            if progress is not None:
                progress(len(found))
    if output is not None:
        with temporary_path(output) as temporary:
            write(temporary, [frame for frames in found for frame in frames[-1 if last else 0 :]])
    return found


def largest_force(atoms: Atoms) -> float:
    """On a free atom, eV/Å."""
    return float(np.linalg.norm(atoms.get_forces(), axis=1).max(initial=0.0))


def _relax(
    model: Any, atoms: Sequence[Atoms], kind: Any, fmax: float, steps: int
) -> list[list[Atoms]]:
    """One batch: a call of the model, then a step of each optimiser whose forces are too large."""
    frames: list[list[Atoms]] = [[] for _ in atoms]
    active = {b: kind(one, logfile=None) for b, one in enumerate(atoms)}
    for step in range(steps + 1):
        _calculate(model, [atoms[b] for b in active])
        for b in active:
            frame = atoms[b].copy()
            frame.info["step"] = step
            frame.calc = SinglePointCalculator(frame, **atoms[b].calc.results)
            frames[b].append(frame)
        active = {b: own for b, own in active.items() if largest_force(atoms[b]) >= fmax}
        if not active or step == steps:
            break
        for own in active.values():
            own.step()
    return frames


def _calculate(model: Any, atoms: Sequence[Atoms]) -> None:
    each = [from_ase(x.copy(), sid=x.info["sid"], ignore_energy=True) for x in atoms]
    batch = Structures.cat(each)
    out = model(prepared(model, batch))
    if "forces" not in out:
        hint = "it was not trained on them (model.outputs=[energy,forces])"
        raise ValueError(f"the model gives no forces: {hint}")
    forces = np.split(out["forces"].cpu().double().numpy(), batch.ptr[1:-1].tolist())
    for one, energy, own in zip(atoms, energies_of(out, batch).tolist(), forces, strict=True):
        if not np.isfinite(own).all():
            raise ValueError(f"the model gives forces that are not finite for {one.info['sid']}")
        one.calc = SinglePointCalculator(one, energy=energy, forces=own)
