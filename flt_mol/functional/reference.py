"""The quadratic truth: attention with every weight A_ij written out, system by system.

Slow on purpose and short enough to be checked by eye; every fast form is tested against it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flt_mol.functional._common import at_least_float32, without_autocast
from flt_mol.functional.packed import system_sizes


def softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ptr: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float | None = None,
) -> Tensor:
    """out_i = Σ_j A_ij v_j / Σ_j A_ij with A_ij = exp(s q_i·k_j + bias_ij), j in the system of i.

    With ``bias = f(r_i − r_j)`` this is attention with relative positional encoding [1, Def. 3.1].

    Args:
        query: (N, H, D).
        key: (N, H, D).
        value: (N, H, V).
        ptr: (B + 1,), first row of each system.
        bias: (H, N, N) or None; only the blocks within systems are read.
        scale: s, 1/√D if None.

    Returns:
        (N, H, V), computed in at least float32, in the dtype of `value`.

    Raises:
        ValueError: `ptr` does not describe N rows.

    References:
        [1] Choromanski et al., "Learning a Fourier Transform for Linear Relative Positional
        Encodings in Transformers", AISTATS 2024.
    """
    sizes = system_sizes(ptr, query.shape[0])
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    outputs, start = [], 0
    with without_autocast(query):
        triples = (torch.split(at_least_float32(x), sizes) for x in (query * scale, key, value))
        for size, q, k, v in zip(sizes, *triples, strict=True):
            logits = torch.einsum("ihd,jhd->hij", q, k)
            if bias is not None:
                logits = logits + bias[:, start : start + size, start : start + size]
            outputs.append(torch.einsum("hij,jhd->ihd", logits.softmax(-1), v))
            start += size
    return torch.cat(outputs).to(value.dtype) if outputs else torch.zeros_like(value)


def kernel_attention(
    query_features: Tensor, key_features: Tensor, value: Tensor, ptr: Tensor
) -> Tensor:
    """out_i = Σ_j A_ij v_j / Σ_j A_ij with A_ij = φ(q_i)·φ(k_j), j in the system of i.

    The same numbers as `linear.linear_attention`, by way of the matrix A.

    Args:
        query_features: φ(q) (N, H, M), not negative.
        key_features: φ(k) (N, H, M), not negative.
        value: (N, H, V).
        ptr: (B + 1,), first row of each system.

    Returns:
        (N, H, V).
    """
    sizes = system_sizes(ptr, value.shape[0])
    outputs = []
    triples = (torch.split(x, sizes) for x in (query_features, key_features, value))
    for q, k, v in zip(*triples, strict=True):
        weights = torch.einsum("ihm,jhm->hij", q, k)
        weights = weights / weights.sum(-1, keepdim=True)
        outputs.append(torch.einsum("hij,jhd->ihd", weights, v))
    return torch.cat(outputs) if outputs else torch.zeros_like(value)


def relative_mask(query_features: Tensor, key_features: Tensor) -> Tensor:
    """The mask N̂ = Φ Ψᵀ that position features stand for.

    Args:
        query_features: Φ (N, H, 2R) or (N, 1, 2R).
        key_features: Ψ (N, H, 2R).

    Returns:
        (H, N, N), N̂_hij = Φ_ih·Ψ_jh.
    """
    heads = key_features.shape[1]
    return torch.einsum("ihf,jhf->hij", query_features.expand(-1, heads, -1), key_features)
