"""Rows of ASE's database as records of the OC20 schema, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from flt_mol.data.aselmdb.json_values import StoredJson, decode_json
from flt_mol.data.fields import GRAPH_FIELDS, Fields, read_sid, shown
from flt_mol.data.targets import read_energy

__all__ = ["NAMES", "PROPERTIES", "Broken", "Row", "disagreement", "row_of"]

# What a calculator may have found; those with one number per atom have no place in a record.
PROPERTIES = ("energy", "free_energy", "forces", "stress", "dipole", "magmom")
_COLUMNS = {"pos": "positions", "atomic_numbers": "numbers", "cell": "cell", "tags": "tags"}
NAMES = {column: field for field, column in _COLUMNS.items()}  # column → OC20's name
_HOLDING = ("FixAtoms", "FixCartesian", "FixScaled")


class Row(Mapping[str, Any]):
    """The fields of one row by OC20's names; a field is decoded each time it is asked for.

    What both `data` and `key_value_pairs` hold is taken from `data`, as from ASE atoms.

    Args:
        content: the row, of :func:`flt_mol.data.aselmdb.json_values.load`.
        where: what to call it in errors, e.g. ``data.aselmdb, key 3``.

    Raises:
        ValueError: on access, a value that cannot be decoded, naming `where` and the field.
    """

    def __init__(self, content: Mapping[str, Any], where: str) -> None:
        self.where = where
        self._row = content
        self._fields: dict[str, Any] = {
            name: content[name] for name in PROPERTIES if name in content
        }
        self._pairs: dict[str, Any] = {}  # in `key_value_pairs`, where `data` has that name too
        self._filled: dict[str, str] = {}
        self._found = set(self._fields)
        for part in ("key_value_pairs", "data"):
            value = content.get(part)
            if value is None:
                continue
            if not isinstance(value, dict):
                kind = type(value).__name__
                raise ValueError(f"{where}: {part} of the row is a {kind}, expected names")
            if part == "data":
                value = {name: inner for name, inner in value.items() if inner is not None}
                pairs = content.get("key_value_pairs") or {}
                self._pairs = {name: pairs[name] for name in pairs if name in value}
            self._fields |= value
            self._found -= value.keys()
        if "energy" in content:
            self._fields["calculator"] = content["energy"]
        self._fields |= {
            name: content[column] for name, column in _COLUMNS.items() if column in content
        }

    def __getitem__(self, name: str) -> Any:
        made = self._MADE.get(name)
        if made is None and name not in self._fields:
            raise KeyError(name)
        try:
            return made(self) if made else decode_json(self._fields[name])
        except (ValueError, TypeError, LookupError, OverflowError) as error:
            reason = str(error) or type(error).__name__
            raise ValueError(f"{self.where}: field {name} {reason}") from error

    def __iter__(self) -> Iterator[str]:
        yield from (name for name in self._fields if name not in self._MADE)
        yield from self._MADE

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def describe(self, name: str) -> tuple[str, tuple[int, ...] | None]:
        """Type and shape of a field; the shape of plain values is None.

        Arrays are not decoded for it. What cannot be decoded is "unreadable", of shape (0, 0).
        """
        value = None if name in self._MADE else self._fields[name]
        if isinstance(value, StoredJson) and value.shape is not None:
            return "array", value.shape
        try:
            found = self[name]
        except ValueError:
            return "unreadable", (0, 0)
        if isinstance(found, np.ndarray) or name in PROPERTIES:
            return "array", np.shape(found)
        return type(found).__name__, None

    def fill(self, name: str, value: Any, other: str | None = None) -> None:
        """Give a field that is missing; `other` is the field that the value is of."""
        if self._fields.get(name) is None:
            self._fields[name] = value
            self._filled[name] = name if other is None else other

    def conflict(self, name: str) -> str | None:
        """What to say of a field of which the row holds two values, None where it does not."""
        name = self._filled.get(name, name)
        if self._pairs.get(name) is None or name in self._MADE or name in _COLUMNS:
            return None
        return disagreement(name, self[name], decode_json(self._pairs[name]))

    def of_calculator(self, name: str) -> bool:
        """Whether a field is what a calculator found, and stored by nobody else."""
        return name in self._found and name not in self._filled

    def _natoms(self) -> int:
        return int(np.size(decode_json(self._row.get("numbers", []))))

    def _pbc(self) -> NDArray[Any]:
        """A row without pbc is not periodic: ASE leaves out what is False."""
        return np.asarray(decode_json(self._row.get("pbc", [False] * 3)))

    def _fixed(self) -> NDArray[np.bool_]:
        """(N,), the atoms that constraints hold in all three directions."""
        held = np.zeros((self._natoms(), 3), dtype=bool)
        constraints = decode_json(self._row.get("constraints") or [])
        if not isinstance(constraints, list):
            raise ValueError(f"(constraints) is a {type(constraints).__name__}, expected a list")
        for constraint in constraints:
            if constraint["name"] in _HOLDING:
                _hold(held, constraint["name"], constraint["kwargs"])
        return np.asarray(held.all(axis=1))

    # Fields that are worked out from the row's columns.
    _MADE: ClassVar[dict[str, Callable[[Row], Any]]] = {
        "pbc": _pbc,
        "fixed": _fixed,
        "natoms": _natoms,
    }


def disagreement(name: str, of_data: Any, of_pairs: Any) -> str | None:
    """What to say of two values of a row's field, None where they are equal."""
    try:
        equal = np.array_equal(np.asarray(of_data), np.asarray(of_pairs))
    except ValueError:  # ragged lists
        equal = False
    if equal:
        return None
    return (
        f"of data is {shown(of_data)}, {name} of key_value_pairs is {shown(of_pairs)}: the row "
        "holds two values; keep one"
    )


