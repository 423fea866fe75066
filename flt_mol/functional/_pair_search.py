"""Pairs of a batch: small systems together by matrix products, large ones by vesin, one by one."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from flt_mol.functional import _vesin
from flt_mol.functional._dense_pairs import MOST_IMAGES, dense_pairs
from flt_mol.functional._pair_images import images_of
from flt_mol.functional._pair_lattices import Floats, Found, Integers, Lattices

# Squared distances of one system: with more of them and a short cutoff, cell lists are faster.
_MOST_DISTANCES = 2**20
# Squared distances of all systems that are searched together, one byte each.
_MOST_TOGETHER = 2**22


def search(
    points: Floats, lattices: Lattices, sizes: list[int], cutoff: float, self_pairs: bool
) -> Found:
    """All pairs of B systems, sorted by i, then j, then T.

    Args:
        points: (N, 3).
        lattices: of B systems.
        sizes: atoms of each system.
        cutoff: in the unit of the points.
        self_pairs: whether every atom also sees itself.
    """
    occupied = np.flatnonzero(sizes)
    if len(occupied) == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, 3), np.int64)
    if len(occupied) < len(sizes):
        lattices = lattices.take(occupied)
    ptr = np.cumsum([0, *(size for size in sizes if size)])
    images = images_of(points, lattices, ptr, cutoff)
    distances = images.per_system * np.diff(ptr)
    dense = images.sound & (images.per_system <= MOST_IMAGES) & (distances <= _MOST_DISTANCES)
    parts = []
    for start, stop in _runs(dense, distances):
        first, last = int(ptr[start]), int(ptr[stop])
        systems, atoms = slice(start, stop), slice(first, last)
        rows, some = points[atoms], lattices.take(systems)
        if dense[start]:
            cut, offsets = images.cut(systems, atoms), ptr[start : stop + 1] - first
            found = dense_pairs(rows, some, offsets, cut, cutoff, self_pairs)
        else:
            found = _vesin.search(
                rows, some.cells[0], some.periodic[0], some.heights[0], cutoff, self_pairs
            )
        if first:
            for index in found[:2]:
                index += first
        parts.append(found)
    if len(parts) == 1:
        return parts[0]
    index_i, index_j, shift = (np.concatenate(part) for part in zip(*parts, strict=True))
    return index_i, index_j, shift


def _runs(dense: NDArray[np.bool_], distances: Integers) -> list[tuple[int, int]]:
    """Systems from and to that are searched together: one, where it is not small."""
    together = np.where(dense, distances, 0).cumsum() // _MOST_TOGETHER
    group = np.where(dense, together, -1 - np.arange(len(dense)))
    edges = np.flatnonzero(np.diff(group)) + 1
    return list(pairwise([0, *edges.tolist(), len(dense)]))
