"""Several data sets as one: the files of a folder, of whatever kind."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flt_mol.data.dataset import Notes, StructuresDataset
from flt_mol.data.options import ReadOptions
from flt_mol.files import readable
from flt_mol.structures import Structures

__all__ = ["JoinedDataset"]


class JoinedDataset(StructuresDataset):
    """The records of several files, one file after the other.

    Args:
        path: what the whole is called.
        files: its files, in order.
        open_part: opens one file: called with the file, the options, where warnings go, and what
            to put before a key that names a record.
        options: how records are read.
        notes: where warnings go.

    Raises:
        ValueError: as `open_part`, of any file; with on_error="skip", if all are bad.
    """

    def __init__(
        self,
        path: str | Path,
        files: Sequence[Path],
        open_part: Callable[[Path, ReadOptions, Notes, str], StructuresDataset],
        options: ReadOptions | None = None,
        *,
        notes: Notes | None = None,
    ) -> None:
        super().__init__(path, options, notes=notes)
        self.parts: list[StructuresDataset] = []
        for file in files:
            prefix = f"{file.stem}:" if len(files) > 1 else ""
            try:
                with readable(file):
                    part = open_part(file, self.options, self.notes, prefix)
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
        return self.parts[part].record(inside)

    def where(self, index: int) -> str:
        """File and key of system `index`, for errors."""
        part, inside = self._locate(index)
        return self.parts[part].where(inside)

    def default_sid(self, index: int) -> int | str:
        """File and key, for a record without sid."""
        part, inside = self._locate(index)
        return self.parts[part].default_sid(inside)

    def natoms(self) -> NDArray[np.int64]:
        """Atoms of each system (len,)."""
        return np.concatenate([part.natoms() for part in self.parts])

    def _at_once(self, indices: Sequence[int]) -> Structures | None:
        places: dict[int, list[int]] = {}
        for place, index in enumerate(indices):
            places.setdefault(self._locate(index)[0], []).append(place)
        batches = []
        for part, own in places.items():
            inside = [self._locate(indices[place])[1] for place in own]
            batch = self.parts[part]._at_once(inside)
            if batch is None:
                return None
            batches.append(batch)
        order = [place for own in places.values() for place in own]
        return _in_order(Structures.cat(batches), order)

    def _locate(self, index: int) -> tuple[int, int]:
        which = bisect.bisect_right(self._ends, index)
        return which, index - (self._ends[which - 1] if which else 0)

    def _keep(self, indices: list[int]) -> None:
        raise NotImplementedError("the parts leave out their own records")


def _in_order(batch: Structures, order: Sequence[int]) -> Structures:
    """The systems of `batch`, of which the b-th is to be at `order[b]`."""
    if list(order) == list(range(len(order))):
        return batch
    where_from = np.argsort(order).tolist()
    systems = torch.tensor(where_from)
    natoms = batch.natoms[systems]
    ptr = torch.cat([natoms.new_zeros(1), natoms.cumsum(0)])
    shift = torch.repeat_interleave(batch.ptr[systems] - ptr[:-1], natoms)
    atoms = torch.arange(len(shift)) + shift

    def take(value: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor | None:
        return None if value is None else value[rows]

    return replace(
        batch,
        atomic_numbers=batch.atomic_numbers[atoms],
        positions=batch.positions[atoms],
        tags=batch.tags[atoms],
        fixed=batch.fixed[atoms],
        positions_relaxed=take(batch.positions_relaxed, atoms),
        cell=batch.cell[systems],
        pbc=batch.pbc[systems],
        energy=take(batch.energy, systems),
        energy_initial=take(batch.energy_initial, systems),
        ptr=ptr,
        sid=tuple(batch.sid[b] for b in where_from),
        info={name: tuple(values[b] for b in where_from) for name, values in batch.info.items()},
    )
