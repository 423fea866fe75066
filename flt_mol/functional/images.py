"""Exact attention over neighbour pairs whose keys are periodic images: a lattice sum of masks."""

from __future__ import annotations

import torch
from torch import Tensor

from flt_mol.functional import _image_ops
from flt_mol.functional.groups import settled, system_sizes, without_autocast
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
) -> Tensor:
    """out_i = Σ_p A_p v_j / Σ_p A_p, A_p = exp(s q_i·k_j + log w_p), over the pairs p of i.

    With one pair per image of j, the weight of j is exp(s q_i·k_j) Σ_T w(r_i − r_j − T): a
    multiplicative lattice sum, hence the same in a supercell. It is what 3D-Graphormer's explicit
    image keys compute [1]. Logits may be ±10⁴; a weight of 0 (log w = −∞) is a pair left out.

    Systems of n atoms with g distinct (i, j) go through an n × n matrix where n² ≤ 16 g, else
    along the pairs: measured on one core, a pair costs as much as 13 to 25 entries. Either is
    formed for one system at a time, and again in the backward pass: n²·H numbers, at most 16 g·H,
    that are not kept: the backward pass starts from the inputs. Only where gradients are themselves
    differentiated are a few numbers per pair and head kept besides.

    Args:
        query: (N, H, D).
        key: (N, H, D).
        value: (N, H, V).
        ptr: (B + 1,), first row of each system.
        index_i: (P,) int64, query of each pair. Sorted by (i, j) is fastest.
        index_j: (P,) int64, key of each pair, in the same system; the atom itself belongs to them
            (`neighbor_pairs(..., self_pairs=True)`).
        log_weight: log w (P, H).
        scale: s, 1/√D if None.

    Returns:
        (N, H, V), at least float32 whatever the autocast dtype; 0 for rows without any weight.

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
    if log_weight.shape != (len(index_i), query.shape[1]):
        raise ValueError(
            f"log_weight has shape {tuple(log_weight.shape)}, expected (P, H) = "
            f"{(len(index_i), query.shape[1])}"
        )
    if not torch.compiler.is_compiling():
        system_sizes(ptr, query.shape[0])
        if len(index_i) == 0 and query.shape[0]:
            raise ValueError(
                f"there are {query.shape[0]} queries and no pairs, so no atom would attend to "
                "itself: build pairs with neighbor_pairs(..., self_pairs=True)"
            )
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    q, k, v, w = settled(query, key, value, log_weight)
    with without_autocast(q):
        out: Tensor = _image_ops.image_attention(q * scale, k, v, w, ptr, index_i, index_j)
        return out


def log_sum_over_images(log_weight: Tensor, group: Tensor, num_groups: int) -> Tensor:
    """Images of one (i, j) drawn together, log Σ_T w: for layers that share a mask.

    Args:
        log_weight: log w (P, H), −∞ where w = 0.
        group: (P,) int64, the group of each pair (`NeighborPairs.groups`).
        num_groups: G.

    Returns:
        (G, H), −∞ for groups without weight, with gradient 0 there.

    Example:
        >>> w = torch.tensor([[0.25], [0.5], [0.25]])
        >>> log_sum_over_images(w.log(), torch.tensor([0, 0, 1]), 2).exp().flatten()
        tensor([0.7500, 0.2500])
    """
    peak = segment_peak(log_weight, group, num_groups)
    total = segment_sum((log_weight - peak[group]).exp(), group, num_groups)
    nothing = total == 0
    return (peak + total.masked_fill(nothing, 1.0).log()).masked_fill(nothing, -torch.inf)
