"""Attention over the groups of a batch as one step, for autograd and for compilers.

Graphs cannot loop over groups, whose number depends on the data. Inputs are all that is kept: the
backward pass computes a group's features or weights again, while they are in a core's cache.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from flt_mol.functional.groups import (
    Groups,
    PaddedRows,
    budget_of,
    groups_of,
    row_offsets,
    settled,
    without_autocast,
)

_ROWS = "Tensor q, Tensor k, Tensor v, Tensor ptr, Tensor key_ptr, str mode"
Run = Callable[..., tuple[Tensor, ...]]
Cost = Callable[[int, int, int], int]


def operator(
    name: str, attend: Run, gradients: Run, cost: Cost, width: Callable[[int, str], int]
) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, str], Tensor]:
    """Attention as a function of (N, H, M), (K, H, M), (K, H, V), ptr, key_ptr and a mode.

    It returns (N, H, V), at least float32, and 0 for rows without a system or without keys; the
    same is there as ``torch.ops.flt_mol.NAME``, of (H, N, ·), and with `_gradients` at its end.
    All functions are of differentiable steps, for derivatives of higher order.

    Args:
        name: of the operator.
        attend: (q, k, v, rows, keys, mode) → (out,) of blocks (B, L, ·) of heads of systems.
        gradients: (gradient, q, k, v, rows, keys, mode) → gradients to q, k, v.
        cost: numbers of the largest tensor of n queries, m keys and M features.
        width: V of the output, for V of the values and a mode.
    """

    def forward(q: Tensor, k: Tensor, v: Tensor, ptr: Tensor, key_ptr: Tensor, mode: str) -> Tensor:
        with torch.no_grad():
            return attended(_groups(q, k, ptr, key_ptr, cost), q, k, v, mode).contiguous()

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, ptr: Tensor, key_ptr: Tensor, mode: str
    ) -> tuple[Tensor, ...]:
        # Operators run below autograd, which some gradients are made by.
        include = torch._C._dispatch_tls_local_include_set()
        nothing = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
        with torch._C._ForceDispatchKeyGuard(include, nothing), torch.no_grad():
            found = differentiated(_groups(q, k, ptr, key_ptr, cost), grad, q, k, v, mode)
        return tuple(x.contiguous() for x in found)

    def attended(groups: _BothGroups, q: Tensor, k: Tensor, v: Tensor, mode: str) -> Tensor:
        outputs = [(0, width(v.shape[-1], mode))]
        return _over_groups(attend, (q,), (k, v), groups, cost, outputs, mode)[0]

    def differentiated(
        groups: _BothGroups, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mode: str
    ) -> list[Tensor]:
        outputs = [(0, q.shape[-1]), (1, k.shape[-1]), (1, v.shape[-1])]
        return _over_groups(gradients, (grad, q), (k, v), groups, cost, outputs, mode)

    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.mode = inputs
        ctx.save_for_backward(*tensors)

    def differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *run_backward(grad, *ctx.saved_tensors, ctx.mode), None, None, None

    schema = f"({_ROWS}) -> Tensor", f"(Tensor grad, {_ROWS}) -> (Tensor, Tensor, Tensor)"
    run = custom_op(f"flt_mol::{name}", forward, mutates_args=(), schema=schema[0])
    run_backward = custom_op(
        f"flt_mol::{name}_gradients", backward, mutates_args=(), schema=schema[1]
    )
    run.register_fake(
        lambda q, k, v, ptr, key_ptr, mode: q.new_empty(*q.shape[:2], width(v.shape[-1], mode))
    )
    run_backward.register_fake(
        lambda grad, q, k, v, *_: tuple(x.new_empty(x.shape) for x in (q, k, v))
    )
    run.register_autograd(differentiate, setup_context=save)

    apply: Any = _Step.apply

    def call(
        query: Tensor, key: Tensor, value: Tensor, ptr: Tensor, key_ptr: Tensor, mode: str
    ) -> Tensor:
        q, k, v = (x.transpose(0, 1) for x in settled(query, key, value))
        if torch.compiler.is_compiling():
            out: Tensor = run(q, k, v, ptr, key_ptr, mode)
        else:
            groups = _groups(q, k, ptr, key_ptr, cost)
            out = apply(q, k, v, attended, differentiated, groups, mode)
        return out.transpose(0, 1)

    return call


def real_only(x: Tensor, block: PaddedRows) -> Tensor:
    """0 in the slots of a block (B, L, F) that repeat a row."""
    if block.real is None:
        return x
    return (x.view(-1, *block.real.shape, x.shape[2]) * block.real[..., None]).view(x.shape)


class _Step(torch.autograd.Function):
    """What an operator of torch's does, at a third of its cost in small systems."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, run: Any, gradients: Any, groups: Any, mode: str
    ) -> Tensor:
        out: Tensor = run(groups, q, k, v, mode)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        q, k, v, _, ctx.gradients, ctx.groups, ctx.mode = inputs
        ctx.save_for_backward(q, k, v)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        found = ctx.gradients(ctx.groups, grad, *ctx.saved_tensors, ctx.mode)
        return *found, None, None, None, None


