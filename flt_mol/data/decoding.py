"""The one decoder: stored records of the OC20 schema → a batch of `Structures`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flt_mol.data.schema import (
    GRAPH_FIELDS,
    ReadOptions,
    Record,
    Stored,
    decoded,
    heights,
    may_be_energy,
    to_numpy,
)
from flt_mol.data.tags import tags_are_layers
from flt_mol.structures import Structures

_OWN_NAMES = ("y_relaxed", "y_init", "pos_relaxed")
_NOT_INFO = GRAPH_FIELDS | {"pos", "cell", "pbc", "atomic_numbers", "tags", "fixed", "natoms"}
_NOT_INFO |= {"sid", "force", "forces", "x", "y", "normal", "face", "calculator", *_OWN_NAMES}
_LARGEST = float(np.finfo(np.float32).max)
_LARGEST_ENERGY = 1e9  # eV; squares and sums of these are finite
_SMALLEST_HEIGHT = 0.5  # Å, thinner than any crystal: no two atoms are closer than 0.7 Å
_FAR = 100.0  # Å from the origin; beyond it float32 is coarser than 1e-5 Å
_LARGEST_SID = 1 << 63
_TAGS = (
    "0 below the surface, 1 surface, 2 adsorbate (ase.build numbers layers instead: use tag_slab, "
    "or predict with --tag-slab)"
)
_INFO_SIZE = 64  # numbers in one further field; larger ones stay in the file


def decode(
    records: Sequence[Record],
    options: ReadOptions,
    *,
    where: Callable[[int], str],
    default_sid: Callable[[int], int | str] = lambda i: i,
    notes: dict[str, str] | None = None,
) -> Structures:
    """Records as one batch; one by one only to name the record that is invalid.

    Numbers may come as tensors, arrays or lists of any dtype, and in shapes that differ by axes of
    length one. Used fields: pos and pos_relaxed (N, 3) Å, atomic_numbers, tags, fixed (N,), cell
    (3, 3) Å, pbc (3,), natoms, sid, y_init and y_relaxed eV; with `options.forces` also force or
    forces (N, 3) eV/Å, y eV, and fid, the frame, which then becomes part of a numeric sid.

    Defaults: tags 0, fixed False, sid `default_sid`, no targets. Without `pbc`, a system repeats
    along every lattice vector that is not zero; without `cell`, along none. Further plain values
    and up to 64 numbers (bulk_index, ads_index, …) go to `info`. A system whose centre is more than
    100 Å from the origin is moved there, since float32 would blur its distances. A malformed y_init
    is a note, since nothing depends on it.

    Args:
        records: B ≥ 1, values by name.
        options: which targets are read, under which names, and whether one is required.
        where: what errors call record i, e.g. ``data.lmdb, key 3``.
        default_sid: the sid of record i where none is stored.
        notes: filled with the defaults taken, kind → text.

    Raises:
        ValueError: a field missing or malformed, a number that is not finite or too large for
            float32, a cell singular along a periodic direction; naming `where`, sid and field.
    """
    notes = {} if notes is None else notes
    try:
        return _decode(records, options, default_sid, notes)
    except ValueError as error:
        if len(records) == 1:
            raise ValueError(f"{where(0)}{_named(records[0])}: {error}") from error

    def alone(i: int) -> Structures:
        here, sid = (lambda _: where(i)), (lambda _: default_sid(i))
        return decode([records[i]], options, where=here, default_sid=sid, notes=notes)

    return Structures.cat([alone(i) for i in range(len(records))])


def _named(record: Record) -> str:
    with suppress(ValueError):
        sid = _sid(record, 0, lambda _: "", {})
        return "" if sid == "" else f", sid {sid}"
    return ""


def _decode(
    records: Sequence[Record],
    options: ReadOptions,
    default_sid: Callable[[int], int | str],
    notes: dict[str, str],
) -> Structures:
    sid = tuple(_sid(record, i, default_sid, notes) for i, record in enumerate(records))
    if options.forces:  # frames of one relaxation have its sid
        each = zip(sid, (_plain(record.get("fid")) for record in records), strict=True)
        sid = tuple(f"{s}#{f}" if type(s) is type(f) is int else s for s, f in each)
    natoms = np.array([_count(record, notes) for record in records], dtype=np.int64)
    numbers = _whole(records, "atomic_numbers", natoms, (1, 118), "elements 1 to 118")
    names = () if options.ignore_energy else _targets(records, options)
    for name in names:
        if 0 < sum(record.get(name) is not None for record in records) < len(records):
            raise ValueError(f"{name} is missing in some records")
    ptr = np.concatenate([[0], np.cumsum(natoms)])
    positions = _vectors(records, "pos", natoms)
    if positions is None:
        raise ValueError(f"pos is missing; fields stored: {', '.join(records[0])}")
    energy = initial = relaxed = forces = None
    if names:
        if options.forces:
            oc20 = any(record.get("force") is not None for record in records)
            forces = _vectors(records, "force" if oc20 else "forces", natoms, unknown=True)
        relaxed = _vectors(records, options.positions_relaxed, natoms)
        energy = _energies(records, names[0])
        try:
            initial = _energies(records, options.energy_initial)
        except ValueError as error:
            if len(records) > 1:
                raise
            notes["y_init"] = f"energy before relaxation not read: {error}"
    if np.abs(positions).max() > _FAR:
        positions, relaxed = _near_origin(positions, relaxed, ptr)
    retagged = options.tag_slab is not None
    tagged = [{} if retagged and tags_are_layers(record) else record for record in records]
    cell, pbc = _cells(records)
    if any(record.get("fixed") is None for record in records):
        notes["fixed"] = "no field fixed (taken as False)"
    return Structures(
        atomic_numbers=torch.from_numpy(numbers),
        positions=torch.from_numpy(positions.astype(np.float32)),
        cell=torch.from_numpy(cell.astype(np.float32)),
        pbc=torch.from_numpy(pbc),
        tags=torch.from_numpy(_whole(tagged, "tags", natoms, (0, 2), _TAGS)),
        fixed=torch.from_numpy(_whole(records, "fixed", natoms, (0, 1), "0 or 1") != 0),
        ptr=torch.from_numpy(ptr),
        sid=sid,
        energy=energy,
        energy_initial=initial,
        positions_relaxed=relaxed if relaxed is None else torch.from_numpy(np.float32(relaxed)),
        forces=forces if forces is None else torch.from_numpy(np.float32(forces)),
        info=_info(records, names),
    )


def _sid(
    record: Record, i: int, default: Callable[[int], int | str], notes: dict[str, str]
) -> int | str:
    value = decoded(record.get("sid"))
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    while isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    value = value.strip() or None if isinstance(value, str) else value
    if value is None:
        notes["sid"] = "no sid (the key is used)"
        return default(i)
    if isinstance(value, str):
        return value
    if type(value) is not int:
        array = _array(value, "sid")
        value = array.item() if array.size == 1 else math.nan
    if value % 1 != 0 or not -_LARGEST_SID <= value < _LARGEST_SID:
        raise ValueError("sid is neither text nor one whole number of 64 bits")
    return int(value)


def _array(value: Any, field: str) -> NDArray[Any]:
    if isinstance(value, Stored) and value.array is not None and value.array.dtype.kind in "biuf":
        return value.array
    try:
        return to_numpy(value)
    except ValueError as error:
        raise ValueError(f"{field} {error}") from error


def _count(record: Record, notes: dict[str, str]) -> int:
    """Atoms of a record; a stored natoms must agree, and batch of PyG be of one graph."""
    if not all(isinstance(name, str) for name in record):
        raise ValueError("names of fields are not all text (pass several records as a list)")
    numbers, natoms = record.get("atomic_numbers"), record.get("natoms")
    if numbers is None:
        fields = ", ".join(record) or "none"
        hint = " (weights of a model?)" if "state_dict" in record or "weight" in fields else ""
        raise ValueError(f"atomic_numbers is missing; fields stored: {fields:.300}{hint}")
    n = _array(numbers, "atomic_numbers").size
    if n == 0:
        raise ValueError("atomic_numbers is empty: the system has no atoms")
    if natoms is None:
        notes["natoms"] = "no natoms (counted)"
    elif type(natoms) is not int or natoms != n:
        stored = _array(natoms, "natoms")
        if stored.size != 1 or stored.item() != n:
            raise ValueError(f"natoms is {stored.tolist()}, but there are {n} atomic numbers")
    batch = np.empty(0)
    with suppress(KeyError, ValueError):  # or another field of that name
        batch = to_numpy(record["batch"])
    if batch.size == n and batch.dtype.kind in "iu" and np.ptp(batch) > 0:
        raise ValueError("batch is of several graphs: store one system per record")
    return n


def _whole(
    records: Sequence[Record],
    field: str,
    natoms: NDArray[np.int64],
    bounds: tuple[int, int],
    expected: str,
) -> NDArray[np.int64]:
    """One whole number per atom (N,), out of (n,), (n, 1) or (1, n); 0 where it is missing."""
    parts = []
    for record, n in zip(records, natoms.tolist(), strict=True):
        value = record.get(field)
        array = np.zeros(n, np.int64) if value is None else _array(value, field)
        if array.size != n or max(array.shape, default=1) != n:
            raise ValueError(f"{field} has shape {array.shape}, expected ({n},)")
        parts.append(array.reshape(-1))
    given = np.concatenate(parts)
    with np.errstate(invalid="ignore"):
        whole = given.astype(np.int64)
    if given.dtype.kind == "f" and not np.array_equal(whole, given):
        raise ValueError(f"{field} holds numbers that are not whole")
    if whole.min() < bounds[0] or whole.max() > bounds[1]:
        wrong = given[(whole < bounds[0]) | (whole > bounds[1])][0]
        raise ValueError(f"{field} holds {wrong:g}, expected {expected}")
    return whole


def _vectors(
    records: Sequence[Record], field: str, natoms: NDArray[np.int64], *, unknown: bool = False
) -> NDArray[Any] | None:
    """One finite vector per atom, (N, 3); None where the first record has none.

    `unknown` ones may be NaN, and are where a record has none.
    """
    if records[0].get(field) is None and not unknown:
        return None
    parts = []
    for record, n in zip(records, natoms.tolist(), strict=True):
        value = record.get(field)
        array = np.full((n, 3), np.nan) if unknown and value is None else _array(value, field)
        if array.shape not in ((n, 3), (1, n, 3)):
            raise ValueError(f"{field} has shape {array.shape}, expected ({n}, 3)")
        parts.append(array.reshape(-1, 3))
    joined = np.concatenate(parts)
    if joined.dtype != np.float32:
        with np.errstate(invalid="ignore"):  # a signalling NaN, refused below
            joined = joined.astype(np.float64)
    if not np.abs(np.nan_to_num(joined, nan=0.0) if unknown else joined).max() <= _LARGEST:
        valid = (np.abs(joined) <= _LARGEST) | (np.isnan(joined) & unknown)
        atom = int(np.argmin(valid.all(1)))
        reason = "is too large for float32" if np.isfinite(joined).all() else "is not finite"
        raise ValueError(f"{field} of atom {atom} {reason}")
    return joined


def _near_origin(
    positions: NDArray[Any], relaxed: NDArray[Any] | None, ptr: NDArray[np.int64]
) -> tuple[NDArray[Any], NDArray[Any] | None]:
    natoms = ptr[1:] - ptr[:-1]
    centre = np.add.reduceat(positions.astype(np.float64), ptr[:-1]) / natoms[:, None]
    far = np.abs(centre).max(1, keepdims=True) > _FAR
    moved = np.repeat(np.where(far, centre, 0.0), natoms, axis=0)
    return positions - moved, None if relaxed is None else relaxed - moved


def _cells(records: Sequence[Record]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Cells (B, 3, 3), Å, and pbc (B, 3), of which no periodic direction is singular."""
    cells = np.zeros((len(records), 3, 3))
    pbc = np.zeros((len(records), 3), dtype=np.bool_)
    for b, record in enumerate(records):
        cell, periodic = record.get("cell"), record.get("pbc")
        if cell is not None:
            array = _array(cell, "cell")
            if array.shape == (3,):
                array = np.diag(array)
            if array.size != 9 or array.shape[-1] not in (3, 9):
                raise ValueError(f"cell has shape {array.shape}, expected (3, 3)")
            cells[b] = array.reshape(3, 3)
        if periodic is None:
            pbc[b] = cells[b].any(axis=1)
        else:
            array = _array(periodic, "pbc")
            if array.size not in (1, 3) or (array != array.astype(bool)).any():
                raise ValueError(f"pbc is {array.tolist()!r:.60}, expected true or false per axis")
            pbc[b] = array.reshape(-1)
    if not np.abs(cells).max() <= _LARGEST:
        raise ValueError("cell is not finite, or too large for float32")
    for pattern in np.unique(pbc, axis=0) if len(records) > 1 else pbc:
        distance = heights(cells[(pbc == pattern).all(axis=1)][:, pattern])
        if distance.size and distance.min() < _SMALLEST_HEIGHT:
            raise ValueError(
                f"cell is singular along a periodic direction: {distance.min():.2g} Å between "
                f"images, at least {_SMALLEST_HEIGHT} Å expected; correct it or set pbc False"
            )
    return cells, pbc


