"""Reciprocal vectors of a batch of cells: all |k| ≤ k_max of each, periodic or not.

Reciprocal vectors carry no 2π: k·a is an integer for every lattice vector a, phases are 2πk·r.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flt_mol.functional.groups import at_least_float32, first_per_system, outside, spread
from flt_mol.functional.lattice import (
    Floats,
    Integers,
    UnfitSystemError,
    checked_cells,
    rows_times,
    virtual_cells,
)

MOST_VECTORS = 2**24  # looked at together: 0.8 GB while they are sorted out
_SAME_SHELL = 1e-5  # relative; cells are often known to float32 only


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
        offset: (N, 3), Å, lattice vectors of the given cell to take off each atom first.
    """

    integers: Tensor
    vectors: Tensor
    weight: Tensor
    ptr: Tensor
    cell: Tensor
    inverse: Tensor
    offset: Tensor


def reciprocal_vectors(
    cell: Tensor | None,
    pbc: Tensor | None,
    positions: Tensor,
    ptr: Tensor,
    *,
    k_max: float,
    padding: float,
    shrink_vacuum: bool = True,
    max_vectors: int | None = None,
) -> ReciprocalVectors:
    r"""All k ∈ Λ\* with \|k\| ≤ k_max of every system, one of each pair ±k.

    With them Σ_T f(r + T) = Σ_k weight_k g(k) cos 2πk·r (Poisson), where f is the inverse Fourier
    transform of g and T goes over the lattice vectors of the periodic directions. f must have
    decayed at the distance `padding`: for widths σ of f, padding = 4σ gives errors of 2e-4 f(0),
    5σ of 2e-5; k_max = 4/(2πσ) gives 1e-3, 5/(2πσ) 2e-5.

    Periodic directions keep their lattice, in any basis. Open directions get
    virtual vectors, perpendicular to all others, along the principal axes of the atoms, as long as
    their extent plus `padding`; rows of `cell` for them are ignored. All tensors of floats are
    differentiable functions of `cell`, virtual vectors held constant. K depends on the data:
    `torch.compile` breaks the graph here.

    Args:
        cell: (B, 3, 3), Å, rows are lattice vectors. None, with `pbc` None, where all is open.
        pbc: (B, 3) bool.
        positions: (N, 3), Å.
        ptr: (B + 1,), first atom of each system.
        k_max: cycles/Å.
        padding: Å.
        shrink_vacuum: whether a periodic direction with a gap between atoms and their images wider
            than `padding` counts as open: fewer vectors, the same sums up to f beyond `padding`.
        max_vectors: at most so many vectors per system, the shortest in whole shells of equal
            \|k\|. Sums are then neither the same in a supercell nor continuous in the cell.

    Returns:
        ReciprocalVectors in the dtype of `positions`, at least float32; none of empty systems.

    Raises:
        ValueError: arguments that do not fit together; and `UnfitSystemError`, which is one, for a
            periodic direction without a lattice vector, numbers that are not finite, or more than
            16.8 million vectors to look at.

    Example:
        >>> lattice = reciprocal_vectors(
        ...     5.0 * torch.eye(3)[None], torch.ones(1, 3, dtype=torch.bool), torch.zeros(1, 3),
        ...     torch.tensor([0, 1]), k_max=0.2, padding=10.0)
        >>> lattice.integers.tolist()
        [[0, 0, 0], [0, 0, 1], [0, 1, 0], [1, 0, 0]]
    """
    run = outside(_vectors) if torch.compiler.is_compiling() else _vectors
    return run(cell, pbc, positions, ptr, k_max, padding, shrink_vacuum, max_vectors)


def _vectors(
    cell: Tensor | None,
    pbc: Tensor | None,
    positions: Tensor,
    ptr: Tensor,
    k_max: float,
    padding: float,
    shrink_vacuum: bool,
    max_vectors: int | None,
) -> ReciprocalVectors:
    cell, pbc = checked_cells(cell, pbc, positions, ptr)
    virtual = virtual_cells(cell, pbc, positions, ptr, padding=padding, shrink=shrink_vacuum)
    radius = _radius(virtual.cell, k_max, max_vectors) * (ptr.diff() > 0).cpu().numpy()
    _check_number(virtual.cell, radius)
    integers, owner = _shortest(virtual.cell, radius, max_vectors)

    def tensor(x: Any) -> Tensor:
        return torch.as_tensor(x, dtype=dtype, device=positions.device)

    dtype = at_least_float32(positions).dtype
    # Sums of products: a matmul may be rounded to TF32, or to bfloat16 under autocast.
    basis = (tensor(virtual.change)[..., None] * tensor(cell)[:, None]).sum(2)
    kept = torch.from_numpy(virtual.kept).to(positions.device)[..., None]
    used = torch.where(kept, basis, tensor(virtual.cell))
    inverse = torch.linalg.inv(used)
    system = torch.from_numpy(owner).to(positions.device)
    whole = torch.from_numpy(integers).to(positions.device)
    vectors = (whole.to(dtype)[:, None, :] * inverse[system]).sum(-1)
    count = torch.where((whole == 0).all(-1), 1.0, 2.0).to(dtype)
    first = np.searchsorted(owner, np.arange(len(cell) + 1))
    return ReciprocalVectors(
        integers=whole,
        vectors=vectors,
        weight=count / torch.linalg.det(used).abs()[system],
        ptr=torch.from_numpy(first).to(positions.device),
        cell=used,
        inverse=inverse,
        offset=rows_times(tensor(virtual.shift), basis, ptr),
    )


