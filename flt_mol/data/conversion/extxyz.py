"""Frames of extended XYZ with all digits: what ASE reads back from them is what was written.

ASE's own writer prints eight decimals, which is not exact. Here float64 is written with the
shortest digits that give it back, float32 with nine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flt_mol.data.fields import Fields
from flt_mol.structures import Structures

__all__ = ["encode_frame"]

_NEAR = 99.0  # Å: further out, systems are moved to the origin, which takes every digit of float64
_BOOLEANS = {"T", "F", "true", "false", "True", "False", "TRUE", "FALSE"}
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_.:+*/()#-]*")
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_.:+*/()#-]*")
# Names of the format, and those that ASE or our reader take for something else.
_TAKEN = {"lattice", "properties", "pbc", "uid", "virial", "polarization", "dielectric_tensor"}
_TAKEN |= {"unique_id", "calculator", "data", "key_value_pairs", "sid", "y_relaxed", "y_init"}
_RESULTS = {"energy": 1, "free_energy": 1, "magmom": 1, "dipole": 3, "stress": 6}  # and sizes


def encode_frame(record: Mapping[str, Any], structures: Structures, where: str) -> bytes:
    """One system as a frame: the number of atoms, a comment line of values, a line per atom.

    Columns: species, pos, and where they are stored tags, move_mask (False: fixed, as ASE has it)
    and pos_relaxed, Å. Values: Lattice, Å, pbc, sid, y_relaxed and y_init, eV, and `info`.

    Args:
        record: the system in OC20's names; from here come the positions, in their stored precision.
        structures: the same system as the data set gives it; from here comes everything else.
        where: how errors name the system.

    Raises:
        ValueError: a value of `info` that ASE would not read back as it is, naming the field.
    """
    from ase.data import chemical_symbols

    read = Fields(record, where, structures.sid[0])
    numbers = structures.atomic_numbers.tolist()
    columns = [[chemical_symbols[number] for number in numbers]]
    properties = ["species:S:1", "pos:R:3"]
    columns += _vectors(read, "pos", len(numbers))
    if record.get("tags") is not None:
        properties.append("tags:I:1")
        columns.append([str(tag) for tag in structures.tags.tolist()])
    if record.get("fixed") is not None:
        properties.append("move_mask:L:1")
        columns.append(["F" if fixed else "T" for fixed in structures.fixed.tolist()])
    if structures.positions_relaxed is not None:
        properties.append("pos_relaxed:R:3")
        columns += _vectors(read, "pos_relaxed", len(numbers))
    comment = " ".join([*_head(read, structures, ":".join(properties)), *_info(read, structures)])
    rows = map(" ".join, zip(*columns, strict=True))
    return "\n".join([str(len(numbers)), comment, *rows, ""]).encode("ascii")


def _vectors(read: Fields, field: str, atoms: int) -> list[list[str]]:
    """The three columns of a field (N, 3), with as many digits as its type has.

    Nine digits give every float32 back. Where the system is moved to the origin, float64 is what
    is computed with, so that the digits of float64 are needed, of a float32 too.
    """
    stored, values = read.array(field), read.vectors(field, atoms)
    pos = read.vectors("pos", atoms)
    if stored is None or values is None or pos is None:
        read.fail(field, "is missing")
    near = np.abs(pos.mean(0)).max() < _NEAR
    show = "%.9g".__mod__ if stored.dtype == np.float32 and near else repr
    return [[show(value) for value in column] for column in values.T.tolist()]


def _head(read: Fields, structures: Structures, properties: str) -> list[str]:
    """What has a place of its own in the comment line."""
    cell = read.cell({})[0]
    head = [] if _empty(cell) else [f'Lattice="{" ".join(map(repr, cell.reshape(-1).tolist()))}"']
    pbc = " ".join("T" if periodic else "F" for periodic in structures.pbc[0].tolist())
    head += [f"Properties={properties}", f'pbc="{pbc}"']
    head.append(f"sid={_text(structures.sid[0])}")
    for name, energy in (
        ("y_relaxed", structures.energy),
        ("y_init", structures.energy_initial),
    ):
        if energy is not None:
            head.append(f"{name}={energy.item()!r}")
    return head


def _empty(cell: NDArray[np.float64]) -> bool:
    return not (cell.any() or np.signbit(cell).any())


def _info(read: Fields, structures: Structures) -> list[str]:
    """`key=value` of all further values, each in a form that is known to come back, or tried."""
    taken = set(_TAKEN)
    taken |= {"energy_relaxed"} if structures.energy is None else set()
    taken |= {"energy_init"} if structures.energy_initial is None else set()
    pairs = []
    for key, (value,) in structures.info.items():
        if not _KEY.fullmatch(key) or key.lower() in taken:
            read.fail(key, f"cannot have this name in an extxyz file{_MEND}")
        text = _result(key, value) if key in _RESULTS else _exact(value)
        if text is None:
            read.fail(key, f"is a {_kind(value)}, which extxyz does not keep as it is{_MEND}")
        pairs.append(f"{key}={text}")
    return pairs


_MEND = "; convert to .lmdb, which keeps every name and value"


def _kind(value: Any) -> str:
    name = type(value).__name__
    if not isinstance(value, list) or not value:
        return name
    return f"{name} of {' and '.join(sorted({type(item).__name__ for item in value}))}"


def _exact(value: Any) -> str | None:
    """A value as text that gives the same value; None where there is no such text."""
    if type(value) in (bool, float, str) or (type(value) is int and value.bit_length() < 64):
        return _text(value)
    plain = isinstance(value, list) and all(isinstance(v, str | int | float) for v in value)
    text = _text(value) if plain or type(value) is int else None
    return text if text is not None and _comes_back(text, value) else None


def _result(key: str, value: Any) -> str | None:
    """What ASE hands to a calculator, which keeps numbers as float64."""
    size = _RESULTS[key]
    if size == 1:
        return repr(value) if type(value) is float else None
    if not (
        isinstance(value, list) and len(value) == size and all(type(v) is float for v in value)
    ):
        return None
    if key == "stress":  # six numbers, xx yy zz yz xz xy, but nine in the file
        value = [value[i] for i in (0, 5, 4, 5, 1, 3, 4, 3, 2)]
    return f'"{" ".join(map(repr, value))}"'


def _text(value: Any) -> str | None:
    """A value as the comment line holds it; None where there is no form for it."""
    if isinstance(value, bool):
        return "T" if value else "F"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str) and _WORD.fullmatch(value) and not _looks_like_another(value):
        return value
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return None
    text = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"_JSON {text}"'


def _looks_like_another(text: str) -> bool:
    if text in _BOOLEANS:
        return True
    try:
        float(text)
    except ValueError:
        return False
    return True


def _comes_back(text: str, value: Any) -> bool:
    """Whether ASE reads the value back, with the types of all that is in it."""
    from ase.io.extxyz import key_val_str_to_dict

    try:
        back = key_val_str_to_dict(f"key={text}")["key"]
    except Exception:
        return False
    if isinstance(back, np.ndarray | np.generic):
        back = back.tolist()
        back = back[0] if isinstance(back, list) and len(back) == 1 else back
    # repr tells 1 from 1.0 and True, a tuple from a list, -0.0 from 0.0; and nan is like nan
    return repr(back) == repr(value)
