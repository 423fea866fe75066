"""Neighbour pairs as a field of a batch of structures: checked, cut and joined.

`flt_mol.functional` is not imported: a batch without pairs does not need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from flt_mol.functional.neighbors import NeighborPairs
    from flt_mol.structures import Structures


def check_pairs(pairs: NeighborPairs | None, cutoff: float | None) -> None:
    """Refuse pairs without cutoff, a cutoff without pairs, and other shapes or types."""
    if (pairs is None) != (cutoff is None):
        given = "cutoff without pairs" if pairs is None else "pairs without cutoff"
        raise ValueError(f"Structures has {given}: give both, or call with_pairs(cutoff)")
    if pairs is None:
        return
    count = len(pairs.index_i)
    for name, shape in (("index_i", (count,)), ("index_j", (count,)), ("shift", (count, 3))):
        value = getattr(pairs, name)
        if tuple(value.shape) != shape or value.dtype != torch.int64:
            raise ValueError(
                f"Structures.pairs.{name} has shape {tuple(value.shape)} and {value.dtype}, "
                f"expected {shape} and torch.int64"
            )


def cut(pairs: NeighborPairs, start: int, stop: int) -> NeighborPairs:
    """The pairs of rows `start` to `stop`, counted from `start`."""
    inside = (pairs.index_i >= start) & (pairs.index_i < stop)
    index_i, index_j, shift = (x[inside] for x in pairs)
    return type(pairs)(index_i - start, index_j - start, shift)


def join(parts: Sequence[Structures]) -> tuple[NeighborPairs | None, float | None]:
    """Pairs and cutoff of all parts in one, or neither, where a part lacks them or differs."""
    first = parts[0].pairs
    if first is None or any(part.cutoff != parts[0].cutoff for part in parts):
        return None, None
    index_i: list[Tensor] = []
    index_j: list[Tensor] = []
    shift: list[Tensor] = []
    start = 0
    for part in parts:
        if part.pairs is not None:
            index_i.append(part.pairs.index_i + start)
            index_j.append(part.pairs.index_j + start)
            shift.append(part.pairs.shift)
        start += part.num_atoms
    joined = type(first)(torch.cat(index_i), torch.cat(index_j), torch.cat(shift))
    return joined, parts[0].cutoff
