"""Attention over the groups of a batch as one step, for autograd and for compilers.

Graphs cannot loop over groups, whose number depends on the data. Inputs are all that is kept: the
backward pass computes a group's features or weights again, while they are in a core's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

Run = Callable[..., tuple[Tensor, ...]]
Cost = Callable[[int, int, int], int]


def single_step(
    name: str,
    schema: tuple[str, str],
    forward: Callable[..., Tensor],
    backward: Callable[..., Sequence[Tensor]],
    shape: Callable[..., tuple[int, ...]],
) -> Callable[..., Tensor]:
    """`forward` as one step for autograd: in eager mode, and as ``torch.ops.flt_mol.NAME``.

    Args:
        name: of the operator; that of its gradients has `_gradients` at the end.
        schema: names of the tensors it can be differentiated by, ``"Tensor q, Tensor k"``, and what
            else it takes.
        forward: (*tensors, *others) → result.
        backward: (gradient, *tensors, *others) → gradients to the tensors; both of differentiable
            steps, for derivatives of higher order.
        shape: (*tensors, *others) → shape of the result.
    """
    count = schema[0].count("Tensor ")
    arguments = ", ".join(schema)

    def run(*given: Any) -> Tensor:
        with torch.no_grad():
            return forward(*given).contiguous()

    def run_backward(*given: Any) -> tuple[Tensor, ...]:
        # Operators run below autograd, which some gradients are made by.
        include = torch._C._dispatch_tls_local_include_set()
        nothing = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
        with torch._C._ForceDispatchKeyGuard(include, nothing), torch.no_grad():
            return tuple(x.contiguous() for x in backward(*given))

    compiled = custom_op(
        f"flt_mol::{name}", run, mutates_args=(), schema=f"({arguments}) -> Tensor"
    )
    gradients = custom_op(
        f"flt_mol::{name}_gradients",
        run_backward,
        mutates_args=(),
        schema=f"(Tensor grad, {arguments}) -> ({', '.join(['Tensor'] * count)})",
    )
    compiled.register_fake(lambda *given: given[0].new_empty(shape(*given)))
    gradients.register_fake(lambda grad, *given: tuple(x.new_empty(x.shape) for x in given[:count]))

    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]
        ctx.save_for_backward(*tensors)

    def given_to(ctx: Any) -> list[Any]:
        saved = iter(ctx.saved_tensors)
        return [next(saved) if x is None else x for x in ctx.others]

    def differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        given = given_to(ctx)
        return *gradients(grad, *given), *[None] * (len(given) - count)

    compiled.register_autograd(differentiate, setup_context=save)

    class Step(torch.autograd.Function):  # a third of the operator's cost in small systems
        @staticmethod
        def forward(*given: Any) -> Tensor:
            return forward(*given)

        setup_context = staticmethod(save)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            given = given_to(ctx)
            return *backward(grad, *given), *[None] * (len(given) - count)

    apply: Any = Step.apply

    def call(*given: Any) -> Tensor:
        out: Tensor = (compiled if torch.compiler.is_compiling() else apply)(*given)
        return out

    return call


def operator(
    name: str, attend: Run, gradients: Run, cost: Cost, width: Callable[[int, str], int]
) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, str], Tensor]:
    """Attention as a function of (N, H, M), (K, H, M), (K, H, V), ptr, key_ptr and a mode.

    It returns (N, H, V), at least float32, and 0 for rows without a system or without keys; the
    same is there as ``torch.ops.flt_mol.NAME``, of (H, N, ·).

    Args:
        name: of the operator.
        attend: (q, k, v, rows, keys, mode) → (out,) of blocks (B, L, ·) of heads of systems.
        gradients: (gradient, q, k, v, rows, keys, mode) → gradients to q, k, v.
        cost: numbers of the largest tensor of n queries, m keys and M features.
        width: V of the output, for V of the values and a mode.
    """

    def forward(q: Tensor, k: Tensor, v: Tensor, ptr: Tensor, key_ptr: Tensor, mode: str) -> Tensor:
        groups, outputs = _groups(q, k, ptr, key_ptr, cost), [(0, width(v.shape[-1], mode))]
        return _over_groups(attend, (q,), (k, v), groups, cost, outputs, mode)[0]

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, ptr: Tensor, key_ptr: Tensor, mode: str
    ) -> list[Tensor]:
        groups = _groups(q, k, ptr, key_ptr, cost)
        outputs = [(0, q.shape[-1]), (1, k.shape[-1]), (1, v.shape[-1])]
        return _over_groups(gradients, (grad, q), (k, v), groups, cost, outputs, mode)

    step = single_step(
        name,
        ("Tensor q, Tensor k, Tensor v", "Tensor ptr, Tensor key_ptr, str mode"),
        forward,
        backward,
        lambda q, k, v, ptr, key_ptr, mode: (*q.shape[:2], width(v.shape[-1], mode)),
    )

    def call(
        query: Tensor, key: Tensor, value: Tensor, ptr: Tensor, key_ptr: Tensor, mode: str
    ) -> Tensor:
        rows = (x.transpose(0, 1) for x in settled(query, key, value))
        return step(*rows, ptr, key_ptr, mode).transpose(0, 1)

    return call


def gradients_of(
    run: Callable[..., Tensor], grad: Tensor, tensors: tuple[Tensor, ...], *others: Any
) -> tuple[Tensor, ...]:
    """Gradients of ``run(*tensors, *others)`` by autograd, differentiable where that is on."""
    higher = torch.is_grad_enabled()
    with torch.enable_grad(), without_autocast(grad):
        # Aliases: where one input was computed from another, that way is not for this function.
        tensors = tuple(
            x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in tensors
        )
        out = run(*tensors, *others)
        return torch.autograd.grad(out, tensors, grad, create_graph=higher, materialize_grads=True)


def real_only(x: Tensor, block: PaddedRows) -> Tensor:
    """0 in the slots of a block (B, L, F) that repeat a row."""
    if block.real is None:
        return x
    return (x.view(-1, *block.real.shape, x.shape[2]) * block.real[..., None]).view(x.shape)


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
    lengths = of_rows[0].shape[1], of_keys[0].shape[1]
    parts: list[list[Tensor]] = [[] for _ in outputs]
    # On a CPU a block goes to its rows while it is in the cache, in a step for each system.
    number, plain = len(groups[0].rows), first.is_cpu and not torch.is_grad_enabled()
    direct = number == 0 or (number > 1 and plain)
    whole = [
        first.new_empty(heads, lengths[kind], width)
        if groups[kind].complete
        else first.new_zeros(heads, lengths[kind], width)
        for kind, width in (outputs if direct else ())
    ]
    with without_autocast(first):
        for both in zip(groups[0].rows, groups[0].keys, strict=True):
            rows, keys = both
            size = rows.number * cost(rows.length, keys.length, first.shape[2])
            found = []
            for some in _some_heads(heads, max(1, budget // size)):
                own = (rows.by_head(x if some is None else x[some]) for x in of_rows)
                others = (keys.by_head(x if some is None else x[some]) for x in of_keys)
                blocks = run(*own, *others, rows, keys, mode)
                if direct:
                    for block, out, (kind, _) in zip(blocks, whole, outputs, strict=True):
                        both[kind].write(block, out if some is None else out[some])
                else:
                    found.append(blocks)
            for all_groups, all_heads in zip(parts, zip(*found, strict=True), strict=False):
                block = all_heads[0] if len(all_heads) == 1 else torch.cat(all_heads)
                all_groups.append(block.reshape(heads, -1, block.shape[-1]))
    if direct:
        return whole
    return [groups[kind].put_back(x, 1) for x, (kind, _) in zip(parts, outputs, strict=True)]


def _some_heads(heads: int, step: int) -> list[slice | None]:
    if step >= heads:
        return [None]
    return [slice(head, head + step) for head in range(0, heads, step)]