class Broken(Mapping[str, Any]):
    """In place of a row that cannot be read: whoever asks for a field is told why."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __getitem__(self, name: str) -> Any:
        raise ValueError(self.reason)

    def __iter__(self) -> Iterator[str]:
        raise ValueError(self.reason)

    def __len__(self) -> int:
        return 0

    def fill(self, name: str, value: Any, other: str | None = None) -> None:
        """Nothing is to be had."""


def _hold(held: NDArray[np.bool_], name: str, arguments: Mapping[str, Any]) -> None:
    """Mark the directions in which one constraint holds atoms."""
    indices = np.atleast_1d(np.asarray(arguments["indices" if "indices" in arguments else "a"]))
    if indices.size == 0:
        return
    if indices.dtype.kind == "b" and indices.shape != (len(held),):
        raise ValueError(f"{name} marks {indices.size} atoms of {len(held)}")
    if indices.dtype.kind not in "biu" or indices.ndim != 1:
        raise ValueError(f"{name} holds indices that are no whole numbers")
    if indices.dtype.kind != "b" and not (-len(held) <= indices.min() <= indices.max() < len(held)):
        raise ValueError(f"{name} holds atom {indices.max()} of {len(held)}")
    mask = True if name == "FixAtoms" else np.asarray(arguments.get("mask", (True,) * 3), bool)
    held[indices] |= mask


def row_of(record: Mapping[str, Any], where: str, *, forces: bool = False) -> dict[str, Any]:
    """A record as a row of ASE's database, with everything further in `data`.

    Raises:
        ValueError: a record without atomic numbers or positions, or with a field that does not
            fit its atoms, naming `where` and the field.
    """
    read = Fields(record, where, _shown_sid(record))
    numbers = read.numbers({})
    n = len(numbers)
    row: dict[str, Any] = {"numbers": numbers, "positions": _per_atom_vectors(read, "pos", n)}
    cell, pbc, tags = read.array("cell"), read.array("pbc"), read.per_atom("tags", n)
    if cell is not None:
        read.cell({})
        row["cell"] = np.diag(cell) if cell.shape == (3,) else cell.reshape(3, 3)
    row["pbc"] = _periodic(row.get("cell"), pbc)
    if tags is not None:
        row["tags"] = tags
    row["constraints"] = _constraints(read.fixed(n, {}))
    row |= _results(read, n, forces)
    row |= {"key_value_pairs": {}, "ctime": 0.0, "mtime": 0.0, "user": ""}
    used = {*_COLUMNS, *Row._MADE, *GRAPH_FIELDS, "force", "forces"}
    used |= {"calculator"} if "energy" in row else set()
    row["data"] = {
        name: value
        for name in record
        if name not in used and not name.startswith("_") and (value := record[name]) is not None
    }
    return row


def _shown_sid(record: Mapping[str, Any]) -> int | str:
    return read_sid(record, "record", "?", {})


def _per_atom_vectors(read: Fields, field: str, n: int) -> NDArray[Any]:
    """(n, 3) in the stored type."""
    vectors = read.array(field)
    if vectors is None:
        read.fail(field, f"is missing; fields stored: {', '.join(read.record)}")
    if vectors.shape not in ((n, 3), (1, n, 3)):
        read.fail(field, f"has shape {vectors.shape}, expected ({n}, 3) for {n} atomic numbers")
    return vectors.reshape(n, 3)


def _periodic(cell: NDArray[Any] | None, pbc: NDArray[Any] | None) -> NDArray[np.bool_]:
    """What was stored, else the vectors that are not zero, as for any record without pbc."""
    periodic = np.zeros(3, dtype=bool)
    if pbc is not None:
        periodic[:] = pbc.reshape(-1)
    elif cell is not None:
        periodic[:] = cell.any(axis=1)
    return periodic


def _constraints(fixed: NDArray[Any] | None) -> list[dict[str, Any]]:
    held = [] if fixed is None else np.flatnonzero(fixed).tolist()
    return [{"name": "FixAtoms", "kwargs": {"indices": held}}] if held else []


def _results(read: Fields, n: int, forces: bool) -> dict[str, Any]:
    """What a calculator found, where the record tells it from further fields."""
    row: dict[str, Any] = {}
    if not isinstance(read.record.get("calculator"), str | None):
        row["energy"] = read_energy(read, "calculator")
    for field in ("forces", "force"):
        if forces and "forces" not in row and read.record.get(field) is not None:
            row["forces"] = _per_atom_vectors(read, field, n)
    return {"calculator": "unknown", **row} if row else row
