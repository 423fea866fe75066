"""Augmentation of training systems: rotations, other periodic images, moved atoms.

The paper's mode sees positions in a fixed frame: neither rotations nor the choice of periodic image
leave its energies unchanged, which random ones teach. Targets that are vectors follow.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flt_mol.structures import Structures, relaxed_displacement


def rotate(structures: Structures, kind: str) -> Structures:
    """Each system and its cell rotated at random, and mirrored half of the time.

    Args:
        structures: initial positions, and relaxed ones if there are any.
        kind: "none", "z" (about the z axis, the normal of slabs) or "full" (any rotation).
    """
    if kind == "none":
        return structures
    matrix = _orthogonal(len(structures), {"z": 2, "full": 3}[kind], structures.positions)
    fields: dict[str, Any] = {"reciprocal": None, "reciprocal_settings": None}
    for name in ("positions", "positions_relaxed", "forces"):
        if (vectors := getattr(structures, name)) is not None:
            fields[name] = _apply(vectors, matrix[structures.system])
    return replace(structures, cell=structures.cell @ matrix, **fields)


def shift_images(structures: Structures) -> Structures:
    """Another choice of periodic images: a random origin in the cell, atoms wrapped around it.

    Only along a and b of systems with `pbc` along all axes, whose cells must not be singular (which
    reading refuses); c of slabs, across the vacuum, is left alone, since OC20 calls it periodic
    too. `positions_relaxed` move by the same lattice vectors.
    """
    whole, system = structures.pbc.all(1), structures.system
    axes = whole[:, None] & torch.tensor([True, True, False], device=whole.device)
    # Others may lack vectors; any invertible stand-in does, as they are not moved.
    stand_in = torch.eye(3, dtype=structures.cell.dtype, device=structures.cell.device)
    cell = torch.where(whole[:, None, None], structures.cell, stand_in)
    fractional = _apply(structures.positions, torch.linalg.inv(cell)[system])
    origin = torch.rand(len(structures), 3, dtype=cell.dtype, device=cell.device)
    lattice = -(fractional + origin[system]).floor() * axes[system]
    shift = _apply(lattice, cell[system])
    relaxed, pairs = structures.positions_relaxed, structures.pairs
    if pairs is not None:  # the same pairs: T' = T + lᵢ − lⱼ
        moves = lattice.to(pairs.shift.dtype)
        pairs = pairs._replace(shift=pairs.shift + moves[pairs.index_i] - moves[pairs.index_j])
    return replace(
        structures,
        positions=structures.positions + shift,
        positions_relaxed=None if relaxed is None else relaxed + shift,
        pairs=pairs,
        reciprocal=None,
        reciprocal_settings=None,
    )


def move_atoms(
    structures: Structures, noise: float = 0.0, interpolation: float = 0.0
) -> tuple[Structures, Tensor]:
    """Other starting points of the same relaxations: free atoms elsewhere, fixed ones in place.

    r ← r + t d + `noise` ε, with d the displacement to the relaxed structure by its shortest
    periodic image, ε standard normal, and t uniform in [0, 1] for a share `interpolation` of the
    systems, 0 for the others. The relaxed energy and `positions_relaxed` stay, so the displacement
    that remains follows. Pairs are dropped: they are those of the old positions.

    Args:
        structures: with `positions_relaxed` for interpolation.
        noise: standard deviation along each axis, Å.
        interpolation: probability, per system.

    Returns:
        The systems, and (B,) bool, which of them were moved: `energy_initial` is not theirs.

    Raises:
        ValueError: no `positions_relaxed` to interpolate to, naming the sids.

    References:
        Godwin et al., ICLR 2022 (Noisy Nodes), arXiv:2106.07971: both, for IS2RE.
    """
    positions, system = structures.positions, structures.system
    moved = torch.zeros(len(structures), dtype=torch.bool, device=positions.device)
    if noise == 0 and interpolation == 0:
        return structures, moved
    free = ~structures.fixed
    if interpolation > 0:
        displacement = relaxed_displacement(structures).to(positions.dtype)
        shape = 2, len(structures)
        chosen, reach = torch.rand(shape, dtype=positions.dtype, device=positions.device)
        moved = chosen < interpolation
        positions = positions + (reach * moved)[system, None] * displacement
    if noise > 0:
        positions = positions + noise * torch.randn_like(positions) * free[:, None]
        moved = torch.ones_like(moved)
    num_free = torch.zeros_like(structures.natoms).index_add_(0, system, free.to(torch.int64))
    return structures.moved(positions), moved & (num_free > 0)


def _apply(rows: Tensor, matrices: Tensor) -> Tensor:
    return torch.einsum("ni,nij->nj", rows, matrices)


def _orthogonal(count: int, size: int, like: Tensor) -> Tensor:
    """(count, 3, 3): of the first axes, uniform over O(size), Q of a Gaussian's QR, R positive."""
    gaussian = torch.randn(count, size, size, dtype=like.dtype, device=like.device)
    q, r = torch.linalg.qr(gaussian)
    out = torch.eye(3, dtype=like.dtype, device=like.device).repeat(count, 1, 1)
    out[:, :size, :size] = q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None, :]
    return out
