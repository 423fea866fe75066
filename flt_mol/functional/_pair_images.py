"""Which periodic images of which atoms can be in pairs, for all systems of a batch at once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flt_mol.functional._pair_lattices import Floats, Integers, Lattices

# A system longer than so many cells along an axis has its atoms moved into one cell.
_LONG = 1.2
# How much further than the cutoff images are laid out, relatively, so that rounding loses none.
_MARGIN = 1e-6
# Up to so many cutoffs from the origin, for right angles, float64 keeps within that margin, unless
# angles are this small; and up to so many from end to end, float32 tells most pairs from others.
_FARTHEST, _NARROWEST, _WIDEST = 1e8, 1e-4, 200
_CUTOFFS = 1e-15, 1e15


class Images(NamedTuple):
    """Atoms of B systems next to each other, and how many images each has.

    Attributes:
        places: (3, N), atoms about the middle of their system.
        moved: (3, N) int64, by how many cells each was moved back.
        first: (3, N) int64, the lowest shift of each atom along each axis.
        counts: (3, N) int64, how many shifts it has along each axis, 0 among them.
        per_system: (B,) int64, images of all atoms, those without a shift included.
        sound: (B,) bool, whether numbers are close enough to each other to trust the rest.
    """

    places: Floats
    moved: Integers
    first: Integers
    counts: Integers
    per_system: Integers
    sound: NDArray[np.bool_]

    def cut(self, systems: slice, atoms: slice) -> Images:
        """The images of systems that follow each other, and of their atoms."""
        places, moved, first, counts, per_system, sound = self
        parts = places[:, atoms], moved[:, atoms], first[:, atoms], counts[:, atoms]
        return Images(*parts, per_system[systems], sound[systems])


def images_of(points: Floats, lattices: Lattices, ptr: Integers, cutoff: float) -> Images:
    """Images that lie, along each axis, within the cutoff of the span of a system's atoms.

    Args:
        points: (N, 3).
        lattices: of B systems.
        ptr: (B + 1,), first row of each system; none is empty.
        cutoff: in the unit of the points.
    """
    starts, sizes = ptr[:-1], np.diff(ptr)
    places = points.T.copy()
    low, high = _ends(places, starts)
    sound = _near_enough(low, high, lattices, cutoff)
    repeats = lattices.periodic & sound[:, None]
    places -= (low / 2 + high / 2).repeat(sizes, axis=1)
    duals = np.where(repeats[..., None], lattices.duals, 0.0)
    duals = duals.transpose(1, 2, 0).repeat(sizes, axis=2)
    along = np.einsum("acn,cn->an", duals, places)
    low, high = _ends(along, starts)
    cells = np.rint(along) * (high - low > _LONG).repeat(sizes, axis=1)
    if cells.any():
        vectors = lattices.cells.transpose(1, 2, 0).repeat(sizes, axis=2)
        places -= np.einsum("acn,an->cn", vectors, cells)
        along = np.einsum("acn,cn->an", duals, places)
        low, high = _ends(along, starts)
    reach = np.zeros_like(lattices.heights)
    np.divide(cutoff * (1 + _MARGIN), lattices.heights, out=reach, where=repeats)
    first = np.ceil((low - reach.T).repeat(sizes, axis=1) - along).astype(np.int64)
    last = np.floor((high + reach.T).repeat(sizes, axis=1) - along).astype(np.int64)
    counts = last - first + 1
    per_system = np.add.reduceat(counts.prod(axis=0), starts)
    lengths = np.abs(lattices.cells).sum(axis=-1).T
    norms = np.einsum("cn,cn->n", places, places) ** 0.5
    farthest = np.maximum(-first, last) * lengths.repeat(sizes, axis=1)
    width = np.maximum.reduceat(2 * norms + farthest.sum(axis=0), starts)
    sound &= width <= _WIDEST * cutoff
    return Images(places, cells.astype(np.int64), first, counts, per_system, sound)


def _near_enough(low: Floats, high: Floats, lattices: Lattices, cutoff: float) -> NDArray[np.bool_]:
    """Whether the atoms of each system (B,), between `low` and `high` (3, B), are near enough."""
    if not _CUTOFFS[0] < cutoff < _CUTOFFS[1]:
        return np.zeros(low.shape[1], np.bool_)
    farthest = np.maximum(np.abs(low), np.abs(high)).max(axis=0)
    longest = np.abs(lattices.cells).max(axis=(1, 2))
    near = farthest + longest <= _FARTHEST * cutoff * lattices.openness
    return np.asarray(near & (lattices.openness >= _NARROWEST))


def _ends(values: Floats, starts: Integers) -> tuple[Floats, Floats]:
    """Lowest and highest (3, B) of each system's values (3, N)."""
    return np.minimum.reduceat(values, starts, axis=1), np.maximum.reduceat(values, starts, axis=1)


def laid_out(images: Images) -> tuple[Integers, Integers]:
    """The images themselves, sorted: of which atom (M,), and shifts (3, M) from its place."""
    atom = np.arange(images.counts.shape[1])
    shift = np.zeros((3, 0), np.int64)
    for axis in range(3):
        count, first = images.counts[axis], images.first[axis]
        if axis:
            count, first = count[atom], first[atom]
        if (count == 1).all():
            shift = np.vstack([shift.reshape(axis, len(atom)), first])
            continue
        before = count.cumsum() - count
        new = (first - before).repeat(count)
        new += np.arange(len(new))
        atom = atom.repeat(count)
        shift = np.vstack([shift.reshape(axis, len(count)).repeat(count, axis=1), new])
    return atom, shift
