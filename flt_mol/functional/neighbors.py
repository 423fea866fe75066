"""Neighbour pairs within a cutoff, periodic images included, and the vectors between them."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flt_mol.functional.groups import at_least_float32, outside
from flt_mol.functional.lattice import Floats, checked_cells, host_array, virtual_cells

# Where there are more than 10⁵ cells, vesin 0.4 to 0.6 merges them by one factor; a direction with
# fewer cells than that is left without, and a division by zero ends the process.
_MOST_CELLS = 50_000


class PairGroups(NamedTuple):
    """The distinct (i, j) of P pairs, int64 (G,) each, ascending; `group` (P,) of each pair."""

    index_i: Tensor
    index_j: Tensor
    group: Tensor


class NeighborPairs(NamedTuple):
    """Pairs (i, j, T): atom i sees the image of atom j at r_j + T·cell. Sorted by i, j, then T.

    Both directions are listed, (i, j, T) and (j, i, −T), and an atom may see images of itself.

    Attributes:
        index_i: (P,) int64, the receiver (query), a row of the batch.
        index_j: (P,) int64, the sender (key), a row of the same system.
        shift: T (P, 3) int64, in lattice vectors; 0 along axes that do not repeat.
    """

    index_i: Tensor
    index_j: Tensor
    shift: Tensor

    def vectors(self, positions: Tensor, cell: Tensor | None, ptr: Tensor) -> Tensor:
        """r_i − r_j − T·cell (P, 3), Å, from the image of j to i, at least float32; differentiable.

        Arguments are those of `neighbor_pairs`; without `cell`, shifts are ignored.
        """
        positions = at_least_float32(positions)
        i, j = self.index_i, self.index_j
        between = positions.index_select(0, i) - positions.index_select(0, j)
        if cell is None:
            return between
        matrix = cell.to(positions.dtype)[torch.bucketize(i, ptr.to(torch.int64), right=True) - 1]
        # Not a matmul: TF32, where it is allowed, would cost lengths three digits.
        a, b, c = self.shift.to(positions.dtype).split(1, dim=1)
        vectors: Tensor = between - (a * matrix[:, 0] + b * matrix[:, 1] + c * matrix[:, 2])
        return vectors

    def with_self(self, num_rows: int) -> NeighborPairs:
        """These pairs, and each of `num_rows` atoms with itself, before its images."""
        rows = torch.arange(num_rows, device=self.index_i.device)
        index_i, index_j = torch.cat([rows, self.index_i]), torch.cat([rows, self.index_j])
        shift = torch.cat([self.shift.new_zeros(num_rows, 3), self.shift])
        order = torch.argsort(index_i * num_rows + index_j, stable=True)
        return NeighborPairs(index_i[order], index_j[order], shift[order])

    def groups(self) -> PairGroups:
        """Which pairs share (i, j). Their number depends on the data: not for compiled regions."""
        step = (self.index_i.diff() != 0) | (self.index_j.diff() != 0)
        first = torch.cat([step.new_ones(min(1, len(self.index_i))), step])
        return PairGroups(self.index_i[first], self.index_j[first], first.cumsum(0) - 1)

    def is_self(self) -> Tensor:
        """(P,) bool, which pairs are an atom and itself, without a shift."""
        return (self.index_i == self.index_j) & (self.shift == 0).all(-1)


def pair_lengths(vectors: Tensor) -> Tensor:
    """‖x‖ with gradient 0 instead of NaN at x = 0: (P, 3) → (P,), at least float32."""
    squared = at_least_float32(vectors).square().sum(-1)
    zero = squared == 0
    return squared.masked_fill(zero, 1.0).sqrt().masked_fill(zero, 0.0)


def neighbor_pairs(
    positions: Tensor,
    cell: Tensor | None,
    pbc: Tensor | None,
    ptr: Tensor,
    cutoff: float,
    *,
    self_pairs: bool = False,
) -> NeighborPairs:
    """All pairs closer than `cutoff` in every system of a batch, found by vesin [1].

    Atoms may lie outside their cell, cells may be skewed or smaller than the cutoff (then j appears
    with several shifts, and i sees itself), and rows of `cell` for axes that do not repeat are
    ignored. Distances are judged in float64, on CPU; `torch.compile` breaks the graph here.

    Args:
        positions: (N, 3), Å, any device.
        cell: (B, 3, 3), Å; rows are lattice vectors. None, with `pbc` None: molecules.
        pbc: (B, 3) bool, whether the system repeats along each lattice vector.
        ptr: (B + 1,), first row of each system.
        cutoff: Å.
        self_pairs: whether every atom also sees itself at distance 0.

    Returns:
        Pairs on the device of `positions`.

    Raises:
        ValueError: shapes that do not belong together, a cutoff that is not positive; as
            `UnfitSystemError` for numbers that are not finite or a singular cell.

    References:
        [1] Fraux et al., vesin, https://luthaf.fr/vesin.

    Examples:
        >>> one, ptr = torch.zeros(1, 3), torch.tensor([0, 1])
        >>> chain = torch.tensor([[True, False, False]])
        >>> neighbor_pairs(one, 2.0 * torch.eye(3)[None], chain, ptr, 2.5).shift.tolist()
        [[-1, 0, 0], [1, 0, 0]]
    """
    if torch.compiler.is_compiling():
        run = outside(neighbor_pairs)
        return run(positions, cell, pbc, ptr, cutoff, self_pairs=self_pairs)
    import vesin

    if not 0 < cutoff < math.inf:
        raise ValueError(f"cutoff is {cutoff}, expected a positive length in Å")
    cell, pbc = checked_cells(cell, pbc, positions, ptr)
    points, given = host_array(positions), host_array(cell)
    # Open directions become periodic ones too long for pairs to reach across.
    where = virtual_cells(cell, pbc, positions, ptr, padding=1.01 * cutoff, shrink=False)
    parts = [np.zeros((0, 5), np.int64)]
    for b, (start, stop) in enumerate(pairwise(ptr.tolist())):
        if start == stop:
            continue
        some = points[start:stop] - points[start]
        box, radius = _search_box(where.cell[b], where.kept[b].any(), cutoff)
        search = vesin.NeighborList(cutoff=radius, full_list=False)
        pair, image = search.compute(some, box, True, "PS", copy=False)
        i, j = pair.T.astype(np.int64)
        shift = image.astype(np.int64) @ where.change[b]
        vectors = some[j] - some[i] + shift @ given[b]
        near = np.einsum("pc,pc->p", vectors, vectors) < cutoff**2
        near &= ~shift[:, ~where.kept[b]].any(1)
        parts.append(np.column_stack([i + start, j + start, shift])[near])
    half = np.concatenate(parts)
    back = np.column_stack([half[:, 1], half[:, 0], -half[:, 2:]])
    both = np.concatenate([half, back])
    found = torch.from_numpy(both[np.lexsort(both.T[::-1])]).to(positions.device)
    pairs = NeighborPairs(*(x.contiguous() for x in (found[:, 0], found[:, 1], found[:, 2:])))
    return pairs.with_self(len(positions)) if self_pairs else pairs


def _search_box(cell: Floats, periodic: bool, cutoff: float) -> tuple[Floats, float]:
    """Cell and cutoff or somewhat more, such that vesin has no direction left without cells."""
    heights = 1 / np.linalg.norm(np.linalg.inv(cell), axis=0)  # between lattice planes
    radius = max(cutoff * (1 + 1e-9), 1e-3, heights.max() * 1e-6)  # vesin refuses below 1e-6
    if not periodic:
        return cell * (heights.max() / heights)[:, None], radius
    while np.floor(heights / radius).clip(1).prod() > _MOST_CELLS:
        radius *= 1.25
    return cell, radius
