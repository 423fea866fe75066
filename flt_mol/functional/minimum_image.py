"""The shortest of a vector's periodic images, exactly, in cells of any shape."""

from __future__ import annotations

from itertools import combinations

import torch
from torch import Tensor

from flt_mol.functional._boundaries import boundaries, stored_flat
from flt_mol.functional.groups import at_least_float32, spread, system_sizes
from flt_mol.functional.virtual_cells import rows_times, short_basis

# Sums of these of four vectors that add up to zero: one of each pair ±, the other is the rest.
_SUBSETS = ((0,), (1,), (2,), (3,), (0, 1), (0, 2), (1, 2))
_MARGIN = 1e-9  # so that rounding does not go back and forth between two equally short vectors
_MOST_STEPS = 1000  # a handful is usual


def minimum_image(vectors: Tensor, cell: Tensor | None, pbc: Tensor | None, ptr: Tensor) -> Tensor:
    r"""The shortest of v − T·cell, over all integers T along axes that repeat.

    Exact for any basis of the lattice, however skewed. v is shortest if and only if
    \|v·w\| ≤ ½\|w\|² for every w that bounds the lattice's Voronoi cell. Of four lattice vectors
    that add up to 0 and of which no two form an acute angle (Selling's reduction), these w are
    among the ± 7 sums [1]; one after the other is taken off as long as one shortens v. Of equally
    short images one is taken, v itself if it is among them.

    Decisions are made in float64 on CPU; T is constant to autograd, so the gradient with respect to
    `vectors` is the identity. No system's result depends on others. Outside compiled regions.

    Args:
        vectors: v (N, 3), Å.
        cell: (B, 3, 3), Å, rows are lattice vectors; anything where an axis does not repeat.
            None, with `pbc` None: nothing repeats.
        pbc: (B, 3) bool, along which lattice vectors the system repeats.
        ptr: (B + 1,), first row of each system.

    Returns:
        (N, 3), Å, at least float32. Along axes that do not repeat nothing is taken off.

    Raises:
        ValueError: shapes that do not belong together, numbers that are not finite, or a cell that
            is singular along its periodic axes.

    References:
        [1] Conway, Sloane, "Low-dimensional lattices. VI. Voronoi reduction of three-dimensional
        forms", Proc. R. Soc. A 436 (1992), theorems 3 and 8.

    Example:
        >>> cell, pbc = 4.0 * torch.eye(3)[None], torch.tensor([[True, True, False]])
        >>> minimum_image(torch.tensor([[3.0, -9.0, 3.0]]), cell, pbc, torch.tensor([0, 1]))
        tensor([[-1., -1.,  3.]])
    """
    cell, pbc = boundaries(cell, pbc, vectors, ptr)
    _check(vectors, cell, pbc, ptr)
    host = vectors.detach().to("cpu", torch.float64)
    periodic, host_ptr = pbc.cpu(), ptr.to("cpu", torch.int64)
    lattice = torch.where(periodic[..., None], cell.detach().to("cpu", torch.float64), 0.0)
    _check_lattice(lattice, periodic)
    if _all_short(host, lattice, periodic, host_ptr):
        return at_least_float32(vectors)
    shift = _shortening(host, lattice, _voronoi_vectors(lattice, periodic), host_ptr)

    vectors = at_least_float32(vectors)
    rows = torch.where(pbc[..., None], cell.to(vectors.dtype), 0.0)
    return vectors - rows_times(shift.to(vectors), rows, ptr)


def _all_short(vectors: Tensor, lattice: Tensor, periodic: Tensor, ptr: Tensor) -> bool:
    """Whether all v (N, 3) are surely shortest: no longer than half of any lattice vector.

    Lattice vectors are no shorter than the least diagonal entry of R in cellᵀ = QR.
    """
    diagonal = torch.linalg.qr(lattice.mT).R.diagonal(dim1=-2, dim2=-1).abs()
    shortest = diagonal.masked_fill(~periodic, torch.inf).amin(-1)
    reach = spread((0.5 - _MARGIN) * shortest, ptr, vectors.shape[0])
    return bool((torch.linalg.vector_norm(vectors, dim=-1) <= reach).all())


