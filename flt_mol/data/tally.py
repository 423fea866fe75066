"""Counts of what a data set holds, in a few bytes for each record."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from ase.data import chemical_symbols
from numpy.typing import NDArray

from flt_mol.structures import Structures

__all__ = ["KEPT", "LARGEST_ENERGY", "Some", "Tally", "targets_apart"]

LARGEST_ENERGY = 10.0  # eV; OC20's makers dropped systems beyond it
KEPT = 1000  # messages, outliers and repeated sids that are kept; all are counted
_ELEMENTS = len(chemical_symbols)


class Some:
    """The first items of a list that may be long, and how many there are."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.count = 0

    def add(self, item: Any) -> None:
        """Count it, and keep it if it is among the first."""
        self.count += 1
        if self.count <= KEPT:
            self.items.append(item)


@dataclass
class Tally:
    """What has been counted so far; a few bytes for each record."""

    records: int = 0
    fields: Counter[str] = field(default_factory=Counter)
    dtypes: dict[str, set[str]] = field(default_factory=dict)
    elements: NDArray[np.int64] = field(default_factory=lambda: np.zeros(_ELEMENTS, np.int64))
    tags: Counter[int] = field(default_factory=Counter)
    pbc: Counter[str] = field(default_factory=Counter)
    natoms: array[int] = field(default_factory=lambda: array("q"))
    fixed: int = 0
    energies: array[float] = field(default_factory=lambda: array("d"))
    outliers: Some = field(default_factory=Some)
    problems: Some = field(default_factory=Some)
    numbers: array[int] = field(default_factory=lambda: array("q"))  # sids that are numbers
    names: Counter[str] = field(default_factory=Counter)  # and those that are text

    def add_record(self, record: Mapping[str, Any], decode: bool) -> None:
        """Count the fields; look up what they hold if `decode`."""
        self.records += 1
        names = [name for name in record if not _is_none(record, name)]
        self.fields.update(names)
        for name in names if decode else ():
            self.dtypes.setdefault(name, set()).add(_dtype(record, name))

    def add(self, systems: Structures) -> None:
        """Count what is in them."""
        numbers, system = systems.atomic_numbers.numpy(), systems.system.numpy()
        pairs = np.unique(system * _ELEMENTS + numbers)
        self.elements += np.bincount(pairs % _ELEMENTS, minlength=_ELEMENTS)
        self.natoms.extend(systems.natoms.tolist())
        tags, counts = np.unique(systems.tags.numpy(), return_counts=True)
        self.tags.update(dict(zip(tags.tolist(), counts.tolist(), strict=True)))
        self.fixed += int(systems.fixed.sum())
        self.pbc.update("".join("T" if p else "F" for p in row) for row in systems.pbc.tolist())
        for sid in systems.sid:
            if isinstance(sid, int) and sid.bit_length() < 64:
                self.numbers.append(sid)
            else:
                self.names[str(sid)] += 1
        self.add_energies(systems)

    def add_energies(self, systems: Structures) -> None:
        """Count the targets, and note those that cannot be adsorption energies."""
        if systems.energy is None:
            return
        energies = systems.energy.tolist()
        self.energies.extend(energies)
        for sid, energy in zip(systems.sid, energies, strict=True):
            if abs(energy) > LARGEST_ENERGY:
                self.outliers.add({"sid": sid, "energy": energy})

    def repeated(self) -> Some:
        """Sids that several records have."""
        found = Some()
        numbers, counts = np.unique(np.array(self.numbers, np.int64), return_counts=True)
        for number in numbers[counts > 1].tolist():
            found.add(number)
        for name, count in self.names.items():
            if count > 1:
                found.add(name)
        return found


def targets_apart(
    dataset: Any, indices: Sequence[int], has_target: Callable[[int], bool]
) -> Iterator[Structures]:
    """Systems in batches, those that have a target apart from those that have none.

    In one batch, a single system without target would take the targets of all others away.

    Args:
        dataset: with `batch`.
        indices: of the systems.
        has_target: whether the system of an index has a target; asked only where some have none.

    Raises:
        ValueError: as `batch`.
    """
    whole = dataset.batch(list(indices))
    if whole.energy is not None or len(indices) == 1:
        yield whole
        return
    apart: dict[bool, list[int]] = {True: [], False: []}
    for index in indices:
        apart[has_target(index)].append(index)
    if apart[True]:
        yield dataset.batch(apart[True])
        if apart[False]:
            yield dataset.batch(apart[False])
    else:
        yield whole


def _is_none(record: Mapping[str, Any], name: str) -> bool:
    """Without decoding tensors that nobody looks at."""
    describe: Callable[[str], Any] | None = getattr(record, "describe", None)
    return record[name] is None if describe is None else bool(describe(name)[0] == "NoneType")


def _dtype(record: Mapping[str, Any], name: str) -> str:
    try:
        value = record[name]
    except ValueError:
        return "unreadable"
    if isinstance(value, torch.Tensor | np.ndarray):
        kind = "tensor" if isinstance(value, torch.Tensor) else "array"
        return f"{kind} {str(value.dtype).removeprefix('torch.')}, {value.ndim} axes"
    return type(value).__name__
