"""Lattices of a batch: short bases, virtual cells of open directions, shortest images.

What is decided here is decided in float64 on CPU and not differentiated.
"""

from __future__ import annotations

import math
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flt_mol.functional.groups import at_least_float32, row_offsets, spread, system_index

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_THINNEST = 0.5  # Å between images, less than in any crystal
SHARPNESS = 20.0  # 1/Å, of `_completed`


class UnfitSystemError(ValueError):
    """`system` (its place in a batch) has a singular or too large lattice: the `reason`."""

    def __init__(self, system: int, reason: str) -> None:
        super().__init__(f"system {system}: {reason}")
        self.system, self.reason = system, reason


class VirtualCells(NamedTuple):
    """A cell (B, 3, 3), Å, of three independent vectors for each system, N atoms in all.

    Attributes:
        change: (B, 3, 3) int64; ``change @ given cell`` is a short basis of periodic directions.
        kept: (B, 3) bool, rows of that basis that stay; the others are virtual.
        shift: (N, 3) int64; atoms are taken at r − shift·(change @ given cell).
    """

    cell: Floats
    change: Integers
    kept: NDArray[np.bool_]
    shift: Integers


def checked_cells(
    cell: Tensor | None, pbc: Tensor | None, positions: Tensor, ptr: Tensor
) -> tuple[Tensor, Tensor]:
    """Cells (B, 3, 3) and pbc (B, 3) of a batch, zeros and False where both are None."""
    systems = len(row_offsets(ptr, positions.shape[0], padding=False)) - 1
    if cell is None or pbc is None:
        if cell is not pbc:
            raise ValueError("cell and pbc belong together: give both, or None for molecules")
        cell = positions.new_zeros(systems, 3, 3)
        pbc = torch.zeros(systems, 3, dtype=torch.bool, device=positions.device)
    for name, value, shape in (
        ("positions", positions, (positions.shape[0], 3)),
        ("cell", cell, (systems, 3, 3)),
        ("pbc", pbc, (systems, 3)),
    ):
        if tuple(value.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(value.shape)}, expected {shape}")
    if pbc.dtype != torch.bool:
        raise ValueError(f"pbc is {pbc.dtype}, expected torch.bool: pass pbc.bool()")
    for name, value in (("positions", positions), ("cell", cell)):
        finite = value.isfinite().flatten(1).all(1)
        if not bool(finite.all()):
            row = int((~finite).nonzero()[0])
            system = row if name == "cell" else int(system_index(ptr, len(positions))[row])
            raise UnfitSystemError(system, f"{name} hold a number that is not finite")
    return cell, pbc


def minimum_image(vectors: Tensor, cell: Tensor | None, pbc: Tensor | None, ptr: Tensor) -> Tensor:
    r"""The shortest of v − T·cell, over all integers T along axes that repeat.

    Exact for any basis of the lattice: in a Minkowski-reduced one the shortest image is among the
    27 around the rounded fractions. Of equally short images v itself is taken if it is one. T is
    constant to autograd.

    Args:
        vectors: v (N, 3), Å.
        cell: (B, 3, 3), Å, rows are lattice vectors. None, with `pbc` None: nothing repeats.
        pbc: (B, 3) bool, along which lattice vectors the system repeats.
        ptr: (B + 1,), first row of each system.

    Returns:
        (N, 3), Å, at least float32.

    Raises:
        ValueError: shapes that do not belong together, numbers that are not finite, or a cell that
            is singular along its periodic axes.

    Examples:
        >>> cell, pbc = 4.0 * torch.eye(3)[None], torch.tensor([[True, True, False]])
        >>> minimum_image(torch.tensor([[3.0, -9.0, 3.0]]), cell, pbc, torch.tensor([0, 1]))
        tensor([[-1., -1.,  3.]])
    """
    cell, pbc = checked_cells(cell, pbc, vectors, ptr)
    periodic, given = pbc.cpu().numpy(), host_array(cell)
    change, basis = short_basis(given, periodic)
    system, v = system_index(ptr.cpu(), len(vectors)).numpy(), host_array(vectors)
    rows = basis[system]
    whole = np.rint(np.einsum("nc,nca->na", v, np.linalg.pinv(basis)[system])).astype(np.int64)
    around = np.array(list(product((0, 1, -1), repeat=3)))
    shifts = (whole[:, None] + around) * periodic[system][:, None]
    square = ((v[:, None] - shifts @ rows) ** 2).sum(-1)
    shift = shifts[np.arange(len(v)), square.argmin(1)]
    stays = (v**2).sum(-1) <= square.min(1, initial=np.inf) * (1 + 1e-9)
    shift = np.where(stays[:, None], 0, np.einsum("na,nab->nb", shift, change[system]))
    vectors = at_least_float32(vectors)
    moved = torch.from_numpy(shift).to(vectors)
    lattice = torch.where(pbc[..., None], cell.to(vectors.dtype), 0.0)
    return vectors - rows_times(moved, lattice, ptr)


def rows_times(x: Tensor, matrix: Tensor, ptr: Tensor) -> Tensor:
    """Each row times the matrix of its system, x_n @ M_b, without TF32: (N, 3), (B, 3, 3)."""
    rows = spread(matrix, ptr, x.shape[0])
    return x[:, :1] * rows[:, 0] + x[:, 1:2] * rows[:, 1] + x[:, 2:] * rows[:, 2]


def matrices_times(left: Tensor, right: Tensor) -> Tensor:
    """Products (B, 3, 3) as sums: a matmul may be rounded to TF32, to bfloat16 under autocast."""
    return (left[..., None] * right[:, None]).sum(2)


def host_array(x: Tensor) -> Floats:
    """The numbers on CPU in float64."""
    return x.detach().to("cpu", torch.float64).numpy()


