"""Linear attention over packed systems: sums over keys per system, read back per query."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flt_mol.functional.feature_maps import features_of, row_level
from flt_mol.functional.groups import (
    LOWEST,
    PaddedRows,
    check_ptr,
    operator,
    real_only,
    settled,
    without_autocast,
)


def linear_attention(
    query_features: Tensor,
    key_features: Tensor,
    value: Tensor,
    ptr: Tensor,
    key_ptr: Tensor | None = None,
) -> Tensor:
    """out_i = φ(q_i)·S / φ(q_i)·z with S = Σ_j φ(k_j) v_jᵀ, z = Σ_j φ(k_j), j in the system of i.

    Costs O(N·M·V) time and O(N·M + B·M·V) memory per head. Rows without any weight, as those
    without keys, give 0: see `normalised`.

    Args:
        query_features: φ(q) (N, H, M), not negative.
        key_features: φ(k) (K, H, M), not negative.
        value: (K, H, V).
        ptr: (B + 1,), first row of each system.
        key_ptr: (B + 1,), first key of each system where keys are another set; else K = N.

    Returns:
        (N, H, V), accumulated in at least float32 for any autocast dtype, in that dtype.

    Raises:
        ValueError: `ptr` does not describe N rows, or `key_ptr` not K rows of as many systems.

    Examples:
        >>> ones = torch.ones(3, 1, 4)
        >>> value = torch.tensor([1.0, 3.0, 7.0]).reshape(3, 1, 1)
        >>> linear_attention(ones, ones, value, torch.tensor([0, 2, 3])).flatten().tolist()
        [2.0, 2.0, 7.0]
    """
    key_ptr = check_ptr(ptr, query_features.shape[0], key_ptr, value.shape[0])
    return _linear(query_features, key_features, value, ptr, key_ptr, "features")


def linear_log_attention(
    query_logits: Tensor,
    key_logits: Tensor,
    value: Tensor,
    ptr: Tensor,
    key_ptr: Tensor | None = None,
) -> Tensor:
    """`linear_attention` of log φ(q), log φ(k), of any size, stabilised as `stabilised_features`.

    A logit of −∞ is a feature of 0. Offsets are checked by whoever made them.
    """
    key_ptr = ptr if key_ptr is None else key_ptr
    return _linear(query_logits, key_logits, value, ptr, key_ptr, "log")


def linear_sums(
    query_features: Tensor,
    key_features: Tensor,
    value: Tensor,
    ptr: Tensor,
    key_ptr: Tensor | None = None,
) -> Tensor:
    """Numerator and denominator of `linear_attention`, φ(q_i)·S and φ(q_i)·z, before the division.

    Sums of other keys, or of pairs, can be added to them: (N, H, V + 1), the normaliser last.
    """
    key_ptr = check_ptr(ptr, query_features.shape[0], key_ptr, value.shape[0])
    return _linear(query_features, key_features, value, ptr, key_ptr, "sums")


def normalised(sums: Tensor) -> Tensor:
    """Numerator over denominator: (…, V + 1) → (…, V), the last column being the denominator.

    Only the denominator is clamped, at the smallest normal number: nothing is added. Where it
    is 0 the result is the numerator, which is 0 too, with gradients that stay finite.

    Examples:
        >>> normalised(torch.tensor([[6.0, 2.0], [0.0, 0.0]])).tolist()
        [[3.0], [0.0]]
    """
    return sums[..., :-1] / _positive(sums[..., -1:])


def _positive(total: Tensor) -> Tensor:
    clamped = total.clamp(min=torch.finfo(total.dtype).tiny)
    return clamped.masked_fill(total == 0, 1.0)


def with_ones(value: Tensor) -> Tensor:
    """(…, V) → (…, V + 1): a last column of ones, whose weighted sum is the normaliser."""
    return torch.cat([value, value.new_ones(1).expand(*value.shape[:-1], 1)], -1)


def read_sums(queries: Tensor, sums: Tensor, level: Tensor | None) -> Tensor:
    """φ(q)·[S, z], S of keys less their `level` (H, M) where there is one: (N, H, V + 1).

    Queries (N, H, M) are log φ(q) then, else φ(q); `sums` are (H, M, V + 1).
    """
    queries, sums = settled(queries, sums)
    if level is not None:
        queries = queries + level
        queries = features_of(queries - row_level(queries))
    with without_autocast(queries):
        return torch.einsum("nhm,hmv->nhv", queries, sums)


def _features(
    q: Tensor, k: Tensor, rows: PaddedRows, keys: PaddedRows, mode: str
) -> tuple[Tensor, Tensor]:
    if mode != "log":
        return q, k
    level = k.detach().amax(1, keepdim=True).clamp_(min=LOWEST[k.dtype])
    # Blocks that are gathered rows are nobody else's.
    q = q + level if rows.slots is None else q.add_(level)
    k = k - level if keys.slots is None else k.sub_(level)
    return features_of(q.sub_(row_level(q))), features_of(k)


def _weights(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Normalised weights, and what they were divided by."""
    weights = q.bmm(k.mT)
    total = _positive(weights.sum(-1, keepdim=True))
    return weights / total, total


def _attend(
    q: Tensor, k: Tensor, v: Tensor, rows: PaddedRows, keys: PaddedRows, mode: str
) -> tuple[Any, ...]:
    q, k = _features(q, k, rows, keys, mode)
    if _by_weights(q, v, keys, mode):
        k = real_only(k, keys)
        weights, total = _weights(q, k)
        return weights.bmm(v), q, k, v, weights, total
    read = q.bmm(k.mT.bmm(real_only(with_ones(v), keys)))
    return read if mode == "sums" else normalised(read), q, k, v, None, None


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: PaddedRows, keys: PaddedRows, mode: str,
    *kept: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if not kept:
        q, k = _features(q, k, rows, keys, mode)
    grad = real_only(grad, rows)
    if _by_weights(q, v, keys, mode):
        if not kept:
            k = real_only(k, keys)
            kept = _weights(q, k)
        weights, total = kept
        slopes = grad.bmm(v.mT)
        slopes = (slopes - (slopes * weights).sum(-1, keepdim=True)) / total
        to_q, to_k, to_v = slopes.bmm(k), slopes.mT.bmm(q), weights.mT.bmm(grad)
    else:
        v = with_ones(v)
        sums = k.mT.bmm(real_only(v, keys))
        if mode != "sums":
            read = q.bmm(sums)
            total = _positive(read[..., -1:])
            grad, out = grad / total, read[..., :-1] / total
            grad = torch.cat([grad, -(grad * out).sum(-1, keepdim=True)], -1)
        to_sums = q.mT.bmm(grad)
        to_q, to_k, to_v = grad.bmm(sums.mT), v.bmm(to_sums.mT), k.bmm(to_sums[..., :-1])
    return (to_q.mul_(q), to_k.mul_(k), to_v) if mode == "log" else (to_q, to_k, to_v)


def _by_weights(q: Tensor, v: Tensor, keys: PaddedRows, mode: str) -> bool:
    """Whether (φ(q) φ(k)ᵀ) v takes fewer products than φ(q) (φ(k)ᵀ v)."""
    features, channels = q.shape[-1], v.shape[-1]
    return mode != "sums" and keys.length * (features + channels) <= 2 * features * channels


_linear = operator(
    "linear_attention",
    _attend,
    _gradients,
    lambda rows, keys, features: max(rows, keys) * features,
    lambda channels, mode: channels + (mode == "sums"),
)
