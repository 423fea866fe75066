"""Reciprocal vectors of a batch of cells: all |k| ≤ k_max of each, periodic or not.

Reciprocal vectors carry no 2π: k·a is an integer for every lattice vector a, phases are 2πk·r.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flt_mol.functional.groups import (
    at_least_float32,
    first_per_system,
    largest_per_system,
    mean_per_system,
    outside,
    spread,
    sum_per_system,
    system_index,
)
from flt_mol.functional.lattice import (
    SHARPNESS,
    Floats,
    Integers,
    checked_cells,
    matrices_times,
    rows_times,
    virtual_cells,
)


class ReciprocalVectors(NamedTuple):
    """K reciprocal vectors of B systems, one after the other, |k| ascending within each.

    Only a half space: k stands for −k too, and `weight` counts both; k = 0 comes first, once.

    Attributes:
        integers: (K, 3) int64, k = integers @ (cell⁻¹)ᵀ.
        vectors: (K, 3), cycles/Å.
        weight: (K,), 2/V, and 1/V for k = 0; Å⁻³.
        ptr: (B + 1,) int64, first vector of each system.
        cell: (B, 3, 3), Å, the virtual cells used.
        inverse: (B, 3, 3), their inverses; fractions are r @ inverse.
        virtual: (B, 3) bool, rows of them that are virtual.
        offset: (N, 3), Å, lattice vectors of the given cell to take off each atom first.
        large: systems that are for `mesh`, and have no vectors.
    """

    integers: Tensor
    vectors: Tensor
    weight: Tensor
    ptr: Tensor
    cell: Tensor
    inverse: Tensor
    virtual: Tensor
    offset: Tensor
    large: tuple[int, ...] = ()


def reciprocal_vectors(
    cell: Tensor | None,
    pbc: Tensor | None,
    positions: Tensor,
    ptr: Tensor,
    *,
    k_max: float,
    padding: float,
    max_products: float = math.inf,
) -> ReciprocalVectors:
    r"""All k ∈ Λ\* with \|k\| ≤ k_max of every system, one of each pair ±k.

    With them Σ_T f(r + T) = Σ_k weight_k g(k) cos 2πk·r (Poisson), T all lattice vectors of the
    periodic directions and f the inverse Fourier transform of g, of width σ: padding = 4σ gives
    errors of 2e-4 f(0), k_max = 4/(2πσ) of 1e-3.

    Periodic directions keep their lattice, in any basis. Open directions, and periodic ones with a
    gap between atoms and their images wider than `padding`, get virtual vectors, perpendicular to
    all others, along the principal axes of the atoms, as long as their extent plus `padding`. All
    tensors of floats are differentiable functions of `cell`, virtual vectors held constant: see
    `following`. K depends on the data: `torch.compile` breaks the graph here.

    Args:
        cell: (B, 3, 3), Å, rows are lattice vectors. None, with `pbc` None, where all is open.
        pbc: (B, 3) bool.
        positions: (N, 3), Å.
        ptr: (B + 1,), first atom of each system.
        k_max: cycles/Å.
        padding: Å.
        max_products: of atoms and vectors; systems with more get none, they are for `mesh`.

    Returns:
        ReciprocalVectors in the dtype of `positions`, at least float32; none of empty systems.

    Raises:
        ValueError: arguments that do not fit together; as `UnfitSystemError` for a singular cell or
            numbers that are not finite.

    Examples:
        >>> lattice = reciprocal_vectors(
        ...     5.0 * torch.eye(3)[None], torch.ones(1, 3, dtype=torch.bool), torch.zeros(1, 3),
        ...     torch.tensor([0, 1]), k_max=0.2, padding=10.0)
        >>> lattice.integers.tolist()
        [[0, 0, 0], [0, 0, 1], [0, 1, 0], [1, 0, 0]]
    """
    if torch.compiler.is_compiling():
        run = outside(reciprocal_vectors)
        where = cell, pbc, positions, ptr
        return run(*where, k_max=k_max, padding=padding, max_products=max_products)
    if not 0 < k_max < math.inf:
        raise ValueError(f"k_max is {k_max}, expected a positive number, in 1/Å")
    cell, pbc = checked_cells(cell, pbc, positions, ptr)
    virtual = virtual_cells(cell, pbc, positions, ptr, padding=padding)
    # About how many there are, one of each pair ±k, by the volume.
    counts = np.abs(np.linalg.det(virtual.cell)) * 2 / 3 * math.pi * k_max**3
    sizes = ptr.diff().tolist()
    large = tuple(b for b, n in enumerate(sizes) if n * counts[b] > max_products)
    none = np.zeros((0, 3), np.int64)
    parts = [
        half_lattice(virtual.cell[b], k_max) if n and b not in large else none
        for b, n in enumerate(sizes)
    ]
    dtype, device = at_least_float32(positions).dtype, positions.device

    def tensor(x: Any) -> Tensor:
        return torch.as_tensor(x, dtype=dtype, device=device)

    basis = matrices_times(tensor(virtual.change), tensor(cell))
    kept = torch.from_numpy(virtual.kept).to(device)[..., None]
    used = torch.where(kept, basis, tensor(virtual.cell))
    integers = torch.cat([torch.zeros(0, 3, dtype=torch.int64), *map(torch.from_numpy, parts)])
    integers, starts = integers.to(device), torch.tensor([0, *map(len, parts)], device=device)
    starts, offset = starts.cumsum(0), rows_times(tensor(virtual.shift), basis, ptr)
    return _vectors(integers, starts, used, ~kept[..., 0], offset, large)


def _vectors(
    integers: Tensor,
    ptr: Tensor,
    cell: Tensor,
    virtual: Tensor,
    offset: Tensor,
    large: tuple[int, ...],
) -> ReciprocalVectors:
    system, inverse = system_index(ptr, len(integers)), torch.linalg.inv(cell)
    count = torch.where((integers == 0).all(-1), 1.0, 2.0).to(cell.dtype)
    vectors = (integers.to(cell.dtype)[:, None, :] * inverse[system]).sum(-1)
    weight = count / torch.linalg.det(cell).abs()[system]
    return ReciprocalVectors(integers, vectors, weight, ptr, cell, inverse, virtual, offset, large)


def following(lattice: ReciprocalVectors, positions: Tensor, ptr: Tensor) -> ReciprocalVectors:
    """The lattice as a differentiable function of `positions`, which virtual vectors follow.

    The numbers stay. First derivatives are exact, but that axes do not turn where moments of
    inertia differ by less than a thousandth: there they are no smooth functions.
    """
    virtual, before = lattice.virtual[..., None], lattice.cell.detach()
    length = before.norm(dim=-1, keepdim=True)
    axes = torch.where(virtual, before / length, 0.0)
    local = _local(positions, ptr, lattice)
    along = rows_times(local, axes.mT, ptr)
    along = along - spread(mean_per_system(along, ptr), ptr, len(along))
    # Principal axes a_i turn by Σ_j a_j M_ij / (M_ii − M_jj).
    moments = sum_per_system(along[:, :, None] * along[:, None], ptr)
    main = moments.detach().diagonal(dim1=1, dim2=2)
    gap = main[:, :, None] - main[:, None]
    equal = gap.abs() <= 1e-3 * main.sum(-1)[:, None, None]
    turn = (moments - moments.detach()) / gap.masked_fill(equal, torch.inf)
    turned = axes + matrices_times(turn, axes)
    along = rows_times(local, turned.mT, ptr)
    extent = _end(along, ptr) + _end(-along, ptr)
    grown = turned * (length + (extent - extent.detach())[..., None])
    cell = torch.where(virtual, grown, lattice.cell)
    return _vectors(lattice.integers, lattice.ptr, cell, *lattice[6:])


def _end(along: Tensor, ptr: Tensor) -> Tensor:
    """Where the atoms end, as `virtual_cells` has it: (N, 3) → (B, 3)."""
    largest = spread(largest_per_system(along, ptr)[:-1], ptr, len(along))
    weight = torch.exp(SHARPNESS * (along - largest))
    total = sum_per_system(weight, ptr)
    return sum_per_system(weight * along, ptr) / total.clamp(min=1.0)  # 0 of empty systems


def fractional_positions(positions: Tensor, ptr: Tensor, lattice: ReciprocalVectors) -> Tensor:
    """Fractions (N, 3) in [−½, ½] of the virtual cells, relative to each system's first atom.

    So phases 2π·(integers·fraction) stay exact in float32 wherever the system lies.
    """
    fraction = rows_times(_local(positions, ptr, lattice), lattice.inverse, ptr)
    return fraction - fraction.detach().round()


def _local(positions: Tensor, ptr: Tensor, lattice: ReciprocalVectors) -> Tensor:
    positions = positions.to(lattice.offset.dtype)
    # Sums depend on differences within a system only, so the anchor needs no gradient.
    anchor = spread(first_per_system(positions.detach(), ptr), ptr, positions.shape[0])
    return positions - anchor - lattice.offset


def half_lattice(cell: Floats, radius: float) -> Integers:
    """Integers (K, ℓ), the origin and one of each ±n, of all |k| ≤ radius, by length ascending.

    k = n @ (cell⁻¹)ᵀ for a cell (ℓ, ℓ), Å.
    """
    most = np.floor(radius * np.linalg.norm(cell, axis=1) * (1 + 1e-9)).astype(np.int64)
    found = np.indices(2 * most + 1).reshape(len(cell), -1)
    found = found[:, found.shape[1] // 2 :].T - most  # −n comes before the origin, n after it
    length = np.linalg.norm(found @ np.linalg.inv(cell).T, axis=1)
    found = found[inside := length <= radius * (1 + 1e-9)]
    return np.asarray(found[np.argsort(length[inside], kind="stable")])
