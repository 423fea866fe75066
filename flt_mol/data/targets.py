"""The targets of one record, under the names that were asked for."""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from difflib import get_close_matches

import numpy as np
from numpy.typing import NDArray

from flt_mol.data.fields import GRAPH_FIELDS, Fields, shown
from flt_mol.data.options import ReadOptions

__all__ = ["OWN_NAMES", "nearest_fields", "read_energy", "read_targets"]

OWN_NAMES = ("y_relaxed", "y_init", "pos_relaxed")  # OC20's own names


def read_targets(
    read: Fields, n: int, options: ReadOptions, notes: MutableMapping[str, str]
) -> tuple[NDArray[np.float64] | None, float | None, float | None]:
    """Relaxed positions (n, 3), Å, and the energies after and before relaxation, eV.

    OC20's names may be missing, and so may be any value that is None. A name that was asked for
    has to be a field of the record. A malformed energy before relaxation is left out, with a
    note, since nothing depends on it.

    Raises:
        ValueError: naming record, sid and field, and the fields that are there.
    """
    if options.ignore_energy:
        return None, None, None
    for name in (options.energy, options.energy_initial, options.positions_relaxed):
        if name not in OWN_NAMES and name not in read.record:
            near = nearest_fields(read, name)
            read.fail(name, f"was asked for, and is not stored; stored are: {near}")
    relaxed = read.vectors(options.positions_relaxed, n)
    energy = read_energy(read, options.energy)
    if energy is None and options.require_energy:
        near = nearest_fields(read, options.energy)
        read.fail(
            options.energy,
            f"is missing: the system has no target; stored are: {near} (the option energy names "
            "the target)",
        )
    try:
        initial = read_energy(read, options.energy_initial)
    except ValueError as error:
        notes["y_init"] = f"{options.energy_initial} left out: {error}"
        initial = None
    return relaxed, energy, initial


def read_energy(read: Fields, field: str) -> float | None:
    """A finite energy, eV; None where it is missing."""
    value = read.record.get(field)
    if value is None:
        return None
    array = None if isinstance(value, str) else read.array(field)
    if array is None or array.size != 1 or array.dtype.kind == "b":
        read.fail(field, f"is {shown(value)}, expected one number in eV")
    energy = float(array.item())
    if not math.isfinite(energy):
        read.fail(field, f"is {energy}, expected a finite energy in eV")
    return energy


def nearest_fields(read: Fields, name: str) -> str:
    """Names of the fields that hold something, those most like `name` first."""
    stored = [field for field in read.record if field not in GRAPH_FIELDS]
    stored = [field for field in stored if not _is_empty(read, field)]
    return ", ".join(get_close_matches(name, stored, n=len(stored) or 1, cutoff=0)) or "none"


def _is_empty(read: Fields, field: str) -> bool:
    describe = getattr(read.record, "describe", None)
    return bool(describe(field)[0] == "NoneType" if describe else read.record[field] is None)
