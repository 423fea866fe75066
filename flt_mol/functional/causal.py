"""Causal linear attention over packed systems: row i sees the rows j ≤ i of its own system.

Rows are cut into blocks of up to 64. Within a block the weights are written out as a small masked
matrix; from block to block only Σ_j φ(k_j) v_jᵀ is carried on. Time O(N·M·V), memory O(N·(M + V))
for forward and backward together, since nothing but the inputs and the output is kept in between.
`streaming` has the same sums one row at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flt_mol.functional._blocks import blocks_of, carried_back, carried_in
from flt_mol.functional._causal_log import attend, attend_backward
from flt_mol.functional.groups import check_ptr
from flt_mol.functional.linear import normalised
from flt_mol.functional.numerics import operator, settled, with_ones, without_autocast


def causal_log_attention(
    query_logits: Tensor, key_logits: Tensor, value: Tensor, ptr: Tensor
) -> Tensor:
    """out_i = Σ_{j≤i} A_ij v_j / Σ_{j≤i} A_ij with A_ij = Σ_m exp(q_im + k_jm), for logits q, k.

    Logits may be of any size. What keeps the exponentials in range depends on rows j ≤ i alone,
    so a later row changes earlier outputs by no more than rounding, however large it is: neither
    through a maximum over all keys nor through underflow beside it. Normalisers are ≥ 1 by
    construction, without an eps, and the first row of a system gives its value exactly. A logit of
    −∞ is a feature of 0; rows that see no weight at all give 0.

    Logits that rise by more than 36 within a block are worked through in ever smaller blocks, which
    takes up to six times as long. Second and higher derivatives exist in eager mode; they go
    through autograd, which keeps all intermediate results.

    Args:
        query_logits: q = log φ(query) (N, H, M).
        key_logits: k = log φ(key) (N, H, M).
        value: (N, H, V).
        ptr: (B + 1,), first row of each system.

    Returns:
        (N, H, V), computed in at least float32 whatever the autocast dtype, in that dtype.

    Raises:
        ValueError: `ptr` does not describe N rows, or shapes that do not belong together.

    References:
        Katharopoulos et al., "Transformers are RNNs", ICML 2020, section 3.3 (causal sums);
        Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018 (rescaled sums).

    Example:
        >>> logits = torch.tensor([0.0, 0.0, 1e4]).reshape(3, 1, 1)
        >>> value = torch.tensor([1.0, 3.0, 7.0]).reshape(3, 1, 1)
        >>> causal_log_attention(logits, logits, value, torch.tensor([0, 3])).flatten().tolist()
        [1.0, 2.0, 7.0]
    """
    queries, keys, values = _by_head(query_logits, key_logits, value, ptr)
    out: Tensor = _log_attention(queries, keys, values, ptr)[0]
    return out.transpose(0, 1)


def causal_attention(
    query_features: Tensor, key_features: Tensor, value: Tensor, ptr: Tensor
) -> Tensor:
    """out_i = Σ_{j≤i} A_ij v_j / Σ_{j≤i} A_ij with A_ij = φ(q_i)·φ(k_j), for given features φ ≥ 0.

    For features that are not exponentials, such as softplus(Wx + b), ReLU(Wx) or elu(x) + 1: used
    as they are, without stabiliser. Rows that see no weight at all give 0. Any number of
    derivatives.

    Args:
        query_features: φ(q) (N, H, M), not negative.
        key_features: φ(k) (N, H, M), not negative.
        value: (N, H, V).
        ptr: (B + 1,), first row of each system.

    Returns:
        (N, H, V), accumulated in at least float32 whatever the autocast dtype, in that dtype.

    Raises:
        ValueError: `ptr` does not describe N rows, or shapes that do not belong together.

    References:
        Katharopoulos et al., "Transformers are RNNs", ICML 2020, section 3.3.

    Example:
        >>> ones = torch.ones(4, 1, 2)
        >>> value = torch.tensor([1.0, 3.0, 7.0, 9.0]).reshape(4, 1, 1)
        >>> causal_attention(ones, ones, value, torch.tensor([0, 2, 4])).flatten().tolist()
        [1.0, 2.0, 7.0, 8.0]
    """
    queries, keys, values = _by_head(query_features, key_features, value, ptr)
    return normalised(causal_sums(queries, keys, with_ones(values), ptr)).transpose(0, 1)


def causal_sums(
    queries: Tensor, keys: Tensor, values: Tensor, ptr: Tensor, *, reverse: bool = False
) -> Tensor:
    """Σ_{j≤i} (q_i·k_j) v_j over the row's own system; Σ_{j≥i} if `reverse`. Any signs.

    One step for autograd and torch.compile. Its gradients are such sums with the roles exchanged:
    dq from (g, v, k), dk and dv from (v, g, q) and (k, q, g) in the other direction.

    Args:
        queries: q (H, N, M).
        keys: k (H, N, M).
        values: v (H, N, V), all three of one dtype.
        ptr: (B + 1,), first row of each system; rows beyond the last offset are padding.
        reverse: whether to sum over later rows.

    Returns:
        (H, N, V), 0 for padding.
    """
    out: Tensor = _sums(queries, keys, values, ptr, reverse)
    return out


def _by_head(
    queries: Tensor, keys: Tensor, value: Tensor, ptr: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    check_ptr(ptr, value.shape[0])
    if value.dim() != 3 or queries.shape != keys.shape or queries.shape[:-1] != value.shape[:-1]:
        raise ValueError(
            f"queries {tuple(queries.shape)}, keys {tuple(keys.shape)} and value "
            f"{tuple(value.shape)} must be (N, H, M), (N, H, M) and (N, H, V) of the same N and H"
        )
    q, k, v = (x.transpose(0, 1) for x in settled(queries, keys, value))
    return q, k, v


@operator("causal_sums")
def _sums(q: Tensor, k: Tensor, v: Tensor, ptr: Tensor, reverse: bool) -> Tensor:
    num_rows = q.shape[1]
    blocks = blocks_of(ptr, num_rows)
    if not blocks.active:
        return v.new_zeros(v.shape)
    q, k, v = blocks.cut(q), blocks.cut_zero_filled(k), blocks.cut(v)
    with without_autocast(q):
        weights = q @ k.mT
        out = (weights.triu_() if reverse else weights.tril_()) @ v
        if len(blocks.active) > 1:
            carried = carried_back if reverse else carried_in
            out += q @ carried(blocks, k.mT @ v)
        return blocks.join(out, num_rows)


@_sums.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, ptr: Tensor, reverse: bool) -> Tensor:
    return v.new_empty(v.shape)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.reverse = inputs
    ctx.save_for_backward(*tensors)


def _sums_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, ptr = ctx.saved_tensors
    to_q, to_k, to_v = ctx.needs_input_grad[:3]
    back = not ctx.reverse
    return (
        causal_sums(grad, v, k, ptr, reverse=ctx.reverse) if to_q else None,
        causal_sums(v, grad, q, ptr, reverse=back) if to_k else None,
        causal_sums(k, q, grad, ptr, reverse=back) if to_v else None,
        None,
        None,
    )


_sums.register_autograd(_sums_backward, setup_context=_save_inputs)


@operator("causal_log_attention")
def _log_attention(q: Tensor, k: Tensor, v: Tensor, ptr: Tensor) -> tuple[Tensor, Tensor]:
    """(H, N, M), (H, N, M), (H, N, V) → out (H, N, V) and (H, N, 2) for the backward pass."""
    with without_autocast(q), torch.no_grad():
        return attend(q, k, v, ptr)


@_log_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, ptr: Tensor) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), q.new_empty(*q.shape[:2], 2)


@operator("causal_log_attention_backward")
def _log_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, rows: Tensor, ptr: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    with without_autocast(q), torch.no_grad():
        return attend_backward(grad, q, k, v, out, rows, ptr)


@_log_gradients.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, rows: Tensor, ptr: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save_all(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _log_backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, ptr, out, rows = ctx.saved_tensors
    return *_log_gradients(grad, q, k, v, out, rows, ptr), None


def _save_for_second(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    grad, q, k, v, _, _, ptr = inputs
    ctx.save_for_backward(grad, q, k, v, ptr)


def _log_second_backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
    """By autograd through `attend`, which consists of differentiable operations."""
    *saved, ptr = ctx.saved_tensors
    higher = torch.is_grad_enabled()
    with torch.enable_grad(), without_autocast(saved[0]):
        # Aliases: where one input was computed from another, that way is not for this function.
        inputs = [x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in saved]
        grad, q, k, v = inputs
        out, _ = attend(q, k, v, ptr)
        first = torch.autograd.grad(out, (q, k, v), grad, create_graph=True)
        second = torch.autograd.grad(
            first, inputs, cotangents, create_graph=higher, materialize_grads=True
        )
    return *second, None, None, None


_log_attention.register_autograd(_log_backward, setup_context=_save_all)
_log_gradients.register_autograd(_log_second_backward, setup_context=_save_for_second)
