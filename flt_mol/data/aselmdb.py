"""`.aselmdb` files: rows of ASE's database in an LMDB, as newer sets of the OC20 family come.

Keys are ``1``, ``2``, … in ascii, with gaps where rows were deleted; values are JSON, compressed
by zlib, in which arrays are ``{"__ndarray__": [shape, dtype, flat list]}``. ``nextid`` holds the
next key, ``deleted_ids`` those that are gone. Nothing of ASE is made: other objects stay unread.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flt_mol.data.lmdb import LmdbDataset
from flt_mol.data.schema import Record, Stored

__all__ = ["AseLmdbDataset", "is_row", "merged"]

_LARGEST = 1 << 26  # bytes of one decompressed row; parsed, it takes up to twenty times as many
_COLUMNS = {"pos": "positions", "atomic_numbers": "numbers", "cell": "cell", "tags": "tags"}
_MARKERS = ("__ndarray__", "__complex__", "__ase_objtype__")
_HELD_BY: dict[str, set[type]] = {
    "b": {bool},
    "i": {int},
    "u": {int},
    "f": {float, int},
}  # numbers in JSON, by dtype


class AseLmdbDataset(LmdbDataset):
    """Rows of one `.aselmdb` file as records of the OC20 schema.

    Numbers, positions, cell, pbc and tags are the row's; fixed are the atoms that its constraints
    hold; sid, y_relaxed, y_init, pos_relaxed and whatever else are looked up in the row's `data`,
    then in its `key_value_pairs`; a field of which the two hold different values cannot be read.
    The calculator's energy and forces are there as "calculator" and "forces".
    """

    def _record(self, data: bytes) -> Record:
        row = _load(data)
        if not isinstance(row, dict):
            raise ValueError(f"the row is a {type(row).__name__}, expected a JSON object")
        return _record_of(row)

    def _content(self) -> str:
        return "ASE rows (aselmdb)"

    def _announced(self, about: dict[bytes, bytes | None]) -> int | str | None:
        """Rows that there are by `nextid` and `deleted_ids`."""
        following, deleted = about[b"nextid"], about[b"deleted_ids"]
        if following is None:
            return super()._announced(about)
        try:
            return int(_load(following)) - 1 - len(set(_load(deleted) if deleted else ()))
        except (ValueError, TypeError):
            return "an unreadable number of"


def is_row(data: bytes) -> bool:
    """Whether a stored value is JSON, plain or compressed."""
    try:
        head = zlib.decompressobj().decompress(data, 16) if data[:1] == b"x" else data[:16]
    except zlib.error:
        return False
    return head.lstrip()[:1] == b"{"


def _load(data: bytes) -> Any:
    """JSON with arrays and objects left as :class:`Stored`."""
    try:
        if data[:1] == b"x":
            stream = zlib.decompressobj()
            data = stream.decompress(data, _LARGEST)
            if stream.unconsumed_tail or not stream.eof:
                raise ValueError(f"truncated, or more than {_LARGEST} bytes")
        return json.loads(data.decode(), object_hook=_marked)
    except (zlib.error, ValueError, RecursionError) as error:
        raise ValueError(f"damaged row of {len(data)} bytes ({error})") from error


def _marked(content: dict[str, Any]) -> Any:
    if content.get("__ase_objtype__") == "cell":  # an array under another name
        return content.get("array")
    return _Json(content) if any(marker in content for marker in _MARKERS) else content


class _Json(Stored):
    """An array or object in a JSON row."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content

    def numpy(self) -> NDArray[Any]:
        """The array; sizes and values are checked against what is announced."""
        try:
            shape, name, flat = self.content["__ndarray__"]
            dtype = np.dtype(name)
            kinds = _HELD_BY[dtype.kind]
            good = dtype.itemsize <= 8 and all(type(n) is int and n >= 0 for n in shape)
            if not good or math.prod(shape) != len(flat) or not set(map(type, flat)) <= kinds:
                raise ValueError(f"is an array of {name} {shape} with {len(flat)} values")
            with np.errstate(over="ignore"):  # beyond float32 is inf, refused by whoever uses it
                return np.array(flat, dtype).reshape(shape)
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError("is neither an array of numbers nor a plain value") from error


class _Conflict(Stored):
    """In place of a field of which a row holds two values."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def numpy(self) -> NDArray[Any]:
        """Refuse."""
        of_data, of_pairs = self.values
        raise ValueError(
            f"of data is {of_data!r:.40}, of key_value_pairs {of_pairs!r:.40}: the row holds two "
            "values; keep one"
        )


def merged(pairs: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """The further fields of a row: those of `data`, then those of `key_value_pairs`."""
    if not isinstance(pairs, Mapping) or not isinstance(data, Mapping):
        raise ValueError("data or key_value_pairs of the row are not names with values")
    fields = {**pairs, **{name: value for name, value in data.items() if value is not None}}
    for name in pairs.keys() & fields.keys():
        both = fields[name], pairs[name]
        if all(isinstance(v, str | int | float) for v in both) and both[0] != both[1]:
            fields[name] = _Conflict(*both)
    return fields


def _record_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row by OC20's names."""
    fields = merged(row.get("key_value_pairs") or {}, row.get("data") or {})
    fields |= {name: row[column] for name, column in _COLUMNS.items() if column in row}
    fields["pbc"] = row.get("pbc", [False] * 3)  # ASE leaves out what is False
    if "forces" in row:
        fields["forces"] = row["forces"]
    if "energy" in row:
        fields["calculator"] = row["energy"]
    numbers = fields.get("atomic_numbers")
    if numbers is not None:
        n = numbers.numpy().size if isinstance(numbers, Stored) else np.size(numbers)
        fields["natoms"] = n
        fields["fixed"] = _fixed(row.get("constraints") or [], n)
    return fields


def _fixed(constraints: Any, n: int) -> NDArray[np.bool_]:
    """(n,), the atoms that constraints hold in all three directions."""
    held = np.zeros((n, 3), dtype=bool)
    try:
        if isinstance(constraints, str):
            constraints = json.loads(constraints, object_hook=_marked)
        for constraint in constraints:
            name, arguments = constraint["name"], constraint["kwargs"]
            if name in ("FixAtoms", "FixCartesian", "FixScaled"):
                found = arguments["indices" if "indices" in arguments else "a"]
                found = found.numpy() if isinstance(found, Stored) else np.asarray(found)
                rows = np.atleast_1d(found)
                mask = True if name == "FixAtoms" else arguments.get("mask", True)
                mask = mask.numpy() if isinstance(mask, Stored) else np.asarray(mask)
                if rows.size:
                    held[rows] |= mask.astype(bool)
    except (TypeError, KeyError, IndexError, ValueError, RecursionError) as error:
        raise ValueError(f"fixed: its constraints cannot be read ({error})") from error
    return np.asarray(held.all(axis=1))
