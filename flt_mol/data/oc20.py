"""The OC20 schema: one stored record → :class:`Structures`, checked, with stated defaults."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flt_mol.data.fields import Fields, read_sid
from flt_mol.data.options import ReadOptions
from flt_mol.data.slabs.numbered import tags_are_layers
from flt_mol.data.targets import read_targets
from flt_mol.structures import Structures

__all__ = ["to_structures"]

Positions = NDArray[np.float64]

_FAR = 100.0  # Å: beyond it float32 is coarser than 1e-5 Å


def to_structures(
    record: Mapping[str, Any],
    *,
    where: str,
    default_sid: int | str = 0,
    options: ReadOptions | None = None,
    notes: MutableMapping[str, str] | None = None,
) -> Structures:
    """One record of the OC20 schema as a batch of B = 1.

    Numbers may come as tensors, arrays or lists of any dtype, and in the shapes that differ by
    axes of length one. Used fields: pos and pos_relaxed (N, 3) Å, atomic_numbers, tags, fixed
    (N,), cell (3, 3) Å, pbc (3,), natoms, sid, y_init and y_relaxed eV.

    Defaults: tags 0, fixed False, sid `default_sid`, no targets. Without `pbc`, the system
    repeats along every lattice vector that is not zero; without `cell`, along none. Further plain
    values and lists of up to 64 numbers (bulk_index, ads_index, …) go to `info` as stored; the
    graph, forces and large arrays do not. A system whose centre is more than 100 Å from the
    origin is moved there, since float32 would blur its distances.

    Args:
        record: stored values by stored name.
        where: how errors name the record, e.g. ``data.lmdb, key 3``.
        default_sid: sid where none is stored.
        options: which targets are read, under which names, and whether one is required.
        notes: filled with the defaults taken, kind → text.

    Raises:
        ValueError: a field missing or malformed, an element outside 1 to 118, a number that is
            not finite or too large for float32, counts that disagree, a cell singular along a
            periodic direction; naming `where`, the sid, and the field. A malformed y_init is a
            note instead, since nothing depends on it.

    Example:
        >>> record = {"pos": [[0, 0, 0.0]], "atomic_numbers": [29.0], "sid": 7, "y_relaxed": -1.5}
        >>> to_structures(record, where="example").sid
        (7,)
    """
    notes = {} if notes is None else notes
    options = ReadOptions() if options is None else options
    sid = read_sid(record, where, default_sid, notes)
    read = Fields(record, where, sid)
    numbers = read.numbers(notes)
    n = len(numbers)
    relaxed, energy, energy_initial = read_targets(read, n, options, notes)
    positions, relaxed = _near_origin(read.positions(n), relaxed)
    cell, pbc = read.cell(notes)
    numbered = options.layer_numbers and tags_are_layers(record)
    return Structures.single(
        numbers,
        positions,
        cell=cell,
        pbc=pbc,
        tags=None if numbered else read.tags(n, notes),
        fixed=read.fixed(n, notes),
        sid=sid,
        energy=energy,
        energy_initial=energy_initial,
        positions_relaxed=relaxed,
        info=read.info(),
    )


def _near_origin(
    positions: Positions, relaxed: Positions | None
) -> tuple[Positions, Positions | None]:
    """Both moved to the origin where float32 would blur their distances."""
    centre = positions.mean(0)
    if np.abs(centre).max() <= _FAR:
        return positions, relaxed
    return positions - centre, None if relaxed is None else relaxed - centre
