"""vesin's search for pairs, kept away from systems that it cannot lay cells over."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flt_mol.functional._pair_lattices import Floats, Found, Integers, within

# Where there would be more cells than this and one direction is much thinner than the others,
# vesin 0.4 to 0.6 divides by zero, which ends the process.
_MOST_CELLS = 2e4
_WIDE = 20
# What lies so near the cutoff, relatively to it and to the positions, is judged by `within`.
_DOUBT = 1e-9, 1e-12
# vesin refuses cutoffs below 1e-6.
_SHORTEST = 1e-3


def search(
    points: Floats,
    cell: Floats,
    periodic: NDArray[np.bool_],
    heights: Floats,
    cutoff: float,
    self_pairs: bool,
) -> Found:
    """Pairs of one system within the cutoff, sorted by i, then j, then T.

    Args:
        points: (n, 3).
        cell: (3, 3), rows are lattice vectors, 0 for axes that do not repeat.
        periodic: (3,), which axes repeat.
        heights: (3,), distance between lattice planes, for axes that repeat.
        cutoff: in the unit of the points.
        self_pairs: whether every atom also sees itself.

    Raises:
        ImportError: vesin is not installed.
    """
    span, wrapped, given = np.ptp(points, axis=0), None, points
    if span.max() > _WIDE * cutoff:
        points, wrapped, span = _gathered(points, cell, periodic, cutoff)
    # With one or two open axes, vesin picks their directions; without lattice, those of space.
    extent = np.where(periodic, heights, np.linalg.norm(span)) if periodic.any() else span
    doubt = _DOUBT[0] * cutoff + _DOUBT[1] * float(np.abs(given).max())
    radius = _radius(extent, periodic, max(cutoff + doubt, _SHORTEST))
    found = _vesin().NeighborList(cutoff=radius, full_list=False)
    pair, shift, distance = found.compute(points, cell, periodic, "PSd", copy=False)
    (i, j), shift = pair.astype(np.int64).T, shift.astype(np.int64)
    if wrapped is not None:
        shift += wrapped[i] - wrapped[j]
    unsure = np.flatnonzero(distance >= cutoff - doubt)
    if len(unsure):
        near = within(given, cell, (i[unsure], j[unsure], shift[unsure]), cutoff)
        i, j, shift = (np.delete(x, unsure[~near], axis=0) for x in (i, j, shift))
    return _both_ways(i, j, shift, len(points), self_pairs)


def _both_ways(i: Integers, j: Integers, shift: Integers, atoms: int, self_pairs: bool) -> Found:
    """The pairs, the same seen from j, and self pairs, sorted by i, then j, then T."""
    own = np.arange(atoms if self_pairs else 0)
    farthest = np.abs(shift).max(axis=0, initial=0)
    widths = [int(most).bit_length() for most in (atoms, *(2 * farthest))]
    if widths[0] + sum(widths) > 63:
        # Atoms scattered over so many cells that one integer cannot hold pair and shift.
        nowhere = np.zeros((len(own), 3), np.int64)
        index_i, index_j = np.concatenate([i, j, own]), np.concatenate([j, i, own])
        shift = np.concatenate([shift, -shift, nowhere])
        order = np.lexsort((*shift.T[::-1], index_j, index_i))
        return index_i[order], index_j[order], shift[order]
    places = np.cumsum([0, *widths[:0:-1]])[::-1]
    steps = 1 << places[1:]
    image, origin = shift @ steps, farthest @ steps
    forth, back = (((x << widths[0]) + y) << places[0] for x, y in ((i, j), (j, i)))
    itself = ((own << widths[0]) + own) << places[0]
    key = np.concatenate([forth + image, back - image, itself])
    key += origin
    # Sorting the keys alone is several times as fast as finding their order.
    key.sort()
    parts = np.empty((len(key), 3), np.int64)
    for axis in range(3):
        part = (key >> places[axis + 1]) & ((1 << widths[axis + 1]) - 1)
        np.subtract(part, farthest[axis], out=parts[:, axis])
    key >>= places[0]
    return key >> widths[0], key & ((1 << widths[0]) - 1), parts


def _vesin() -> Any:
    """vesin, which nothing but the search needs."""
    try:
        import vesin
    except ImportError as error:
        raise ImportError("neighbour pairs are found by vesin: pip install vesin") from error
    return vesin


def _gathered(
    points: Floats, cell: Floats, periodic: NDArray[np.bool_], cutoff: float
) -> tuple[Floats, Integers, Floats]:
    """Points that have the same pairs, close to each other.

    Returns:
        The points; by how many cells (n, 3) each was moved back; and their extents along the axes
        that do not repeat, where empty space was cut to two cutoffs.
    """
    vectors = cell[periodic]
    wrapped = np.zeros((len(points), 3), np.int64)
    wrapped[:, periodic] = np.floor(points @ np.linalg.pinv(vectors))
    points = points - wrapped @ cell
    axes = np.linalg.svd(vectors)[2][len(vectors) :] if len(vectors) else np.eye(3)
    for axis in axes:
        height = points @ axis
        order = np.argsort(height)
        excess = np.maximum(np.diff(height[order]) - 2 * cutoff, 0.0).cumsum()
        points[order[1:]] -= excess[:, None] * axis
    return points, wrapped, np.ptp(points @ axes.T, axis=0)


def _radius(extent: Floats, periodic: NDArray[np.bool_], cutoff: float) -> float:
    """The cutoff, or a longer one with which there are few enough cells."""
    while True:
        cells = extent / cutoff + 1
        thinnest = 1.0 if periodic.any() and not periodic.all() else cells.min()
        if cells.prod() <= _MOST_CELLS * thinnest**3:
            return cutoff
        cutoff *= 1.25
