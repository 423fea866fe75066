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
from flt_mol.data.dataset import Notes, StructuresDataset
from flt_mol.data.lmdb.file import Environment, stamp
from flt_mol.data.options import ReadOptions
from flt_mol.structures import Structures

__all__ = ["CompactDataset", "is_compact", "read_at_once", "write_compact"]

_NAMES = ("y_relaxed", "y_init", "pos_relaxed")  # of targets, where records are the common kind


def is_compact(path: str | Path) -> bool:
    """Whether an LMDB file says of itself that it is in the compact format, of any version.

    Raises:
        ValueError: a file that LMDB cannot read, naming it.
    """
    return (Environment.of(_file(Path(path))).get(b"format") or b"").startswith(FORMAT)


class CompactDataset(StructuresDataset):
    """Records of one compact file, as `write_compact` makes it.

    The file is opened by whoever reads, once per process, and not written to; the data set can
    be pickled, forked, and opened twice.

    Args:
        path: the file, or the folder with `data.mdb` in it.
        options: how records are read.
        notes: shared by the parts of a larger data set.
        prefix: put before the number of a record, where one without sid is named by it.

    Raises:
        ValueError: a file that is no LMDB file, is truncated, of another format or of a newer
            version of this one, or holds no records; where targets are required, a file without
            them.

    Warns:
        UserWarning: `length` or gaps between blocks disagree with the records found; defaults
            taken for missing fields; each once.
    """

    def __init__(
        self,
        path: str | Path,
        options: ReadOptions | None = None,
        *,
        notes: Notes | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__(path, options, notes=notes)
        self.file = _file(self.path)
        self.prefix = prefix
        self._stamp = stamp(self.file)
        self._environment: Environment | None = None
        self._check_format()
        self._index = Index.read(self._open())
        self._places: NDArray[np.int64] | None = None  # of the records that are kept; None: all
        self._compare_counts()
        self._check()

    def __len__(self) -> int:
        return len(self._index if self._places is None else self._places)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_environment": None}

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
        return f"{self.path}, record {self._place(index)}"

    def default_sid(self, index: int) -> int | str:
        """The number, for a record without sid."""
        return f"{self.prefix}{self._place(index)}" if self.prefix else self._place(index)

    def record(self, index: int) -> CompactRecord:
        """The stored fields of system `index`.

        Raises:
            ValueError: a damaged record, naming file, record and block.
        """
        place = self._place(index)
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

    def _place(self, index: int) -> int:
        """The number in the file of system `index`."""
        return int(index) if self._places is None else int(self._places[index])

    def _open(self) -> Environment:
        if self._environment is None or not self._environment.usable:
            if stamp(self.file) != self._stamp:
                raise ValueError(f"{self.path} has changed since it was opened; open it anew")
            self._environment = Environment.of(self.file)
        return self._environment

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
        name, count = self.file.name, len(self._index)
        kinds: dict[str, str] = {}
        stored = self._open().get(b"length") or b""
        if stored != b"%d" % count:
            announced = (
                int(stored) if stored.isdigit() and len(stored) < 19 else "an unknown number of"
            )
            kinds[f"length {self.file}"] = (
                f"{name} says that it holds {announced} records, {count} are stored "
                f"({count} are read)"
            )
        if self._index.absent:
            kinds[f"gaps {self.file}"] = (
                f"{self._index.absent} blocks of records are missing in {name} ({count} are read)"
            )
        self.notes.add(kinds)

    def _keep(self, indices: list[int]) -> None:
        self._places = np.array([self._place(i) for i in indices], dtype=np.int64)


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


def _file(path: Path) -> Path:
    inside = path / "data.mdb"
    return (inside if inside.is_file() else path).resolve()