def fractional_positions(positions: Tensor, ptr: Tensor, lattice: ReciprocalVectors) -> Tensor:
    """Fractions (N, 3) in [−½, ½] of the virtual cells, relative to each system's first atom.

    Differences within a system come first, and whole turns are dropped: phases
    2π·(integers·fraction) stay exact in float32 wherever the system lies.
    """
    positions = at_least_float32(positions).to(lattice.offset.dtype)
    # Sums depend on differences within a system only, so the anchor needs no gradient.
    anchor = spread(first_per_system(positions.detach(), ptr), ptr, positions.shape[0])
    fraction = rows_times(positions - anchor - lattice.offset, lattice.inverse, ptr)
    return fraction - fraction.detach().round()


def check_vectors(
    cell: Tensor,
    pbc: Tensor,
    positions: Tensor,
    ptr: Tensor,
    *,
    k_max: float,
    padding: float,
    max_vectors: int | None = None,
) -> None:
    """Raise what `reciprocal_vectors` would, without making vectors."""
    cell, pbc = checked_cells(cell, pbc, positions, ptr)
    cells = virtual_cells(cell, pbc, positions, ptr, padding=padding).cell
    _check_number(cells, _radius(cells, k_max, max_vectors))


def _radius(cell: Floats, k_max: float, max_vectors: int | None) -> Floats:
    """Radius (B,) of a ball that holds all vectors wanted: k_max, or less under a budget."""
    if not 0 < k_max < math.inf:
        raise ValueError(f"k_max is {k_max}, expected a positive number, in 1/Å")
    if max_vectors is None:
        return np.full(len(cell), float(k_max))
    if max_vectors < 1:
        raise ValueError(f"max_vectors is {max_vectors}, expected a number ≥ 1")
    # The ball q + d, d a diagonal of the reciprocal cell, holds at least V·4πq³/3 vectors; two per
    # entry of the half space, and a few more, so that the last shell is known to be whole.
    volume = np.abs(np.linalg.det(cell))
    ball = np.cbrt(3 * (2 * max_vectors + 4) / (4 * math.pi * volume))
    return np.asarray(np.minimum(ball + np.sqrt((np.linalg.inv(cell) ** 2).sum((1, 2))), k_max))


def _widths(cell: Floats, radius: Floats) -> tuple[Integers, Floats]:
    # The largest integers (B, 3), radius·|a|, and how many (B, 3) there are for one of ±k.
    most = np.floor(radius[:, None] * np.linalg.norm(cell, axis=-1) * (1 + 1e-9))
    return most.astype(np.int64), most * (1, 2, 2) + 1


def _check_number(cell: Floats, radius: Floats) -> None:
    count = _widths(cell, radius)[1].prod(-1)
    if (count > MOST_VECTORS).any():
        worst = int(np.flatnonzero(count > MOST_VECTORS)[0])
        size = " x ".join(f"{length:.0f}" for length in np.linalg.norm(cell[worst], axis=-1))
        raise UnfitSystemError(
            worst,
            f"too large: {count[worst]:.1e} reciprocal vectors to look at for {size} Å without "
            f"vacuum, at most {MOST_VECTORS:.1e}; set max_vectors, or a smaller k_max",
        )


def _shortest(cell: Floats, radius: Floats, max_vectors: int | None) -> tuple[Integers, Integers]:
    """Integers (K, 3) of one of ±k for all |k| ≤ radius, ascending, and their systems (K,)."""
    most, widths = _widths(cell, radius)
    count = (widths.prod(-1) * (radius > 0)).astype(np.int64)
    if len(cell) > 1 and count.sum() > MOST_VECTORS:
        half = len(cell) // 2
        low = _shortest(cell[:half], radius[:half], max_vectors)
        high = _shortest(cell[half:], radius[half:], max_vectors)
        return np.concatenate([low[0], high[0]]), np.concatenate([low[1], high[1] + half])
    system = np.repeat(np.arange(len(cell)), count)
    index = np.arange(len(system)) - (np.cumsum(count) - count)[system]
    width, most = widths.astype(np.int64)[system], most[system]
    index, third = index // width[:, 2], index % width[:, 2] - most[:, 2]
    first, second = index // width[:, 1], index % width[:, 1] - most[:, 1]
    half_space = (first > 0) | (second > 0) | ((second == 0) & (third >= 0))
    integers = np.stack([first, second, third], axis=-1)
    vectors = np.einsum("kc,kac->ka", integers.astype(np.float64), np.linalg.inv(cell)[system])
    length = np.sqrt((vectors**2).sum(-1))
    inside = half_space & (length <= radius[system] * (1 + 1e-9))
    integers, system, length = integers[inside], system[inside], length[inside]
    order = np.lexsort((length, system))
    integers, system, length = integers[order], system[order], length[order]
    if max_vectors is None or not len(length):
        return integers, system
    fresh = np.append(True, (np.diff(system) > 0) | (np.diff(length) > _SAME_SHELL * length[1:]))
    last = np.append(np.flatnonzero(fresh)[1:], len(length)) - 1
    rank = np.arange(len(system)) - np.searchsorted(system, system)
    whole = rank[last[np.cumsum(fresh) - 1]] < max_vectors
    return integers[whole], system[whole]
