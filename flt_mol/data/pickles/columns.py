"""Records as they come out of their pickles → columns, many at once; the fast way past `Fields`."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flt_mol.data.columns import Columns
from flt_mol.data.fields import DROPPED_FIELDS, USED_FIELDS, Fields, read_sid
from flt_mol.data.graph_counts import refuse_several
from flt_mol.data.options import ReadOptions
from flt_mol.data.pickles.numbers import UnusualError, stored_array, stored_numbers
from flt_mol.data.pickles.unpickling import Record
from flt_mol.data.pickles.values import decode
from flt_mol.data.targets import OWN_NAMES

__all__ = ["to_columns"]

_NOT_IN_INFO = frozenset(USED_FIELDS | DROPPED_FIELDS)


def to_columns(
    records: Sequence[Mapping[str, Any]],
    options: ReadOptions,
    *,
    known: Collection[str],
    default_sid: Callable[[int], int | str],
) -> Columns:
    """The fields that :class:`~flt_mol.structures.Structures` has a place for, of many records.

    Values are checked by :meth:`Columns.structures`; here it is seen to that they are numbers of
    the right count. Nothing of the result depends on the memory that the records lie in.

    Args:
        records: fields by name, as :func:`flt_mol.data.pickles.unpickling.raw_fields` gives them.
        options: which targets are read.
        known: kinds of notes that have been given already; what would lead to others is not taken.
        default_sid: the sid of the i-th record, where it has none.

    Raises:
        Exception: of any kind, where a record is out of the ordinary; what is wrong with it,
            :func:`flt_mol.data.oc20.to_structures` says.
    """
    numbers = _column(records, "atomic_numbers", _per_atom)
    if numbers is None:
        raise UnusualError
    values, natoms = numbers
    _compare_natoms(records, natoms, known)
    _need_single(records, natoms)
    energy = initial = relaxed = None
    if not options.ignore_energy:
        _need_names(records, options)
        energy = _energies(records, options.energy)
        initial = _energies(records, options.energy_initial)
        relaxed = _vectors(records, options.positions_relaxed, natoms)
        if energy is None and options.require_energy:
            raise UnusualError
    positions, cell = _vectors(records, "pos", natoms), _cells(records)
    if positions is None or cell is None:
        raise UnusualError
    return Columns(
        sid=tuple(_sid(record, known, default_sid, i) for i, record in enumerate(records)),
        natoms=natoms,
        atomic_numbers=values,
        positions=positions,
        tags=_whole(records, "tags", natoms),
        fixed=_whole(records, "fixed", natoms),
        cell=cell,
        pbc=_pbc(records),
        energy=energy,
        energy_initial=initial,
        positions_relaxed=relaxed,
        info=_info(records),
    )


def _need_names(records: Sequence[Mapping[str, Any]], options: ReadOptions) -> None:
    """Names of targets that were asked for have to be fields, as in `targets.read_targets`."""
    for name in (options.energy, options.energy_initial, options.positions_relaxed):
        if name not in OWN_NAMES and not all(name in record for record in records):
            raise UnusualError


# Size of a stored value, or an error where its shape is not as wanted.
Size = Callable[[tuple[int, ...]], int]


def _per_atom(shape: tuple[int, ...]) -> int:
    size = math.prod(shape)
    if size != max(shape, default=1):
        raise UnusualError
    return size


def _per_vector(shape: tuple[int, ...]) -> int:
    if len(shape) not in (2, 3) or shape[-1] != 3 or (len(shape) == 3 and shape[0] != 1):
        raise UnusualError
    return shape[-2]


def _nine(shape: tuple[int, ...]) -> int:
    if math.prod(shape) != 9 or shape[-1] not in (3, 9):
        raise UnusualError
    return 9


def _three(shape: tuple[int, ...]) -> int:
    if math.prod(shape) != 3:
        raise UnusualError
    return 3


def _column(
    records: Sequence[Mapping[str, Any]], field: str, size: Size
) -> tuple[NDArray[Any], NDArray[np.int64]] | None:
    """A field's numbers, one record after the other, and its size in each; None if none has it."""
    values = [record.get(field) for record in records]
    if all(value is None for value in values):
        return None
    found = [stored_numbers(value) for value in values]
    sizes = np.array([size(shape) for _, shape, _ in found], dtype=np.int64)
    first = found[0][0]
    if all(dtype == first for dtype, _, _ in found):
        return np.frombuffer(b"".join([data for _, _, data in found]), dtype=first), sizes
    parts = [np.frombuffer(data, dtype=dtype) for dtype, _, data in found]
    return np.concatenate(parts), sizes


