"""Reference attention: every weight A_ij is formed explicitly, system by system.

Slow on purpose and short enough to be checked by eye; every fast form is tested against it.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from flt_mol.functional.groups import at_least_float32, check_ptr, row_offsets, without_autocast


def softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ptr: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    key_ptr: Tensor | None = None,
) -> Tensor:
    """out_i = Σ_j A_ij v_j / Σ_j A_ij with A_ij = exp(s q_i·k_j + bias_ij), j in the system of i.

    With ``bias = f(r_i − r_j)`` this is attention with relative positional encoding [1, Def. 3.1].

    Args:
        query: (N, H, D).
        key: (K, H, D).
        value: (K, H, V).
        ptr: (B + 1,), first row of each system.
        bias: (H, N, K) or None; only the blocks within systems are read.
        scale: s, 1/√D if None.
        causal: whether row i of a system sees its rows j ≤ i only.
        key_ptr: (B + 1,), first key of each system where keys are another set; else K = N.

    Returns:
        (N, H, V), computed in at least float32, in the dtype of `value`; 0 for queries without
        keys.

    Raises:
        ValueError: `ptr` does not describe N rows, or `key_ptr` not K rows of as many systems.

    References:
        [1] Choromanski et al., "Learning a Fourier Transform for Linear Relative Positional
        Encodings in Transformers", AISTATS 2024.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    outputs = [value.new_zeros(0, *value.shape[1:])]
    with without_autocast(query):
        query, key, values = (at_least_float32(x) for x in (query * scale, key, value))
        for rows, keys in _systems(ptr, query.shape[0], key_ptr, value.shape[0]):
            logits = torch.einsum("ihd,jhd->hij", query[rows], key[keys])
            if bias is not None:
                logits = logits + bias[:, rows, keys]
            if causal:
                logits = logits.masked_fill(~_lower(logits), -torch.inf)
            outputs.append(torch.einsum("hij,jhd->ihd", logits.softmax(-1), values[keys]))
    return torch.cat(outputs).to(value.dtype)


def kernel_attention(
    query_features: Tensor,
    key_features: Tensor,
    value: Tensor,
    ptr: Tensor,
    *,
    causal: bool = False,
    key_ptr: Tensor | None = None,
) -> Tensor:
    """out_i = Σ_j A_ij v_j / Σ_j A_ij with A_ij = φ(q_i)·φ(k_j), j in the system of i.

    The same numbers as `linear_attention` of the same arguments, or with `causal` those of
    `causal_attention`, by way of the matrix A: (N, H, V), 0 for queries without keys.
    """
    outputs = [value.new_zeros(0, *value.shape[1:])]
    for rows, keys in _systems(ptr, query_features.shape[0], key_ptr, value.shape[0]):
        weights = torch.einsum("ihm,jhm->hij", query_features[rows], key_features[keys])
        if causal:
            weights = weights * _lower(weights)
        weights = weights / weights.sum(-1, keepdim=True)
        outputs.append(torch.einsum("hij,jhd->ihd", weights, value[keys]))
    return torch.cat(outputs)


def _systems(
    ptr: Tensor, num_rows: int, key_ptr: Tensor | None, num_keys: int
) -> list[tuple[slice, slice]]:
    """The queries and the keys of each system."""
    keys = check_ptr(ptr, num_rows, key_ptr, num_keys)
    both = (pairwise(row_offsets(*x)) for x in ((ptr, num_rows), (keys, num_keys)))
    return [(slice(*own), slice(*others)) for own, others in zip(*both, strict=True)]


def _lower(weights: Tensor) -> Tensor:
    """True where j ≤ i, for a matrix (…, i, j)."""
    return torch.ones_like(weights, dtype=torch.bool).tril()
