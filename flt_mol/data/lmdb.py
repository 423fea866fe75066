"""Data sets in one LMDB file, or in many."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from flt_mol.data.dataset import Notes, StructuresDataset
from flt_mol.data.lmdb_file import Environment, stamp
from flt_mol.data.options import ReadOptions
from flt_mol.data.unpickling import Record, unpickle

__all__ = ["LmdbDataset", "ShardedDataset"]

_DIGITS = 18  # of a key that still is an int64


class LmdbDataset(StructuresDataset):
    """Records of one LMDB file: keys are whole numbers in ascii, values pickles, zlib or plain.

    Other keys are left out. The file is opened by whoever reads, once per process, and not
    written to; the data set can be pickled, forked, and opened twice.

    Args:
        path: the file, or the folder with `data.mdb` in it.
        options: how records are read.
        notes: shared by the parts of a larger data set.
        prefix: put before the key, where a record without sid is named by it.

    Raises:
        ValueError: a file that is no LMDB file, is truncated, or holds no records; where targets
            are required, a file without them.

    Warns:
        UserWarning: `length` or gaps between keys disagree with the records found; defaults taken
            for missing fields; each once.
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
        inside = self.path / "data.mdb"
        self.file = (inside if inside.is_file() else self.path).resolve()
        self.prefix = prefix
        self._stamp = stamp(self.file)
        self._environment: Environment | None = None
        self._keys = self._index()
        self._check()

    def __len__(self) -> int:
        return len(self._keys)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_environment": None}

    def key(self, index: int) -> int:
        """The key of system `index`."""
        return int(self._keys[index])

    def where(self, index: int) -> str:
        """File and key of system `index`, for errors."""
        return f"{self.path}, key {self._keys[index].decode()}"

    def default_sid(self, index: int) -> int | str:
        """The key, for a record without sid."""
        return f"{self.prefix}{self.key(index)}" if self.prefix else self.key(index)

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

    def _open(self) -> Environment:
        if self._environment is None or not self._environment.usable:
            if stamp(self.file) != self._stamp:
                raise ValueError(f"{self.path} has changed since it was opened; open it anew")
            self._environment = Environment.of(self.file)
        return self._environment

    def _index(self) -> np.ndarray[Any, np.dtype[np.bytes_]]:
        """Keys of the records in numeric order, 8 to 20 bytes each."""
        every = list(self._open().keys())
        keys = sorted((k for k in every if k.isdigit() and len(k) <= _DIGITS), key=int)
        if not keys:
            others = ", ".join(repr(k.decode(errors="replace")) for k in every[:3]) or "none"
            raise ValueError(
                f"no records in {self.path}: records have whole numbers as keys; "
                f"keys found: {others}"
            )
        self._compare_counts(keys)
        return np.array(keys, dtype=np.bytes_)

    def _compare_counts(self, keys: Sequence[bytes]) -> None:
        """Warn where the file says that it holds more or fewer records."""
        count = len(keys)
        kinds: dict[str, str] = {}
        stored = self._stored_length()
        if stored is not None and stored != count:
            kinds[f"length {self.file}"] = (
                f"{self.file.name} says that it holds {stored} records, {count} are stored "
                f"({count} are read)"
            )
        absent = int(keys[-1]) - int(keys[0]) + 1 - count
        # Keys that are mostly absent are not numbered one by one, but are names.
        if 0 < absent <= count:
            kinds[f"gaps {self.file}"] = (
                f"{absent} records are missing between keys {int(keys[0])} and {int(keys[-1])} "
                f"of {self.file.name} ({count} are read)"
            )
        self.notes.add(kinds)

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


class ShardedDataset(StructuresDataset):
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
        super().__init__(path, options, notes=notes)
        self.parts: list[LmdbDataset] = []
        for file in files:
            prefix = f"{file.stem}:" if len(files) > 1 else ""
            try:
                part = LmdbDataset(file, self.options, notes=self.notes, prefix=prefix)
            except ValueError as error:
                if self.options.on_error == "raise":
                    raise
                self.skipped.append(str(error))
            else:
                self.parts.append(part)
                self.skipped += part.skipped
        if not self.parts:
            raise ValueError(f"{path}: every file is bad; the first: {self.skipped[0]}")
        self._ends = list(accumulate(len(part) for part in self.parts))

    def __len__(self) -> int:
        return self._ends[-1]

    def record(self, index: int) -> Mapping[str, Any]:
        """The stored fields of system `index`."""
        part, inside = self._locate(index)
        return part.record(inside)

    def where(self, index: int) -> str:
        """File and key of system `index`, for errors."""
        part, inside = self._locate(index)
        return part.where(inside)

    def default_sid(self, index: int) -> int | str:
        """File and key, for a record without sid."""
        part, inside = self._locate(index)
        return part.default_sid(inside)

    def _locate(self, index: int) -> tuple[LmdbDataset, int]:
        which = bisect.bisect_right(self._ends, index)
        before = self._ends[which - 1] if which else 0
        return self.parts[which], index - before

    def _keep(self, indices: list[int]) -> None:
        raise NotImplementedError("the parts leave out their own records")
