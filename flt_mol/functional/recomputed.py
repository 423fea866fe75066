"""Linear softmax attention with gradients, whose features are made again in the backward pass.

The numbers are those of `softmax_log_features`, `stabilised_features` and `linear_attention` to
rounding. What is kept for the backward pass are queries, keys, values, the output and the sums of
each system, never anything of size N × H × M: features of a system, or of a chunk of its rows, stay
in a core's cache while they are needed, and are cheap to make again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flt_mol.functional._feature_groups import (
    Gradients,
    Side,
    groups_of,
    joined,
    read_sums,
    rows_at_once,
    scaled_columns,
    sum_keys,
)
from flt_mol.functional.feature_maps import (
    SharedLogits,
    softmax_log_features,
    stabilised_features,
)
from flt_mol.functional.groups import check_ptr
from flt_mol.functional.linear import linear_attention
from flt_mol.functional.numerics import refuse_forward_mode, settled, with_ones, without_autocast


def recomputed_softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    projection: Tensor,
    ptr: Tensor,
    key_ptr: Tensor | None = None,
    query_at: SharedLogits | None = None,
    key_at: SharedLogits | None = None,
) -> Tensor:
    """Attention with `softmax_log_features` per system, differentiable any number of times.

    Second derivatives (training on forces) go through `written_out_attention`. Meant where
    `ordinary` is true: compiled graphs fuse by themselves, and other devices dislike
    many small kernels.

    Args:
        query: (N, H, D).
        key: (K, H, D).
        value: (K, H, V).
        projection: W (H, M, D), rows standard normal, a constant: no gradient goes to it.
        ptr: (B + 1,), first query of each system.
        key_ptr: (B + 1,), first key of each system where keys are another set; else K = N.
        query_at: position logits of the queries, shared by all heads; None without positions.
        key_at: of the keys.

    Returns:
        (N, H, V), at least float32 whatever the autocast dtype; 0 for queries without keys.

    Raises:
        ValueError: `ptr` does not describe N rows, or `key_ptr` not K rows of as many systems.

    References:
        Choromanski et al., "Rethinking Attention with Performers", ICLR 2021, Lemma 1.
    """
    refuse_forward_mode()
    key_ptr = check_ptr(ptr, len(query), key_ptr, len(key))
    query, key, value = settled(query, key, value)
    places: list[Tensor | None] = []
    for at in (query_at, key_at):
        places += [None, None] if at is None else [x.to(query.dtype) for x in at]
    with without_autocast(query):
        out: Tensor = _Recomputed.apply(  # type: ignore[no-untyped-call]
            *(query, key, value, projection.detach(), ptr, key_ptr, *places)
        )
    return out


def written_out_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    projection: Tensor,
    ptr: Tensor,
    key_ptr: Tensor | None = None,
    query_at: SharedLogits | None = None,
    key_at: SharedLogits | None = None,
) -> Tensor:
    """The same step by step with all features held: what the fast form has to agree with."""
    queries = softmax_log_features(query, projection, query_at, subtract_norm=False)
    keys = softmax_log_features(key, projection, key_at)
    queries, keys = stabilised_features(queries, keys, ptr, key_ptr)
    return linear_attention(queries, keys, value, ptr, key_ptr)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        projection: Tensor,
        ptr: Tensor,
        key_ptr: Tensor,
        *places: Tensor | None,
    ) -> Tensor:
        columns = scaled_columns(projection, query.dtype)
        queries, keys = Side(query, columns, *places[:2]), Side(key, columns, *places[2:])
        sums = sum_keys(keys, value, key_ptr, rows_at_once(columns))
        both = sums.both()
        out = value.new_empty(len(query), *value.shape[1:])
        totals = value.new_empty(*query.shape[:2], 1)
        for group in groups_of(ptr, rows_at_once(columns)):
            total = read_sums(queries, group, sums.peaks, both, out)
            totals[group.part] = total.transpose(0, 1)
        given = (query, key, value, projection, ptr, key_ptr, *places)
        ctx.save_for_backward(*given, out, totals, sums.peaks, both)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with without_autocast(grad):
            return _again(ctx, grad) if torch.is_grad_enabled() else _gradients(ctx, grad)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # asked for once: a checkpoint around this gives it once
    query, key, value, projection, ptr, key_ptr, *places = saved[:10]
    out, totals, peaks, both = saved[10:]
    needs = ctx.needs_input_grad
    columns = scaled_columns(projection, query.dtype)
    queries, keys = Side(query, columns, *places[:2]), Side(key, columns, *places[2:])
    to_queries = Gradients(queries, (needs[0], *needs[6:8]))
    to_keys = Gradients(keys, (needs[1], *needs[8:10]))
    to_sums = _query_gradients(to_queries, grad, ptr, (peaks, both), (out, totals))
    to_value = _key_gradients(to_keys, value, key_ptr, peaks, to_sums)
    return (
        *(to_queries.rows, to_keys.rows, to_value if needs[2] else None, None, None, None),
        *(to_queries.basis, to_queries.shared, to_keys.basis, to_keys.shared),
    )


def _query_gradients(
    to_queries: Gradients,
    grad: Tensor,
    ptr: Tensor,
    sums: tuple[Tensor, Tensor],
    result: tuple[Tensor, Tensor],
) -> Tensor:
    """Gradients of queries, into `to_queries`, and of the sums over keys (B, H, M, V + 1)."""
    (peaks, sums_of_both), (out, totals) = sums, result
    to_sums, side = torch.zeros_like(sums_of_both), to_queries.side
    for group in groups_of(ptr, rows_at_once(side.columns)):
        features = side.query_features(group, peaks)
        both = _both_gradients(*(x[group.part] for x in (grad, out, totals)))
        pieces = zip(group.systems, group.split(features), group.split(both), strict=True)
        for system, some, some_grad in pieces:
            to_sums[system].baddbmm_(some.mT, some_grad)
        logits = joined(group, both, sums_of_both.mT)
        to_queries.add(group.part, logits.mul_(features), key=False)
    return to_sums


def _key_gradients(
    to_keys: Gradients, value: Tensor, key_ptr: Tensor, peaks: Tensor, to_sums: Tensor
) -> Tensor:
    """Gradients of keys, into `to_keys`, and of values (K, H, V)."""
    to_value = torch.zeros_like(value)
    for group in groups_of(key_ptr, rows_at_once(to_keys.side.columns)):
        features = to_keys.side.key_features(group, peaks)
        read = joined(group, features, to_sums[..., :-1])
        to_value[group.part] = read.transpose(0, 1)
        values = with_ones(value[group.part]).transpose(0, 1)
        logits = joined(group, values, to_sums.mT)
        to_keys.add(group.part, logits.mul_(features), key=True)
    return to_value


def _both_gradients(grad: Tensor, out: Tensor, total: Tensor) -> Tensor:
    """∂L/∂[φ(q)·S, φ(q)·z] (H, n, V + 1) from that of their ratio `out`, (n, H, V)."""
    both = grad.new_empty(grad.shape[1], grad.shape[0], grad.shape[2] + 1)
    numerator = both[..., :-1]
    torch.div(grad.transpose(0, 1), total.transpose(0, 1), out=numerator)
    torch.sum(numerator * out.transpose(0, 1), -1, out=both[..., -1])
    both[..., -1].neg_()
    return both


def _again(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients that can be differentiated themselves, of the form written out."""
    query, key, value, projection, ptr, key_ptr, *places = ctx.saved_tensors[:10]
    given = (query, key, value, projection, ptr, key_ptr, *places)
    at = [
        None if basis is None else SharedLogits(basis, columns)
        for basis, columns in (places[:2], places[2:])
    ]
    wanted = [x for x, needed in zip(given, ctx.needs_input_grad, strict=True) if needed]
    out = written_out_attention(query, key, value, projection, ptr, key_ptr, *at)
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
    return tuple(next(found) if needed else None for needed in ctx.needs_input_grad)
