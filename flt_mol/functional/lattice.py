"""Lattices of a batch: short bases, virtual cells of open directions, shortest images.

What is decided here is decided in float64 on CPU and not differentiated.
"""

from __future__ import annotations

import math
from itertools import permutations, product
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flt_mol.functional.groups import at_least_float32, spread, system_index, system_sizes

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_THINNEST = 0.5  # Å between lattice planes, less than in any crystal
_OTHERS = ((1, 2), (2, 0), (0, 1))


class UnfitSystemError(ValueError):
    """One system of a batch whose lattice is singular or too large.

    Attributes:
        system: its place in the batch.
        reason: what is wrong with it.
    """

    def __init__(self, system: int, reason: str) -> None:
        super().__init__(f"system {system}: {reason}")
        self.system, self.reason = system, reason


class VirtualCells(NamedTuple):
    """A cell (B, 3, 3), Å, of three independent vectors for each system, N atoms in all.

    Attributes:
        change: (B, 3, 3) int64; ``change @ given cell`` is a short basis of periodic directions.
        kept: (B, 3) bool, rows of that basis that stay; the others are virtual.
        heights: (B, 3), Å, distances between the planes of `cell`.
        shift: (N, 3) int64; atoms are taken at r − shift·(change @ given cell).
    """

    cell: Floats
    change: Integers
    kept: NDArray[np.bool_]
    heights: Floats
    shift: Integers


