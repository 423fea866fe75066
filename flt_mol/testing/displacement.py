"""A check of models that say where atoms go, as vectors (N, 3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from flt_mol.modes import evaluating
from flt_mol.structures import Structures
from flt_mol.testing._common import difference, seeded
from flt_mol.testing.structures import (
    random_orthogonal,
    reordered,
    rounded_to_1024ths,
    shifted,
    times,
    turned,
)

Model = Callable[[Structures], Mapping[str, Tensor]]


def check_displacement_equivariance(
    model: Model,
    structures: Structures,
    *,
    tolerance: float = 1e-4,
    distance: int = 100,
    generator: torch.Generator | None = None,
) -> float:
    """Displacements turn and mirror with the system, and follow their atoms; fixed atoms stay.

    Systems are rotated, and mirrored, together with their cells; their atoms reordered; and shifted
    by up to `distance` Å per axis, exactly in float32. The displacements of every pass are looked
    at; those of atoms marked as fixed must be exactly 0. The default tolerance leaves room for the
    rounding of rotated float32 positions.

    Args:
        model: Structures → ``{"displacement": (N, 3)}``, Å, and, where there are several passes,
            ``"displacement_recycles"`` (K, N, 3). Modules are put in eval mode meanwhile.
        structures: the systems.
        tolerance: of the difference, relative to the largest component of any displacement.
        distance: Å.
        generator: source of all draws; seed 0 if None.

    Returns:
        The largest error found.

    Raises:
        AssertionError: naming the atom that differs most, or that is fixed and moves.

    Example:
        >>> from flt_mol.testing import random_structures
        >>> structures = random_structures(torch.Generator().manual_seed(0))
        >>> check_displacement_equivariance(
        ...     lambda s: {"displacement": s.positions.new_zeros(s.num_atoms, 3)}, structures
        ... )
        0.0
    """
    generator = seeded(generator)
    first = _displacements(model, structures)
    _fixed_stay(structures, first)
    errors = []
    for mirrored, words in ((False, "rotated"), (True, "rotated and mirrored")):
        q = random_orthogonal(len(structures), generator, mirrored=mirrored)
        second = _displacements(model, turned(structures, q))
        expected = times(first, q[structures.system.cpu()])
        errors.append(_agree(structures, expected, second, tolerance, f"it was {words}"))
    other, order = reordered(structures, generator)
    second = _displacements(model, other)
    change = "its atoms were reordered"
    errors.append(_agree(structures, first[:, order], second, tolerance, change, order))
    before = rounded_to_1024ths(structures)
    shift = torch.randint(-distance, distance + 1, (len(structures), 3), generator=generator)
    after = shifted(before, shift.to(before.positions)[before.system])
    first, second = (_displacements(model, x) for x in (before, after))
    change = f"it was shifted by up to {distance} Å"
    errors.append(_agree(structures, first, second, tolerance, change))
    return max(errors)


def _displacements(model: Model, structures: Structures) -> Tensor:
    """(K, N, 3): of the passes, and of the whole."""
    with evaluating(model), torch.no_grad():
        out = model(structures)
    whole = out["displacement"]
    if tuple(whole.shape) != (structures.num_atoms, 3):
        raise AssertionError(
            f"displacements have shape {tuple(whole.shape)} for {structures.num_atoms} atoms"
        )
    passes = out.get("displacement_recycles")
    return whole[None] if passes is None else torch.cat([passes, whole[None]])


def _fixed_stay(structures: Structures, found: Tensor) -> None:
    moving = (found != 0).any(-1).any(0) & structures.fixed
    if bool(moving.any()):
        atom = int(moving.nonzero()[0])
        raise AssertionError(
            f"{int(moving.sum())} of {int(structures.fixed.sum())} fixed atoms move, the first "
            f"being {_name(structures, atom)}, by {found[-1, atom].tolist()} Å"
        )


def _agree(
    structures: Structures,
    first: Tensor,
    second: Tensor,
    tolerance: float,
    change: str,
    order: Tensor | None = None,
) -> float:
    found = difference(first, second)
    if found.error <= tolerance:  # false for NaN
        return found.error
    row = found.place[1]
    atom = row if order is None else int(order[row])
    raise AssertionError(
        f"displacements do not follow when {change}; most, that of {_name(structures, atom)}: "
        f"{found.words}: relative error {found.error:.3g}, tolerance {tolerance:g}"
    )


def _name(structures: Structures, atom: int) -> str:
    system = int(structures.system[atom])
    return f"atom {atom - int(structures.ptr[system])} of sid {structures.sid[system]}"
