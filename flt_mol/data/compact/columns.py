"""Many records at once: slices of their bytes, joined, are the columns of a batch."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flt_mol.data.columns import Columns
from flt_mol.data.compact import layout
from flt_mol.data.compact.decoding import CompactRecord, read_extras
from flt_mol.data.fields import Fields

__all__ = ["to_columns"]

# In these, the records of a batch may differ; the others say how numbers are stored.
_FREE = layout.SID_NUMBER | layout.SID_TEXT | sum(layout.PBC_AXES)
_TARGETS = layout.ENERGY | layout.ENERGY_INITIAL | layout.RELAXED
_AXES = np.array(layout.PBC_AXES, dtype=np.uint32)
_CELL, _POS, _ROWS, _FORCE, _ATOMS, _TEXT, _EXTRAS = range(7)  # sections


def to_columns(
    payloads: Sequence[bytes],
    sids: Sequence[int | str],
    *,
    ignore_energy: bool = False,
    known: Collection[str] = (),
) -> Columns | None:
    """The records in `payloads` as :class:`Columns`; None where `decode` has to look at each.

    That is so for damaged records, and for those that differ in what they hold.

    Args:
        payloads: B records that `encode` made.
        sids: B names, for records that have none.
        ignore_energy: targets are left out.
        known: kinds of notes that have been given; records that need another one ("sid",
            "natoms") make no columns.
    """
    if not payloads or min(map(len, payloads)) < layout.HEADER.itemsize:
        return None
    batch = _Batch(payloads)
    if not batch.is_sound() or not (batch.flags & layout.NATOMS or "natoms" in known):
        return None
    try:
        names = batch.names(sids if "sid" in known else None)
        info = batch.info()
    except ValueError:
        return None
    return batch.columns(names, info, not ignore_energy)


class _Batch:
    """B records whose sections lie at `edges` (8, B), and `flags` that they share."""

    def __init__(self, payloads: Sequence[bytes]) -> None:
        size = layout.HEADER.itemsize
        self.payloads = payloads
        self.heads = np.frombuffer(b"".join([p[:size] for p in payloads]), dtype=layout.HEADER)
        self.flags = int(self.heads["flags"][0]) & ~_FREE
        natoms, moved, sid, extras = (
            self.heads[name].astype(np.int64) for name in ("natoms", "moved", "sid", "extras")
        )
        self.has_text = (self.heads["flags"] & layout.SID_TEXT) != 0
        sizes = layout.section_sizes(
            self.flags | layout.SID_TEXT, natoms, moved, sid * self.has_text, extras
        )
        self.least = min(int(column.min()) for column in sizes)
        self.edges = np.cumsum([np.full_like(natoms, size), *sizes], axis=0)

    def is_sound(self) -> bool:
        """Whether all are whole and can be read together."""
        if self.flags & ~layout.KNOWN or self.least < 0:
            return False
        if ((self.heads["flags"] & ~np.uint32(_FREE)) != self.flags).any():
            return False
        if self.edges[-1].tolist() != [len(payload) for payload in self.payloads]:
            return False
        sums = [zlib.crc32(memoryview(payload)[4:]) for payload in self.payloads]
        return sums == self.heads["crc"].tolist() and self._moved_agree()

    def _moved_agree(self) -> bool:
        """Whether as many atoms are marked as there are rows of relaxed positions."""
        so_far = np.zeros(len(self.atoms) + 1, dtype=np.int64)
        np.cumsum((self.atoms[:, 1] & layout.MOVED_BIT) != 0, out=so_far[1:])
        atoms, moved = (self.heads[name].cumsum(dtype=np.int64) for name in ("natoms", "moved"))
        return bool((so_far[atoms] == moved).all())

    def cut(self, section: int) -> list[bytes]:
        """One section of every record."""
        starts, ends = self.edges[section].tolist(), self.edges[section + 1].tolist()
        return [p[a:b] for p, a, b in zip(self.payloads, starts, ends, strict=True)]

    @cached_property
    def atoms(self) -> NDArray[np.uint8]:
        """Atomic numbers and bits (N, 2)."""
        return np.frombuffer(b"".join(self.cut(_ATOMS)), dtype=np.uint8).reshape(-1, 2)

    def vectors(self, section: int, wide: int) -> NDArray[Any]:
        """Vectors (K, 3)."""
        data = b"".join(self.cut(section))
        return np.frombuffer(data, dtype=layout.floats(self.flags, wide)).reshape(-1, 3)

    def names(self, defaults: Sequence[int | str] | None) -> tuple[int | str, ...]:
        """Sids; ValueError for texts that are none, and where one is missing without default."""
        names: list[int | str] = self.heads["sid"].tolist()
        flags = self.heads["flags"] & (layout.SID_NUMBER | layout.SID_TEXT)
        if (flags == layout.SID_NUMBER).all():
            return tuple(names)
        texts = self.cut(_TEXT)
        for index in np.flatnonzero(flags != layout.SID_NUMBER).tolist():
            if flags[index] == layout.SID_TEXT:
                names[index] = texts[index].decode("utf-8", "surrogatepass")
            elif flags[index] == 0 and defaults is not None:
                names[index] = defaults[index]
            else:
                raise ValueError("no sid")
        return tuple(names)

    def info(self) -> dict[str, tuple[Any, ...]]:
        """Further values by name; ValueError for damaged ones, and fields of another place."""
        if not self.heads["extras"].any():
            return {}
        values = [CompactRecord(read_extras(data)) for data in self.cut(_EXTRAS)]
        for record in values:
            if Fields(record, "", 0).info().keys() != record.keys():
                raise ValueError("a field that belongs elsewhere")
        names = dict.fromkeys(name for record in values for name in record)
        return {name: tuple(record.get(name) for record in values) for name in names}

    def columns(
        self, names: tuple[int | str, ...], info: dict[str, tuple[Any, ...]], energies: bool
    ) -> Columns:
        """The columns, `energies` and relaxed positions among them."""
        flags, heads, atoms = self.flags, self.heads, self.atoms
        bits = atoms[:, 1]
        held = flags if energies else flags & ~_TARGETS
        positions = self.vectors(_POS, layout.POS_64)
        return Columns(
            sid=names,
            natoms=heads["natoms"].astype(np.int64),
            atomic_numbers=atoms[:, 0],
            positions=positions,
            tags=bits & layout.TAG_BITS if flags & layout.TAGS else None,
            fixed=bits & layout.FIXED_BIT if flags & layout.FIXED else None,
            cell=self._cell(),
            pbc=(heads["flags"][:, None] & _AXES) != 0 if flags & layout.PBC else None,
            energy=heads["y_relaxed"] if held & layout.ENERGY else None,
            energy_initial=heads["y_init"] if held & layout.ENERGY_INITIAL else None,
            positions_relaxed=self._relaxed(positions, bits) if held & layout.RELAXED else None,
            info=info,
        )

    def _relaxed(self, positions: NDArray[Any], bits: NDArray[np.uint8]) -> NDArray[Any]:
        rows = self.vectors(_ROWS, layout.RELAXED_64)
        relaxed = positions.astype(rows.dtype)
        relaxed[(bits & layout.MOVED_BIT) != 0] = rows
        return relaxed

    def _cell(self) -> NDArray[Any]:
        if self.flags & layout.CELL_64:
            return self.vectors(_CELL, layout.CELL_64).reshape(-1, 3, 3)
        if self.flags & layout.CELL:
            return np.asarray(self.heads["cell"])
        return np.zeros((len(self.payloads), 3, 3))
