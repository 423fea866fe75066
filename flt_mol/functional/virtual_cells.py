"""Cells for lattice sums: a short basis, vacuum found, and a stand-in for each open direction.

Everything here decides, nothing is differentiated: float64 on CPU, all systems at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flt_mol.functional.groups import (
    first_per_system,
    max_per_system,
    mean_per_system,
    spread,
    sum_per_system,
)

_SMALLEST = 0.5  # Å, thinner than any crystal


class UnfitSystemError(ValueError):
    """One system of a batch that no lattice sums can be made of.

    Args:
        message: says which one, by its place.
        system: that place.
    """

    def __init__(self, message: str, system: int) -> None:
        super().__init__(message)
        self.system = system


class VirtualCells(NamedTuple):
    """What `virtual_cells` decided for B systems with N atoms.

    Attributes:
        change: (B, 3, 3) int64; ``change @ cell`` is a short basis of the periodic directions.
        kept: (B, 3) bool, rows of that basis that stay; the others become virtual.
        cell: (B, 3, 3), Å, the cell to use.
        shift: (N, 3) int64: atoms are taken at r − shift·(change @ cell), all of them on the
            same side of the vacuum.
    """

    change: Tensor
    kept: Tensor
    cell: Tensor
    shift: Tensor


def virtual_cells(
    cell: Tensor, pbc: Tensor, positions: Tensor, ptr: Tensor, *, padding: float, shrink: bool
) -> VirtualCells:
    """A cell of three independent vectors for every system, see `reciprocal_vectors`.

    Args:
        cell: (B, 3, 3) float64 on CPU, Å.
        pbc: (B, 3) bool.
        positions: (N, 3) float64 on CPU, Å, finite.
        ptr: (B + 1,).
        padding: Å.
        shrink: whether a periodic direction with a gap wider than `padding` counts as open.

    Raises:
        UnfitSystemError: a periodic direction without a lattice vector of its own.
    """
    num_atoms = positions.shape[0]
    local = positions - spread(first_per_system(positions, ptr), ptr, num_atoms)
    kept = pbc & (ptr.diff() > 0)[:, None]
    change = short_basis(torch.where(kept[..., None], cell, 0.0), kept)
    basis = torch.where(kept[..., None], change.to(cell.dtype) @ cell, 0.0)
    _check_heights(basis, kept)
    shift = torch.zeros(local.shape, dtype=torch.int64)
    if shrink:
        # Fractions along periodic vectors do not depend on what stands in for the open ones.
        fraction = rows_times(local, torch.linalg.pinv(basis), ptr)
        gap, shift = _largest_gaps(fraction, ptr)
        vacuum = kept & (gap * _heights(basis, kept) > padding)
        shift = shift * spread(vacuum, ptr, num_atoms)
        local = local - rows_times(shift.to(local.dtype), basis, ptr)
        kept = kept & ~vacuum
    return VirtualCells(
        change, kept, _with_perpendicular_vectors(basis, kept, local, ptr, padding), shift
    )


def rows_times(x: Tensor, matrix: Tensor, ptr: Tensor) -> Tensor:
    """Each row times the matrix of its system, x_n @ M_b: (N, 3), (B, 3, 3) → (N, 3).

    Sums of products, not a matmul, which TF32 would round.
    """
    one = len(matrix) == 1 and not torch.compiler.is_compiling()
    a, b, c = x.split(1, dim=1)
    first, second, third = (matrix if one else spread(matrix, ptr, x.shape[0])).unbind(1)
    summed: Tensor = a * first + b * second + c * third
    return summed


def short_basis(cell: Tensor, periodic: Tensor) -> Tensor:
    """U (B, 3, 3) int64 such that no row of U·cell gets shorter by adding multiples of another.

    Only rows marked in `periodic` (B, 3) take part; determinant ±1.

    Example:
        >>> cell = torch.tensor([[[7.0, 0, 0], [0, 6, 0], [70, 0, 21]]], dtype=torch.float64)
        >>> (short_basis(cell, torch.ones(1, 3, dtype=torch.bool)).double() @ cell)[0, 2].tolist()
        [0.0, 0.0, 21.0]
    """
    change = torch.eye(3, dtype=torch.int64).repeat(cell.shape[0], 1, 1)
    pairs = [(i, j) for i in range(3) for j in range(3) if i != j]
    for _ in range(1000):  # each step shortens a vector; a handful is usual
        changed = False
        for i, j in pairs:
            basis = change.to(cell.dtype) @ cell
            short, long = basis[:, i], basis[:, j]
            square = short.square().sum(-1)
            ratio = (short * long).sum(-1) / square.clamp(min=1e-12)
            # A margin, so that rounding does not decide between two equally short vectors.
            applies = (ratio.abs() > 0.5 + 1e-6) & periodic[:, i] & periodic[:, j]
            steps = torch.where(applies & (square > 1e-12), ratio.round(), 0.0).to(torch.int64)
            change[:, j] -= steps[:, None] * change[:, i]
            changed = changed or bool((steps != 0).any())
        if not changed:
            break
    return change


def _check_heights(basis: Tensor, kept: Tensor) -> None:
    thin = kept & (_heights(basis, kept) < _SMALLEST)
    if bool(thin.any()):
        system, axis = thin.nonzero()[0].tolist()
        raise UnfitSystemError(
            f"cell of system {system} is singular along a periodic direction: less than "
            f"{_SMALLEST} Å between images along {'abc'[axis]}; give a lattice vector for each "
            "periodic direction, or set pbc False there",
            system,
        )


def _heights(basis: Tensor, kept: Tensor) -> Tensor:
    """Distance (B, 3) between lattice planes, Å; 0 where a vector is missing or in line."""
    heights = []
    for axis in range(3):
        others = basis.clone()
        others[:, axis] = 0.0
        plane = torch.linalg.pinv(others, rtol=1e-9) @ others
        across = basis[:, axis] - (basis[:, axis, None, :] @ plane).squeeze(1)
        heights.append(torch.linalg.vector_norm(across, dim=-1))
    return torch.stack(heights, dim=-1) * kept


def _largest_gaps(fraction: Tensor, ptr: Tensor) -> tuple[Tensor, Tensor]:
    """Widest empty stretch (B, 3) per lattice vector, in fractions, and shifts (N, 3) behind it.

    Fractions are taken mod 1, on a circle; ``fraction - shift`` of a system then begins right
    after its gap, wherever its atoms were written.
    """
    num_atoms = fraction.shape[0]
    wrapped = fraction - fraction.floor()
    order = torch.argsort(wrapped, dim=0, stable=True)
    system = spread(torch.arange(ptr.numel() - 1), ptr, num_atoms)
    if len(ptr) > 2:
        order = order.gather(0, torch.argsort(system[order], dim=0, stable=True))
    ascending = wrapped.gather(0, order)
    # What lies below each atom: the next one, and below the lowest the image of the highest.
    below = ascending.roll(1, 0)
    occupied = ptr.diff() > 0
    below[ptr[:-1][occupied]] = ascending[ptr[1:][occupied] - 1] - 1.0
    gap = max_per_system(ascending - below, ptr)
    widest = ascending - below >= spread(gap, ptr, num_atoms)
    # Cut in the middle of the gap, so that rounding takes no atom to the other side.
    middle = torch.where(widest, (ascending + below) / 2, -torch.inf)
    cut = spread(max_per_system(middle, ptr), ptr, num_atoms)
    return gap, (fraction - cut).floor().to(torch.int64)


def _with_perpendicular_vectors(
    basis: Tensor, kept: Tensor, local: Tensor, ptr: Tensor, padding: float
) -> Tensor:
    """`basis` (B, 3, 3), every row not `kept` replaced by one perpendicular to all the others.

    Its length is the extent of the atoms in that direction plus `padding`. Where several are
    missing, they lie along the principal axes of the atoms, so that they turn with them.
    """
    if bool(kept.all()):
        return basis
    rows = torch.where(kept[..., None], basis, 0.0)
    plane = torch.linalg.pinv(rows) @ rows
    across = local - rows_times(local, plane, ptr)
    across = across - spread(mean_per_system(across, ptr), ptr, local.shape[0])
    moments = sum_per_system(across[:, :, None] * across[:, None, :], ptr)
    trace = moments.diagonal(dim1=-2, dim2=-1).sum(-1).clamp(min=1e-12)
    # Kept directions get the eigenvalue −2, so the open ones, 0 to 1, come last.
    axes = torch.linalg.eigh(moments / trace[:, None, None] - 2.0 * plane).eigenvectors
    along = rows_times(across, axes, ptr)
    extent = max_per_system(along, ptr) + max_per_system(-along, ptr)
    vectors = axes.mT * (extent.clamp(min=0.0) + padding)[..., None]
    column = (kept.sum(-1, keepdim=True) + (~kept).cumsum(-1) - 1).clamp(min=0)
    chosen = vectors.gather(1, column[..., None].expand(-1, -1, 3))
    return torch.where(kept[..., None], basis, chosen)
