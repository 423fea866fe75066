"""Sums over neighbour pairs, linear in P in time and memory, in a fixed order of summation.

Everything here can be differentiated any number of times, as training on forces does, and nothing
of the size pairs × channels is kept for a backward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flt_mol.functional import _pair_ops
from flt_mol.functional.groups import settled, without_autocast
from flt_mol.functional.linear import with_ones


def pair_filter(
    basis: Tensor,
    weight: Tensor,
    value: Tensor,
    index_i: Tensor,
    index_j: Tensor,
    num_rows: int,
    *,
    symmetric: bool = False,
) -> Tensor:
    """out_ic = Σ_p (Σ_t B_pt W_tc) v_{j(p) c} over the pairs p of receiver i: a filter per channel.

    Saves only its inputs for the backward pass: O(P·T + N·C), never P × C. Time O(P·T·C).

    Args:
        basis: B (P, T), basis functions of each pair.
        weight: W (T, C).
        value: v (K, C).
        index_i: (P,) int64, receiver of each pair, a row of the result. Sorted is fastest.
        index_j: (P,) int64, sender of each pair, a row of `value`.
        num_rows: N.
        symmetric: a promise that K = N and that with each pair its reverse is there
            (`NeighborPairs.symmetric`), with the same basis: gradients then take two thirds of
            their time. Where it does not hold, gradients are wrong.

    Returns:
        (N, C), at least float32 whatever the autocast dtype; 0 for rows without pairs.

    Raises:
        ValueError: shapes that do not belong together.

    References:
        Schütt et al., "SchNet: A continuous-filter convolutional neural network", NeurIPS 2017,
        equation 3.

    Example:
        >>> i, j = torch.tensor([0, 0, 1]), torch.tensor([1, 2, 0])
        >>> basis, value = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[1.0], [10.0], [5.0]])
        >>> pair_filter(basis, torch.ones(1, 1), value, i, j, num_rows=3).flatten().tolist()
        [20.0, 3.0, 0.0]
    """
    if basis.shape != (len(index_i), weight.shape[0]) or value.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"basis {tuple(basis.shape)}, weight {tuple(weight.shape)} and value "
            f"{tuple(value.shape)} do not belong together: expected (P, T), (T, C) and (K, C) "
            f"for P = {len(index_i)} pairs"
        )
    basis, weight, value = settled(basis, weight, value)
    if symmetric and len(value) != num_rows:
        raise ValueError(f"{len(value)} senders for {num_rows} receivers: pairs are not symmetric")
    run = _pair_ops.symmetric_pair_filter if symmetric else _pair_ops.pair_filter
    out: Tensor = run(basis, weight, value, index_i, index_j, num_rows)
    return out


def filtered_dots(x: Tensor, y: Tensor, weight: Tensor, index_i: Tensor, index_j: Tensor) -> Tensor:
    """s_pt = Σ_c x_{i(p) c} W_tc y_{j(p) c}: (N, C), (K, C), W (T, C) → (P, T), at least float32.

    Times the basis and summed over t it is the dot product under a filter per channel,
    Σ_c x_ic F_c(r_p) y_jc, without anything of size P × C.
    """
    x, y, weight = settled(x, y, weight)
    out: Tensor = _pair_ops.pair_filter_basis(x, y, weight, index_i, index_j)
    return out


def pair_dots(x: Tensor, y: Tensor, index_i: Tensor, index_j: Tensor) -> Tensor:
    """s_ph = x_{i(p) h} · y_{j(p) h}: (N, H, M), (K, H, M) → (P, H), at least float32."""
    x, y = settled(x, y)
    out: Tensor = _pair_ops.pair_dots(x, y, index_i, index_j)
    return out


def weighted_sum(
    weight: Tensor, value: Tensor, index_i: Tensor, index_j: Tensor, num_rows: int
) -> Tensor:
    """out_ih = Σ_p w_ph v_{j(p) h} over the pairs p of receiver i.

    Args:
        weight: w (P, H).
        value: v (K, H, V).
        index_i: (P,) int64, receiver of each pair, a row of the result. Sorted is fastest.
        index_j: (P,) int64, sender of each pair, a row of `value`.
        num_rows: N.

    Returns:
        (N, H, V), at least float32; 0 for rows without pairs.
    """
    weight, value = settled(weight, value)
    out: Tensor = _pair_ops.weighted_sum(weight, value, index_i, index_j, num_rows)
    return out


def segment_sum(x: Tensor, index: Tensor, num_rows: int) -> Tensor:
    """Σ of the rows with the same index: (P, H) → (num_rows, H), in a fixed order."""
    one = x.new_ones(1, x.shape[1], 1)
    return weighted_sum(x, one, index, torch.zeros_like(index), num_rows).squeeze(-1)


def segment_peak(x: Tensor, index: Tensor, num_rows: int) -> Tensor:
    """Largest finite entry of the rows with the same index, 0 where there is none; no gradient.

    What to subtract before exponentials are summed: (P, H) → (num_rows, H).
    """
    x = x.detach()
    peak = x.new_full((num_rows, x.shape[1]), -torch.inf)
    peak = peak.scatter_reduce(0, index[:, None].expand_as(x), x, "amax")
    return peak.masked_fill(peak.isinf(), 0.0)


def pair_sums(
    query_features: Tensor,
    key_features: Tensor,
    value: Tensor,
    weight: Tensor,
    index_i: Tensor,
    index_j: Tensor,
) -> Tensor:
    """Σ_p φ(q_i)·φ(k_j) w_p [v_j, 1]: what pairs add to `linear.linear_sums` before the division.

    With w = exp(f) − 1 the weight of (i, j) becomes φ(q_i)·φ(k_j)·exp(f_ij) under attention's one
    normaliser, exactly, provided every (i, j) occurs once (`NeighborPairs.groups`). Time
    O(P·H·(M + V)), memory O(P·H + N·H·(M + V)).

    Args:
        query_features: φ(q) (N, H, M), the same as in `linear_sums`.
        key_features: φ(k) (K, H, M), likewise.
        value: (K, H, V).
        weight: w (P, H).
        index_i: (P,) int64, query of each pair.
        index_j: (P,) int64, key of each pair.

    Returns:
        (N, H, V + 1), the normaliser last; at least float32 whatever the autocast dtype.
    """
    query_features, key_features, value, weight = settled(
        query_features, key_features, value, weight
    )
    with without_autocast(value):
        weight = weight * pair_dots(query_features, key_features, index_i, index_j)
        value = with_ones(value)
        return weighted_sum(weight, value, index_i, index_j, query_features.shape[0])
