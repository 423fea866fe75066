"""vesin's search for pairs, kept away from systems that it cannot lay cells over."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

# Where there would be more cells than this and one direction is much thinner than the others,
# vesin 0.4 to 0.6 divides by zero, which ends the process.
_MOST_CELLS = 2e4
_WIDE = 20


def search(
    points: Floats, cell: Floats, periodic: NDArray[np.bool_], heights: Floats, cutoff: float
) -> tuple[Integers, Integers]:
    """Pairs (P, 2) and shifts (P, 3) of one system within the cutoff, in any order.

    Args:
        points: (n, 3).
        cell: (3, 3), rows are lattice vectors, 0 for axes that do not repeat.
        periodic: (3,), which axes repeat.
        heights: (3,), distance between lattice planes, for axes that repeat.
        cutoff: in the unit of the points.

    Raises:
        ImportError: vesin is not installed.
    """
    span, wrapped = np.ptp(points, axis=0), None
    if span.max() > _WIDE * cutoff:
        points, wrapped, span = _gathered(points, cell, periodic, cutoff)
    # With one or two open axes, vesin picks their directions; without lattice, those of space.
    extent = np.where(periodic, heights, np.linalg.norm(span)) if periodic.any() else span
    radius = _radius(extent, periodic, cutoff)
    found = _vesin().NeighborList(cutoff=radius, full_list=True)
    pair, shift, distance = found.compute(points, cell, periodic, "PSd")
    pair, shift = pair.astype(np.int64), shift.astype(np.int64)
    if radius > cutoff:
        near = distance < cutoff
        pair, shift = pair[near], shift[near]
    if wrapped is not None:
        shift += wrapped[pair[:, 0]] - wrapped[pair[:, 1]]
    return pair, shift


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
