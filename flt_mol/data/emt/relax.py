"""Relaxation for the EMT data set: L-BFGS that never climbs and can be stopped early."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from ase import Atoms
from ase.calculators.emt import EMT
from ase.constraints import FixAtoms
from numpy.typing import NDArray

Array = NDArray[Any]
Stop = Callable[[Array], str | None]
"""Takes the positions (N, 3) of every atom and gives a reason to stop relaxing, or None."""

MAX_STEP = 0.1
"""Largest distance that one atom moves in one step, Å."""
_MEMORY = 20
_FIRST_STEP = 1.0 / 70.0  # Å²/eV, the inverse curvature that ASE's BFGS starts from
_HALVINGS = 4


def relax(atoms: Atoms, *, fmax: float, steps: int, stop: Stop | None = None) -> str:
    """Relaxes `atoms` in place with ASE's EMT; atoms under `FixAtoms` stay where they are.

    Nocedal's two-loop L-BFGS (Math. Comp. 35, 773, 1980) with a backtracking line search, so
    the energy falls with every step and the path stays in its valley. It needs scalar products
    only: the result does not depend on a number of threads.

    Args:
        atoms: relaxed in place; its calculator is taken away at the end.
        fmax: converged once every free atom's force is below, eV/Å.
        steps: most steps.
        stop: asked after each step.

    Returns:
        "converged", "not_converged" (steps used up, or energy or forces not finite), or what
        `stop` gave.
    """
    free = np.ones(len(atoms), dtype=bool)
    for constraint in atoms.constraints:
        if isinstance(constraint, FixAtoms):
            free[constraint.index] = False
    atoms.calc = EMT()
    try:
        with np.errstate(all="ignore"):
            return _minimise(atoms, free, fmax, steps, stop)
    finally:
        atoms.calc = None


def _minimise(atoms: Atoms, free: Array, fmax: float, steps: int, stop: Stop | None) -> str:
    energy, forces = _evaluate(atoms, free)
    pairs: deque[tuple[Array, Array, float]] = deque(maxlen=_MEMORY)
    for _ in range(steps):
        if not (np.isfinite(energy) and np.isfinite(forces).all()):
            return "not_converged"
        if float(np.linalg.norm(forces, axis=1).max(initial=0.0)) < fmax:
            return "converged"
        direction = _direction(forces, pairs)
        if float((direction * forces).sum()) <= 0.0:
            pairs.clear()
            direction = forces * _FIRST_STEP
        longest = float(np.linalg.norm(direction, axis=1).max())
        direction = direction * min(1.0, MAX_STEP / longest)
        energy, change, step = _line_search(atoms, free, energy, forces, direction)
        curvature = float((step * change).sum())
        if curvature > 1e-10:
            pairs.append((step, change, 1.0 / curvature))
        forces = forces - change
        reason = None if stop is None else stop(atoms.positions)
        if reason is not None:
            return reason
    converged = float(np.linalg.norm(forces, axis=1).max(initial=0.0)) < fmax
    return "converged" if converged else "not_converged"


def _evaluate(atoms: Atoms, free: Array) -> tuple[float, Array]:
    """Energy, eV, and the forces on the free atoms, eV/Å."""
    energy = float(atoms.get_potential_energy())
    return energy, np.array(atoms.get_forces(apply_constraint=False))[free]


def _direction(forces: Array, pairs: Iterable[tuple[Array, Array, float]]) -> Array:
    """−H⁻¹ ∇E by the two-loop recursion over (step, gradient change, 1 / their product)."""
    pairs = list(pairs)
    if not pairs:
        return forces * _FIRST_STEP
    q = forces.copy()
    weights = []
    for step, change, inverse in reversed(pairs):
        weights.append(inverse * float((step * q).sum()))
        q -= weights[-1] * change
    _, change, inverse = pairs[-1]
    q *= 1.0 / (inverse * float((change * change).sum()))
    for (step, change, inverse), weight in zip(pairs, reversed(weights), strict=True):
        q += step * (weight - inverse * float((change * q).sum()))
    return q


def _line_search(
    atoms: Atoms, free: Array, energy: float, forces: Array, direction: Array
) -> tuple[float, Array, Array]:
    """Halves `direction` until the energy falls (Armijo), moves there.

    Returns the energy, the change of the gradient, and the step. EMT's neighbour cutoff leaves
    jumps of some 1e-5 eV, so that after the last halving the step is taken all the same.
    """
    start = atoms.positions[free]
    slope = float((direction * forces).sum())
    for halving in range(_HALVINGS + 1):
        step = direction * 0.5**halving
        atoms.positions[free] = start + step
        new_energy, new_forces = _evaluate(atoms, free)
        if new_energy <= energy - 1e-4 * slope * 0.5**halving:
            break
    return new_energy, forces - new_forces, step
