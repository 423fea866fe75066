"""Exact attention over neighbour pairs whose keys are periodic images: a lattice sum of masks."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from flt_mol.functional.groups import settled, system_index, system_sizes, without_autocast
from flt_mol.functional.linear import normalised, with_ones
from flt_mol.functional.pairs import pair_dots, segment_peak, segment_sum, weighted_sum
from flt_mol.functional.spectral import padded_groups, padded_rows

# What a pair costs over an entry of an n × n matrix in time: 13 to 25 on one core.
_PAIR_COST = 16
_recomputed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


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
) -> Tensor:
    """out_i = Σ_p A_p v_j / Σ_p A_p, A_p = exp(s q_i·k_j + log w_p), over the pairs p of i.

    With one pair per image of j, the weight of j is exp(s q_i·k_j) Σ_T w(r_i − r_j − T): the same
    in a supercell, and what 3D-Graphormer's explicit image keys compute [1]. Logits may be ±10⁴.
    Where pairs are many, Σ n² ≤ 16 P, systems go through padded n × n matrices, else along the
    pairs. Weights are recomputed in the backward pass.

    Args:
        query: (N, H, D).
        key: (N, H, D).
        value: (N, H, V).
        ptr: (B + 1,), first row of each system.
        index_i: (P,) int64, query of each pair.
        index_j: (P,) int64, key of each pair, in the same system, the atom itself among them.
        log_weight: log w (P, H).
        scale: s; None is 1/√D.

    Returns:
        (N, H, V), at least float32 for any autocast dtype; 0 for rows without any weight.

    Raises:
        ValueError: `ptr` does not describe N rows, `log_weight` not P pairs and H heads, or there
            are rows and no pairs at all.

    References:
        [1] Shi et al., "Benchmarking Graphormer on Large-Scale Molecular Modeling Datasets", 2022.

    Example:
        >>> query = key = torch.zeros(2, 1, 1)
        >>> value, three = torch.tensor([[[0.0]], [[4.0]]]), torch.tensor([0, 0, 0])
        >>> pairs = three, torch.tensor([0, 1, 1]), torch.zeros(3, 1)
        >>> image_attention(query, key, value, torch.tensor([0, 2]), *pairs).flatten()
        tensor([2.6667, 0.0000])
    """
    rows, pairs_heads = query.shape[0], (len(index_i), query.shape[1])
    if log_weight.shape != pairs_heads:
        shape = tuple(log_weight.shape)
        raise ValueError(f"log_weight has shape {shape}, expected (P, H) = {pairs_heads}")
    sizes = system_sizes(ptr, rows)
    if len(index_i) == 0 and rows:
        raise ValueError(
            f"no pairs for {rows} queries: build them with neighbor_pairs(..., self_pairs=True)"
        )
    q, k, v, w = settled(query, key, value, log_weight)
    q = q * (query.shape[-1] ** -0.5 if scale is None else scale)
    with without_autocast(q):
        if sum(size**2 for size in sizes) <= _PAIR_COST * len(index_i):
            return _by_systems(q, k, v, w, index_i, index_j, ptr, sizes)
        out: Tensor = _recomputed(_over_pairs, q, k, v, w, index_i, index_j)
        return out


def log_sum_over_images(log_weight: Tensor, group: Tensor, num_groups: int) -> Tensor:
    """(G, H) log Σ_T w of log w (P, H), −∞ for groups without weight, with gradient 0 there.

    `group` (P,) int64 is the group of each pair, see `NeighborPairs.groups`.
    """
    peak = segment_peak(log_weight, group, num_groups)
    total = segment_sum((log_weight - peak[group]).exp(), group, num_groups)
    nothing = total == 0
    return (peak + total.masked_fill(nothing, 1.0).log()).masked_fill(nothing, -torch.inf)


def _over_pairs(
    q: Tensor, k: Tensor, v: Tensor, log_weight: Tensor, i: Tensor, j: Tensor
) -> Tensor:
    logits = pair_dots(q, k, i, j) + log_weight
    weight = (logits - segment_peak(logits, i, len(q))[i]).exp()
    return normalised(weighted_sum(weight, with_ones(v), i, j, len(q)))


def _by_systems(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_weight: Tensor,
    i: Tensor,
    j: Tensor,
    ptr: Tensor,
    sizes: list[int],
) -> Tensor:
    rows = len(q)
    label, image = torch.unique(i * rows + j, return_inverse=True)
    if len(label) < len(image):
        log_weight = log_sum_over_images(log_weight, image, len(label))
    i, j = label // rows, label % rows
    system = system_index(ptr, rows)
    column = torch.arange(rows, device=q.device) - ptr[system]
    out = v.new_zeros(rows + 1, *v.shape[1:])
    costs = [q.shape[1] * size**2 for size in sizes]
    for systems in padded_groups(costs, [b for b, n in enumerate(sizes) if n], q.device):
        at = padded_rows(ptr, systems, rows)
        place = torch.full((len(sizes),), -1, device=q.device)
        place[systems] = torch.arange(len(systems), device=q.device)
        own = (place[system[i]] >= 0).nonzero().squeeze(1)
        slot = (place[system[i[own]]] * at.shape[1] + column[i[own]]) * at.shape[1] + column[j[own]]
        part = _recomputed(_over_matrices, q, k, v, log_weight[own], slot, at)
        out = out.index_copy(0, at.flatten(), part.flatten(0, 1))
    return out[:-1]


def _over_matrices(
    q: Tensor, k: Tensor, v: Tensor, log_weight: Tensor, slot: Tensor, at: Tensor
) -> Tensor:
    # All rows (N, H, ·), those of the group at (G, L) → (G, L, H, V).
    heads, (count, size) = q.shape[1], at.shape
    bias = log_weight.new_full((count * size**2, heads), -torch.inf).index_copy(0, slot, log_weight)
    q, k, v = (pad(x, (0, 0, 0, 0, 0, 1))[at].transpose(1, 2) for x in (q, k, with_ones(v)))
    logits = q @ k.mT + bias.view(count, size, size, heads).permute(0, 3, 1, 2)
    peak = logits.detach().amax(-1, keepdim=True)
    weight = (logits - peak.masked_fill(peak.isinf(), 0.0)).exp()
    return normalised(weight @ v).transpose(1, 2)
