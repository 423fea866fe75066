"""Exact attention over neighbour pairs whose keys are periodic images: a lattice sum of masks."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from flt_mol.functional.groups import (
    Groups,
    budget_of,
    check_ptr,
    groups_of,
    row_offsets,
    settled,
    single_step,
    system_index,
    without_autocast,
)
from flt_mol.functional.pairs import segment_peak, segment_sum


def image_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ptr: Tensor,
    index_i: Tensor,
    index_j: Tensor,
    log_weight: Tensor,
    *,
    scale: float | None = None,
    others: bool = False,
) -> Tensor:
    """out_i = Σ_p A_p v_j / Σ_p A_p, A_p = exp(s q_i·k_j + log w_p), over the pairs p of i.

    With `log_sum_over_images` the weight of j is exp(s q_i·k_j) Σ_T w(r_i − r_j − T): the same in a
    supercell, and what 3D-Graphormer's image keys compute [1]. Logits may be ±10⁴. Time and memory
    are quadratic in the size of a system; weights are recomputed in the backward pass.

    Args:
        query: (N, H, D).
        key: (N, H, D).
        value: (N, H, V).
        ptr: (B + 1,), first row of each system.
        index_i: (P,) int64, query of each pair.
        index_j: (P,) int64, key of each pair, in the same system, the atom itself among them; every
            (i, j) is there once at most, as with `NeighborPairs.groups`.
        log_weight: log w (P, H).
        scale: s; None is 1/√D.
        others: whether the other (i, j) of a system are there too, with w = 1.

    Returns:
        (N, H, V), at least float32 for any autocast dtype; 0 for rows without any weight.

    Raises:
        ValueError: `ptr` does not describe N rows, `log_weight` not P pairs and H heads, or there
            are rows and no pairs at all.

    References:
        [1] Shi et al., "Benchmarking Graphormer …", 2022.

    Examples:
        >>> query = key = torch.zeros(2, 1, 1)
        >>> value, log_weight = torch.tensor([[[0.0]], [[4.0]]]), torch.tensor([[1.0], [2.0]]).log()
        >>> pairs = torch.tensor([0, 0]), torch.tensor([0, 1]), log_weight
        >>> image_attention(query, key, value, torch.tensor([0, 2]), *pairs).flatten()
        tensor([2.6667, 0.0000])
    """
    rows, pairs_heads = query.shape[0], (len(index_i), query.shape[1])
    if log_weight.shape != pairs_heads:
        shape = tuple(log_weight.shape)
        raise ValueError(f"log_weight has shape {shape}, expected (P, H) = {pairs_heads}")
    check_ptr(ptr, rows)
    if index_i.shape[0] == 0 and rows and not others:
        raise ValueError(f"no pairs for {rows} queries: give neighbor_pairs(…, self_pairs=True)")
    q, k, v, w = settled(query, key, value, log_weight)
    if rows == 0:
        return v
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (x.transpose(0, 1) for x in (q if scale == 1.0 else q * scale, k, v))
    return _attention(q, k, v, w, index_i, index_j, ptr, others).transpose(0, 1)


def log_sum_over_images(log_weight: Tensor, group: Tensor, num_groups: int) -> Tensor:
    """(G, H) log Σ_T w of log w (P, H), −∞ for groups without weight, with gradient 0 there.

    `group` (P,) int64 is the group of each pair, see `NeighborPairs.groups`.
    """
    peak = segment_peak(log_weight, group, num_groups)
    total = segment_sum((log_weight - peak[group]).exp(), group, num_groups)
    nothing = total == 0
    return (peak + total.masked_fill(nothing, 1.0).log()).masked_fill(nothing, -torch.inf)


def _weights(q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
    """softmax(Q Kᵀ + bias) (B, n, m) of a group, 0 where nothing has any weight."""
    logits = torch.baddbmm(bias, q, k.mT)
    nothing = logits.detach().amax(-1, keepdim=True) == -torch.inf
    return logits.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)


def _groups(q: Tensor, i: Tensor, j: Tensor, ptr: Tensor) -> tuple[Groups, Tensor]:
    """Groups by n × n matrices, and the place of each pair among the numbers of them all."""
    heads, rows = q.shape[:2]
    offsets = row_offsets(ptr, rows)
    costs = tuple(heads * (b - a) ** 2 for a, b in pairwise(offsets))
    groups = groups_of(costs, offsets, offsets, rows, q.device, budget_of(q.device), heads)
    firsts, widths, total = [0] * len(offsets), [0] * len(offsets), 0
    for systems, block in zip(groups.systems, groups.rows, strict=True):
        for b in systems:
            firsts[b], widths[b] = total, block.length
            total += block.length**2
    system = system_index(ptr, rows)
    column = torch.arange(rows, device=q.device) - ptr[system]
    first, width = torch.tensor([firsts, widths], device=q.device)[:, system[i]]
    return groups, first + column[i] * width + column[j]


def _forward(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, i: Tensor, j: Tensor, ptr: Tensor, others: bool
) -> Tensor:
    heads, parts = len(q), []
    with without_autocast(q):
        groups, slot = _groups(q, i, j, ptr)
        sizes = [block.number * block.length**2 for block in groups.rows]
        bias = w.new_full((sum(sizes), heads), 0.0 if others else -torch.inf)
        bias = bias.index_copy(0, slot, w)
        for block, own in zip(groups.rows, bias.split(sizes), strict=True):
            matrices = own.T.reshape(heads, -1, block.length, block.length)
            if block.real is not None:
                matrices = matrices.masked_fill(~block.real[:, None], -torch.inf)
            matrices = matrices.flatten(0, 1)
            weights = _weights(block.by_head(q), block.by_head(k), matrices)
            parts.append(weights.bmm(block.by_head(v)).reshape(heads, -1, v.shape[-1]))
        return groups.put_back(parts, 1)


_attention = single_step(
    "image_attention",
    (
        "Tensor q, Tensor k, Tensor v, Tensor log_weight",
        "Tensor i, Tensor j, Tensor ptr, bool others",
    ),
    _forward,
    lambda q, k, v, *_: (*q.shape[:2], v.shape[-1]),
)
