"""Reciprocal vectors of a batch of cells: all |k| ≤ k_max of each, whatever is periodic.

Reciprocal vectors carry no 2π: k·a is an integer for every lattice vector a, phases are 2πk·r.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flt_mol.functional._boundaries import boundaries, stored_flat
from flt_mol.functional._common import at_least_float32
from flt_mol.functional.packed import first_per_system, spread, system_index, system_sizes
from flt_mol.functional.virtual_cells import rows_times, virtual_cells

_MOST_CANDIDATES = 2**24  # 0.8 GB while they are sorted out
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

    With them Σ_T f(r + T) = Σ_k weight_k g(k) cos 2πk·r (Poisson), where f is the
    inverse Fourier transform of g and T goes over the lattice vectors of the periodic directions.
    f must have decayed at the distance `padding`: for widths σ of f,
    padding = 4σ gives errors of 2e-4 f(0), 5σ of 2e-5; k_max = 4/(2πσ) gives 1e-3, 5/(2πσ) 2e-5.

    - Periodic directions keep their lattice vectors. The set of k, hence every sum, does not
      depend on the basis they are given in, nor on orientation or handedness.
    - Open directions get virtual vectors, perpendicular to all others, as long as the atoms'
      extent plus `padding`. With two or three of them they lie along the principal axes of the
      atoms and turn with them; where these are degenerate, sums depend on orientation by what f
      is beyond `padding`. The vectors given in `cell` for open directions are not looked at.
    - With `shrink_vacuum`, a periodic direction along which there is a gap between the atoms and
      their images wider than `padding` counts as open: fewer vectors, and the same sums up to what
      f is beyond `padding`. Gaps are looked for along the normals of the faces of the cell, in
      fractions mod 1 of a shortened basis, so lattice shifts of atoms change nothing. Of a basis
      that no two-vector step shortens but whose faces cut through the vacuum, the gap is not seen:
      then nothing shrinks, at the same accuracy.

    Decisions are made in float64 on CPU and are not differentiable; `vectors`, `weight`, `inverse`
    and `offset` are differentiable functions of `cell`, virtual vectors held constant (exact up to
    what f is beyond `padding`). K depends on the data: call this outside compiled regions.

    Args:
        cell: (B, 3, 3), Å, rows are lattice vectors; anything where a direction is open. None, with
            `pbc` None, where all are.
        pbc: (B, 3) bool.
        positions: (N, 3), Å.
        ptr: (B + 1,), first atom of each system.
        k_max: cycles/Å.
        padding: Å.
        shrink_vacuum: see above.
        max_vectors: at most so many vectors per system: the shortest ones, in whole shells of equal
            \|k\|, so that the lattice's symmetry stays. For cells where all would be too many.
            **Its limits**: where it takes hold, the cutoff in \|k\| depends on the cell. Sums are
            then those of a sharply truncated g: blurred, with ripples that reach through the whole
            cell, no longer the same in a supercell, nor a continuous function of the cell. Still
            invariant to rotation, lattice shifts, the choice of basis, and to other systems.

    Returns:
        ReciprocalVectors in the dtype of `positions`, at least float32. Systems without atoms
        have no vectors.

    Raises:
        ValueError: a periodic direction without a lattice vector, positions or cells that are not
            finite, more vectors than memory holds, or arguments that do not fit together.

    Example:
        >>> lattice = reciprocal_vectors(
        ...     5.0 * torch.eye(3)[None], torch.ones(1, 3, dtype=torch.bool), torch.zeros(1, 3),
        ...     torch.tensor([0, 1]), k_max=0.2, padding=10.0)
        >>> lattice.integers.tolist()
        [[0, 0, 0], [0, 0, 1], [0, 1, 0], [1, 0, 0]]
    """
    cell, pbc = boundaries(cell, pbc, positions, ptr)
    _check(cell, pbc, positions, ptr, k_max, padding, max_vectors)
    host = [x.detach().to("cpu", torch.float64) for x in (cell, positions)]
    host_ptr = ptr.to("cpu", torch.int64)
    chosen = virtual_cells(
        host[0], pbc.cpu(), host[1], host_ptr, padding=padding, shrink=shrink_vacuum
    )
    integers, first = _shortest_vectors(chosen.cell, host_ptr.diff() > 0, k_max, max_vectors)

    dtype, device = at_least_float32(positions).dtype, positions.device
    # Sums of products: a matmul may be rounded to TF32, or to bfloat16 under autocast.
    change = chosen.change.to(device, dtype)[..., None]
    basis = (change * cell.to(device, dtype)[:, None]).sum(2)
    kept = chosen.kept.to(device)[..., None]
    virtual = torch.where(kept, basis, chosen.cell.to(device, dtype))
    inverse = torch.linalg.inv(virtual)
    integers, first = integers.to(device), first.to(device)
    owner = system_index(first, integers.shape[0])
    vectors = (integers.to(dtype)[:, None, :] * inverse[owner]).sum(-1)
    count = torch.where((integers == 0).all(-1), 1.0, 2.0).to(dtype)
    weight = count / torch.linalg.det(virtual).abs()[owner]
    offset = rows_times(chosen.shift.to(device, dtype), basis, ptr)
    return ReciprocalVectors(integers, vectors, weight, first, virtual, inverse, offset)


def fractional_positions(positions: Tensor, ptr: Tensor, lattice: ReciprocalVectors) -> Tensor:
    """Fractions (N, 3) in [−½, ½] of the virtual cells, relative to each system's first atom.

    Differences within a system are taken before anything is multiplied, and whole turns dropped:
    phases 2π·(integers·fraction) stay exact in float32 wherever the system lies.

    Args:
        positions: (N, 3), Å, those that `lattice` was made of.
        ptr: (B + 1,).
        lattice: of the same systems.
    """
    positions = at_least_float32(positions).to(lattice.offset.dtype)
    # Sums depend on differences within a system only, so the anchor needs no gradient.
    anchor = spread(first_per_system(positions.detach(), ptr), ptr, positions.shape[0])
    fraction = rows_times(positions - anchor - lattice.offset, lattice.inverse, ptr)
    return fraction - fraction.detach().round()


