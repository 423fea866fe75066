"""The fields of one record of the OC20 schema, each read and checked by itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from flt_mol.data.cells import periodicity
from flt_mol.data.graph_counts import refuse_several
from flt_mol.data.slabs.numbered import LAYERS_MEND
from flt_mol.data.tensors import numpy_of

__all__ = ["DROPPED_FIELDS", "GRAPH_FIELDS", "USED_FIELDS", "Fields", "read_sid", "shown"]

GRAPH_FIELDS = frozenset(
    ("edge_index", "cell_offsets", "distances", "neighbors", "edge_attr", "batch", "ptr")
)

# Fields with a place in Structures, and fields of the 6 Å graph or of other tasks.
USED_FIELDS = {"pos", "pos_relaxed", "cell", "pbc", "atomic_numbers", "tags", "fixed", "natoms"}
USED_FIELDS |= {"sid", "y_init", "y_relaxed"}
DROPPED_FIELDS = GRAPH_FIELDS | {"force", "x", "y", "normal", "face", "calculator"}
_INFO_SIZE = 64  # numbers in one further field; larger ones stay in the file
_LARGEST_SID = 1 << 63
_LARGEST = float(np.finfo(np.float32).max)
_TAGS = "0 below the surface, 1 surface, 2 adsorbate"


def read_sid(
    record: Mapping[str, Any], where: str, default: int | str, notes: MutableMapping[str, str]
) -> int | str:
    """The stored sid: int or text, out of a tensor or array of one number if need be."""
    value = record.get("sid")
    if value is None:
        notes["sid"] = "no sid (the key is used)"
        return default
    try:
        value = numpy_of(value) if isinstance(value, Tensor) else value
    except ValueError as error:
        raise ValueError(f"{where}: sid {error}") from error
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    while isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int | str):
        several = "; store one system per record" if isinstance(value, list) else ""
        raise ValueError(
            f"{where}: sid is {shown(value)}, expected a whole number or text{several}"
        )
    if isinstance(value, int) and not -_LARGEST_SID <= value < _LARGEST_SID:
        raise ValueError(f"{where}: sid is a number of {value.bit_length()} bits; store an int64")
    return value


class Fields:
    """Fields of one record, each checked; errors name the record, its sid and the field."""

    def __init__(self, record: Mapping[str, Any], where: str, sid: int | str) -> None:
        self.record = record
        self.where = where
        self.sid = sid

    def fail(self, field: str, message: str) -> NoReturn:
        """Raise ValueError about a field."""
        raise ValueError(f"{self.where}, sid {self.sid}: {field} {message}")

    def array(self, field: str) -> NDArray[Any] | None:
        """The numbers of a field, None where it is missing."""
        value = self.record.get(field)
        if value is None:
            return None
        conflict: Callable[[str], str | None] | None = getattr(self.record, "conflict", None)
        if conflict and (reason := conflict(field)) is not None:
            self.fail(field, reason)
        try:
            array = numpy_of(value) if isinstance(value, Tensor) else np.asarray(value)
        except ValueError as error:
            if isinstance(value, Tensor):
                self.fail(field, str(error))
            self.fail(field, "is a ragged list")
        if array.dtype.kind not in "biuf":
            self.fail(field, f"holds {array.dtype}, expected numbers")
        return array

    def per_atom(self, field: str, n: int | None = None) -> NDArray[Any] | None:
        """A field of one whole number per atom (N,), out of (N, 1), (1, N) too."""
        array = self.array(field)
        if array is None:
            return None
        if array.size != max(array.shape, default=1):
            self.fail(field, f"has shape {array.shape}, expected one number per atom")
        if n is not None and array.size != n:
            self.fail(field, f"has {array.size} numbers for {n} atoms")
        if array.dtype.kind == "f":
            with np.errstate(invalid="ignore"):
                whole = array.astype(np.int64)
            if not np.array_equal(whole, array):
                self.fail(field, "holds numbers that are not whole")
            array = whole
        return array.reshape(-1)

    def vectors(self, field: str, n: int) -> NDArray[np.float64] | None:
        """A field of one finite vector per atom, (N, 3) float64."""
        array = self.array(field)
        if array is None:
            return None
        if array.shape not in ((n, 3), (1, n, 3)):
            self.fail(field, f"has shape {array.shape}, expected ({n}, 3) for {n} atomic numbers")
        with np.errstate(invalid="ignore"):  # a signalling NaN, refused below
            array = array.reshape(n, 3).astype(np.float64)
        for good, reason in (
            (np.isfinite(array), "is not finite"),
            (np.abs(array) <= _LARGEST, "is too large for float32"),
        ):
            if not good.all():
                self.fail(field, f"of atom {int(np.argmin(good.all(1)))} {reason}")
        return array

    def numbers(self, notes: MutableMapping[str, str]) -> NDArray[Any]:
        """Atomic numbers (N,), of a record that is one system and has names for its fields."""
        for name in self.record:
            if not isinstance(name, str):
                raise ValueError(
                    f"{self.where}, sid {self.sid}: {shown(name)} is the name of a field, expected "
                    "text (of several records give a list)"
                )
        numbers = self.per_atom("atomic_numbers")
        if numbers is None:
            fields = ", ".join(self.record) or "none"
            self.fail("atomic_numbers", f"is missing; fields stored: {fields}")
        if not len(numbers):
            self.fail("atomic_numbers", "is empty: the system has no atoms")
        if numbers.min() < 1 or numbers.max() > 118:
            wrong = numbers[(numbers < 1) | (numbers > 118)][0]
            self.fail("atomic_numbers", f"holds {wrong}, expected elements 1 to 118")
        self.check_natoms(len(numbers), notes)
        return numbers.astype(np.int64)

    def check_natoms(self, n: int, notes: MutableMapping[str, str]) -> None:
        """A stored natoms must agree."""
        natoms = self.array("natoms")
        refuse_several(self, n)
        if natoms is None:
            notes["natoms"] = "no natoms (counted)"
            return
        if natoms.size != 1:
            self.fail("natoms", f"is {natoms.tolist()}: store one system per record")
        if natoms.item() != n:
            self.fail("natoms", f"is {natoms.item()}, but there are {n} atomic numbers")

    def positions(self, n: int) -> NDArray[np.float64]:
        """Initial positions (N, 3), Å."""
        positions = self.vectors("pos", n)
        if positions is None:
            self.fail("pos", f"is missing; fields stored: {', '.join(self.record)}")
        return positions

    def cell(
        self, notes: MutableMapping[str, str]
    ) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Cell (3, 3), Å, and pbc (3,)."""
        cell, pbc = self.array("cell"), self.array("pbc")
        if cell is not None and cell.size == 3 and cell.ndim == 1:
            cell = np.diag(cell)
        if cell is not None and (cell.size != 9 or cell.shape[-1] not in (3, 9)):
            self.fail("cell", f"has shape {cell.shape}, expected (3, 3)")
        if pbc is not None and pbc.size not in (1, 3):
            self.fail("pbc", f"has shape {pbc.shape}, expected (3,)")
        if pbc is not None and not np.isin(pbc, (0, 1)).all():
            self.fail("pbc", f"is {pbc.reshape(-1).tolist()}, expected true or false for each axis")
        if cell is not None and not np.isfinite(cell).all():
            self.fail("cell", "is not finite")
        if cell is not None and np.abs(cell.astype(np.float64)).max() > _LARGEST:
            self.fail("cell", "is too large for float32")
        try:
            cell, pbc = periodicity(cell, pbc)
        except ValueError as error:
            self.fail("cell", str(error))
        if not cell.any():
            notes["cell"] = "no cell (taken as not periodic)"
        return cell, pbc

    def tags(self, n: int, notes: MutableMapping[str, str]) -> NDArray[Any] | None:
        """Tags (N,)."""
        tags = self.per_atom("tags", n)
        if tags is None:
            notes["tags"] = f"no tags (taken as 0; set tags: {_TAGS})"
            return None
        if tags.min() < 0 or tags.max() > 2:
            wrong = tags[(tags < 0) | (tags > 2)][0]
            self.fail(
                "tags",
                f"holds {wrong}, expected {_TAGS} (ase.build numbers layers instead: "
                f"{LAYERS_MEND})",
            )
        if not tags.any():
            notes["tags"] = (
                f"all tags are 0, no atom is marked surface or adsorbate (set tags: {_TAGS})"
            )
        return tags.astype(np.int64)  # torch compares no unsigned numbers but bytes

    def fixed(self, n: int, notes: MutableMapping[str, str]) -> NDArray[Any] | None:
        """Whether atoms are held fixed (N,)."""
        fixed = self.per_atom("fixed", n)
        if fixed is None:
            notes["fixed"] = "no field fixed (taken as False)"
            return None
        return np.asarray(fixed != 0)

    def info(self) -> dict[str, Any]:
        """Further values: plain ones, and short lists of numbers."""
        describe: Callable[[str], Any] | None = getattr(self.record, "describe", None)
        info: dict[str, Any] = {}
        for field in self.record:
            if field in USED_FIELDS or field in DROPPED_FIELDS or field.startswith("_"):
                continue
            shape = describe(field)[1] if describe else getattr(self.record[field], "shape", None)
            if shape is not None and (len(shape) > 1 or math.prod(shape) > _INFO_SIZE):
                continue
            value = self._plain(field, self.record[field])
            if value is not None:
                info[field] = value
        return info

    def _plain(self, field: str, value: Any) -> Any:
        """A Python number out of one number, a list out of several; other values as they are."""
        if isinstance(value, Tensor):
            try:
                value = numpy_of(value)
            except ValueError as error:
                self.fail(field, str(error))
        if isinstance(value, np.ndarray | np.generic):
            value = value.tolist()
            if isinstance(value, list) and len(value) == 1:
                return value[0]
        return value


def shown(value: Any) -> str:
    """A value as errors show it, cut short."""
    if isinstance(value, Tensor | np.ndarray):
        return f"of shape {tuple(value.shape)}"
    try:
        text = repr(value)
    except ValueError:  # whole numbers of more than 4300 digits
        return f"a {type(value).__name__} of too many digits"
    return text if len(text) < 60 else text[:57] + "…"
