"""Data sets in one LMDB file, or in many."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flt_mol.data.dataset import Notes, StructuresDataset
from flt_mol.data.joined import JoinedDataset
from flt_mol.data.lmdb.base import LmdbFileDataset
from flt_mol.data.options import ReadOptions
from flt_mol.data.pickles.columns import to_columns
from flt_mol.data.pickles.unpickling import Record, raw_fields, unpickle
from flt_mol.data.pickles.values import shape_of
from flt_mol.structures import Structures

__all__ = ["LmdbDataset", "ShardedDataset"]

_DIGITS = 18  # of a key that still is an int64
_WORD = re.compile(rb"_{0,2}[A-Za-z][A-Za-z_.-]{2,}")  # a key that names something: length, …


class LmdbDataset(LmdbFileDataset):
    """Records of one LMDB file: keys are whole numbers in ascii, values pickles, zlib or plain.

    Other keys are left out.

    Args:
        path: the file, or the folder with `data.mdb` in it.
        options: how records are read.
        notes: shared by the parts of a larger data set.
        prefix: put before the key, where a record without sid is named by it.

    Raises:
        ValueError: as :class:`LmdbFileDataset`.

    Warns:
        UserWarning: `length` or gaps between keys disagree with the records found; defaults taken
            for missing fields; each once.
    """

    _keys: NDArray[np.bytes_]

    def __len__(self) -> int:
        return len(self._keys)

    def number(self, index: int) -> int:
        """The key of system `index`."""
        return int(self._keys[index])

    def where(self, index: int) -> str:
        """File and key of system `index`, for errors."""
        return f"{self.path}, key {self._keys[index].decode()}"

    def record(self, index: int) -> Record:
        """The stored fields of system `index`.

        Raises:
            ValueError: a damaged record, naming file and key.
        """
        where = self.where(index)
        data = self._open().get(bytes(self._keys[index]))
        if data is None:
            raise ValueError(f"{where}: the record is gone; the file has changed, open it anew")
        record = unpickle(data, where)
        if not isinstance(record, Record):
            raise ValueError(
                f"{where}: the record is a {type(record).__name__}, expected PyG Data or a dict"
            )
        return record

    def natoms(self) -> NDArray[np.int64]:
        """Atoms of each system (len,); no numbers are read."""
        counts = np.empty(len(self), dtype=np.int64)
        with self._open().reading() as read:
            for index, key in enumerate(self._keys):
                try:
                    shape = shape_of(raw_fields(read(bytes(key))).get("atomic_numbers"))[1]
                # Whatever it is: looking at the record by itself says so.
                except Exception:
                    shape = None
                counts[index] = self._count(index) if shape is None else math.prod(shape)
        return counts

    def _at_once(self, indices: Sequence[int]) -> Structures | None:
        return _read_at_once(self, [(self, i) for i in indices], indices)

    def _read_index(self) -> None:
        """Keys of the records in numeric order, 8 to 20 bytes each."""
        every = list(self._open().keys())
        keys = sorted((k for k in every if k.isdigit() and len(k) <= _DIGITS), key=int)
        if not keys:
            others = ", ".join(repr(k.decode(errors="replace")) for k in every[:3]) or "none"
            raise ValueError(
                f"no records in {self.path}: records have whole numbers as keys; "
                f"keys found: {others}"
            )
        self._tell_of_others(every, len(keys))
        self._compare_counts(keys)
        self._keys = np.array(keys, dtype=np.bytes_)

    def _tell_of_others(self, keys: Sequence[bytes], count: int) -> None:
        """Warn of keys that are neither numbers nor words: they may have been numbers."""
        odd = [k for k in keys if not ((k.isdigit() and len(k) <= _DIGITS) or _WORD.fullmatch(k))]
        if odd:
            shown = ", ".join(repr(key[:20].decode(errors="replace")) for key in odd[:3])
            self.notes.add(
                {
                    f"others {self.file}": f"{len(odd)} keys of {self.file.name} are no whole "
                    f"numbers and are passed over: {shown} ({count} records are read)"
                }
            )

    def _compare_counts(self, keys: Sequence[bytes]) -> None:
        """Warn where the file says that it holds more or fewer records."""
        count, first, last = len(keys), int(keys[0]), int(keys[-1])
        absent = last - first + 1 - count
        # Keys that are mostly absent are not numbered one by one, but are names.
        gaps = (
            f"{absent} records are missing between keys {first} and {last} of {self.file.name}"
            if 0 < absent <= count
            else None
        )
        self._compare(self._stored_length(), count, gaps)

    def _stored_length(self) -> int | str | None:
        """What `length` says: a pickled int, or digits."""
        data = self._open().get(b"length")
        if data is None:
            return None
        if data.strip().isdigit():
            return int(data[:_DIGITS])
        try:
            return int(unpickle(data, "length"))
        except (ValueError, TypeError):
            return "an unreadable number of"

    def _keep(self, indices: list[int]) -> None:
        self._keys = self._keys[indices]


class ShardedDataset(JoinedDataset):
    """The records of several LMDB files, one file after the other.

    Args:
        path: what the whole is called.
        files: its files, in order.
        options: how records are read.
        notes: where warnings go.

    Raises:
        ValueError: as :class:`LmdbDataset`, of any file.
    """

    def __init__(
        self,
        path: str | Path,
        files: Sequence[Path],
        options: ReadOptions | None = None,
        *,
        notes: Notes | None = None,
    ) -> None:
        super().__init__(path, files, _open_part, options, notes=notes)

    def _at_once(self, indices: Sequence[int]) -> Structures | None:
        # All files together: a batch drawn at random has few systems in each.
        places = [self._locate(i) for i in indices]
        parts = [(self.parts[part], inside) for part, inside in places]
        kinds = {type(part) for part, _ in parts}
        if kinds == {LmdbDataset}:
            return _read_at_once(self, parts, indices)
        return super()._at_once(indices)


def _open_part(path: Path, options: ReadOptions, notes: Notes, prefix: str) -> LmdbDataset:
    return LmdbDataset(path, options, notes=notes, prefix=prefix)


def _read_at_once(
    dataset: StructuresDataset, places: Sequence[tuple[Any, int]], indices: Sequence[int]
) -> Structures | None:
    """Systems of one or several files; the files' own bytes are looked at and not copied."""
    known = dataset.notes.seen
    try:
        with ExitStack() as stack:
            readers: dict[int, Callable[[bytes], memoryview]] = {}
            records = []
            for part, index in places:
                if id(part) not in readers:
                    readers[id(part)] = stack.enter_context(part._open().reading())
                records.append(raw_fields(readers[id(part)](bytes(part._keys[index]))))
            columns = to_columns(
                records,
                dataset.options,
                known=known,
                default_sid=lambda i: dataset.default_sid(indices[i]),
            )
    # Whatever it is: reading the systems one by one says so, and names the one it is about.
    except Exception:
        return None
    return columns.structures(known)
