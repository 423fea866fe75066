"""Softmax attention over packed systems, fast: what linear attention estimates, for small systems.

The same numbers as `reference.softmax_attention` without a bias.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from flt_mol.functional.groups import (
    PaddedRows,
    at_least_float32,
    budget_of,
    check_ptr,
    operator,
    real_only,
)

MIN_ROWS = 64


def exact_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ptr: Tensor,
    key_ptr: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """out_i = Σ_j A_ij v_j / Σ_j A_ij with A_ij = exp(s q_i·k_j), j in the system of i.

    Costs Σ_b n_b m_b (D + V) per head for n_b queries and m_b keys, and memory linear in N: the
    backward pass forms the weights again. It can be differentiated any number of times.

    Args:
        query: (N, H, D).
        key: (K, H, D).
        value: (K, H, V).
        ptr: (B + 1,), first row of each system; rows beyond the last offset are padding and get 0.
        key_ptr: (B + 1,), first key of each system where keys are another set; else K = N.
        scale: s, 1/√D if None.
        causal: whether row i sees rows up to i of its system only; without `key_ptr` only.

    Returns:
        (N, H, V), at least float32 for any autocast dtype; 0 for queries without keys.

    Raises:
        ValueError: `ptr` does not describe N rows, `key_ptr` not K rows of as many systems, or
            `causal` with `key_ptr`.

    Examples:
        >>> zeros = torch.zeros(3, 1, 4)
        >>> value = torch.tensor([1.0, 3.0, 7.0]).reshape(3, 1, 1)
        >>> exact_attention(zeros, zeros, value, torch.tensor([0, 2, 3])).flatten().tolist()
        [2.0, 2.0, 7.0]
    """
    if causal and key_ptr is not None:
        raise ValueError("causal attention is among rows of one set: leave key_ptr out")
    key_ptr = check_ptr(ptr, query.shape[0], key_ptr, value.shape[0])
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    query = query if scale == 1.0 else at_least_float32(query) * scale
    return _exact(query, key, value, ptr, key_ptr, "causal" if causal else "all")


def _weights(q: Tensor, k: Tensor, keys: PaddedRows, mode: str, first: int = 0) -> Tensor:
    """softmax(Q Kᵀ) (B, n, m) of blocks whose queries begin with row `first`."""
    if mode != "causal" and keys.real is not None:
        hidden = keys.real.to(q.dtype).log()
        hidden = hidden.expand(len(q) // len(hidden), -1, -1).flatten(0, 1)[:, None]
        return torch.baddbmm(hidden, q, k.mT).softmax(-1)
    logits = q.bmm(k.mT)
    if mode == "causal":  # which hides repeated keys, too
        later = torch.ones(logits.shape[1:], dtype=torch.bool, device=q.device).triu(first + 1)
        logits = logits.masked_fill(later, -torch.inf)
    return logits.softmax(-1)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, rows: PaddedRows, keys: PaddedRows, mode: str
) -> tuple[Tensor, ...]:
    if len(q) * q.shape[1] * k.shape[1] <= budget_of(q.device):
        return _weights(q, k, keys, mode).bmm(v), q, k, v
    # A head of a large system by torch's own attention, which wants values as wide as keys.
    width, channels = max(q.shape[-1], v.shape[-1]), v.shape[-1]
    q, k, v = (pad(x, (0, width - x.shape[-1]))[None] for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, is_causal=mode == "causal", scale=1.0)
    return (out[0, ..., :channels],)


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: PaddedRows, keys: PaddedRows, mode: str
) -> tuple[Tensor, Tensor, Tensor]:
    """With P = softmax(Q Kᵀ): dV = Pᵀ G, dS = P ∘ (G Vᵀ − Σ P ∘ G Vᵀ), dQ = dS K, dK = dSᵀ Q.

    Where one head's weights are over the budget, some queries at a time.
    """
    grad, to_q, to_k, to_v = real_only(grad, rows), [], [], []
    few = max(MIN_ROWS, budget_of(q.device) // k.shape[1]) if len(q) == 1 else q.shape[1]
    for first in range(0, q.shape[1], few):
        some, g = q[:, first : first + few], grad[:, first : first + few]
        weights = _weights(some, k, keys, mode, first)
        slopes = torch._softmax_backward_data(g.bmm(v.mT), weights, -1, q.dtype)
        to_q.append(slopes.bmm(k))
        to_k.append(slopes.mT.bmm(some))
        to_v.append(weights.mT.bmm(g))
    if len(to_q) == 1:
        return to_q[0], to_k[0], to_v[0]
    return torch.cat(to_q, 1), sum(to_k[1:], to_k[0]), sum(to_v[1:], to_v[0])


_exact = operator(
    "exact_attention",
    _attend,
    _gradients,
    lambda rows, keys, channels: rows * keys,
    lambda channels, mode: channels,
)
