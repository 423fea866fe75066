"""Linear softmax attention where no gradient is asked for: features of a chunk of rows at a time.

The same numbers as `stabilised_features` and `linear.linear_attention` to rounding. What differs is
what is held: features of a chunk of rows, never of all. Keys go first, their sums rescaled as
larger logits turn up; then queries read the sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flt_mol.functional._feature_groups import (
    Side,
    groups_of,
    read_sums,
    rows_at_once,
    scaled_columns,
    sum_keys,
)
from flt_mol.functional._rows import ordinary
from flt_mol.functional.feature_maps import SharedLogits
from flt_mol.functional.groups import check_ptr
from flt_mol.functional.numerics import at_least_float32

# Rows at a time of a whole layer: enough for products with weights to run at full speed.
CHUNK = 2048

# Numbers of a system's features from which doing it by itself is worth the calls.
LEAST = 2**15


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
    chunk: int | None = None,
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
        chunk: rows at a time; None is `rows_at_once`.

    Returns:
        (N, H, V), at least float32; 0 for queries without keys.

    Raises:
        ValueError: `ptr` does not describe N rows, or `key_ptr` not K rows of as many systems.
    """
    key_ptr = check_ptr(ptr, len(query), key_ptr, len(key))
    dtype = at_least_float32(query[:0]).dtype
    for x in (key, value):
        dtype = torch.promote_types(dtype, x.dtype)
    columns = scaled_columns(projection, dtype)
    queries, keys = (
        Side(rows, columns) if at is None else Side(rows, columns, at.basis, at.columns.to(dtype))
        for rows, at in ((query, query_at), (key, key_at))
    )
    out = query.new_empty(*query.shape[:2], value.shape[-1], dtype=dtype)
    return attended(queries, keys, value, (ptr, key_ptr), out, chunk)


def attended(
    queries: Side,
    keys: Side,
    value: Tensor,
    ptr: tuple[Tensor, Tensor],
    out: Tensor,
    chunk: int | None = None,
) -> Tensor:
    """What queries read of keys with values (K, H, V), of systems at `ptr`, into `out` (N, H, V).

    `out` may be the rows of the queries: those of a chunk are read before they are written.
    """
    size = rows_at_once(keys.columns) if chunk is None else chunk
    sums = sum_keys(keys, value, ptr[1], size)
    both = sums.both()
    for group in groups_of(ptr[0], size):
        read_sums(queries, group, sums.peaks, both, out)
    return out


def pieces(rows: slice, size: int) -> list[slice]:
    """Consecutive slices of at most `size` rows.

    Example:
        >>> pieces(slice(3, 8), 2)
        [slice(3, 5, None), slice(5, 7, None), slice(7, 8, None)]
    """
    starts = range(rows.start, rows.stop, size)
    return [slice(start, min(start + size, rows.stop)) for start in starts]
