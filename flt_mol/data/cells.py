"""Which directions of a cell repeat, and whether they can."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["SMALLEST_HEIGHT", "heights", "periodicity"]

SMALLEST_HEIGHT = 0.5  # Å, thinner than any crystal: no two atoms are closer than 0.7 Å


def periodicity(
    cell: NDArray[Any] | None, pbc: NDArray[Any] | None
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Cell (3, 3) float64, Å, rows are lattice vectors, and pbc (3,) of what was stored.

    Without `pbc`, the axes whose vector is not zero are periodic (OC20 stores no pbc).

    Args:
        cell: nine finite numbers, or None for no cell.
        pbc: one or three booleans, or None where none are stored.

    Raises:
        ValueError: the cell is singular along a periodic direction: a vector that is missing, or
            too short, or in line with others.

    Example:
        >>> periodicity(np.diag([12.0, 12.0, 0.0]), None)[1]
        array([ True,  True, False])
    """
    cell = np.zeros((3, 3)) if cell is None else cell.reshape(3, 3).astype(np.float64)
    periodic = np.zeros(3, dtype=np.bool_)
    periodic[:] = cell.any(axis=1) if pbc is None else pbc.reshape(-1)
    thickness = heights(cell[periodic])
    if thickness.size and thickness.min() < SMALLEST_HEIGHT:
        # Of vectors that are in line, the shortest is most likely the one that is wrong.
        worst = np.lexsort((np.linalg.norm(cell[periodic], axis=1), thickness))[0]
        axis = "abc"[int(np.flatnonzero(periodic)[worst])]
        raise ValueError(
            f"is singular along the periodic direction {axis}: {thickness.min():.2g} Å between "
            f"images, at least {SMALLEST_HEIGHT} Å expected; give a cell with a lattice vector for "
            "each periodic direction, or set pbc False there"
        )
    return cell, periodic


def heights(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    """Distance (n,), Å, between lattice planes, for each of n ≤ 3 lattice vectors (n, 3).

    hᵢ = |det| / |aⱼ × aₖ|, and its likeness for two and one vectors; 0 where vectors are in line.
    """
    n = len(vectors)
    if n < 2:
        return np.asarray(np.linalg.norm(vectors, axis=1), dtype=np.float64)
    if n == 2:
        volume = np.linalg.norm(np.cross(vectors[0], vectors[1]))
        others = np.linalg.norm(vectors[::-1], axis=1)
    else:
        volume = np.abs(np.linalg.det(vectors))
        others = np.linalg.norm(np.cross(vectors[[1, 2, 0]], vectors[[2, 0, 1]]), axis=1)
    result = np.zeros(n)
    np.divide(volume, others, out=result, where=others > 0)
    return result
