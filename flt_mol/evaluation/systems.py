"""What is known of each evaluated system beside its energy: size, elements, adsorbate, facet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from flt_mol.structures import Structures

__all__ = ["COLUMNS", "columns_of", "joined_columns"]

COLUMNS = ("natoms", "adsorbate", "elements", "facet", "trained_on", "held_out")
"""In this order in files; "elements" is text, symbols in alphabetical order between spaces.

The last two are "yes" or "no", as the checkpoint tells that is evaluated."""

_FACETS = ("facet", "miller_index")  # names under which data sets store it

Columns = dict[str, tuple[Any, ...]]


def columns_of(structures: Structures) -> Columns:
    """Columns of B systems by name, None where a system has no such thing.

    - natoms: number of atoms.
    - adsorbate: formula of the atoms with tag 2, in Hill's order.
    - elements: all symbols.
    - facet: what the data set stores under "facet" or "miller_index".

    Example:
        >>> system = Structures.single(
        ...     [29, 28, 8, 6], [[0, 0, 0]] * 4, tags=[0, 1, 2, 2], info={"facet": "111"})
        >>> columns_of(system)
        {'natoms': (4,), 'adsorbate': ('CO',), 'elements': ('C Cu Ni O',), 'facet': ('111',)}
    """
    numbers = np.split(structures.atomic_numbers.cpu().numpy(), structures.ptr[1:-1].tolist())
    tags = np.split(structures.tags.cpu().numpy(), structures.ptr[1:-1].tolist())
    if not len(structures):
        numbers, tags = [], []
    return {
        "natoms": tuple(len(z) for z in numbers),
        "adsorbate": tuple(
            _hill(tuple(sorted(z[tag == 2].tolist()))) for z, tag in zip(numbers, tags, strict=True)
        ),
        "elements": tuple(_symbols(tuple(sorted(set(z.tolist())))) for z in numbers),
        "facet": _facets(structures),
    }


def joined_columns(parts: Iterable[Columns]) -> Columns:
    """Columns of all batches one after the other; those that hold only None are left out."""
    joined: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    for part in parts:
        for name in COLUMNS:
            joined[name] += part.get(name, (None,) * len(part["natoms"]))
    return {
        name: tuple(values)
        for name, values in joined.items()
        if any(value is not None for value in values)
    }


def _facets(structures: Structures) -> tuple[str | None, ...]:
    stored: Mapping[str, tuple[Any, ...]] = structures.info
    for name in _FACETS:
        if name in stored:
            return tuple(_text(value) for value in stored[name])
    return (None,) * len(structures)


def _text(value: Any) -> str | None:
    """(1, 1, 1) as "111", (1, -1, 0) as "1 -1 0"; text as it is."""
    if value is None or isinstance(value, str):
        return value or None
    numbers = [str(x) for x in np.asarray(value).reshape(-1).tolist()]
    return ("" if all(len(x) == 1 for x in numbers) else " ").join(numbers) or None


@lru_cache(maxsize=4096)
def _hill(numbers: tuple[int, ...]) -> str | None:
    from ase.data import chemical_symbols
    from ase.formula import Formula

    if not numbers:
        return None
    return str(Formula.from_list([chemical_symbols[z] for z in numbers]).format("hill"))


@lru_cache(maxsize=4096)
def _symbols(numbers: tuple[int, ...]) -> str | None:
    from ase.data import chemical_symbols

    return " ".join(sorted(chemical_symbols[z] for z in numbers)) or None
