"""What all data sets have in common, and several files as one data set."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from flt_mol.data.decoding import decode
from flt_mol.data.schema import ReadOptions, Record, decoded, may_be_energy, to_numpy
from flt_mol.structures import Structures

_AT_ONCE = 64  # systems read together when a whole file is read


class Notes:
    """Warnings about one data set: of each kind only the first is issued."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.seen: set[str] = set()

    def add(self, kinds: Mapping[str, str]) -> None:
        """Warn of the kinds not seen before (kind → text), all in one warning."""
        new = {kind: text for kind, text in kinds.items() if kind not in self.seen}
        self.seen.update(new)
        if new:
            warnings.warn(f"{self.subject}: {'; '.join(new.values())}", UserWarning, stacklevel=4)


class StructuresDataset(Dataset[Structures]):
    """Systems in a file: ``dataset[i]`` is a :class:`Structures` with B = 1, `batch` reads many.

    Subclasses give `_records` (or `_systems`), `_where` and, where records may lack one,
    `_default_sid`, all by row of the file, and call :meth:`_finish` at the end of `__init__`.
    With on_error="skip", `skipped` holds one message for each invalid record.

    Args:
        path: file or folder.
        options: how records are read.
        notes: shared by the parts of a larger data set.
    """

    def __init__(
        self, path: str | Path, options: ReadOptions | None = None, *, notes: Notes | None = None
    ) -> None:
        self.path = Path(path)
        self.options = ReadOptions() if options is None else options
        self.notes = Notes(str(path)) if notes is None else notes
        self.skipped: list[str] = []
        self.prefix = ""  # of sids that are not stored
        self.is_relaxation = False
        self.kind = type(self).__name__.removesuffix("Dataset")
        self._rows: NDArray[np.int64] = np.empty(0, np.int64)

    @abstractmethod
    def _where(self, row: int) -> str:
        """How errors name a row of the file, e.g. ``data.lmdb, key 3``."""

    def _records(self, rows: Sequence[int]) -> list[Record]:
        """The stored fields of rows of the file, by their stored names."""
        raise NotImplementedError

    def _default_sid(self, row: int) -> int | str:
        return f"{self.prefix}{row}" if self.prefix else row

    def _systems(self, rows: Sequence[int], notes: dict[str, str]) -> Structures:
        """Rows of the file as one batch."""
        return decode(
            self._records(rows),
            self.options,
            where=lambda i: self._where(rows[i]),
            default_sid=lambda i: self._default_sid(rows[i]),
            notes=notes,
        )

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Structures:
        return self._batch(self._rows_of([index]))

    def __getitems__(self, indices: Sequence[int]) -> Structures:  # torch's DataLoader calls it
        return self.batch(indices)

    def __iter__(self) -> Iterator[Structures]:
        return (self[i] for i in range(len(self)))

    def batch(self, indices: Sequence[int]) -> Structures:
        """Many systems in one batch, in the order asked for, repeated where asked for twice.

        Raises:
            ValueError: the first system that cannot be read, naming it.
            IndexError: an index outside the data set.
        """
        return self._batch(self._rows_of(indices))

    def record(self, index: int) -> dict[str, Any]:
        """The stored fields of system `index` by their stored names: arrays and plain values.

        Raises:
            ValueError: a damaged record or field, naming it.
        """
        (row,) = self._rows_of([index])
        fields = {}
        for name, value in self._records([row])[0].items():
            try:
                fields[name] = decoded(value)
            except ValueError as error:
                raise ValueError(f"{self._where(row)}: {name} {error}") from error
        return fields

    def keep(self, indices: Sequence[int]) -> None:
        """Hold only these systems, in this order."""
        self._rows = self._rows[list(indices)]

    def frame(self, index: int) -> int:
        """Which record of the file system `index` is, from 0."""
        return self._rows_of([index])[0]

    def where(self, index: int) -> str:
        """How errors name system `index`, e.g. ``data.lmdb, key 3``."""
        return self._where(self._rows_of([index])[0])

    def natoms(self) -> NDArray[np.int64]:
        """Atoms of each system (len,), counted without making structures of them.

        Raises:
            ValueError: a record that cannot be read, or holds no atomic numbers.
        """
        counts = []
        for row in self._rows.tolist():
            numbers = self._records([row])[0].get("atomic_numbers")
            if numbers is None:
                raise ValueError(f"{self._where(row)}: atomic_numbers is missing")
            counts.append(to_numpy(numbers).size)
        return np.array(counts, dtype=np.int64)

    def read_through(self) -> None:
        """Read every system once, so that invalid records raise ValueError before work begins."""
        if self.options.on_error == "raise":
            for rows in self._chunks():
                self._batch(rows)

    def without_targets(self) -> str | None:
        """What to report of a data set whose first 64 valid records lack the target, else None."""
        found: dict[str, bool] = {}
        for row in self._rows[:_AT_ONCE].tolist():
            with suppress(ValueError):
                record = self._records([row])[0]
                if record.get(self.options.energy_of(record)) is not None:
                    return None
                found |= {str(name): may_be_energy(name, value) for name, value in record.items()}
        numbers = [name for name, possible in found.items() if possible]
        text = (
            f"this split has no targets (no record holds {self.options.energy}); train and "
            f"evaluate need them, predict does not; stored are: {', '.join(numbers) or 'none'}"
        )
        if "calculator" in numbers:
            text += (
                '; energy="calculator" takes total energies. Adsorption energies of relaxations: '
            )
            text += "flt-mol data convert --references TABLE (slab + gas phase)"
        return text if found else None

    def _rows_of(self, indices: Sequence[int]) -> list[int]:
        try:
            rows: list[int] = self._rows[np.asarray(indices, dtype=np.int64)].tolist()
        except IndexError as error:
            raise IndexError(f"{self.path}: {error}") from None
        return rows

    def _chunks(self) -> Iterator[list[int]]:
        for start in range(0, len(self._rows), _AT_ONCE):
            yield self._rows[start : start + _AT_ONCE].tolist()

    def _batch(self, rows: list[int]) -> Structures:
        kinds: dict[str, str] = {}
        structures = self._systems(rows, kinds)
        if kinds:
            self.notes.add(kinds)
        try:
            structures = self._tagged(structures, rows)
            if self.options.check is not None:
                self.options.check(structures)
        except ValueError as error:
            for row in rows if len(rows) > 1 else ():
                self._batch([row])
            raise ValueError(f"{self._where(rows[0])}, {error}") from None
        return structures

    def _tagged(self, structures: Structures, rows: list[int]) -> Structures:
        tag = self.options.tag_slab
        return structures if tag is None else tag(structures)

    def _finish(self, count: int, index: str | None = None) -> None:
        """Look at the records now, those of `index` or the options' (ASE's, as text)."""
        index = index or self.options.frames or ""
        parts = [int(x) if x else None for x in (":" if index.isalpha() else index).split(":")]
        if len(parts) == 1 and parts[0] is not None:
            parts = [parts[0], parts[0] + 1 or None]  # -1 is the last
        self._rows = np.arange(count)[slice(*parts)]
        if count and not len(self):
            raise ValueError(f"{self.path} has {count} frames, and none of {index}")
        if self.options.require_energy and (text := self.without_targets()) is not None:
            raise ValueError(f"{self.path}: {text}")
        if self.options.on_error == "skip":
            self._rows = np.array([i for rows in self._chunks() for i in self._valid(rows)], int)
            if not len(self):
                reason = self.skipped[0] if self.skipped else "it is empty"
                raise ValueError(f"{self.path}: every record is invalid; the first: {reason}")

    def _valid(self, rows: list[int]) -> list[int]:
        """Those of `rows` whose systems can be read; messages of the others are kept."""
        try:
            self._batch(rows)
            return rows
        except ValueError as error:
            if len(rows) > 1:
                return [row for one in rows for row in self._valid([one])]
            self.skipped.append(str(error))
            return []


