"""The targets of one record, under the names that were asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping
from difflib import get_close_matches
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flt_mol.data.fields import GRAPH_FIELDS, USED_FIELDS, Fields, shown
from flt_mol.data.options import ReadOptions
from flt_mol.targets import LARGEST_ENERGY

__all__ = [
    "OWN_NAMES",
    "nearest_fields",
    "no_targets",
    "note_numbers",
    "read_energy",
    "read_targets",
]

OWN_NAMES = ("y_relaxed", "y_init", "pos_relaxed")  # OC20's own names
_NO_ENERGIES = (USED_FIELDS | GRAPH_FIELDS) - {"y_relaxed", "y_init"}
_LISTED = 8
_ASE_ENERGY = " (ASE hands to a calculator what .extxyz holds as energy=…)"


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
        if _of_calculator(read.record, name):
            read.fail(
                name,
                "is what a calculator found, as a rule a total energy, and is taken for a target "
                f"only under the name 'calculator'{_ASE_ENERGY if name == 'energy' else ''}",
            )
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
    """A finite energy up to `LARGEST_ENERGY`, eV; None where it is missing."""
    value = read.record.get(field)
    if value is None:
        return None
    array = None if isinstance(value, str) else read.array(field)
    if array is None or array.size != 1 or array.dtype.kind == "b":
        read.fail(field, f"is {shown(value)}, expected one number in eV")
    energy = float(array.item())
    if not math.isfinite(energy):
        read.fail(field, f"is {energy}, expected a finite energy in eV")
    if abs(energy) > LARGEST_ENERGY:
        read.fail(field, f"is {energy} eV, which is no energy of a structure")
    return energy


def nearest_fields(read: Fields, name: str) -> str:
    """Names of the fields that hold something, those most like `name` first."""
    stored = [field for field in read.record if field not in GRAPH_FIELDS]
    stored = [field for field in stored if not _of_calculator(read.record, field)]
    stored = [field for field in stored if not _is_empty(read, field)]
    return ", ".join(get_close_matches(name, stored, n=len(stored) or 1, cutoff=0)) or "none"


def _is_empty(read: Fields, field: str) -> bool:
    describe = getattr(read.record, "describe", None)
    return bool(describe(field)[0] == "NoneType" if describe else read.record[field] is None)


def _of_calculator(record: Mapping[str, Any], name: str) -> bool:
    """Whether a field is there only because a calculator found it."""
    found = getattr(record, "of_calculator", None)
    return bool(found is not None and found(name))


def note_numbers(record: Mapping[str, Any], numbers: MutableMapping[str, bool]) -> None:
    """Add the fields of a record that hold one number: name → whether it is a float.

    Example:
        >>> numbers = {}
        >>> note_numbers({"sid": 3, "E_ads": -1.5, "bulk": "Pt", "step": 2}, numbers)
        >>> numbers
        {'E_ads': True, 'step': False}
    """
    read = Fields(record, "", "")
    for name in record:
        if not isinstance(name, str) or name in _NO_ENERGIES or name in numbers:
            continue
        if _of_calculator(record, name):  # "calculator" is there beside it
            continue
        try:
            value = None if isinstance(record[name], str) else read.array(name)
        except ValueError:  # no numbers, or nothing that can be read
            continue
        if value is not None and value.size == 1 and value.dtype.kind != "b":
            numbers[name] = value.dtype.kind == "f"


def no_targets(numbers: Mapping[str, bool], options: ReadOptions, relaxations: bool) -> str:
    """What to say of records that lack their target.

    Args:
        numbers: what they hold instead, of :func:`note_numbers`.
        options: with the name of the target.
        relaxations: whether they are frames of files that may be trajectories.
    """
    text = (
        f"this split has no targets (no record holds {options.energy}); train and evaluate need "
        "them, predict does not"
    )
    near: list[str] = []
    for floats in (True, False):  # energies are rarely whole numbers
        names = [name for name, is_float in numbers.items() if is_float == floats]
        names = [name for name in names if name not in ("calculator", options.energy_initial)]
        near += get_close_matches(options.energy, names, n=len(names) or 1, cutoff=0)
    if near:
        shown_names = ", ".join(near[:_LISTED]) + (", …" if len(near) > _LISTED else "")
        text += f"; stored are: {shown_names}: name it with energy=…, --energy or data.energy"
    if "calculator" in numbers:
        text += '; energy="calculator" takes the total energies that a calculator found'
        if relaxations:
            text += (
                "; of relaxations, a file each, from_trajectories(…, references=…) and flt-mol "
                "data convert --references make records with adsorption energies"
            )
    initial = options.energy_initial
    if initial in numbers and not near:
        text += f"; stored is {initial}, the energy before relaxation: name it with --energy"
    return text if near or numbers else f"{text}; no other number is stored"
