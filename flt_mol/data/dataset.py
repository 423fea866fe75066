"""What all data sets of this library have in common, and their warnings: one of each kind."""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from flt_mol.data.oc20 import to_structures
from flt_mol.data.options import ReadOptions
from flt_mol.data.targets import no_targets, note_numbers
from flt_mol.structures import Structures

__all__ = ["Notes", "StructuresDataset"]

_TRIED_FOR_TARGETS = 64  # readable records
_MOST_TRIED = 1024
_READ_AT_ONCE = 64


class Notes:
    """Warnings about one data set: of each kind only the first is issued.

    Args:
        subject: the data set, named in each warning.
    """

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

    Subclasses give `record` and `__len__`, and end their `__init__` with :meth:`_check`. They may
    read many systems faster in :meth:`_at_once`.

    Args:
        path: file or folder.
        options: how records are read.
        notes: shared by the parts of a larger data set.

    Attributes:
        path: as given.
        skipped: with on_error="skip", one message for each record left out.
    """

    def __init__(
        self,
        path: str | Path,
        options: ReadOptions | None = None,
        *,
        notes: Notes | None = None,
    ) -> None:
        self.path = Path(path)
        self.options = ReadOptions() if options is None else options
        self.notes = Notes(str(path)) if notes is None else notes
        self.skipped: list[str] = []

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def record(self, index: int) -> Mapping[str, Any]:
        """The stored fields of system `index`, by their stored names."""

    @abstractmethod
    def where(self, index: int) -> str:
        """How errors name system `index`, e.g. ``data.lmdb, key 3``."""

    @abstractmethod
    def default_sid(self, index: int) -> int | str:
        """The sid of a record that has none."""

    @abstractmethod
    def _keep(self, indices: list[int]) -> None:
        """Reduce the data set to `indices`."""

    def __getitem__(self, index: int) -> Structures:
        if not -len(self) <= index < len(self):
            raise IndexError(f"system {index} of {len(self)} in {self.path}")
        index = int(index) % len(self)
        return self.convert(index, self.record(index))

    def __getitems__(self, indices: Sequence[int]) -> Structures:
        """`batch`, by the name that torch's DataLoader calls."""
        return self.batch(indices)

    def __iter__(self) -> Iterator[Structures]:
        return (self[i] for i in range(len(self)))

    def batch(self, indices: Sequence[int]) -> Structures:
        """Many systems in one batch, in the order asked for, repeated where asked for twice.

        The same as `Structures.cat` of them one by one, errors and warnings included, and several
        times faster where all is in order.

        Raises:
            ValueError: the first system that cannot be read, as when it is read alone.
            IndexError: an index outside the data set.
        """
        size = len(self)
        if len(indices) and -size <= min(indices) and max(indices) < size:
            structures = self._sound_at_once([int(i) % size for i in indices])
            if structures is not None:
                return structures
        return Structures.cat([self[i] for i in indices])

    def natoms(self) -> NDArray[np.int64]:
        """Atoms of each system (len,), counted without making structures of them.

        Raises:
            ValueError: a record that cannot be read, or holds no atomic numbers.
        """
        return np.fromiter(map(self._count, range(len(self))), np.int64, len(self))

    def _count(self, index: int) -> int:
        numbers = self.record(index).get("atomic_numbers")
        if numbers is None:
            raise ValueError(f"{self.where(index)}: atomic_numbers is missing")
        return math.prod(np.shape(numbers))

    def _at_once(self, indices: Sequence[int]) -> Structures | None:
        """The systems `indices` in one batch, where nothing about them is out of the ordinary.

        None, without a warning or an error, where a system has to be looked at by itself.
        """
        return None

    def _sound_at_once(self, indices: list[int]) -> Structures | None:
        """`_at_once`, and None where the check of the options finds something."""
        structures = None if self.options.layer_numbers else self._at_once(indices)
        if structures is not None and self.options.check is not None:
            try:
                self.options.check(structures)
            except ValueError:
                return None
        return structures

    def convert(self, index: int, record: Mapping[str, Any]) -> Structures:
        """The record of system `index` as a :class:`Structures`.

        Raises:
            ValueError: as :func:`flt_mol.data.oc20.to_structures`, and what the check of the
                options finds.
        """
        kinds: dict[str, str] = {}
        structures = to_structures(
            record,
            where=self.where(index),
            default_sid=self.default_sid(index),
            options=self.options,
            notes=kinds,
        )
        self.notes.add(kinds)
        if self.options.check is not None:
            try:
                self.options.check(structures)
            except ValueError as error:
                raise ValueError(f"{self.where(index)}, {error}") from None
        return structures

    def read_through(self) -> None:
        """Read every system once and keep none, so that a bad one is found before work begins.

        Some 0.2 ms a system. With on_error="skip" that was done when the data set was opened, and
        is not done again.

        Raises:
            ValueError: the first bad record.
        """
        if self.options.on_error == "raise":
            for start in range(0, len(self), _READ_AT_ONCE):
                self.batch(range(start, min(start + _READ_AT_ONCE, len(self))))

    def without_targets(self) -> str | None:
        """What to say of a data set whose first records, 64 that can be read, all lack the target.

        It tells what is stored instead, and how to ask for it.

        Returns:
            None where one of them has a target, or none can be read.
        """
        numbers: dict[str, bool] = {}
        readable = 0
        for index in range(min(len(self), _MOST_TRIED)):
            try:
                record = self.record(index)
                if record.get(self.options.energy) is not None:
                    return None
                note_numbers(record, numbers)
            except ValueError:
                continue
            readable += 1
            if readable == _TRIED_FOR_TARGETS:
                break
        parts: list[StructuresDataset] = getattr(self, "parts", [self])
        relaxations = any(part._may_be_relaxation() for part in parts)
        return no_targets(numbers, self.options, relaxations) if readable else None

    def _may_be_relaxation(self) -> bool:
        """Whether the systems may be frames of one relaxation."""
        return False

    def _check(self) -> None:
        """Look at the first records now, so that complaints come when the data set is opened."""
        if self.options.require_energy:
            text = self.without_targets()
            if text is not None:
                raise ValueError(f"{self.path}: {text}")
        if self.options.on_error == "skip":
            self._keep(list(self._good(range(len(self)))))
            if not len(self):
                raise ValueError(f"{self.path}: every record is bad; the first: {self.skipped[0]}")
        else:
            # A bad first record is reported when it is asked for, like any other.
            list(self._good(range(min(1, len(self)))))
            self.skipped.clear()

    def _good(self, indices: Iterable[int]) -> Iterator[int]:
        """Those of `indices` whose systems can be read; messages of the others are kept."""
        rest = iter(indices)
        while chunk := list(islice(rest, _READ_AT_ONCE)):
            good = self._sound_at_once(chunk) is not None
            yield from chunk if good else self._good_of(chunk)

    def _good_of(self, indices: Iterable[int]) -> Iterator[int]:
        for index in indices:
            try:
                self[index]
            except ValueError as error:
                self.skipped.append(str(error))
            else:
                yield index