def _targets(records: Sequence[Record], options: ReadOptions) -> tuple[str, ...]:
    """The names of the targets; those asked for have to be fields of every record."""
    energy = options.energy_of(records[0])
    names = (energy, options.energy_initial, options.positions_relaxed)
    for record in records:
        missing = [name for name in names if name not in _OWN_NAMES and name not in record]
        if options.require_energy and record.get(energy) is None:
            missing = [energy]
        if missing:
            wanted = missing[0]
            stored = [n for n in record if wanted == names[2] or may_be_energy(n, record[n])]
            near = get_close_matches(wanted, stored, n=20, cutoff=0)
            raise ValueError(
                f"{wanted} is missing, the target that was requested; stored are: "
                f"{', '.join(near) or 'none'} (options energy, energy_initial, positions_relaxed)"
            )
    return names


def _energies(records: Sequence[Record], field: str) -> Tensor | None:
    """One finite energy per record, eV, (B,) float64; None where the first record has none."""
    values = [record.get(field) for record in records]
    if values[0] is None:
        return None
    energies = np.empty(len(values))
    for b, value in enumerate(values):
        if type(value) is not float:
            array = _array(value, field)
            if array.size != 1 or array.dtype.kind == "b":
                raise ValueError(f"{field} is {array.tolist()!r:.60}, expected one number in eV")
            value = array.item()
        energies[b] = value
    if not np.abs(energies).max() <= _LARGEST_ENERGY:
        wrong = energies[~(np.abs(energies) <= _LARGEST_ENERGY)][0]
        raise ValueError(f"{field} is {wrong:g}, expected a finite energy in eV")
    return torch.from_numpy(energies)


def _info(records: Sequence[Record], targets: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """Further plain values and short lists by name, a tuple of B entries each."""
    info: dict[str, tuple[Any, ...]] = {}
    for name in dict.fromkeys(name for record in records for name in record):
        if name not in _NOT_INFO and name not in targets and not name.startswith("_"):
            given = (record.get(name) for record in records)
            values = tuple(v if type(v) in (str, float) else _plain(v) for v in given)
            if any(value is not None for value in values):
                info[name] = values
    return info


def _plain(value: Any) -> Any:
    """Plain values and short lists as they are, short arrays as lists, None for anything else."""
    if value is None or type(value) in (str, bool, float):
        return value
    if type(value) is int:
        return value if -_LARGEST_SID <= value < _LARGEST_SID else None
    if isinstance(value, list | tuple):
        plain = all(type(v) in (str, bool, int, float) for v in value[: _INFO_SIZE + 1])
        return value if plain and len(value) <= _INFO_SIZE else None
    with suppress(ValueError):
        array = np.asarray(value) if isinstance(value, np.generic | str) else to_numpy(value)
        if array.ndim <= 1 and array.size <= _INFO_SIZE:
            return array.item() if array.size == 1 else array.tolist()
    return None
