"""Reciprocal vectors of a batch of cells: all |k| ≤ k_max of each, whatever is periodic.

Reciprocal vectors carry no 2π: k·a is an integer for every lattice vector a, phases are 2πk·r.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flt_mol.functional._boundaries import boundaries, stored_flat
from flt_mol.functional._fragments import brought_together
from flt_mol.functional._shortest_vectors import (
    MOST_CANDIDATES,
    Limits,
    candidates,
    shortest_vectors,
)
from flt_mol.functional.groups import (
    at_least_float32,
    first_per_system,
    spread,
    system_index,
    system_sizes,
)
from flt_mol.functional.numerics import outside
from flt_mol.functional.virtual_cells import (
    UnfitSystemError,
    VirtualCells,
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
        offset: (N, 3), Å, to take off each atom first: lattice vectors of the given cell; and
            what brings far fragments together.
    """

    integers: Tensor
    vectors: Tensor
    weight: Tensor
    ptr: Tensor
    cell: Tensor
    inverse: Tensor
    offset: Tensor


class TooManyVectorsError(UnfitSystemError):
    """A system with more reciprocal vectors than are looked at.

    Attributes:
        system: its place in the batch.
        count: about how many.
        lengths: of the vectors of the cell that they are of, Å; of open directions virtual ones.
    """

    def __init__(self, system: int, count: float, lengths: list[float]) -> None:
        self.count, self.lengths = count, lengths
        super().__init__(
            f"{count:.1e} reciprocal vectors to look at for system {system}, of a cell of "
            f"{self.size}, at most {MOST_CANDIDATES:.1e}: set max_vectors, or a smaller k_max",
            system,
        )

    @property
    def size(self) -> str:
        """The lengths in words."""
        return " x ".join(f"{length:.0f}" for length in self.lengths) + " Å"


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
    - Where that still gives more vectors than memory holds, atoms that are further apart than
      `padding` in open directions, with nothing in between, are brought together first: fragments
      of a cluster then lie `padding` apart, with the same sums up to what f is beyond `padding`.

    Decisions are made in float64 on CPU and are not differentiable; `vectors`, `weight`, `inverse`
    and `offset` are differentiable functions of `cell`, virtual vectors held constant (exact up to
    what f is beyond `padding`). K depends on the data: `torch.compile` breaks the graph here.

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
            finite, more vectors than memory holds (16.8 million looked at, for one system), or
            arguments that do not fit together. The first three are an `UnfitSystemError`, which
            has the place of the system.

    Example:
        >>> lattice = reciprocal_vectors(
        ...     5.0 * torch.eye(3)[None], torch.ones(1, 3, dtype=torch.bool), torch.zeros(1, 3),
        ...     torch.tensor([0, 1]), k_max=0.2, padding=10.0)
        >>> lattice.integers.tolist()
        [[0, 0, 0], [0, 0, 1], [0, 1, 0], [1, 0, 0]]
    """
    limits = Limits(k_max, padding, shrink_vacuum, max_vectors)
    if torch.compiler.is_compiling():
        return outside(_vectors)(cell, pbc, positions, ptr, limits)
    return _vectors(cell, pbc, positions, ptr, limits)


def _vectors(
    cell: Tensor | None, pbc: Tensor | None, positions: Tensor, ptr: Tensor, limits: Limits
) -> ReciprocalVectors:
    cell, pbc = boundaries(cell, pbc, positions, ptr)
    _check(cell, pbc, positions, ptr, limits)
    chosen, move = _chosen_cells(cell, pbc, positions, ptr, limits)
    integers, first = shortest_vectors(chosen.cell, ptr.cpu().diff() > 0, limits)

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
    if move is not None:
        offset = offset + move.to(device, dtype)
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


def check_vectors(
    cell: Tensor,
    pbc: Tensor,
    positions: Tensor,
    ptr: Tensor,
    *,
    k_max: float,
    padding: float,
    shrink_vacuum: bool = True,
    max_vectors: int | None = None,
) -> None:
    """Refuse what `reciprocal_vectors` refuses, without making vectors; quick for usual sizes.

    Cells that are singular are not looked for in small systems.

    Raises:
        ValueError: as :func:`reciprocal_vectors`.
    """
    if positions.numel():
        # No vector of a chosen cell is longer than all given ones and the atoms from end to end.
        # What is not finite is not small, either.
        extent = torch.linalg.vector_norm(positions.amax(0) - positions.amin(0))
        given = (torch.linalg.vector_norm(cell, dim=-1) * pbc).sum(-1).amax()
        if (2 * k_max * (float(extent + given) + padding) + 1) ** 3 < 0.99 * MOST_CANDIDATES:
            return
    limits = Limits(k_max, padding, shrink_vacuum, max_vectors)
    _check(cell, pbc, positions, ptr, limits)
    _chosen_cells(cell, pbc, positions, ptr, limits)


def _check(cell: Tensor, pbc: Tensor, positions: Tensor, ptr: Tensor, limits: Limits) -> None:
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
    for name, number in (("k_max", limits.k_max), ("padding", limits.padding)):
        if not (math.isfinite(number) and number > 0):
            raise ValueError(f"{name} must be a positive number, got {number}")
    if limits.max_vectors is not None and limits.max_vectors < 1:
        raise ValueError(f"max_vectors must be ≥ 1, got {limits.max_vectors}")
    for name, value in (("positions", positions), ("cell", cell)):
        finite = value.isfinite().flatten(1).all(1)
        if not bool(finite.all()):
            row = (~finite).nonzero()[:1, 0]
            offsets = ptr[1:].to(row.device, torch.int64)
            first = torch.searchsorted(offsets, row, right=True) if name == "positions" else row
            raise UnfitSystemError(
                f"{name} of system {int(first)} hold a number that is not finite", int(first)
            )


def _chosen_cells(
    cell: Tensor, pbc: Tensor, positions: Tensor, ptr: Tensor, limits: Limits
) -> tuple[VirtualCells, Tensor | None]:
    """Cells to use, and how far (N, 3) atoms are moved to bring fragments together, if any are.

    Raises:
        TooManyVectorsError: the first system that has them all the same.
    """
    host = [x.detach().to("cpu", torch.float64) for x in (cell, positions)]
    host_ptr, occupied = ptr.to("cpu", torch.int64), ptr.cpu().diff() > 0
    padding, shrink = limits.padding, limits.shrink_vacuum
    chosen = virtual_cells(host[0], pbc.cpu(), host[1], host_ptr, padding=padding, shrink=shrink)
    many = candidates(chosen.cell, occupied, limits) > MOST_CANDIDATES
    if not bool(many.any()):
        return chosen, None
    basis = chosen.change.to(host[0].dtype) @ host[0]
    local = host[1] - rows_times(chosen.shift.to(host[0].dtype), basis, host_ptr)
    cells, move = brought_together(chosen.cell, chosen.kept, local, host_ptr, many, padding)
    count = candidates(cells, occupied, limits)
    if bool((count > MOST_CANDIDATES).any()):
        system = int((count > MOST_CANDIDATES).nonzero()[0])
        lengths = torch.linalg.vector_norm(cells[system], dim=-1).tolist()
        raise TooManyVectorsError(system, float(count[system]), lengths)
    return chosen._replace(cell=cells), move