def virtual_cells(
    cell: Tensor,
    pbc: Tensor,
    positions: Tensor,
    ptr: Tensor,
    *,
    padding: float,
    shrink: bool = True,
) -> VirtualCells:
    """Cells whose open directions are `padding` longer than the atoms: `reciprocal_vectors`.

    With `shrink` a periodic direction with a gap wider than `padding`, Å, counts as open.
    """
    if not 0 < padding < math.inf:
        raise ValueError(f"padding is {padding}, expected a positive length in Å")
    points, kept = host_array(positions), (pbc & (ptr.diff() > 0)[:, None]).cpu().numpy()
    change, basis = short_basis(host_array(cell), kept)
    shift = np.zeros(points.shape, np.int64)
    for b, (start, stop) in enumerate(pairwise(ptr.tolist())):
        local = points[start:stop] - points[start : start + 1]
        if shrink and kept[b].any():
            inverse = np.linalg.pinv(basis[b])
            shift[start:stop], vacuum = _behind_gaps(local, inverse, padding)
            local = local - shift[start:stop] @ basis[b]
            kept[b] &= ~vacuum
        if not kept[b].all():
            basis[b] = _completed(basis[b], kept[b], local, padding)
    return VirtualCells(basis, change, kept, shift)


def short_basis(cell: Floats, periodic: NDArray[np.bool_]) -> tuple[Integers, Floats]:
    """U (B, 3, 3), det ±1, and U·cell, a shortest (Minkowski-reduced) basis.

    No row can be shortened by adding ±1 of others. Only rows in `periodic` (B, 3) take part; others
    are 0 in the basis.

    Raises:
        UnfitSystemError: periodic rows are dependent.
    """
    change = np.tile(np.eye(3, dtype=np.int64), (len(cell), 1, 1))
    basis = np.where(periodic[..., None], cell, 0.0)
    around = np.array(list(product((0, 1, -1), repeat=2)))
    for _ in range(1000):  # a handful is usual
        before = change.copy()
        for row, others in enumerate(([1, 2], [2, 0], [0, 1])):
            free = periodic[:, others] & periodic[:, [row]]
            if not free.any():
                continue
            thick = (np.linalg.norm(basis, axis=-1) > _THINNEST) | ~periodic
            free &= thick.all(1, keepdims=True)
            long, span = basis[:, row], basis[:, others]
            nearest = np.rint(np.einsum("bc,bca->ba", long, np.linalg.pinv(span, rcond=1e-9)))
            steps = (nearest[:, None] + around) * free[:, None]
            square = ((long[:, None] - steps @ span) ** 2).sum(-1)
            # A margin, so that rounding does not decide between two equally short vectors.
            shorter = square.min(1) < (1 - 1e-6) * (long**2).sum(-1)
            best = steps[np.arange(len(cell)), square.argmin(1)] * shorter[:, None]
            change[:, row] -= np.einsum("ba,bac->bc", best.astype(np.int64), change[:, others])
            basis[:, row] = np.where(periodic[:, [row]], (change[:, [row]] @ cell)[:, 0], 0.0)
        if (change == before).all():
            break
    # Dependent vectors have a short one among those of their reduced basis.
    thin = periodic & (np.linalg.norm(basis, axis=-1) < _THINNEST)
    if thin.any():
        system, axis = np.argwhere(thin)[0]
        raise UnfitSystemError(
            int(system),
            f"cell is singular along periodic direction {'abc'[axis]}, less than {_THINNEST} Å "
            "between images; give a lattice vector there, or set pbc False",
        )
    return change, basis


def _behind_gaps(
    local: Floats, inverse: Floats, padding: float
) -> tuple[Integers, NDArray[np.bool_]]:
    """Which directions have a gap wider than `padding`, and shifts that put all atoms behind it."""
    fraction = local @ inverse
    # What lies below each atom: the next one, and below the lowest the image of the highest.
    ascending = np.sort(fraction - np.floor(fraction), axis=0)
    below = np.roll(ascending, 1, axis=0)
    below[0] -= 1.0
    gap = ascending - below
    # Cut in the middle of the widest, so that rounding takes no atom to the other side.
    cut = np.take_along_axis((ascending + below) / 2, gap.argmax(0)[None], 0)
    height = np.linalg.norm(inverse, axis=0)  # one over the distance of lattice planes
    vacuum = inverse.any(0) & (gap.max(0) > padding * height)
    return np.floor(fraction - cut).astype(np.int64) * vacuum, vacuum


def _completed(basis: Floats, kept: NDArray[np.bool_], local: Floats, padding: float) -> Floats:
    """Rows not `kept` replaced by vectors along the atoms' principal axes across the others.

    Atoms end at the mean of x with weights e^(SHARPNESS·x): a maximum that is a smooth function.
    """
    basis = np.where(kept[:, None], basis, 0.0)
    span = np.linalg.qr(basis[kept].T)[0] if kept.any() else np.zeros((3, 0))
    plane = span @ span.T
    across = local - local @ plane
    across = across - across.sum(0) / max(1, len(across))
    moments = across.T @ across
    # Kept directions get the eigenvalue −2, so the open ones, 0 to 1, come last.
    axes = np.linalg.eigh(moments / max(np.trace(moments), 1e-12) - 2 * plane)[1]
    axes = axes.T[kept.sum() :]
    extent = np.zeros(len(axes))
    for along in (across @ axes.T, -across @ axes.T) if len(across) else ():
        weight = np.exp(SHARPNESS * (along - along.max(0)))
        extent += (weight * along).sum(0) / weight.sum(0)
    basis[~kept] = axes * (extent + padding)[:, None]
    return basis
