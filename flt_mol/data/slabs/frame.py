"""Where up is: the direction of a slab's vacuum, and heights along it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flt_mol.data.cells import heights as plane_distances

if TYPE_CHECKING:
    from ase import Atoms

__all__ = ["Frame", "slab_frame"]

_VACUUM = 4.0  # Å; atoms of a solid leave no gap as wide, a slab without one is a bulk crystal
_AXES = "abc"


@dataclass(frozen=True, eq=False)
class Frame:
    """A slab in one piece, with its vacuum above.

    Args:
        positions: (N, 3), Å, moved by lattice vectors into one cell without vacuum in between.
        height: (N,), Å, along the normal of the surface.
        cell: (3, 3), Å, rows are the lattice vectors, a stand-in for one that is zero.
        axis: which lattice vector leads out of the surface, 0 to 2.
    """

    positions: NDArray[np.float64]
    height: NDArray[np.float64]
    cell: NDArray[np.float64]
    axis: int

    @property
    def lateral(self) -> NDArray[np.float64]:
        """(2, 3), Å, the lattice vectors along the surface."""
        return np.delete(self.cell, self.axis, axis=0)

    @property
    def slant(self) -> float:
        """Distance of the cell's planes over the length of the vector that leads from one on."""
        normal = np.cross(*self.lateral)
        normal /= np.linalg.norm(normal)
        out = self.cell[self.axis]
        return float(abs(out @ normal) / np.linalg.norm(out))

    def upside_down(self) -> Frame:
        """The same with the other face above."""
        return Frame(self.positions, -self.height, self.cell, self.axis)


def slab_frame(atoms: Atoms, axis: int | None = None) -> Frame:
    """The frame of a slab: its vacuum lies along an open direction, else the widest gap.

    The slab may wrap through the cell's boundary.

    Args:
        atoms: with a cell that is periodic along two directions or three.
        axis: 0, 1 or 2 for the lattice vector that leads out of the surface; None finds it.

    Raises:
        ValueError: no slab: not periodic along the surface, no vacuum, or vacuum along several
            directions.
    """
    cell, periodic = np.asarray(atoms.cell.complete()), np.asarray(atoms.pbc)
    there = np.asarray(atoms.cell).any(axis=1)
    if axis is not None and (type(axis) is bool or axis not in (0, 1, 2)):
        raise ValueError(f"axis is {axis!r}, expected 0, 1 or 2")
    gaps = {k: _gap(atoms, cell, k, bool(periodic[k])) for k in range(3)}
    axis = _vacuum_axis(gaps, periodic & there) if axis is None else axis
    others = [k for k in range(3) if k != axis]
    if not (periodic & there)[others].all():
        raise ValueError(
            "is no slab: along its surface a slab repeats; give cell and pbc, or set tags by "
            "hand with atoms.set_tags"
        )
    return _unwrapped(atoms, cell, axis, gaps[axis][1])


def _vacuum_axis(gaps: dict[int, tuple[float, float]], periodic: NDArray[np.bool_]) -> int:
    if periodic.sum() < 2:
        raise ValueError(
            "is no slab: it repeats along fewer than two directions; give cell and pbc, or set "
            "tags by hand with atoms.set_tags"
        )
    if periodic.sum() == 2:
        return int(np.flatnonzero(~periodic)[0])
    empty = [k for k, (gap, _) in gaps.items() if gap >= _VACUUM]
    if len(empty) != 1:
        found = ", ".join(f"{_AXES[k]} {gap:.1f} Å" for k, (gap, _) in gaps.items())
        raise ValueError(
            f"is no slab: a slab has vacuum, {_VACUUM:g} Å at least, along one lattice vector; "
            f"gaps found: {found}. Name the one that leads out of the surface with axis=0, 1 or "
            "2 (in Python), or set tags by hand with atoms.set_tags"
        )
    return empty[0]


def _gap(atoms: Atoms, cell: NDArray[np.float64], axis: int, periodic: bool) -> tuple[float, float]:
    """Width of the widest gap along an axis, Å, and the fraction of the cell where it ends."""
    fractions = _fractions(atoms, cell)[:, axis]
    if not periodic:
        return np.inf, float(fractions.min())
    places = np.sort(fractions % 1.0)
    gaps = np.diff(places, append=places[0] + 1.0)
    widest = int(gaps.argmax())
    start = float(places[(widest + 1) % len(places)])
    return float(gaps[widest] * plane_distances(cell)[axis]), start


def _fractions(atoms: Atoms, cell: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.linalg.solve(cell.T, atoms.positions.T).T)


def _unwrapped(atoms: Atoms, cell: NDArray[np.float64], axis: int, start: float) -> Frame:
    """Every atom in one cell that begins where the vacuum ends; open directions as they are."""
    fractions = _fractions(atoms, cell)
    origin = np.zeros(3)
    origin[axis] = start
    # What lies at the very start may be there by rounding only.
    steps = np.where(atoms.pbc, np.floor(fractions - origin + 1e-9), 0.0)
    height = (fractions - steps)[:, axis] * plane_distances(cell)[axis]
    return Frame(atoms.positions - steps @ cell, height, cell, axis)
