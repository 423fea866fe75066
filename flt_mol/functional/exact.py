"""Softmax attention over packed systems, fast: what linear attention estimates, for small systems.

The same numbers as `reference.softmax_attention` without a bias. The loop over systems is hidden
in one operator, which autograd and torch.compile see as a single step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op
from torch.nn.functional import pad, scaled_dot_product_attention

from flt_mol.functional.groups import check_ptr, settled, systems_of, without_autocast

# Weights that are held at once (1 MB in float32). Up to as many over all heads of a system, three
# plain products are faster than torch's fused attention (measured on CPU, D from 16 to 96).
MAX_WEIGHTS = 2**18
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

    Example:
        >>> zeros = torch.zeros(3, 1, 4)
        >>> value = torch.tensor([1.0, 3.0, 7.0]).reshape(3, 1, 1)
        >>> exact_attention(zeros, zeros, value, torch.tensor([0, 2, 3])).flatten().tolist()
        [2.0, 2.0, 7.0]
    """
    if causal and key_ptr is not None:
        raise ValueError("causal attention is among rows of one set: leave key_ptr out")
    key_ptr = check_ptr(ptr, query.shape[0], key_ptr, value.shape[0])
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (x.transpose(0, 1) for x in settled(query, key, value))
    with without_autocast(query):
        out: Tensor = _attend(q if scale == 1.0 else q * scale, k, v, ptr, key_ptr, causal)
        return out.transpose(0, 1)


@custom_op("flt_mol::exact_attention", mutates_args=())
def _attend(q: Tensor, k: Tensor, v: Tensor, ptr: Tensor, key_ptr: Tensor, causal: bool) -> Tensor:
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[-1])
    for rows, keys in _systems(q, k, ptr, key_ptr):
        own_q, own_k, own_v = q[:, rows], k[:, keys], v[:, keys]
        if q.shape[0] * own_q.shape[1] * own_k.shape[1] <= MAX_WEIGHTS:
            out[:, rows] = _weights(own_q, own_k, causal).bmm(own_v)
        else:
            out[:, rows] = _fused(own_q, own_k, own_v, causal)
    return out


def _systems(
    queries: Tensor, keys: Tensor, ptr: Tensor, key_ptr: Tensor
) -> list[tuple[slice, slice]]:
    """The queries and keys of each system that has both."""
    systems = systems_of(ptr, queries.shape[1])
    both = zip(systems, systems_of(key_ptr, keys.shape[1], "key_ptr"), strict=True)
    return [(r, k) for r, k in both if r.start < r.stop and k.start < k.stop]


def _weights(q: Tensor, k: Tensor, causal: bool, first: int = 0) -> Tensor:
    """softmax(Q Kᵀ) (H, n, m) of one system, its queries beginning with row `first`."""
    logits = q.bmm(k.mT)
    if causal:
        later = torch.ones(logits.shape[1:], dtype=torch.bool, device=q.device).triu(first + 1)
        logits = logits.masked_fill(later, -torch.inf)
    return logits.softmax(-1)


def _fused(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """One large system by torch's own attention, which wants values as wide as keys."""
    width, channels = max(q.shape[-1], v.shape[-1]), v.shape[-1]
    q, k, v = (pad(x, (0, width - x.shape[-1]))[None] for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=1.0)[0, ..., :channels]


def _gradients(
    grad: Tensor,
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ptr: Tensor,
    key_ptr: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients to Q, K, V, made of differentiable steps; the weights are formed again, in blocks.

    With P = softmax(Q Kᵀ): dV = Pᵀ G, dS = P ∘ (G Vᵀ − Σ_v G ∘ out), dQ = dS K, dK = dSᵀ Q.
    """
    to_query, to_key, to_value = (torch.zeros_like(x) for x in (q, k, v))
    for rows, keys in _systems(q, k, ptr, key_ptr):
        for heads, block in _blocks(q.shape[0], rows, keys):
            k_b, q_b, g = k[heads, keys], q[heads, block], grad[heads, block]
            weights = _weights(q_b, k_b, causal, block.start - rows.start)
            to_value[heads, keys].add_(weights.mT.bmm(g))
            drift = (g * out[heads, block]).sum(-1, keepdim=True)
            slopes = torch.baddbmm(drift, g, v[heads, keys].mT, beta=-1)
            slopes = slopes * weights if torch.is_grad_enabled() else slopes.mul_(weights)
            to_query[heads, block] = slopes.bmm(k_b)
            to_key[heads, keys].add_(slopes.mT.bmm(q_b))
    return to_query, to_key, to_value


def _blocks(num_heads: int, rows: slice, keys: slice) -> list[tuple[slice, slice]]:
    """Heads and rows of a system to take at once: some heads, or some rows of one head."""
    num_rows, num_keys = rows.stop - rows.start, keys.stop - keys.start
    few_heads = max(1, MAX_WEIGHTS // (num_rows * num_keys))
    few_rows = max(MIN_ROWS, MAX_WEIGHTS // num_keys)
    return [
        (slice(head, head + few_heads), slice(row, min(row + few_rows, rows.stop)))
        for head in range(0, num_heads, few_heads)
        for row in range(rows.start, rows.stop, few_rows)
    ]


_gradients_op = custom_op("flt_mol::exact_attention_gradients", _gradients, mutates_args=())


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.causal = inputs
    ctx.save_for_backward(output, *tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    # A derivative that will be differentiated itself must be seen step by step.
    step_by_step = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    run: Callable[..., tuple[Tensor, ...]] = _gradients if step_by_step else _gradients_op
    with without_autocast(grad):
        gradients = run(grad, *ctx.saved_tensors, ctx.causal)
    return *gradients, None, None, None


_attend.register_fake(lambda q, k, v, *_: q.new_empty(*q.shape[:2], v.shape[-1]))
_gradients_op.register_fake(lambda grad, out, q, k, v, *_: tuple(map(torch.empty_like, (q, k, v))))
_attend.register_autograd(_backward, setup_context=_setup_context)
