"""One record of OC20's schema as a string of bytes."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flt_mol.data.compact import layout
from flt_mol.data.compact.values import to_json
from flt_mol.data.fields import Fields
from flt_mol.data.oc20 import to_structures
from flt_mol.structures import Structures

__all__ = ["encode"]

_FLAGS = {
    "natoms": layout.NATOMS,
    "tags": layout.TAGS,
    "fixed": layout.FIXED,
    "cell": layout.CELL,
    "pbc": layout.PBC,
    "pos_relaxed": layout.RELAXED,
    "y_relaxed": layout.ENERGY,
}


def encode(record: Mapping[str, Any], where: str, *, forces: bool = False) -> bytes:
    """The bytes of one record; what `decode` gives back makes the same `Structures`.

    Kept are pos, pos_relaxed, cell (float32 and narrower ones as float32, others as float64),
    atomic_numbers, tags, fixed, pbc, natoms, sid, y_init, y_relaxed, and further plain values and
    lists of up to 64 numbers. Fields that are missing stay missing. Left out are the graph
    (edge_index, cell_offsets, distances, neighbors, edge_attr), larger further arrays, force
    unless asked for, and names that begin with "_".

    Args:
        record: values by OC20's names.
        where: how errors name the record, e.g. ``data.lmdb, key 3``.
        forces: keep force (n, 3), eV/Å, where the record has it.

    Raises:
        ValueError: what :func:`flt_mol.data.oc20.to_structures` refuses, with its words; a
            further value that is neither plain nor an array; forces of another shape.

    Example:
        >>> record = {"pos": [[0, 0, 0.5]], "atomic_numbers": [29], "sid": 7, "y_relaxed": -1.5}
        >>> len(encode(record, "example"))
        106
    """
    record = _Once(record)
    system = to_structures(record, where=where)
    read = Fields(record, where, system.sid[0])
    arrays = _Arrays.of(read, system.num_atoms, forces)
    sid_flag, sid, text = _sid(record, system)
    extras = _extras(read, system)
    flags = sid_flag | _flags(record, system) | arrays.flags()
    narrow = arrays.cell is not None and not flags & layout.CELL_64
    moved = arrays.moved()
    header = layout.HEADER_STRUCT.pack(
        0,
        flags,
        sid,
        0.0 if system.energy is None else system.energy.item(),
        0.0 if system.energy_initial is None else system.energy_initial.item(),
        *(arrays.cell.flat if narrow and arrays.cell is not None else [0.0] * 9),
        system.num_atoms,
        int(moved.sum()),
        len(extras),
    )
    sections = [None if narrow else arrays.cell, arrays.pos]
    sections += [None if arrays.relaxed is None else arrays.relaxed[moved], arrays.force]
    numbers = b"".join(section.tobytes() for section in sections if section is not None)
    body = header[4:] + numbers + _atoms(system, moved) + text + extras
    return zlib.crc32(body).to_bytes(4, "little") + body


class _Once(Mapping[str, Any]):
    """A record each of whose fields is decoded once, however often it is asked for."""

    def __init__(self, record: Mapping[str, Any]) -> None:
        self._record = record
        self._values: dict[str, Any] = {}
        if hasattr(record, "describe"):
            self.describe = record.describe

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:
            self._values[name] = self._record[name]
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._record)

    def __len__(self) -> int:
        return len(self._record)


@dataclass(frozen=True)
class _Arrays:
    """The numbers that are kept in their own type: little-endian float32 or float64."""

    pos: NDArray[Any]
    relaxed: NDArray[Any] | None
    force: NDArray[Any] | None
    cell: NDArray[Any] | None

    @staticmethod
    def of(read: Fields, n: int, forces: bool) -> _Arrays:
        """Arrays of a record with `n` atoms that `to_structures` has found good."""
        force = read.array("force") if forces else None
        if force is not None and force.shape not in ((n, 3), (1, n, 3)):
            read.fail("force", f"has shape {force.shape}, expected ({n}, 3)")
        cell, relaxed = read.array("cell"), read.array("pos_relaxed")
        if cell is not None and cell.size == 3:
            cell = np.diag(cell)
        return _Arrays(
            pos=_floats(read.array("pos"), n),
            relaxed=None if relaxed is None else _floats(relaxed, n),
            force=None if force is None else _floats(force, n),
            cell=None if cell is None else _floats(cell, 3),
        )

    def flags(self) -> int:
        """Flags of float64, and of what is here only where asked for."""
        wide = {
            layout.POS_64: self.pos,
            layout.RELAXED_64: self.relaxed,
            layout.FORCE_64: self.force,
            layout.CELL_64: self.cell,
        }
        held = sum(f for f, a in wide.items() if a is not None and a.dtype.itemsize == 8)
        return held | layout.FORCE * (self.force is not None)

    def moved(self) -> NDArray[np.bool_]:
        """Which atoms have relaxed positions that are not the same in all bits (n,)."""
        if self.relaxed is None:
            return np.zeros(len(self.pos), dtype=np.bool_)
        if self.pos.dtype != self.relaxed.dtype:
            return np.ones(len(self.pos), dtype=np.bool_)
        bits = f"<u{self.pos.dtype.itemsize}"
        differ: NDArray[np.bool_] = self.pos.view(bits) != self.relaxed.view(bits)
        return np.asarray(differ.any(axis=1))


def _floats(array: NDArray[Any] | None, n: int) -> NDArray[Any]:
    """(n, 3) little-endian float32 or float64, whichever holds the numbers."""
    assert array is not None  # to_structures has seen it
    narrow = array.dtype.kind == "f" and array.dtype.itemsize <= 4
    return np.ascontiguousarray(array.reshape(n, 3), dtype="<f4" if narrow else "<f8")


def _sid(record: Mapping[str, Any], system: Structures) -> tuple[int, int, bytes]:
    """Flag, number (of a text: its bytes), text."""
    (sid,) = system.sid
    if record.get("sid") is None or isinstance(sid, bool):
        return 0, 0, b""
    if isinstance(sid, int):
        return layout.SID_NUMBER, sid, b""
    text = sid.encode("utf-8", "surrogatepass")
    return layout.SID_TEXT, len(text), text


def _flags(record: Mapping[str, Any], system: Structures) -> int:
    """Flags of the fields that are there."""
    held = sum(flag for name, flag in _FLAGS.items() if record.get(name) is not None)
    if held & layout.PBC:
        axes = zip(system.pbc[0].tolist(), layout.PBC_AXES, strict=True)
        held |= sum(flag for periodic, flag in axes if periodic)
    return held | layout.ENERGY_INITIAL * (system.energy_initial is not None)


def _atoms(system: Structures, moved: NDArray[np.bool_]) -> bytes:
    """Atomic numbers and bits (n, 2) uint8."""
    bits = system.tags.numpy() + layout.FIXED_BIT * system.fixed.numpy() + layout.MOVED_BIT * moved
    return np.stack([system.atomic_numbers.numpy(), bits], axis=1).astype(np.uint8).tobytes()


def _extras(read: Fields, system: Structures) -> bytes:
    """What has no place elsewhere, as JSON; no bytes for nothing."""
    values: dict[str, Any] = {}
    if isinstance(read.sid, bool):
        values["sid"] = read.sid
    initial = read.record.get("y_init")
    if initial is not None and system.energy_initial is None:
        # Malformed: kept, since to_structures says so in a note.
        values["y_init"] = initial
    values |= {name: value for name, (value,) in system.info.items()}
    pairs = []
    for name, value in values.items():
        try:
            pairs.append(f"[{to_json(name)},{to_json(value)}]")
        except ValueError as error:
            read.fail(name, str(error))
    return f"[{','.join(pairs)}]".encode("ascii") if pairs else b""
