"""Pairs of small systems: all squared distances, from one matrix product per system.

A product of so few numbers is over before a cell list is laid out, and whatever else there is to
do is done for all systems of a batch in one call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flt_mol.functional._pair_images import Images, laid_out
from flt_mol.functional._pair_lattices import Floats, Found, Integers, Lattices, within

# Squared distances of one product: with more than 2**18 multiplications, BLAS may start threads.
MOST_IMAGES = 50_000
# Squared distances at a time: the 1 MB that they need stays in a core's own cache.
_ROOM = 2**18
# By so many roundings of the largest number involved a squared distance may be off: from positions
# as given, in float64, and as a product, in float32.
_ROUNDINGS = 32, 8
# Where between these shares is true, numpy looks for what is true byte by byte, and slowly.
_SLOW_SHARE = 0.04, 0.1


class _Product(NamedTuple):
    """Factors of |r_i − r_g|² − cutoff² − slack, atoms i by images g of their system.

    Attributes:
        left: (N, 5) float32.
        right: (5, M) float32, the images of the first system, those of the second, and so on.
        columns: (N,) int64, images of each atom's system.
        before: (N,) int64, images of all systems before it.
        stops: (N,) int64, up to where each atom's row goes if all rows follow each other.
        slack: by how much rounding can change a squared distance.
    """

    left: NDArray[np.float32]
    right: NDArray[np.float32]
    columns: Integers
    before: Integers
    stops: Integers
    slack: float


def dense_pairs(
    points: Floats,
    lattices: Lattices,
    ptr: Integers,
    images: Images,
    cutoff: float,
    self_pairs: bool,
) -> Found:
    """All pairs of B systems, sorted by i, then j, then T.

    Args:
        points: (N, 3).
        lattices: of B systems.
        ptr: (B + 1,), first row of each system; none is empty.
        images: of these systems, all sound and with at most `MOST_IMAGES` images each.
        cutoff: in the unit of the points.
        self_pairs: whether every atom also sees itself.
    """
    system = np.arange(len(ptr) - 1).repeat(np.diff(ptr))
    atom, shift = laid_out(images)
    product = _product(points, lattices.cells, system, images, atom, shift, cutoff)
    near, doubtful = _below_zero(product, ptr)
    starts = product.stops - product.columns
    # Shifts between given positions from those between moved ones: T + moved_i − moved_j.
    moves = np.flatnonzero(images.moved.any(axis=1))
    if len(moves):
        shift -= images.moved[:, atom]
    shift = np.ascontiguousarray(shift.T)
    if len(doubtful):
        i = product.stops.searchsorted(doubtful, side="right")
        g = doubtful + (product.before - starts)[i]
        pairs = i, atom[g], shift[g] + images.moved[:, i].T
        near[doubtful] = within(points, lattices.cells[system[i]], pairs, cutoff)
    if not self_pairs:
        near[starts + _own(images) - product.before] = False
    image = _true(near, int(product.stops[-1]))
    partners = image.searchsorted(product.stops)
    partners[1:] -= partners[:-1].copy()
    image += (product.before - starts).repeat(partners)
    index_i, index_j, shifts = _together(len(image))
    index_i[:] = np.arange(len(points)).repeat(partners)
    atom.take(image, out=index_j, mode="clip")
    shift.take(image, axis=0, out=shifts, mode="clip")
    for axis in moves:
        shifts[:, axis] += images.moved[axis].repeat(partners)
    return index_i, index_j, shifts


def _together(count: int) -> Found:
    """Room for i, j and shifts in one piece: small pieces would be given back to the system.

    Then every batch pays anew for the pages that its pairs lie on, as much as for finding them.
    """
    block = np.empty(5 * count, np.int64)
    return block[:count], block[count : 2 * count], block[2 * count :].reshape(count, 3)


def _own(images: Images) -> Integers:
    """Which image (N,) is the atom itself."""
    per_atom, first, counts = images.counts.prod(axis=0), images.first, images.counts
    lower = (first[0] * counts[1] + first[1]) * counts[2] + first[2]
    return np.asarray(per_atom.cumsum() - per_atom - lower)


def _product(
    points: Floats,
    cells: Floats,
    system: Integers,
    images: Images,
    atom: Integers,
    shift: Integers,
    cutoff: float,
) -> _Product:
    """What to multiply, for images of which atom (M,) and with which shift (3, M)."""
    places = images.places
    left, right = np.ones((len(system), 5), np.float32), np.ones((5, len(atom)), np.float32)
    spots = places.take(atom, axis=1)
    vectors, lattice = cells.transpose(1, 2, 0), system[atom]
    for axis in range(3):
        if shift[axis].any():
            spots += vectors[axis].take(lattice, axis=1) * shift[axis]
    right[:3] = spots
    right[4] = np.einsum("cm,cm->m", spots, spots)
    norms = np.einsum("cn,cn->n", places, places)
    slack = _slack(points, cells, images, shift, cutoff, (norms.max(), right[4].max()))
    left[:, :3] = -2.0 * places.T
    left[:, 3] = norms - (cutoff * cutoff + slack)
    columns = images.per_system[system]
    before = (images.per_system.cumsum() - images.per_system)[system]
    return _Product(left, right, columns, before, columns.cumsum(), slack)


def _slack(
    points: Floats,
    cells: Floats,
    images: Images,
    shift: Integers,
    cutoff: float,
    norms: tuple[float, float],
) -> float:
    """By how much rounding can change |r_i − r_g|², in the product or from given positions."""
    most = np.abs(shift).max(axis=1) + 2 * np.abs(images.moved).max(axis=1)
    longest = float(np.abs(cells).max(axis=(0, 2)) @ most)
    given = cutoff * (cutoff + float(np.abs(points).max()) + longest)
    product = cutoff**2 + float(np.sqrt(norms).sum()) ** 2
    double, single = (float(np.finfo(dtype).eps) for dtype in (np.float64, np.float32))
    return _ROUNDINGS[0] * double * given + _ROUNDINGS[1] * single * product


def _below_zero(product: _Product, ptr: Integers) -> tuple[NDArray[np.bool_], Integers]:
    """Which entries, row after row, are below zero, and which of them rounding may have put there.

    What is below zero is followed by what `_true` needs.
    """
    left, right, columns, before, stops, slack = product
    total = int(stops[-1])
    room = np.empty(min(total, _ROOM), np.float32)
    sure = np.empty(len(room), np.bool_)
    near = np.empty(total + total // 8, np.bool_)
    near[total:] = True
    doubtful, done = [], 0
    for blocks in _blocks(ptr, columns):
        used = 0
        for start, stop in blocks:
            first, width = int(before[start]), int(columns[start])
            size = (stop - start) * width
            out = room[used : used + size].reshape(stop - start, width)
            np.matmul(left[start:stop], right[:, first : first + width], out=out)
            used += size
        part = near[done : done + used]
        np.less(room[:used], 0, out=part)
        np.less(room[:used], -2 * slack, out=sure[:used])
        doubtful.append(np.flatnonzero(part != sure[:used]) + done)
        done += used
    return near, np.concatenate(doubtful)


def _true(mask: NDArray[np.bool_], size: int) -> Integers:
    """Where the first `size` entries of a mask are true; an eighth as many follow, all true."""
    count = np.count_nonzero(mask[:size])
    low, high = (share * size for share in _SLOW_SHARE)
    return np.flatnonzero(mask)[:count] if low < count <= high else np.flatnonzero(mask[:size])


def _blocks(ptr: Integers, columns: Integers) -> Iterator[list[tuple[int, int]]]:
    """Rows from and to of products, as many at a time as there is room for."""
    blocks: list[tuple[int, int]] = []
    used, offsets = 0, ptr.tolist()
    for first, last, width in zip(offsets, offsets[1:], columns[ptr[:-1]].tolist(), strict=False):
        step = MOST_IMAGES // width
        for start in range(first, last, step):
            stop = min(start + step, last)
            size = (stop - start) * width
            if used + size > _ROOM:
                yield blocks
                blocks, used = [], 0
            blocks.append((start, stop))
            used += size
    yield blocks
