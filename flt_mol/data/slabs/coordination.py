"""Coordination numbers by Voronoi cells, for slabs."""

from __future__ import annotations

from itertools import product

import numpy as np
from numpy.typing import NDArray

from flt_mol.data.cells import heights

__all__ = ["OPEN", "coordination"]

OPEN = 0.0
"""The coordination number of an atom whose Voronoi cell has no end."""
_REACH = 10.0  # Å, of images around the cell; further ones bound no cell below the surface


def coordination(
    positions: NDArray[np.float64], lateral: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Coordination number (N,) of each atom, Σ over the faces of its Voronoi cell of Ω / Ω_max.

    Ω is the solid angle of a face, seen from the atom (O'Keeffe, Acta Cryst. A 35, 772, 1979).
    Atoms whose cell reaches into the vacuum without end get `OPEN`.

    Args:
        positions: (N, 3), Å.
        lateral: (2, 3), Å, the two directions along which they repeat.
    """
    from scipy.spatial import QhullError, Voronoi

    count = len(positions)
    points = _with_images(positions, lateral)
    try:
        cells = Voronoi(points)
    except QhullError:  # all in one plane: nothing is enclosed
        return np.full(count, OPEN)
    angles: list[list[float]] = [[] for _ in range(count)]
    for pair, corners in zip(cells.ridge_points, cells.ridge_vertices, strict=True):
        for atom in pair[pair < count]:
            seen = cells.vertices[corners] - points[atom]
            angles[atom].append(np.inf if -1 in corners else _solid_angle(seen))
    return np.array([_weighted(np.array(faces)) for faces in angles])


def _with_images(
    positions: NDArray[np.float64], lateral: NDArray[np.float64]
) -> NDArray[np.float64]:
    most = np.ceil(_REACH / heights(lateral)).astype(int)
    steps = np.array(list(product(*(range(-n, n + 1) for n in most))))
    steps = steps[steps.any(axis=1)]
    images = (positions[None] + (steps @ lateral)[:, None]).reshape(-1, 3)
    low, high = positions.min(0) - _REACH, positions.max(0) + _REACH
    near = ((images > low) & (images < high)).all(axis=1)
    return np.concatenate([positions, images[near]])


def _weighted(angles: NDArray[np.float64]) -> float:
    if not len(angles) or not np.isfinite(angles).all() or angles.max() <= 0:
        return OPEN
    return float(angles.sum() / angles.max())


def _solid_angle(corners: NDArray[np.float64]) -> float:
    """Of a flat convex face with corners (K, 3) around the origin: a fan of triangles.

    tan(Ω/2) = |a·(b×c)| / (1 + a·b + b·c + c·a) for unit vectors (van Oosterom and Strackee,
    IEEE Trans. Biomed. Eng. 30, 125, 1983).
    """
    unit = corners / np.linalg.norm(corners, axis=1, keepdims=True)
    a, b, c = unit[0], unit[1:-1], unit[2:]
    above = np.abs(np.cross(b, c) @ a)
    below = 1.0 + b @ a + (b * c).sum(1) + c @ a
    return float(2.0 * np.arctan2(above, below).sum())
