"""A batch on its way from a worker: one block of shared memory, not one for each tensor.

torch sends every tensor through a file of its own, opened for as long as the tensor lives: a few
dozen batches in a list, and a process has no file left to open.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flt_mol.functional.neighbors import NeighborPairs
from flt_mol.structures import Structures

__all__ = ["Packed"]

_ALIGNMENT = 16


class _Place(NamedTuple):
    """Where in the block a tensor lies."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class Packed:
    """A batch of structures in one block of bytes; made by :meth:`of`, undone by :meth:`unpack`.

    Pairs travel in the narrowest integers that hold them.
    """

    block: Tensor
    places: tuple[_Place, ...]
    others: dict[str, Any]

    @classmethod
    def of(cls, structures: Structures) -> Packed:
        """Pack a batch, on the CPU."""
        values = {f.name: getattr(structures, f.name) for f in fields(structures)}
        pairs = values.pop("pairs")
        tensors = {name: x for name, x in values.items() if isinstance(x, Tensor)}
        others = {name: x for name, x in values.items() if name not in tensors}
        if pairs is not None:
            tensors |= {f"pairs.{name}": _narrow(x) for name, x in pairs._asdict().items()}
        places, end = [], 0
        for name, x in tensors.items():
            places.append(_Place(name, x.dtype, tuple(x.shape), end))
            end += math.ceil(x.nbytes / _ALIGNMENT) * _ALIGNMENT
        block = torch.empty(end, dtype=torch.uint8)
        for place in places:
            _view(block, place).copy_(tensors[place.name])
        return cls(block, tuple(places), others)

    def unpack(self) -> Structures:
        """The batch, in memory of its own: the block is given back."""
        tensors = {place.name: _view(self.block, place) for place in self.places}
        pairs = None
        if "pairs.shift" in tensors:
            columns = [tensors.pop(f"pairs.{name}") for name in NeighborPairs._fields]
            pairs = NeighborPairs(*(x.to(torch.int64, copy=True) for x in columns))
        copies: dict[str, Any] = {name: x.clone() for name, x in tensors.items()}
        return Structures(**copies, **self.others, pairs=pairs)

    def pin_memory(self) -> Structures:
        """The batch in page-locked memory; called by DataLoader(pin_memory=True)."""
        return self.unpack().pin_memory()


def _view(block: Tensor, place: _Place) -> Tensor:
    size = math.prod(place.shape) * place.dtype.itemsize
    return block[place.start : place.start + size].view(place.dtype).reshape(place.shape)


def _narrow(x: Tensor) -> Tensor:
    """Integers in the narrowest type that holds them all."""
    low, high = (x.min().item(), x.max().item()) if x.numel() else (0, 0)
    for dtype in (torch.int8, torch.int16, torch.int32):
        limits = torch.iinfo(dtype)
        if limits.min <= low and high <= limits.max:
            return x.to(dtype)
    return x