_BothGroups = tuple[Groups, Groups]


def _groups(q: Tensor, k: Tensor, ptr: Tensor, key_ptr: Tensor, cost: Cost) -> _BothGroups:
    """The groups by queries, and the same ones by keys."""
    heads, rows, width = q.shape
    offsets = key_offsets = row_offsets(ptr, rows)
    if key_ptr is not ptr:
        key_offsets = row_offsets(key_ptr, k.shape[1], "key_ptr")
    costs = []
    for (a, b), (c, d) in zip(pairwise(offsets), pairwise(key_offsets), strict=True):
        n, m = b - a, d - c
        costs.append(heads * cost(n, m, width) if n and m else 0)
    budget, others = budget_of(q.device), k.shape[1]
    groups = groups_of(tuple(costs), offsets, key_offsets, rows, q.device, budget)
    if offsets == key_offsets and rows == others:
        return groups, groups
    return groups, groups_of(tuple(costs), key_offsets, offsets, others, q.device, budget)


def _over_groups(
    run: Run,
    of_rows: tuple[Tensor, ...],
    of_keys: tuple[Tensor, ...],
    groups: _BothGroups,
    cost: Cost,
    outputs: list[tuple[int, int]],
    mode: str,
) -> list[Tensor]:
    """`run` on the blocks of all groups; each output is by query (0) or key (1), and has a width.

    A group of one system that is over the budget is taken in parts, some heads at a time.
    """
    first = of_rows[-1]
    heads, budget = first.shape[0], budget_of(first.device)
    parts: list[list[Tensor]] = [[] for _ in outputs]
    with without_autocast(first):
        for rows, keys in zip(groups[0].rows, groups[0].keys, strict=True):
            size = rows.number * cost(rows.length, keys.length, first.shape[2])
            found = []
            for some in _some_heads(heads, max(1, budget // size)):
                own = (rows.by_head(x if some is None else x[some]) for x in of_rows)
                others = (keys.by_head(x if some is None else x[some]) for x in of_keys)
                found.append(run(*own, *others, rows, keys, mode))
            for all_groups, all_heads in zip(parts, zip(*found, strict=True), strict=True):
                block = all_heads[0] if len(all_heads) == 1 else torch.cat(all_heads)
                all_groups.append(block.reshape(heads, -1, block.shape[-1]))
    lengths = of_rows[0].shape[1], of_keys[0].shape[1]
    return [
        groups[kind].put_back(blocks, 1)
        if blocks
        else first.new_zeros(heads, lengths[kind], channels)
        for blocks, (kind, channels) in zip(parts, outputs, strict=True)
    ]


def _some_heads(heads: int, step: int) -> list[slice | None]:
    if step >= heads:
        return [None]
    return [slice(head, head + step) for head in range(0, heads, step)]