def _voronoi_vectors(lattice: Tensor, periodic: Tensor) -> Tensor:
    """T (B, 7, 3) int64 of lattice vectors that, with their opposites, bound the Voronoi cell."""
    start = short_basis(lattice, periodic) * periodic[..., None]
    base = torch.cat([start, -start.sum(1, keepdim=True)], dim=1)
    for _ in range(_MOST_STEPS):
        changed = False
        for i, j in combinations(range(4), 2):
            vectors = base.to(lattice.dtype) @ lattice
            product = (vectors[:, i] * vectors[:, j]).sum(-1)
            size = vectors[:, [i, j]].square().sum(-1).prod(-1).sqrt()
            acute = product > _MARGIN * size
            step = base[:, i] * acute[:, None]
            base[:, [k for k in range(4) if k not in (i, j)]] += step[:, None]
            base[:, i] -= 2 * step
            changed = changed or bool(acute.any())
        if not changed:
            break
    return torch.stack([base[:, list(subset)].sum(1) for subset in _SUBSETS], dim=1)


def _shortening(vectors: Tensor, lattice: Tensor, candidates: Tensor, ptr: Tensor) -> Tensor:
    """T (N, 3) int64 such that v − T·cell is no longer than with any other T."""
    num_rows = vectors.shape[0]
    w = spread(candidates.to(lattice.dtype) @ lattice, ptr, num_rows)
    candidates = spread(candidates, ptr, num_rows)
    square = w.square().sum(-1)
    shift = torch.zeros(num_rows, 3, dtype=torch.int64)
    for _ in range(_MOST_STEPS):
        rest = vectors - rows_times(shift.to(lattice.dtype), lattice, ptr)
        # Where axes do not repeat some of the seven are zero.
        ratio = (rest[:, None] * w).sum(-1) / square.clamp(min=1e-30)
        times = torch.where(ratio.abs() > 0.5 + _MARGIN, ratio.round(), 0.0)
        if not bool(times.any()):
            break
        best = (times * (2 * ratio - times) * square).argmax(-1, keepdim=True)
        step = candidates.gather(1, best[..., None].expand(-1, -1, 3)).squeeze(1)
        shift += times.gather(1, best).to(torch.int64) * step
    return shift


def _check(vectors: Tensor, cell: Tensor, pbc: Tensor, ptr: Tensor) -> None:
    if vectors.dim() != 2 or vectors.shape[1] != 3:
        raise ValueError(f"vectors have shape {tuple(vectors.shape)}, expected (N, 3)")
    systems = len(system_sizes(ptr, vectors.shape[0]))
    for name, value, shape in (("cell", cell, (systems, 3, 3)), ("pbc", pbc, (systems, 3))):
        if tuple(value.shape) != shape:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}, expected {shape} for {systems} systems"
                f"{stored_flat(value, shape)}"
            )
    if pbc.dtype != torch.bool:
        raise ValueError(f"pbc is {pbc.dtype}, expected torch.bool: pass pbc.bool()")
    if not bool(vectors.isfinite().all()):
        row = int((~vectors.isfinite().all(-1)).nonzero()[0])
        raise ValueError(f"vectors[{row}] is {vectors[row].tolist()}, expected finite numbers")


def _check_lattice(lattice: Tensor, periodic: Tensor) -> None:
    """ValueError unless the vectors (B, 3, 3) of periodic axes are independent and finite."""
    length = torch.linalg.vector_norm(lattice, dim=-1, keepdim=True)
    unit = torch.where(length > 0, lattice / length, 0.0)
    gram = unit @ unit.mT + torch.diag_embed((~periodic).to(unit.dtype))
    # The squared volume of unit vectors. What is not finite compares as singular.
    singular = ~(torch.linalg.det(gram) > 1e-12)
    if bool(singular.any()):
        system = int(singular.nonzero()[0])
        axes = ", ".join("abc"[axis] for axis in periodic[system].nonzero().flatten().tolist())
        raise ValueError(
            f"cell[{system}] is {lattice[system].tolist()}: singular along its periodic axes "
            f"({axes}); give a finite lattice vector for each of them, none in line with the "
            "others, or set pbc False there"
        )
