"""Neighbour pairs within a cutoff, periodic images included, and the vectors between them."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from flt_mol.functional._boundaries import boundaries, stored_flat
from flt_mol.functional._pair_lattices import as_given, lattices_of
from flt_mol.functional._pair_search import search
from flt_mol.functional._rows import by_rows, rows_of, values_only
from flt_mol.functional.groups import at_least_float32, system_sizes
from flt_mol.functional.numerics import outside

_FARTHEST = 1e8  # Å; vesin counts cells in 32 bits


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

    def to(self, device: torch.device | str) -> PairGroups:
        """The same groups on another device."""
        return PairGroups(*(x.to(device) for x in self))


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
        """r_i − r_j − T·cell, the vector from the image of j to i; differentiable.

        Positions are subtracted before anything else happens, so a system that lies 10⁵ Å from
        the origin loses no more than the float32 spacing of its own coordinates.

        Args:
            positions: (N, 3), Å.
            cell: (B, 3, 3), Å; rows are lattice vectors. None where nothing repeats.
            ptr: (B + 1,), first row of each system.

        Returns:
            (P, 3), Å, at least float32.
        """
        positions = at_least_float32(positions)
        cell = None if cell is None else cell.to(positions.dtype)
        vectors = partial(_vectors, positions, cell, ptr.to(torch.int64))
        if values_only(positions) and (cell is None or values_only(cell)):
            return by_rows(vectors, *self, size=rows_of(9))
        return vectors(*self)

    def symmetric(self) -> bool:
        """Whether with each (i, j, T) there is (j, i, −T), as often.

        By a sum of 64-bit hashes: lists that are not, such as those cut to a number of neighbours,
        pass by chance once in some 10¹⁸.

        Example:
            >>> i, j = torch.tensor([[0, 1, 1], [1, 0, 2]])
            >>> pairs = NeighborPairs(i, j, torch.zeros(3, 3, dtype=torch.int64))
            >>> pairs.symmetric(), NeighborPairs(*(x[:2] for x in pairs)).symmetric()
            (False, True)
        """
        there = _hashes(self.index_i, self.index_j, self.shift)
        back = _hashes(self.index_j, self.index_i, -self.shift)
        return bool(there.sum() == back.sum())

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
        """Which pairs share (i, j).

        How many groups there are depends on the data: call this where the pairs are made, not in a
        region that is compiled.
        """
        step = (self.index_i.diff() != 0) | (self.index_j.diff() != 0)
        first = torch.cat([step.new_ones(min(1, len(self.index_i))), step])
        return PairGroups(self.index_i[first], self.index_j[first], first.cumsum(0) - 1)

    def is_self(self) -> Tensor:
        """(P,) bool, which pairs are an atom and itself, without a shift."""
        return (self.index_i == self.index_j) & (self.shift == 0).all(-1)

    def without_self(self) -> NeighborPairs:
        """The pairs that are not an atom and itself."""
        other = ~self.is_self()
        return NeighborPairs(*(x[other] for x in self))

    def to(self, device: torch.device | str) -> NeighborPairs:
        """The same pairs on another device."""
        return NeighborPairs(*(x.to(device) for x in self))


def pair_lengths(vectors: Tensor) -> Tensor:
    """‖x‖ with gradient 0 instead of NaN at x = 0: (P, 3) → (P,), at least float32.

    Example:
        >>> pair_lengths(torch.tensor([[3.0, 4.0, 0.0], [0.0, 0.0, 0.0]]))
        tensor([5., 0.])
    """
    if values_only(vectors):
        return by_rows(_lengths, vectors, size=rows_of(3))
    return _lengths(vectors)


def _lengths(vectors: Tensor) -> Tensor:
    squared = at_least_float32(vectors).square().sum(-1)
    zero = squared == 0
    return squared.masked_fill(zero, 1.0).sqrt().masked_fill(zero, 0.0)


def _vectors(
    positions: Tensor, cell: Tensor | None, ptr: Tensor, i: Tensor, j: Tensor, shift: Tensor
) -> Tensor:
    """The vectors of some pairs."""
    between = positions[i] - positions[j]
    if cell is None:
        return between
    if len(cell) != 1:
        cell = cell[torch.bucketize(i, ptr, right=True) - 1]
    # Not a matmul: TF32, which many training scripts allow, would cost lengths three digits.
    a, b, c = shift.to(positions.dtype).split(1, dim=1)
    vectors: Tensor = between - (a * cell[:, 0] + b * cell[:, 1] + c * cell[:, 2])
    return vectors


def neighbor_pairs(
    positions: Tensor,
    cell: Tensor | None,
    pbc: Tensor | None,
    ptr: Tensor,
    cutoff: float,
    *,
    self_pairs: bool = False,
) -> NeighborPairs:
    """All pairs within `cutoff` in every system of a batch.

    Small systems are searched together by matrix products, large ones by vesin's cell lists; pairs
    do not depend on which. Distances are judged in float64, and lie strictly below the cutoff.
    Atoms may lie outside their cell, cells may be smaller than the cutoff (then j appears with
    several shifts, and i sees itself) or skewed, systems may be empty, and vectors of axes that do
    not repeat are ignored. Runs on CPU; `torch.compile` breaks the graph here, since the number of
    pairs depends on the data.

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
        ValueError: shapes that do not belong together, positions or cells that are not finite or
            beyond 10⁸ Å, a cutoff that is not positive, or a cell that is singular along a
            periodic axis.

    References:
        Fraux et al., vesin, https://luthaf.fr/vesin.

    Example:
        >>> one, ptr = torch.zeros(1, 3), torch.tensor([0, 1])
        >>> chain = torch.tensor([[True, False, False]])
        >>> neighbor_pairs(one, 2.0 * torch.eye(3)[None], chain, ptr, 2.5).shift.tolist()
        [[-1, 0, 0], [1, 0, 0]]
    """
    if torch.compiler.is_compiling():
        return outside(_found)(positions, cell, pbc, ptr, cutoff, self_pairs)
    return _found(positions, cell, pbc, ptr, cutoff, self_pairs)


def _found(
    positions: Tensor,
    cell: Tensor | None,
    pbc: Tensor | None,
    ptr: Tensor,
    cutoff: float,
    self_pairs: bool,
) -> NeighborPairs:
    sizes = system_sizes(ptr, positions.shape[0])
    cell, pbc = boundaries(cell, pbc, positions, ptr)
    _check(positions, cell, pbc, len(sizes), cutoff)
    points, cells = (x.detach().cpu().to(torch.float64).numpy() for x in (positions, cell))
    lattices = lattices_of(cells, pbc.detach().cpu().numpy(), float(cutoff))
    found = search(points, lattices, sizes, float(cutoff), self_pairs)
    if lattices.change is not None:
        found = as_given(found, lattices.change, sizes)
    return NeighborPairs(*(torch.from_numpy(x) for x in found)).to(positions.device)


def _check(positions: Tensor, cell: Tensor, pbc: Tensor, systems: int, cutoff: float) -> None:
    for name, value in (("positions", positions), ("cell", cell), ("pbc", pbc)):
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} is a {type(value).__name__}: torch.as_tensor({name})")
    expected: dict[str, tuple[int, ...]] = {
        "positions": (positions.shape[0], 3),
        "cell": (systems, 3, 3),
        "pbc": (systems, 3),
    }
    for name, value in (("positions", positions), ("cell", cell), ("pbc", pbc)):
        if tuple(value.shape) != expected[name]:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}, expected {expected[name]} for "
                f"{systems} systems and {positions.shape[0]} atoms"
                f"{'' if name == 'positions' else stored_flat(value, expected[name])}"
            )
    if pbc.dtype != torch.bool:
        raise ValueError(f"pbc is {pbc.dtype}, expected torch.bool: pass pbc.bool()")
    for name, value in (("positions", positions), ("cell", cell)):
        sound = (value.abs() < _FARTHEST).flatten(1).all(1)
        if not sound.all():
            row = int((~sound).nonzero()[0])
            raise ValueError(
                f"{name}[{row}] is {value[row].tolist()}, expected finite numbers below "
                f"{_FARTHEST:.0e} Å: correct the structure, or move it to the origin"
            )
    if not 0 < cutoff < math.inf:
        raise ValueError(f"cutoff is {cutoff}, expected a positive length in Å")


def _hashes(index_i: Tensor, index_j: Tensor, shift: Tensor) -> Tensor:
    """A number (P,) int64 for each (i, j, T), mixed so that sums tell multisets apart."""
    odd = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5)
    a, b, c, d = (x - 2**64 if x >= 2**63 else x for x in odd)
    image = shift.to(torch.int64)
    x = (index_i.to(torch.int64) * a).add_(index_j, alpha=b)
    for axis, factor in enumerate((c, d, a ^ c)):
        x.add_(image[:, axis], alpha=factor)
    x.bitwise_xor_(x >> 31).mul_(d)
    return x.bitwise_xor_(x >> 29)
