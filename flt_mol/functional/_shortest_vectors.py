"""The shortest reciprocal vectors of a batch of cells, and how many have to be looked at."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

# Of one system, and of those that are looked at together: 0.8 GB while they are sorted out.
MOST_CANDIDATES = 2**24
_SAME_SHELL = 1e-5  # relative; cells are often known to float32 only


class Limits(NamedTuple):
    """What `reciprocal_vectors` is told about sizes."""

    k_max: float
    padding: float
    shrink_vacuum: bool
    max_vectors: int | None


def candidates(cell: Tensor, occupied: Tensor, limits: Limits) -> Tensor:
    """How many integers (B,) float64 are looked at for each system."""
    return _widths(_largest(cell, limits)).prod(-1) * occupied


def _largest(cell: Tensor, limits: Limits) -> Tensor:
    """The largest integers (B, 3): k·a_i is the i-th, so none exceeds radius·|a_i|."""
    radius = _radius(cell, torch.linalg.inv(cell), limits)
    most: Tensor = radius[:, None] * torch.linalg.vector_norm(cell, dim=-1) * (1 + 1e-9)
    return most.floor()


def _widths(most: Tensor) -> Tensor:
    """How many integers there are to look at along each axis, of one of ±k."""
    return torch.stack([most[:, 0] + 1, 2 * most[:, 1] + 1, 2 * most[:, 2] + 1], dim=-1)


def shortest_vectors(cell: Tensor, occupied: Tensor, limits: Limits) -> tuple[Tensor, Tensor]:
    """Integers (K, 3) of one of ±k for all |k| ≤ k_max, ascending, and where systems begin."""
    parts = [
        _shortest_of(cell[some], occupied[some], limits)
        for some in _runs(candidates(cell, occupied, limits))
    ]
    if len(parts) == 1:
        integers, kept = parts[0]
    else:
        integers, kept = (torch.cat(part) for part in zip(*parts, strict=True))
    return integers, torch.cat([kept.new_zeros(1), kept.cumsum(0)])


def _runs(count: Tensor) -> Iterator[slice]:
    """Systems that follow each other and have no more candidates together than one may have."""
    start, total = 0, 0.0
    for system, number in enumerate(count.tolist()):
        if total + number > MOST_CANDIDATES and system > start:
            yield slice(start, system)
            start, total = system, 0.0
        total += number
    yield slice(start, len(count))


def _shortest_of(cell: Tensor, occupied: Tensor, limits: Limits) -> tuple[Tensor, Tensor]:
    """As `_shortest_vectors`, of systems that fit into memory together, with their counts (B,)."""
    inverse = torch.linalg.inv(cell)
    radius, most = _radius(cell, inverse, limits), _largest(cell, limits)
    widths = _widths(most)
    count, most, widths = (x.to(torch.int64) for x in (widths.prod(-1) * occupied, most, widths))
    system = torch.repeat_interleave(torch.arange(cell.shape[0]), count)
    index = torch.arange(system.shape[0]) - (count.cumsum(0) - count)[system]
    width, most = widths[system], most[system]
    third = index % width[:, 2] - most[:, 2]
    index = index // width[:, 2]
    second, first = index % width[:, 1] - most[:, 1], index // width[:, 1]
    half = (first > 0) | (second > 0) | ((second == 0) & (third >= 0))
    integers = torch.stack([first, second, third], dim=-1)
    length = torch.linalg.vector_norm(
        (integers.to(cell.dtype)[:, None, :] * inverse[system]).sum(-1), dim=-1
    )
    inside = half & (length <= radius[system] * (1 + 1e-9))
    integers, system, length = integers[inside], system[inside], length[inside]
    order = torch.argsort(length, stable=True)
    order = order[torch.argsort(system[order], stable=True)]
    integers, system, length = integers[order], system[order], length[order]
    if limits.max_vectors is not None:
        whole = _whole_shells(length, system, limits.max_vectors)
        integers, system = integers[whole], system[whole]
    return integers, torch.bincount(system, minlength=cell.shape[0])


def _radius(cell: Tensor, inverse: Tensor, limits: Limits) -> Tensor:
    """Radius (B,) of a ball that holds all vectors wanted: k_max, or less under a budget."""
    if limits.max_vectors is None:
        return cell.new_full((cell.shape[0],), limits.k_max)
    # A ball of radius q + d holds all reciprocal cells that touch the ball q, so at least V·4πq³/3
    # vectors, where d is half the diagonal of a reciprocal cell. Two per entry of the half space,
    # and a few more, so that the last shell within the budget is known to be whole.
    volume = torch.linalg.det(cell).abs()
    ball = (3 * (2 * limits.max_vectors + 4) / (4 * math.pi * volume)) ** (1 / 3)
    radius: Tensor = ball + inverse.square().sum((-2, -1)).sqrt()
    return radius.clamp(max=limits.k_max)


def _whole_shells(length: Tensor, system: Tensor, max_vectors: int) -> Tensor:
    """Marks (K,) of the vectors in shells that end within the first `max_vectors` of a system."""
    if length.numel() == 0:
        return torch.zeros(0, dtype=torch.bool)
    fresh = torch.ones_like(system, dtype=torch.bool)
    fresh[1:] = (system.diff() > 0) | (length.diff() > _SAME_SHELL * length[1:])
    shell = fresh.cumsum(0) - 1
    count = torch.bincount(system)
    rank = torch.arange(system.shape[0]) - (count.cumsum(0) - count)[system]
    last = torch.zeros(int(shell[-1]) + 1, dtype=torch.int64).scatter_reduce(0, shell, rank, "amax")
    whole: Tensor = last[shell] < max_vectors
    return whole
