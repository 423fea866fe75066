"""What all data sets have in common."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from flt_mol.data.decoding import decode
from flt_mol.data.schema import ReadOptions, Record, Tagger, decoded, may_be_energy, to_numpy
from flt_mol.files import NoteWarning
from flt_mol.structures import Structures

_CHUNK = 64  # systems read together when a whole file is read


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
            text = f"{self.subject}: {'; '.join(new.values())}"
            warnings.warn(text, NoteWarning, stacklevel=4)


class StructuresDataset(Dataset[Structures]):
    """Systems in a file: ``dataset[i]`` is a `Structures` with B = 1, `batch` reads many.

    Subclasses give `_open`, which counts the records and puts them into `_items`, or else
    `_records` (or `_systems`); and as needed `_where` and `_default_sid`, where records may lack
    one. All but the first by row of the file.
    With on_error="skip", `skipped` holds one message for each invalid record.

    Args:
        path: file or folder.
        options: how records are read.
        notes: shared by the parts of a larger data set.
    """

    kind = "folder"

    def __init__(
        self, path: str | Path, options: ReadOptions | None = None, *, notes: Notes | None = None
    ) -> None:
        self.path = Path(path)
        self.options = ReadOptions() if options is None else options
        self.notes = Notes(str(path)) if notes is None else notes
        self.skipped: list[str] = []
        self.prefix = ""  # of sids that are not stored
        self.is_relaxation = False
        self._items: list[Record] = []
        self._index = self.options.frames or ""
        self._rows: NDArray[np.int64] = np.empty(0, np.int64)
        self._tags: dict[int, tuple[Tensor, Tensor, Any]] = {}  # fixed atoms, tag rule; by row
        self._finish(self._open())

    @abstractmethod
    def _open(self) -> int:
        """Prepare reading; the number of records."""

    def _where(self, row: int) -> str:
        return f"{self.path}, system {row}"

    def _records(self, rows: Sequence[int]) -> list[Record]:
        """The stored fields of rows of the file, by their stored names."""
        return [self._items[row] for row in rows]

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

    def batches(self, size: int = _CHUNK) -> Iterator[Structures]:
        """All systems, `size` at a time."""
        for start in range(0, len(self), size):
            yield self.batch(range(start, min(start + size, len(self))))

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

    def files(self) -> list[StructuresDataset]:
        """The data set of each file."""
        return [self]

    def place(self, index: int) -> tuple[Path, int]:
        """The file of system `index`, and which of its records it is, from 0."""
        return self.path, self._rows_of([index])[0]

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
            for _ in self.batches():
                pass

    def without_targets(self) -> str | None:
        """What to report of a data set whose first 64 valid records lack the target, else None."""
        found: dict[str, bool] = {}
        for row in self._rows[:_CHUNK].tolist():
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
            text += '; energy="calculator" takes total energies. Adsorption energies: flt-mol data '
            text += "convert --references TABLE (slab + gas phase)"
        return text if found else None

    def _rows_of(self, indices: Sequence[int]) -> list[int]:
        try:
            rows: list[int] = self._rows[np.asarray(indices, dtype=np.int64)].tolist()
        except IndexError as error:
            raise IndexError(f"{self.path}: {error}") from None
        return rows

    def _batch(self, rows: list[int]) -> Structures:
        kinds: dict[str, str] = {}
        structures = self._systems(rows, kinds)
        if kinds:
            self.notes.add(kinds)
        try:
            if self.options.tag_slab is not None:
                structures = self._tagged(structures, rows, self.options.tag_slab)
            if self.options.check is not None:
                self.options.check(structures)
        except ValueError as error:
            for row in rows if len(rows) > 1 else ():
                self._batch([row])
            raise ValueError(f"{self._where(rows[0])}, {error}") from None
        return structures

    def _tagged(self, structures: Structures, rows: list[int], tag: Tagger) -> Structures:
        """Frames of a relaxation get the tags of the first; a system is tagged once: it is slow."""
        sources = [0 if self.is_relaxation else row for row in rows]
        for row in dict.fromkeys(sources):
            if row not in self._tags:
                tagged = tag(self._systems([row], {}))
                (rule,) = tagged.info.get("tag_rule", (None,))
                self._tags[row] = tagged.tags, tagged.fixed, rule
        tags, fixed, rules = zip(*(self._tags[row] for row in sources), strict=True)
        info = {**structures.info, **({"tag_rule": rules} if any(rules) else {})}
        return replace(structures, tags=torch.cat(tags), fixed=torch.cat(fixed), info=info)

    def _finish(self, count: int) -> None:
        """Look at the records now, those of `_index` (ASE's, as text)."""
        index = self._index
        parts = [int(x) if x else None for x in (":" if index.isalpha() else index).split(":")]
        if len(parts) == 1 and parts[0] is not None:
            parts = [parts[0], parts[0] + 1 or None]  # -1 is the last
        self._rows = np.arange(count)[slice(*parts)]
        if count and not len(self):
            raise ValueError(f"{self.path} has {count} frames, and none of {index}")
        if self.options.require_energy and (text := self.without_targets()) is not None:
            raise ValueError(f"{self.path}: {text}")
        if self.options.on_error == "skip":
            chunks = np.split(self._rows, range(_CHUNK, len(self), _CHUNK))
            self._rows = np.array([i for rows in chunks for i in self._valid(rows.tolist())], int)
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
