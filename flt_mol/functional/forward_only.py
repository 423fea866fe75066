"""Linear softmax attention where no gradient is asked for: rows in chunks, everything in place.

The same numbers as `stabilised_features` and `linear.linear_attention` to rounding. What differs is
what is held: features of a chunk of rows, never of all, in buffers that are used again. Keys go
first, their sums rescaled as larger logits turn up; then queries read the sums.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flt_mol.functional._common import at_least_float32, least_exponent
from flt_mol.functional._operator import systems_of_both
from flt_mol.functional._rows import ordinary
from flt_mol.functional.feature_maps import SharedLogits
from flt_mol.functional.packed import check_ptr

# Rows at a time: enough for products to run at full speed, few enough to stay in a core's cache.
CHUNK = 2048


# Numbers of a system's features from which doing it by itself is worth the calls.
LEAST = 2**15


class KeySums(NamedTuple):
    """What queries need to know of the keys of one system.

    Attributes:
        peak: c (H, M), the largest logit of each feature.
        weights: z = Σ_j φ(k_j) (H, M).
        values: S = Σ_j φ(k_j) v_jᵀ (H, M, V).
    """

    peak: Tensor
    weights: Tensor
    values: Tensor


def available(*tensors: Tensor) -> bool:
    """Whether nothing needs more than values: no gradient, graph, transform or autocast."""
    if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return False
    return ordinary(*tensors)


def worthwhile(ptr: Tensor, num_rows: int, numbers_per_row: int) -> bool:
    """Whether systems are large enough on average for a dozen calls each.

    Measured: 16 rows of 4 heads and 64 features take 1.5 to 2.5 times as long this way, 128 rows of
    4 heads as long, 128 rows of 12 heads and longer systems 0.4 to 0.7 times.
    """
    systems = max(1, ptr.shape[0] - 1)
    return num_rows * numbers_per_row >= LEAST * systems


def forward_softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    projection: Tensor,
    ptr: Tensor,
    key_ptr: Tensor | None = None,
    query_at: SharedLogits | None = None,
    key_at: SharedLogits | None = None,
    *,
    chunk: int = CHUNK,
) -> Tensor:
    """Attention with `softmax_log_features` per system, values only: nothing for autograd.

    Args:
        query: (N, H, D).
        key: (K, H, D).
        value: (K, H, V).
        projection: W (H, M, D), rows standard normal.
        ptr: (B + 1,), first query of each system.
        key_ptr: (B + 1,), first key of each system where keys are another set; else K = N.
        query_at: position logits of the queries, shared by all heads; None without positions.
        key_at: of the keys.
        chunk: rows at a time.

    Returns:
        (N, H, V), at least float32; 0 for queries without keys.

    Raises:
        ValueError: `ptr` does not describe N rows, or `key_ptr` not K rows of as many systems.
    """
    key_ptr = check_ptr(ptr, len(query), key_ptr, len(key))
    dtype = at_least_float32(query[:0]).dtype
    for x in (key, value):
        dtype = torch.promote_types(dtype, x.dtype)
    heads, features = projection.shape[:2]
    columns = scaled_columns(projection, dtype)
    places = [None if at is None else flat_columns(at, dtype) for at in (query_at, key_at)]
    out = query.new_empty(len(query), heads, value.shape[-1], dtype=dtype)
    rows_at_once = max(1, min(chunk, max(len(query), len(key))))
    buffer = query.new_empty(rows_at_once, heads, features, dtype=dtype)
    for rows, keys in systems_of_both(ptr, len(query), key_ptr, len(key)):
        sums = None
        for part in pieces(keys, chunk):
            k = key[part].to(dtype)
            logits = logits_into(buffer[: len(k)], k, columns, places[1], part)
            sums = add_keys(sums, logits, k, value[part].to(dtype))
        for part in pieces(rows, chunk):
            if sums is None:
                out[part] = 0.0
                continue
            q = query[part].to(dtype)
            logits = logits_into(buffer[: len(q)], q, columns, places[0], part)
            read_sums(sums, logits, out[part])
    return out


def pieces(rows: slice, size: int) -> list[slice]:
    """Consecutive slices of at most `size` rows.

    Example:
        >>> pieces(slice(3, 8), 2)
        [slice(3, 5, None), slice(5, 7, None), slice(7, 8, None)]
    """
    starts = range(rows.start, rows.stop, size)
    return [slice(start, min(start + size, rows.stop)) for start in starts]


def scaled_columns(projection: Tensor, dtype: torch.dtype) -> Tensor:
    """W D^{-1/4}, transposed: (H, M, D) → (H, D, M)."""
    scaled: Tensor = projection.to(dtype) * projection.shape[-1] ** -0.25
    return scaled.transpose(1, 2).contiguous()


def flat_columns(at: SharedLogits, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """T (N, 2R) and F side by side for all heads: (2R, H·M)."""
    columns = at.columns.to(dtype).transpose(0, 1).flatten(1)
    return at.basis, columns


def logits_into(
    out: Tensor,
    rows: Tensor,
    columns: Tensor,
    at: tuple[Tensor, Tensor] | None,
    part: slice,
) -> Tensor:
    """x_h W_h + T F_h → `out` (n, H, M) for rows x (n, H, D), which are `part` of all rows."""
    if at is None:
        for h, column in enumerate(columns):
            torch.mm(rows[:, h], column, out=out[:, h])
        return out
    basis, shared = at
    torch.mm(basis[part].to(out.dtype), shared, out=out.flatten(1))
    for h, column in enumerate(columns):
        out[:, h].addmm_(rows[:, h], column)
    return out


def key_exponentials(sums: KeySums | None, logits: Tensor, key: Tensor) -> Tensor:
    """φ(k) relative to the largest logits seen so far, in place; the sums so far are rescaled.

    Args:
        sums: so far, rescaled in place to the new peak; None before the first keys.
        logits: (n, H, M), of `logits_into`; overwritten with φ(k).
        key: (n, H, D).

    Returns:
        The new peak (H, M).
    """
    # Of a key, unlike of a query, ‖k̂‖²/2 does not cancel.
    norm: Tensor = torch.linalg.vector_norm(key, dim=-1, keepdim=True)
    logits.sub_(norm.square_().mul_(0.5 * key.shape[-1] ** -0.5))
    peak = logits.amax(0)
    if sums is not None:
        peak = torch.maximum(peak, sums.peak)
        rescale = (sums.peak - peak).exp_()
        sums.weights.mul_(rescale)
        sums.values.mul_(rescale[..., None])
    logits.sub_(peak).clamp_(min=least_exponent(logits.dtype)).exp_()
    return peak


def add_keys(sums: KeySums | None, logits: Tensor, key: Tensor, value: Tensor) -> KeySums:
    """Sums with some more keys of the system in them; the arguments of `key_exponentials`.

    Args:
        sums: so far, overwritten; None before the first keys.
        logits: (n, H, M), overwritten.
        key: (n, H, D).
        value: (n, H, V).
    """
    peak = key_exponentials(sums, logits, key)
    features, values = logits.permute(1, 2, 0), value.transpose(0, 1)
    if sums is None:
        return KeySums(peak, logits.sum(0), torch.bmm(features, values))
    weights = sums.weights.add_(logits.sum(0))
    return KeySums(peak, weights, sums.values.baddbmm_(features, values))


def read_sums(sums: KeySums, logits: Tensor, out: Tensor) -> None:
    """φ(q)·S / φ(q)·z → `out` (n, H, V); `logits` (n, H, M) are overwritten with φ(q)."""
    query_exponentials(sums.peak, logits)
    total = normaliser(logits, sums.weights)
    for h, values in enumerate(sums.values):
        torch.mm(logits[:, h], values, out=out[:, h])
    out.div_(total)


def query_exponentials(peak: Tensor, logits: Tensor) -> None:
    """φ(q) from logits (n, H, M), in place: what `stabilised_features` gives queries."""
    logits.add_(peak)
    logits.sub_(logits.amax(-1, keepdim=True)).clamp_(min=least_exponent(logits.dtype)).exp_()


def normaliser(features: Tensor, weights: Tensor) -> Tensor:
    """φ(q)·z (n, H, 1), never 0."""
    total: Tensor = torch.bmm(features.transpose(0, 1), weights[..., None]).transpose(0, 1)
    return total.clamp_(min=torch.finfo(features.dtype).tiny)
