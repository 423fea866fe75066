"""Forces and stress: derivatives of the energies of a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from flt_mol.functional.groups import at_least_float32
from flt_mol.functional.lattice import matrices_times, rows_times
from flt_mol.structures import Structures

Outputs = dict[str, Tensor]


def with_forces(
    energies: Callable[[Structures], Outputs], structures: Structures, *, stress: bool = False
) -> Outputs:
    """Outputs of a model, and forces F = −∂E/∂r of their ``"energy"``, by autograd.

    Where gradients are on forces can be differentiated, as training on them needs; elsewhere, in
    inference mode too, all outputs are plain numbers.

    Args:
        energies: a function of a batch whose output ``"energy"`` (B,) depends on its positions.
        structures: with the pairs and reciprocal vectors that it needs: they are not searched
            again, and derivatives go through them.
        stress: whether the stress is given, too: σ = (1/V) ∂E/∂ε for r → (1 + ε) r with the cell,
            ε symmetric.

    Returns:
        These outputs, ``"forces"`` (N, 3), eV/Å, and as asked for ``"stress"`` (B, 3, 3), eV/Å³,
        positive where energy rises by stretching, as in ASE; NaN for cells without a volume.
    """
    higher = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.enable_grad():
        if not higher:  # tensors of inference mode keep no derivatives, but copies do
            structures = structures.select(range(len(structures)))
        positions = at_least_float32(structures.positions)
        if not positions.requires_grad:
            positions = positions.detach().requires_grad_()
        moved, by = replace(structures, positions=positions), [positions]
        if stress:
            by.append(positions.new_zeros(len(structures), 3, 3).requires_grad_())
            moved = strained(moved, by[1])
        out = energies(moved)
        gradient, *by_strain = torch.autograd.grad(
            out["energy"].sum(), by, create_graph=higher, materialize_grads=True
        )
        out["forces"] = -gradient
        for slope in by_strain:
            volume = torch.linalg.det(structures.cell.to(slope.dtype)).abs()[:, None, None]
            out["stress"] = (slope / volume).masked_fill(volume == 0, torch.nan)
    return out if higher else {name: x.detach() for name, x in out.items()}


def strained(structures: Structures, strain: Tensor) -> Structures:
    """The batch with r → (1 + ε) r, ε the symmetric part of `strain` (B, 3, 3), differentiable.

    Cells follow, but for virtual vectors; pairs and the integers of reciprocal vectors stay.
    """
    stretch = torch.eye(3, dtype=strain.dtype, device=strain.device) + (strain + strain.mT) / 2
    lattice = structures.reciprocal
    if lattice is not None:  # the rest follows from positions and these, in the filter
        cell = torch.where(
            lattice.virtual[..., None], lattice.cell, matrices_times(lattice.cell, stretch)
        )
        offset = rows_times(lattice.offset, stretch, structures.ptr)
        lattice = lattice._replace(cell=cell, offset=offset)
    return replace(
        structures,
        positions=rows_times(structures.positions, stretch, structures.ptr),
        cell=matrices_times(structures.cell, stretch),
        reciprocal=lattice,
    )