def _whole(
    records: Sequence[Mapping[str, Any]], field: str, natoms: NDArray[np.int64]
) -> NDArray[Any] | None:
    """A number per atom (N,)."""
    return _fitting(_column(records, field, _per_atom), natoms)


def _vectors(
    records: Sequence[Mapping[str, Any]], field: str, natoms: NDArray[np.int64]
) -> NDArray[Any] | None:
    """A vector per atom (N, 3)."""
    values = _fitting(_column(records, field, _per_vector), natoms)
    return None if values is None else values.reshape(-1, 3)


def _fitting(
    column: tuple[NDArray[Any], NDArray[np.int64]] | None, natoms: NDArray[np.int64]
) -> NDArray[Any] | None:
    if column is None:
        return None
    values, sizes = column
    if not np.array_equal(sizes, natoms):
        raise UnusualError
    return values


def _cells(records: Sequence[Mapping[str, Any]]) -> NDArray[Any]:
    """(B, 3, 3); zeros where none of the records has a cell."""
    column = _column(records, "cell", _nine)
    return np.zeros((len(records), 3, 3)) if column is None else column[0].reshape(-1, 3, 3)


def _pbc(records: Sequence[Mapping[str, Any]]) -> NDArray[np.bool_] | None:
    column = _column(records, "pbc", _three)
    if column is None:
        return None
    if not np.isin(column[0], (0, 1)).all():
        raise UnusualError
    return column[0].reshape(-1, 3).astype(np.bool_)


def _compare_natoms(
    records: Sequence[Mapping[str, Any]], natoms: NDArray[np.int64], known: Collection[str]
) -> None:
    """A stored natoms must agree."""
    for record, n in zip(records, natoms.tolist(), strict=True):
        stored = record.get("natoms")
        if stored is None:
            if "natoms" not in known:
                raise UnusualError
        elif type(stored) is not int:
            stored = stored_array(stored).item()
        if stored is not None and stored != n:
            raise UnusualError


def _need_single(records: Sequence[Mapping[str, Any]], natoms: NDArray[np.int64]) -> None:
    """No record holds the graphs of a PyG `Batch`."""
    for record, n in zip(records, natoms.tolist(), strict=True):
        if record.get("ptr") is not None or record.get("batch") is not None:
            refuse_several(Fields(Record(record, ""), "", 0), n)


def _energies(records: Sequence[Mapping[str, Any]], field: str) -> NDArray[np.float64] | None:
    """One number per record, eV."""
    values = [record.get(field) for record in records]
    if all(value is None for value in values):
        return None
    return np.array([v if type(v) is float else _energy(v) for v in values], dtype=np.float64)


def _energy(value: Any) -> float:
    array = stored_array(value)
    if isinstance(value, str) or array.dtype.kind == "b":
        raise UnusualError
    return float(array.item())


def _sid(
    record: Mapping[str, Any],
    known: Collection[str],
    default_sid: Callable[[int], int | str],
    index: int,
) -> int | str:
    value = record.get("sid")
    if type(value) is int:
        return value
    if value is None:
        if "sid" not in known:
            raise UnusualError
        return default_sid(index)
    return read_sid({"sid": decode(value)}, "", 0, {})


def _info(records: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Any, ...]]:
    """Further plain values and short lists: a tuple with an entry for each record, by name."""
    each: list[dict[str, Any]] = []
    for record in records:
        further = {name: record[name] for name in record if name not in _NOT_IN_INFO}
        each.append(Fields(Record(further, ""), "", 0).info() if further else {})
    names = dict.fromkeys(name for info in each for name in info)
    return {name: tuple(info.get(name) for info in each) for name in names}