def checked_cells(
    cell: Tensor | None, pbc: Tensor | None, positions: Tensor, ptr: Tensor
) -> tuple[Tensor, Tensor]:
    """Cells (B, 3, 3) and pbc (B, 3) of a batch, zeros and False where both are None."""
    systems = len(system_sizes(ptr, positions.shape[0]))
    if pbc is None:
        if cell is not None:
            raise ValueError("pbc is None and there is a cell: give pbc (B, 3), or None for both")
        pbc = torch.zeros(systems, 3, dtype=torch.bool, device=positions.device)
    if cell is None:
        if bool(pbc.any()):
            raise ValueError("cell is None and pbc is True somewhere: give the cell (B, 3, 3), Å")
        cell = positions.new_zeros(systems, 3, 3)
    for name, value, shape in (
        ("positions", positions, (positions.shape[0], 3)),
        ("cell", cell, (systems, 3, 3)),
        ("pbc", pbc, (systems, 3)),
    ):
        if tuple(value.shape) != shape:
            flat = tuple(value.shape) == (systems * shape[1], *shape[2:])
            hint = ": in PyG's Data store cell as (1, 3, 3) and pbc as (1, 3)" if flat else ""
            raise ValueError(f"{name} has shape {tuple(value.shape)}, expected {shape}{hint}")
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

    Exact for any basis of the lattice, however skewed: in a Minkowski-reduced basis the shortest
    image is among the 27 around the rounded fractions. Of equally short images v itself is taken
    if it is one. T is constant to autograd, so the gradient with respect to `vectors` is the
    identity.

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

    Example:
        >>> cell, pbc = 4.0 * torch.eye(3)[None], torch.tensor([[True, True, False]])
        >>> minimum_image(torch.tensor([[3.0, -9.0, 3.0]]), cell, pbc, torch.tensor([0, 1]))
        tensor([[-1., -1.,  3.]])
    """
    cell, pbc = checked_cells(cell, pbc, vectors, ptr)
    periodic, given = pbc.cpu().numpy(), host_array(cell)
    change = reduced_basis(given, periodic)
    basis = np.where(periodic[..., None], change @ given, 0.0)
    _check_lengths(basis, periodic)
    system, v = system_index(ptr.cpu(), len(vectors)).numpy(), host_array(vectors)
    rows = basis[system]
    whole = np.rint(np.einsum("nc,nca->na", v, np.linalg.pinv(basis)[system])).astype(np.int64)
    around = np.array(list(product((0, 1, -1), repeat=3)))
    shifts = (whole[:, None] + around) * periodic[system][:, None]
    square = ((v[:, None] - shifts @ rows) ** 2).sum(-1)
    best = square.argmin(1)
    shift = np.take_along_axis(shifts, best[:, None, None], 1)[:, 0]
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
    given, points = host_array(cell), host_array(positions)
    offsets = ptr.cpu().numpy().astype(np.int64)
    sizes = np.diff(offsets)
    occupied, starts = np.flatnonzero(sizes), offsets[:-1][sizes > 0]
    system = np.repeat(np.arange(len(sizes)), sizes)
    kept = pbc.cpu().numpy() & (sizes > 0)[:, None]
    change = reduced_basis(given, kept)
    basis = np.where(kept[..., None], change @ given, 0.0)
    _check_lengths(basis, kept)
    local = points - points[offsets[:-1][system]]
    shift = np.zeros(local.shape, np.int64)
    if shrink and kept.any():
        fraction = np.einsum("nc,nca->na", local, np.linalg.pinv(basis)[system])
        gap = np.zeros(kept.shape)
        gap[occupied], shift = _largest_gaps(fraction, system, starts)
        vacuum = kept & (gap * _heights(basis) > padding)
        shift *= vacuum[system]
        local -= np.einsum("na,nac->nc", shift, basis[system])
        kept = kept & ~vacuum
    basis = np.where(kept[..., None], basis, 0.0)
    if not kept.all():
        basis = basis + _perpendicular(basis, kept, local, system, (occupied, starts), padding)
    return VirtualCells(basis, change, kept, _heights(basis), shift)


def reduced_basis(cell: Floats, periodic: NDArray[np.bool_]) -> Integers:
    """U (B, 3, 3), det ±1, such that U·cell is a shortest (Minkowski-reduced) basis.

    No row can be shortened by adding ±1 of others. Only rows in `periodic` (B, 3) take part.
    """
    change = np.tile(np.eye(3, dtype=np.int64), (len(cell), 1, 1))
    for _ in range(1000):  # a handful is usual
        before = change.copy()
        for i, j in permutations(range(3), 2):
            short, long = ((change[:, axis, None] @ cell).squeeze(1) for axis in (i, j))
            square = (short**2).sum(-1)
            ratio = (short * long).sum(-1) / np.maximum(square, 1e-12)
            # A margin, so that rounding does not decide between two equally short vectors.
            applies = (np.abs(ratio) > 0.5 + 1e-6) & periodic[:, i] & periodic[:, j]
            steps = np.where(applies & (square > 1e-12), np.rint(ratio), 0.0).astype(np.int64)
            change[:, j] -= steps[:, None] * change[:, i]
        for (j, (k, m)), signs in product(enumerate(_OTHERS), product((1, -1), repeat=2)):
            trial = change[:, j] + signs[0] * change[:, k] + signs[1] * change[:, m]
            old, new = (((x[:, None] @ cell) ** 2).sum((1, 2)) for x in (change[:, j], trial))
            shorter = periodic.all(1) & (new < (1 - 1e-6) * old)
            change[:, j] = np.where(shorter[:, None], trial, change[:, j])
        if (change == before).all():
            break
    return change


def _heights(basis: Floats) -> Floats:
    """Distances (B, 3) between the lattice planes of independent rows, Å; 0 for rows of zeros."""
    size = np.linalg.norm(np.linalg.pinv(basis), axis=1)
    return np.asarray(np.divide(1.0, size, out=np.zeros_like(size), where=size > 0))


def _check_lengths(basis: Floats, kept: NDArray[np.bool_]) -> None:
    # Dependent vectors have a short one among those of their reduced basis.
    thin = kept & (np.linalg.norm(basis, axis=-1) < _THINNEST)
    if thin.any():
        system, axis = np.argwhere(thin)[0]
        raise UnfitSystemError(
            int(system),
            f"cell is singular along periodic direction {'abc'[axis]}, less than {_THINNEST} Å "
            "between images; give a lattice vector there, or set pbc False",
        )


def _largest_gaps(fraction: Floats, system: Integers, starts: Integers) -> tuple[Floats, Integers]:
    """Widest empty stretch per lattice vector, in fractions mod 1, and shifts of atoms behind it.

    ``fraction - shift`` of a system begins right after its gap, wherever its atoms were written.
    """
    wrapped = fraction - np.floor(fraction)
    order = np.lexsort((wrapped, np.broadcast_to(system[:, None], wrapped.shape)), axis=0)
    ascending = np.take_along_axis(wrapped, order, 0)
    # What lies below each atom: the next one, and below the lowest the image of the highest.
    below = np.roll(ascending, 1, axis=0)
    below[starts] = ascending[np.append(starts[1:], len(system)) - 1] - 1.0
    space = ascending - below
    gap = np.maximum.reduceat(space, starts)
    place = np.cumsum(np.diff(system, prepend=-1) > 0) - 1
    # Cut in the middle of the gap, so that rounding takes no atom to the other side.
    middle = np.where(space >= gap[place], (ascending + below) / 2, -np.inf)
    cut = np.maximum.reduceat(middle, starts)
    return gap, np.floor(fraction - cut[place]).astype(np.int64)


def _perpendicular(
    basis: Floats,
    kept: NDArray[np.bool_],
    local: Floats,
    system: Integers,
    occupied: tuple[Integers, Integers],
    padding: float,
) -> Floats:
    """For rows not `kept`, vectors (B, 3, 3) along the atoms' principal axes; else zeros."""
    rows, starts = occupied
    plane = np.linalg.pinv(basis) @ basis
    across = local - np.einsum("nc,ncd->nd", local, plane[system])
    moments, extent = np.zeros(basis.shape), np.zeros(kept.shape)
    if len(rows):
        count = np.bincount(system)[rows, None]
        across -= (np.add.reduceat(across, starts) / count).repeat(count[:, 0], axis=0)
        moments[rows] = np.add.reduceat(across[:, :, None] * across[:, None, :], starts)
    trace = np.trace(moments, axis1=1, axis2=2).clip(1e-12)
    # Kept directions get the eigenvalue −2, so the open ones, 0 to 1, come last.
    axes = np.linalg.eigh(moments / trace[:, None, None] - 2.0 * plane)[1]
    if len(rows):
        along = np.einsum("nc,nca->na", across, axes[system])
        extent[rows] = np.maximum.reduceat(along, starts) - np.minimum.reduceat(along, starts)
    vectors = axes.transpose(0, 2, 1) * (extent + padding)[..., None]
    column = (kept.sum(-1, keepdims=True) + np.cumsum(~kept, -1) - 1).clip(0)
    return np.where(kept[..., None], 0.0, np.take_along_axis(vectors, column[..., None], 1))
