"""One record on its way to another file: what of it goes there, and whether it arrived."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from flt_mol.data.fields import Fields
from flt_mol.data.options import ReadOptions
from flt_mol.structures import Structures

__all__ = ["Prepared", "difference", "left_out"]

_SCHEMA = {"pos", "cell", "pbc", "atomic_numbers", "tags", "fixed", "natoms", "sid"}
_SCHEMA |= {"calculator"}  # another name of "energy"


class Prepared(Mapping[str, Any]):
    """A record with its sid, targets and forces under OC20's names; all else is as stored.

    Fields are decoded when they are asked for, as those of the record itself.

    Args:
        stored: the record.
        structures: the same system as the data set gives it (B = 1).
        options: under which names the record stores its targets, and whether they are read.
    """

    def __init__(
        self, stored: Mapping[str, Any], structures: Structures, options: ReadOptions
    ) -> None:
        self.stored = stored
        energy, initial = structures.energy, structures.energy_initial
        self._own: dict[str, Any] = {
            "sid": structures.sid[0],
            "y_relaxed": None if energy is None else energy.item(),
            "y_init": None if initial is None else initial.item(),
        }
        if initial is None and not options.ignore_energy:
            # a malformed one, which is passed on together with the note about it
            self._own["y_init"] = stored.get(options.energy_initial)
        self._names = {}
        if structures.positions_relaxed is None:
            self._own["pos_relaxed"] = None
        elif options.positions_relaxed != "pos_relaxed":
            self._names["pos_relaxed"] = options.positions_relaxed
        if "forces" in stored and "force" not in stored:
            self._names["force"] = "forces"  # as ASE calls them

    def __getitem__(self, name: str) -> Any:
        if name in self._own:
            return self._own[name]
        return self.stored[self._names.get(name, name)]

    def __iter__(self) -> Iterator[str]:
        yield from dict.fromkeys([*self._own, *self._names, *self.stored])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def describe(self, name: str) -> tuple[str, tuple[int, ...] | None]:
        """Type and shape of a field, where the record knows them without decoding it."""
        describe = getattr(self.stored, "describe", None)
        if describe is not None and name not in self._own:
            found: tuple[str, tuple[int, ...] | None] = describe(self._names.get(name, name))
            return found
        value = self[name]
        return type(value).__name__, np.shape(value) or None


def left_out(
    given: Prepared, structures: Structures, options: ReadOptions, forces: bool
) -> set[str]:
    """Names of stored fields that no place is kept for: the graph, large arrays, forces."""
    kept = _SCHEMA | set(structures.info)
    if not options.ignore_energy:
        kept |= {options.energy, options.energy_initial, options.positions_relaxed}
    if forces:
        kept |= {"force"} if "force" in given.stored else {"forces"}
    further = (name for name in given.stored if name not in kept and not name.startswith("_"))
    return {name for name in further if not _is_none(given.stored, name)}


def _is_none(record: Mapping[str, Any], name: str) -> bool:
    describe = getattr(record, "describe", None)
    return bool(describe(name)[0] == "NoneType") if describe else record[name] is None


def difference(
    given: Fields, expected: Structures, stored: Fields, found: Structures, exact: Mapping[str, str]
) -> str | None:
    """The first field in which a converted system differs from its source, None if in none.

    Args:
        given: the source's record, prepared.
        expected: the source's system.
        stored: the output's record.
        found: the output's system.
        exact: fields of numbers that must agree in the records, too, with their float type; by
            their name in the source, that in the output.
    """
    for field in fields(Structures):
        a, b = getattr(expected, field.name), getattr(found, field.name)
        if not (_same_tensor(a, b) if isinstance(a, Tensor) else _same_values(a, b)):
            return field.name
    for name, stored_name in exact.items():
        a, b = given.array(name), stored.array(stored_name)
        if name == "cell":
            a, b = _whole_cell(a), _whole_cell(b)
        if not _same_numbers(a, b):
            return name
    return None


def _whole_cell(cell: NDArray[Any] | None) -> NDArray[Any] | None:
    """The matrix of a cell stored as the three numbers of its diagonal; others as they are."""
    return np.diag(cell) if cell is not None and cell.shape == (3,) else cell


def _same_tensor(a: Tensor, b: Any) -> bool:
    """Whether two tensors agree in type, shape and every bit."""
    if not isinstance(b, Tensor) or a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bool(a.numpy().tobytes() == b.numpy().tobytes())


def _same_values(a: Any, b: Any) -> bool:
    """Whether plain values agree, and in their types, which `repr` tells apart."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(repr(a[name]) == repr(b[name]) for name in a)
    return repr(a) == repr(b)


def _same_numbers(a: NDArray[Any] | None, b: NDArray[Any] | None) -> bool:
    """Whether stored numbers agree in every bit; shapes may differ by axes of length one."""
    if a is None or b is None or a.size != b.size:
        return a is b
    widths = [4 if x.dtype.kind == "f" and x.dtype.itemsize <= 4 else 8 for x in (a, b)]
    if widths[0] != widths[1]:
        return False
    return a.astype(np.float64).tobytes() == b.astype(np.float64).tobytes()
