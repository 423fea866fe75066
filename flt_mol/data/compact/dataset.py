"""Data sets in our own compact format; see docs/compact.md."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flt_mol.data.compact import CompactRecord, decode, write_compact
from flt_mol.data.compact.columns import to_columns
from flt_mol.data.compact.index import Index
from flt_mol.data.compact.writing import FORMAT, VERSION
from flt_mol.data.dataset import StructuresDataset
from flt_mol.data.lmdb.base import LmdbFileDataset, data_file
from flt_mol.data.lmdb.file import Environment
from flt_mol.structures import Structures

__all__ = ["CompactDataset", "is_compact", "read_at_once", "write_compact"]

_NAMES = ("y_relaxed", "y_init", "pos_relaxed")  # of targets, where records are the common kind


def is_compact(path: str | Path) -> bool:
    """Whether an LMDB file says of itself that it is in the compact format, of any version.

    Raises:
        ValueError: a file that LMDB cannot read, naming it.
    """
    return (Environment.of(data_file(Path(path))).get(b"format") or b"").startswith(FORMAT)


class CompactDataset(LmdbFileDataset):
    """Records of one compact file, as `write_compact` makes it.

    Args:
        path: the file, or the folder with `data.mdb` in it.
        options: how records are read.
        notes: shared by the parts of a larger data set.
        prefix: put before the number of a record, where one without sid is named by it.

    Raises:
        ValueError: as :class:`LmdbFileDataset`, and a file of another format or of a newer version
            of this one.

    Warns:
        UserWarning: `length` or gaps between blocks disagree with the records found; defaults
            taken for missing fields; each once.
    """

    _places: NDArray[np.int64] | None = None  # of the records that are kept; None: all

    def _read_index(self) -> None:
        self._check_format()
        self._index = Index.read(self._open())
        self._compare_counts()

    def __len__(self) -> int:
        return len(self._index if self._places is None else self._places)

    @property
    def metadata(self) -> dict[str, Any]:
        """What the writer said about the file.

        Raises:
            ValueError: it is damaged.
        """
        try:
            value = json.loads(self._open().get(b"metadata") or b"")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self.path}: its metadata are damaged ({error})") from error
        if not isinstance(value, dict):
            raise ValueError(f"{self.path}: its metadata are damaged (no names)")
        return value

    def where(self, index: int) -> str:
        """File and number of system `index`, for errors."""
        return f"{self.path}, record {self.number(index)}"

    def record(self, index: int) -> CompactRecord:
        """The stored fields of system `index`.

        Raises:
            ValueError: a damaged record, naming file, record and block.
        """
        place = self.number(index)
        block = self._index.block(place)
        where = f"{self.where(index)} (block {block})"
        if block in self._index.damaged:
            raise ValueError(
                f"{where}: the block's table is damaged; write or download the file again"
            )
        (payload,) = self.payloads([index])
        return decode(payload, where)

    def natoms(self) -> NDArray[np.int64]:
        """Atoms of each system (len,), without reading any; 0 in a damaged block."""
        natoms = self._index.natoms
        return (natoms if self._places is None else natoms[self._places]).astype(np.int64)

    def _at_once(self, indices: Sequence[int]) -> Structures | None:
        return read_at_once(self, [(self, index) for index in indices], indices)

    def payloads(self, indices: Sequence[int]) -> list[bytes]:
        """The stored bytes of systems, as `decode` takes them; none of one in a damaged block.

        Raises:
            ValueError: the file is damaged or has changed.
        """
        places = np.array(indices, dtype=np.int64)
        if self._places is not None:
            places = self._places[places]
        return self._index.read_records(self._open(), places)

    def number(self, index: int) -> int:
        """The number in the file of system `index`."""
        return int(index) if self._places is None else int(self._places[index])

    def _check_format(self) -> None:
        stored = self._open().get(b"format") or b""
        version = stored[len(FORMAT) :]
        if not stored.startswith(FORMAT) or not version.isdigit():
            raise ValueError(f"{self.path} is no compact file of flt_mol: its format is {stored!r}")
        if int(version) != VERSION:
            raise ValueError(
                f"{self.path} is of version {int(version)} of the compact format, this flt_mol "
                f"reads version {VERSION}; update flt_mol"
            )

    def _compare_counts(self) -> None:
        """Warn where the file says that it holds more or fewer records."""
        stored = self._open().get(b"length") or b""
        known = stored.isdigit() and len(stored) < 19
        gaps = (
            f"{self._index.absent} blocks of records are missing in {self.file.name}"
            if self._index.absent
            else None
        )
        self._compare(int(stored) if known else "an unknown number of", len(self._index), gaps)

    def _keep(self, indices: list[int]) -> None:
        self._places = np.array([self.number(i) for i in indices], dtype=np.int64)


def read_at_once(
    dataset: StructuresDataset,
    places: Sequence[tuple[CompactDataset, int]],
    indices: Sequence[int],
) -> Structures | None:
    """Systems `indices` of `dataset`, which lie at `places` of its files, in one batch.

    None, without a warning or an error, where a system has to be looked at by itself.
    """
    options, known = dataset.options, dataset.notes.seen
    if (options.energy, options.energy_initial, options.positions_relaxed) != _NAMES:
        return None
    try:
        payloads = _payloads(places)
    except ValueError:  # of the file as a whole; it is raised again when a system is read
        return None
    sids = [dataset.default_sid(index) for index in indices] if "sid" in known else ()
    with np.errstate(invalid="ignore", over="ignore"):  # of numbers that are refused
        columns = to_columns(payloads, sids, ignore_energy=options.ignore_energy, known=known)
        if columns is None or (options.require_energy and columns.energy is None):
            return None
        return columns.structures(known)


def _payloads(places: Sequence[tuple[CompactDataset, int]]) -> list[bytes]:
    """The stored bytes of systems in several files, each file looked at once."""
    of_part: dict[int, list[int]] = {}
    for position, (part, _) in enumerate(places):
        of_part.setdefault(id(part), []).append(position)
    payloads = [b""] * len(places)
    for positions in of_part.values():
        part = places[positions[0]][0]
        found = part.payloads([places[position][1] for position in positions])
        for position, payload in zip(positions, found, strict=True):
            payloads[position] = payload
    return payloads
