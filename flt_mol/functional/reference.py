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

    Arguments are those of `exact_attention`, query (N, H, D), key (K, H, D) and value (K, H, V),
    and `bias` (H, N, K) or None, of which only the blocks within systems are read.

    Returns:
        (N, H, V), computed in at least float32, in the dtype of `value`; 0 for queries without
        keys.

    Raises:
        ValueError: `ptr` does not describe N rows, or `key_ptr` not K rows of as many systems.

    References:
        [1] Choromanski et al., AISTATS 2024.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    outputs = [value.new_zeros(0, *value.shape[1:])]
    with without_autocast(query):
        query, key, values = (at_least_float32(x) for x in (query * scale, key, value))
        key_ptr = check_ptr(ptr, query.shape[0], key_ptr, value.shape[0])
        spans = pairwise(row_offsets(ptr, len(query))), pairwise(row_offsets(key_ptr, len(key)))
        for rows, keys in zip(*([slice(*x) for x in both] for both in spans), strict=True):
            logits = torch.einsum("ihd,jhd->hij", query[rows], key[keys])
            if bias is not None:
                logits = logits + bias[:, rows, keys]
            if causal:
                later = torch.ones_like(logits, dtype=torch.bool).triu(1)
                logits = logits.masked_fill(later, -torch.inf)
            outputs.append(torch.einsum("hij,jhd->ihd", logits.softmax(-1), values[keys]))
    return torch.cat(outputs).to(value.dtype)
