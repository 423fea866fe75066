"""Lattices of a batch as the search for pairs needs them, and the one rule for what is a pair."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from flt_mol.functional.virtual_cells import short_basis

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Found = tuple[Integers, Integers, Integers]
"""i (P,), j (P,) and T (P, 3) of pairs."""

_MOST_IMAGES = 100


class Lattices(NamedTuple):
    """Lattices of B systems.

    Attributes:
        cells: (B, 3, 3), rows are lattice vectors, 0 for axes that do not repeat.
        periodic: (B, 3) bool, which axes repeat.
        duals: (B, 3, 3), rows d_a with d_a·cell_b = δ_ab among axes that repeat, 0 for others.
        heights: (B, 3), distance between lattice planes, for axes that repeat.
        openness: (B,), squared volume of the cell spanned by unit vectors along the axes: 1 for
            right angles, 0 for a singular cell.
        change: (B, 3, 3), U with cells = U·(cells as given), where one of the given ones was too
            skewed; None where all are as given. Not among what `take` keeps.
    """

    cells: Floats
    periodic: NDArray[np.bool_]
    duals: Floats
    heights: Floats
    openness: Floats
    change: Integers | None = None

    def take(self, systems: slice | Integers) -> Lattices:
        """The lattices of some of the systems."""
        cells, periodic, duals, heights, openness, _ = self
        kept = cells[systems], periodic[systems], duals[systems], heights[systems]
        return Lattices(*kept, openness[systems])


def lattices_of(cells: Floats, periodic: NDArray[np.bool_], cutoff: float) -> Lattices:
    """Lattices of cells (B, 3, 3), whose vectors count where the axis repeats (B, 3).

    Cells that are thin because they are skewed are taken in a shorter basis of the same lattice.

    Raises:
        ValueError: lattice planes closer to each other than a hundredth of the cutoff.
    """
    lattices, unfit = _lattices(cells, periodic, cutoff)
    if not unfit.any():
        return lattices
    change = np.tile(np.eye(3, dtype=np.int64), (len(cells), 1, 1))
    kept = np.where(periodic[:, :, None], cells, 0.0)[unfit]
    change[unfit] = short_basis(torch.from_numpy(kept), torch.from_numpy(periodic[unfit])).numpy()
    # Vectors of axes that do not repeat stay out of it: U is 1 for them.
    lattices, still = _lattices(change @ cells, periodic, cutoff)
    if still.any():
        _refuse(int(np.flatnonzero(still)[0]), cells, periodic, cutoff)
    return lattices._replace(change=change)


def as_given(found: Found, change: Integers, sizes: list[int]) -> Found:
    """Pairs with shifts T of the cells as given, for those of ``change @ cells``, sorted."""
    index_i, index_j, shift = found
    system = np.repeat(np.arange(len(sizes)), sizes)[index_i]
    shift = (shift[:, :, None] * change[system]).sum(1)
    order = np.lexsort((*shift.T[::-1], index_j, index_i))
    return index_i[order], index_j[order], shift[order]


def _lattices(
    cells: Floats, periodic: NDArray[np.bool_], cutoff: float
) -> tuple[Lattices, NDArray[np.bool_]]:
    """Lattices, and which (B,) of them are singular or thin."""
    kept = np.where(periodic[:, :, None], cells, 0.0)
    lengths = np.sqrt((kept * kept).sum(-1))
    directions = kept / np.where(lengths > 0, lengths, 1.0)[..., None]
    # Axes that do not repeat are taken as perpendicular to all others.
    gram = directions @ directions.transpose(0, 2, 1)
    gram[:, range(3), range(3)] = np.where(periodic & (lengths == 0), 0.0, 1.0)
    openness = np.linalg.det(gram)
    flat = openness < 1e-12
    inverse = np.linalg.inv(np.where(flat[:, None, None], np.eye(3), gram))
    # Dual vectors are as long as one over the distance between lattice planes.
    heights = lengths / np.sqrt(np.diagonal(inverse, axis1=1, axis2=2))
    thin = (periodic & (heights * _MOST_IMAGES < cutoff)).any(1)
    duals = (inverse @ directions) / np.where(lengths > 0, lengths, 1.0)[..., None]
    return Lattices(kept, periodic, duals, heights, openness), flat | thin


def _refuse(bad: int, cells: Floats, periodic: NDArray[np.bool_], cutoff: float) -> None:
    axes = ", ".join("abc"[axis] for axis in np.flatnonzero(periodic[bad]))
    raise ValueError(
        f"cell[{bad}] is {cells[bad].tolist()}: singular, or thinner than a "
        f"{_MOST_IMAGES}th of the cutoff {cutoff} Å, along its periodic axes ({axes}); give a "
        "lattice vector for each periodic axis, none in line with the others, or set pbc "
        "False there"
    )


def within(points: Floats, cells: Floats, pairs: Found, cutoff: float) -> NDArray[np.bool_]:
    """Which pairs (P,) are closer than the cutoff, in float64, from the positions as given.

    Where the last bit decides, this decides: for every search, and for (i, j, T) as for
    (j, i, −T), since no operation depends on the sign.

    Args:
        points: (n, 3).
        cells: (3, 3), or (P, 3, 3) of each pair.
        pairs: i, j and T.
        cutoff: in the unit of the points.
    """
    i, j, shift = pairs
    a, b, c = (shift[:, axis, None] * cells[..., axis, :] for axis in range(3))
    x, y, z = ((points[j] - points[i]) + ((a + b) + c)).T
    return np.asarray((x * x + y * y) + z * z < cutoff * cutoff)