class JoinedDataset(StructuresDataset):
    """The records of several files, one file after the other.

    Args:
        path: what the whole is called.
        files: its files, in order.
        open_part: opens one file, given the file, the options and the shared notes; with
            on_error="skip", files for which it raises ValueError are skipped.
        options: how records are read.
        notes: where warnings go.
    """

    def __init__(
        self,
        path: str | Path,
        files: Iterable[Path],
        open_part: Callable[[Path, ReadOptions, Notes], StructuresDataset],
        options: ReadOptions | None = None,
        *,
        notes: Notes | None = None,
    ) -> None:
        super().__init__(path, options, notes=notes)
        self.parts: list[StructuresDataset] = []
        for file in files:
            try:
                part = open_part(file, self.options, self.notes)
            except ValueError as error:
                if self.options.on_error == "raise":
                    raise
                self.skipped.append(str(error))
                continue
            self.parts.append(part)
            self.skipped += part.skipped
        if not self.parts:
            raise ValueError(f"{path}: every file is invalid; the first: {self.skipped[0]}")
        if len(self.parts) > 1:
            for part in self.parts:
                part.prefix = f"{part.path.stem}:"
        self._starts = list(accumulate((len(part) for part in self.parts), initial=0))
        self._rows = np.arange(self._starts[-1])

    def _locate(self, row: int) -> tuple[int, int]:
        part = bisect_right(self._starts, row) - 1
        return part, row - self._starts[part]

    def _where(self, row: int) -> str:
        part, inside = self._locate(row)
        return self.parts[part].where(inside)

    def _records(self, rows: Sequence[int]) -> list[Record]:
        return [self.parts[part].record(inside) for part, inside in map(self._locate, rows)]

    def _systems(self, rows: Sequence[int], notes: dict[str, str]) -> Structures:
        places: dict[int, list[tuple[int, int]]] = {}
        for place, (part, inside) in enumerate(map(self._locate, rows)):
            places.setdefault(part, []).append((place, inside))
        batches = [self.parts[p].batch([i for _, i in own]) for p, own in places.items()]
        joined = batches[0] if len(batches) == 1 else Structures.cat(batches)
        order = [place for own in places.values() for place, _ in own]
        return joined if order == sorted(order) else joined.select(np.argsort(order).tolist())

    def natoms(self) -> NDArray[np.int64]:
        """Atoms of each system (len,)."""
        return np.concatenate([part.natoms() for part in self.parts])
