"""Packed rows cut into blocks of equal length, and what is carried from block to block.

Block p of a system holds its rows p·n … p·n + n − 1. Blocks stand step by step: the first block of
every system, then the second of every system that has one, and so on. Systems come in order of
falling length, so what is carried into step p comes out of the leading blocks of step p − 1, and
one pass over the steps serves all systems at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from flt_mol.functional.groups import system_offsets

LENGTHS = (4, 8, 16, 32, 64)


class Blocks(NamedTuple):
    """Where the rows of packed systems stand once they are cut into T blocks of n slots.

    Attributes:
        length: n, a power of two.
        active: number of systems that have a block p, for p = 0, 1, …; never rises, Σ = T.
        rows: (T·n,) row of each slot; a slot beyond the end of its system repeats its last row.
            None where every slot is the row of the same number.
        filled: (T, n) bool, False for slots beyond the end; None as above.
        slots: (ptr[-1],) slot of each row; None as above.
    """

    length: int
    active: list[int]
    rows: Tensor | None
    filled: Tensor | None
    slots: Tensor | None

    def cut(self, x: Tensor) -> Tensor:
        """(H, N, F) → (H, T, n, F), repeated rows included."""
        if self.rows is not None:
            x = x.index_select(1, self.rows)
        return x.reshape(x.shape[0], sum(self.active), self.length, x.shape[-1])

    def cut_zero_filled(self, x: Tensor) -> Tensor:
        """(H, N, F) → (H, T, n, F) with zeros beyond the end of each system."""
        x = self.cut(x)
        return x if self.filled is None else x.masked_fill(~self.filled[..., None], 0.0)

    def join(self, x: Tensor, num_rows: int) -> Tensor:
        """(H, T, n, F) → (H, N, F), zeros for rows beyond `ptr[-1]`."""
        x = x.flatten(1, 2)
        if self.slots is not None:
            x = x.index_select(1, self.slots)
            beyond = num_rows - x.shape[1]
            x = F.pad(x, (0, 0, 0, beyond)) if beyond else x
        return x

    def steps(self, x: Tensor) -> Sequence[Tensor]:
        """The blocks of every step: (H, T, …) → (H, active[p], …) for p = 0, 1, and so on."""
        return torch.split(x, self.active, 1)


def blocks_of(ptr: Tensor, num_rows: int) -> Blocks:
    """How to cut systems with offsets `ptr` (B + 1,) among `num_rows` N ≥ ptr[-1] rows."""
    offsets = system_offsets(ptr, num_rows)
    spans = [(start, stop) for start, stop in pairwise(offsets) if stop > start]
    if not spans:
        return Blocks(LENGTHS[0], [], None, None, None)
    spans.sort(key=lambda span: span[0] - span[1])
    sizes = [stop - start for start, stop in spans]
    length = min(LENGTHS, key=lambda n: _time(sizes, n))
    active = _still_running([-(-size // length) for size in sizes])
    if len(spans) == 1 and sizes[0] == num_rows == active[0] * len(active) * length:
        return Blocks(length, active, None, None, None)
    ends = [(start + p * length, stop) for p, k in enumerate(active) for start, stop in spans[:k]]
    first, stop = torch.tensor(ends, device=ptr.device).unsqueeze(-1).unbind(1)
    rows = first + torch.arange(length, device=ptr.device)
    filled = rows < stop
    slots = torch.empty(sum(sizes), dtype=torch.int64, device=ptr.device)
    slots[rows[filled]] = filled.flatten().nonzero().squeeze(1)
    return Blocks(length, active, rows.minimum(stop - 1).flatten(), filled, slots)


def _time(sizes: Sequence[int], length: int) -> float:
    """Relative time of work in blocks of n = `length`, fitted on a CPU at M = V = 64.

    A slot costs a constant, its share of the n × n weights, and its share of what is carried on.
    """
    slots = sum(-(-size // length) * length for size in sizes)
    return slots * (320 + length + (6400 / length if max(sizes) > length else 0))


def _still_running(counts: Sequence[int]) -> list[int]:
    """How many of `counts`, which never rise, exceed p, for p = 0, 1, and so on.

    Example:
        >>> _still_running([3, 2, 1])
        [3, 2, 1]
        >>> _still_running([3, 3])
        [2, 2, 2]
    """
    running, left = [], len(counts)
    for step in range(counts[0]):
        while counts[left - 1] <= step:
            left -= 1
        running.append(left)
    return running


Decays = Sequence[tuple[Tensor, Tensor]]


def carried_in(blocks: Blocks, sums: Tensor, decays: Decays | None = None) -> Tensor:
    """What earlier blocks of the system hand to each block: S_{p+1} = d_p S_p + e_p U_p, S_0 = 0.

    Args:
        blocks: of T blocks.
        sums: U (H, T, M, V).
        decays: (d_p, e_p), each (H, active[p + 1], M, 1), for every step but the last; None for 1.

    Returns:
        S (H, T, M, V).
    """
    parts = blocks.steps(sums)
    state = torch.zeros_like(parts[0])
    states = [state]
    for p, systems in enumerate(blocks.active[1:]):
        state, new = state[:, :systems], parts[p][:, :systems]
        if decays is None:
            state = state + new
        else:
            keep, add = decays[p]
            state = torch.addcmul(state * keep, new, add)
        states.append(state)
    return torch.cat(states, 1)


def carried_back(blocks: Blocks, sums: Tensor, decays: Decays | None = None) -> Tensor:
    """The adjoint of `carried_in`: Y_p = e_p Z_{p+1} with Z_p = W_p + d_p Z_{p+1}.

    Without decays that is the sum over the later blocks of the system.

    Args:
        blocks: of T blocks.
        sums: W (H, T, M, V).
        decays: as in `carried_in`.

    Returns:
        Y (H, T, M, V).
    """
    parts = blocks.steps(sums)
    later, handed = parts[-1], [torch.zeros_like(parts[-1])]
    for p in range(len(parts) - 2, -1, -1):
        idle = blocks.active[p] - later.shape[1]
        keep, add = decays[p] if decays is not None else (1.0, 1.0)
        handed.append(F.pad(later * add, (0, 0, 0, 0, 0, idle)))
        later = parts[p] + F.pad(later * keep, (0, 0, 0, 0, 0, idle))
    return torch.cat(handed[::-1], 1)