def _check(
    cell: Tensor,
    pbc: Tensor,
    positions: Tensor,
    ptr: Tensor,
    k_max: float,
    padding: float,
    max_vectors: int | None,
) -> None:
    if positions.dim() != 2 or positions.shape[-1] != 3:
        raise ValueError(f"positions have shape {tuple(positions.shape)}, expected (N, 3)")
    systems = len(system_sizes(ptr, positions.shape[0]))
    for name, value, shape in (("cell", cell, (systems, 3, 3)), ("pbc", pbc, (systems, 3))):
        if tuple(value.shape) != shape:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}, expected {shape}"
                f"{stored_flat(value, shape)}"
            )
    if pbc.dtype != torch.bool:
        raise ValueError(f"pbc has dtype {pbc.dtype}, expected torch.bool")
    for name, number in (("k_max", k_max), ("padding", padding)):
        if not (math.isfinite(number) and number > 0):
            raise ValueError(f"{name} must be a positive number, got {number}")
    if max_vectors is not None and max_vectors < 1:
        raise ValueError(f"max_vectors must be ≥ 1, got {max_vectors}")
    for name, value in (("positions", positions), ("cell", cell)):
        if not bool(value.isfinite().all()):
            raise ValueError(f"{name} hold a number that is not finite")


def _shortest_vectors(
    cell: Tensor, occupied: Tensor, k_max: float, max_vectors: int | None
) -> tuple[Tensor, Tensor]:
    """Integers (K, 3) of one of ±k for all |k| ≤ k_max, ascending, and where systems begin."""
    inverse = torch.linalg.inv(cell)
    radius = _radius(cell, inverse, k_max, max_vectors)
    # k·a_i is the i-th integer, so none exceeds radius·|a_i|.
    most = (radius[:, None] * torch.linalg.vector_norm(cell, dim=-1) * (1 + 1e-9)).floor()
    widths = torch.stack([most[:, 0] + 1, 2 * most[:, 1] + 1, 2 * most[:, 2] + 1], dim=-1)
    count = widths.prod(-1) * occupied
    if float(count.sum()) > _MOST_CANDIDATES:
        worst = int(count.argmax())
        raise ValueError(
            f"{float(count.sum()):.1e} reciprocal vectors to look at, {float(count[worst]):.1e} of "
            f"them for system {worst}: too many; set max_vectors, or a smaller k_max"
        )
    count, most, widths = (x.to(torch.int64) for x in (count, most, widths))
    system = torch.repeat_interleave(torch.arange(cell.shape[0]), count)
    index = torch.arange(system.shape[0]) - (count.cumsum(0) - count)[system]
    width, most = widths[system], most[system]
    third = index % width[:, 2] - most[:, 2]
    index = index // width[:, 2]
    second, first = index % width[:, 1] - most[:, 1], index // width[:, 1]
    half = (first > 0) | (second > 0) | ((second == 0) & (third >= 0))
    integers = torch.stack([first, second, third], dim=-1)
    length = torch.linalg.vector_norm(
        (integers.to(cell.dtype)[:, None, :] * inverse[system]).sum(-1), dim=-1
    )
    inside = half & (length <= radius[system] * (1 + 1e-9))
    integers, system, length = integers[inside], system[inside], length[inside]
    order = torch.argsort(length, stable=True)
    order = order[torch.argsort(system[order], stable=True)]
    integers, system, length = integers[order], system[order], length[order]
    if max_vectors is not None:
        whole = _whole_shells(length, system, max_vectors)
        integers, system = integers[whole], system[whole]
    kept = torch.bincount(system, minlength=cell.shape[0])
    return integers, torch.cat([kept.new_zeros(1), kept.cumsum(0)])


def _radius(cell: Tensor, inverse: Tensor, k_max: float, max_vectors: int | None) -> Tensor:
    """Radius (B,) of a ball that holds all vectors wanted: k_max, or less under a budget."""
    if max_vectors is None:
        return cell.new_full((cell.shape[0],), k_max)
    # A ball of radius q + d holds all reciprocal cells that touch the ball q, so at least V·4πq³/3
    # vectors, where d is half the diagonal of a reciprocal cell. Two per entry of the half space,
    # and a few more, so that the last shell within the budget is known to be whole.
    volume = torch.linalg.det(cell).abs()
    ball = (3 * (2 * max_vectors + 4) / (4 * math.pi * volume)) ** (1 / 3)
    radius: Tensor = ball + inverse.square().sum((-2, -1)).sqrt()
    return radius.clamp(max=k_max)


def _whole_shells(length: Tensor, system: Tensor, max_vectors: int) -> Tensor:
    """Marks (K,) of the vectors in shells that end within the first `max_vectors` of a system."""
    if length.numel() == 0:
        return torch.zeros(0, dtype=torch.bool)
    fresh = torch.ones_like(system, dtype=torch.bool)
    fresh[1:] = (system.diff() > 0) | (length.diff() > _SAME_SHELL * length[1:])
    shell = fresh.cumsum(0) - 1
    count = torch.bincount(system)
    rank = torch.arange(system.shape[0]) - (count.cumsum(0) - count)[system]
    last = torch.zeros(int(shell[-1]) + 1, dtype=torch.int64).scatter_reduce(0, shell, rank, "amax")
    whole: Tensor = last[shell] < max_vectors
    return whole
