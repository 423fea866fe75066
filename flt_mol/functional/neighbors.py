"""Neighbour pairs within a cutoff, periodic images included, and the vectors between them."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flt_mol.functional.groups import at_least_float32, outside
from flt_mol.functional.lattice import Floats, Integers, checked_cells, host_array, virtual_cells

# Where there are more than 10⁵ cells, vesin 0.4 to 0.6 merges them by one factor; a direction with
# fewer cells than that is left without, and a division by zero ends the process.
_MOST_CELLS = 50_000


class PairGroups(NamedTuple):
    """The distinct (i, j) of a list of pairs: all images of j around i are one group.

    Attributes:
        index_i: (G,) int64, receiver of each group, ascending.
        index_j: (G,) int64, sender of each group, ascending within a receiver.
        group: (P,) int64, the group of each pair.
    """

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

        Positions (N, 3), Å, are subtracted first, so a system that lies 10⁵ Å from the origin
        loses no more than the float32 spacing of its own coordinates. `cell` (B, 3, 3), Å, may be
        None where nothing repeats; `ptr` (B + 1,) is the first row of each system.
        """
        positions = at_least_float32(positions)
        i, j = self.index_i, self.index_j
        between = positions.index_select(0, i) - positions.index_select(0, j)
        if cell is None:
            return between
        matrix = cell.to(positions.dtype)[torch.bucketize(i, ptr.to(torch.int64), right=True) - 1]
        # Not a matmul: TF32, which many training scripts allow, would cost lengths three digits.
        a, b, c = self.shift.to(positions.dtype).split(1, dim=1)
        vectors: Tensor = between - (a * matrix[:, 0] + b * matrix[:, 1] + c * matrix[:, 2])
        return vectors

    def with_self(self, num_rows: int) -> NeighborPairs:
        """These pairs, and each of `num_rows` atoms with itself, before its images.

        Example:
            >>> none = torch.zeros(0, dtype=torch.int64)
            >>> NeighborPairs(none, none, torch.zeros(0, 3, dtype=torch.int64)).with_self(2).index_i
            tensor([0, 1])
        """
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

    def to(self, device: torch.device | str) -> NeighborPairs:
        """The same pairs on another device."""
        return NeighborPairs(*(x.to(device) for x in self))


def pair_lengths(vectors: Tensor) -> Tensor:
    """‖x‖ with gradient 0 instead of NaN at x = 0: (P, 3) → (P,), at least float32.

    Example:
        >>> pair_lengths(torch.tensor([[3.0, 4.0, 0.0], [0.0, 0.0, 0.0]]))
        tensor([5., 0.])
    """
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

    Atoms may lie outside their cell, cells may be smaller than the cutoff (then j appears with
    several shifts, and i sees itself) or skewed, systems may be empty, and rows of `cell` for axes
    that do not repeat are ignored. Distances are judged in float64. Runs on CPU; `torch.compile`
    breaks the graph here, since the number of pairs depends on the data.

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
        ValueError: shapes that do not belong together, a cutoff that is not positive; and
            `UnfitSystemError`, which is one, for numbers that are not finite or a cell that is
            singular along a periodic axis.

    References:
        [1] Fraux et al., vesin, https://luthaf.fr/vesin.

    Example:
        >>> one, ptr = torch.zeros(1, 3), torch.tensor([0, 1])
        >>> chain = torch.tensor([[True, False, False]])
        >>> neighbor_pairs(one, 2.0 * torch.eye(3)[None], chain, ptr, 2.5).shift.tolist()
        [[-1, 0, 0], [1, 0, 0]]
    """
    run = outside(_found) if torch.compiler.is_compiling() else _found
    pairs = run(positions, cell, pbc, ptr, cutoff)
    return pairs.with_self(len(positions)) if self_pairs else pairs


def _found(
    positions: Tensor, cell: Tensor | None, pbc: Tensor | None, ptr: Tensor, cutoff: float
) -> NeighborPairs:
    import vesin

    if not 0 < cutoff < math.inf:
        raise ValueError(f"cutoff is {cutoff}, expected a positive length in Å")
    cell, pbc = checked_cells(cell, pbc, positions, ptr)
    points, given = host_array(positions), host_array(cell)
    # Open directions become periodic ones too long for pairs to reach across.
    where = virtual_cells(cell, pbc, positions, ptr, padding=1.01 * cutoff, shrink=False)
    parts = [np.zeros((0, 5), np.int64)]
    offsets: list[int] = ptr.tolist()
    for b, (start, stop) in enumerate(pairwise(offsets)):
        if start == stop:
            continue
        some, kept = points[start:stop] - points[start], where.kept[b]
        box, radius = _search_box(where.cell[b], where.heights[b], kept, cutoff)
        search = vesin.NeighborList(cutoff=radius, full_list=False)
        pair, image = search.compute(some, box, True, "PS", copy=False)
        i, j = pair.T.astype(np.int64)
        shift = image.astype(np.int64) @ where.change[b]
        vectors = some[j] - some[i] + shift @ given[b]
        near = np.einsum("pc,pc->p", vectors, vectors) < cutoff**2
        near &= ~shift[:, ~kept].any(1)
        parts.append(np.column_stack([i + start, j + start, shift])[near])
    half = np.concatenate(parts)
    back = np.column_stack([half[:, 1], half[:, 0], -half[:, 2:]])
    found = torch.from_numpy(_sorted(np.concatenate([half, back]), len(points)))
    i, j, shift = (x.contiguous() for x in found.split((1, 1, 3), 1))
    return NeighborPairs(i.flatten(), j.flatten(), shift).to(positions.device)


def _search_box(
    cell: Floats, heights: Floats, kept: NDArray[np.bool_], cutoff: float
) -> tuple[Floats, float]:
    """Cell and cutoff or somewhat more, such that vesin has no direction left without cells."""
    radius = max(cutoff * (1 + 1e-9), 1e-3, heights.max() * 1e-6)  # vesin refuses below 1e-6
    if not kept.any():
        return cell * (heights.max() / heights)[:, None], radius
    while np.floor(heights / radius).clip(1).prod() > _MOST_CELLS:
        radius *= 1.25
    return cell, radius


def _sorted(found: Integers, atoms: int) -> Integers:
    low = [0, 0, *found[:, 2:].min(0, initial=0).tolist()]
    widths = [atoms, atoms, *(1 - 2 * least for least in low[2:])]  # with T there is −T
    if math.prod(widths) >= 2**62:
        return found[np.lexsort(found.T[::-1])]
    key = np.zeros(len(found), np.int64)
    for column, (width, least) in enumerate(zip(widths, low, strict=True)):
        key = key * width + (found[:, column] - least)
    return found[np.argsort(key)]
