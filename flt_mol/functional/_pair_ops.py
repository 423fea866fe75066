"""The operators behind `pairs`: what autograd and torch.compile see as one step each.

Three contractions of one form, F = Σ_p Σ_c (B_p W)_c u_{j(p) c} g_{i(p) c}, make up the pair
filter, and two of Σ_p Σ_h w_ph (x_{i(p) h}·y_{j(p) h}) all that is weighted per head. The gradients
of each are others of its family. They go through the pairs in chunks and keep nothing of them.

All tensors of a call have one dtype. Receivers i and senders j may come in any order; sorted
receivers are fastest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flt_mol.functional.groups import operator, without_autocast

# Numbers in a chunk's largest tensor: within a core's cache, and enough to keep a GPU busy.
_CHUNK = {"cpu": 2**17}
_CHUNK_ELSEWHERE = 2**26


class _Chunk(NamedTuple):
    """Some pairs, in order of receiver, and the rows they are added to.

    Attributes:
        pairs: which pairs, a slice where they come sorted.
        rows: the receivers' rows.
        offsets: first pair of each of these rows, and the end.
    """

    pairs: slice | Tensor
    rows: slice
    offsets: Tensor


def _steps(num_pairs: int, width: int, device: torch.device) -> list[slice]:
    size = max(1, _CHUNK.get(device.type, _CHUNK_ELSEWHERE) // max(1, width))
    return [slice(k, min(k + size, num_pairs)) for k in range(0, num_pairs, size)]


def _chunks(receiver: Tensor, num_rows: int, width: int) -> Iterator[_Chunk]:
    """The pairs in order of receiver, cut so that `width` numbers per pair fit a chunk."""
    steps = _steps(len(receiver), width, receiver.device)
    if not steps:
        return
    order = None
    if not bool((receiver[1:] >= receiver[:-1]).all()):
        receiver, order = torch.sort(receiver, stable=True)
    rows = torch.arange(num_rows + 1, device=receiver.device, dtype=receiver.dtype)
    offsets = torch.searchsorted(receiver, rows)
    firsts = receiver[[step.start for step in steps]].tolist()
    lasts = receiver[[step.stop - 1 for step in steps]].tolist()
    for step, first, last in zip(steps, firsts, lasts, strict=True):
        inside = offsets[first : last + 2].clamp(step.start, step.stop) - step.start
        yield _Chunk(step if order is None else order[step], slice(first, last + 1), inside)


def _add_rows(out: Tensor, x: Tensor, chunk: _Chunk) -> None:
    """out[rows] += Σ of the pairs of each row; the same order of summation on every device."""
    every = torch.arange(x.shape[0], device=x.device, dtype=chunk.offsets.dtype)
    out[chunk.rows] += F.embedding_bag(
        every, x, chunk.offsets, mode="sum", include_last_offset=True
    )


def filtered(
    basis: Tensor, weight: Tensor, value: Tensor, receiver: Tensor, sender: Tensor, num_rows: int
) -> Tensor:
    """Σ_p (B_p W) ∘ v_j, one row per receiver, for no autograd: what two operators below do."""
    out = value.new_zeros(num_rows, weight.shape[1])
    with without_autocast(value):
        for chunk in _chunks(receiver, num_rows, weight.shape[1]):
            filters = basis[chunk.pairs] @ weight
            _add_rows(out, filters.mul_(value.index_select(0, sender[chunk.pairs])), chunk)
    return out


@operator("pair_filter")
def pair_filter(
    basis: Tensor, weight: Tensor, value: Tensor, receiver: Tensor, sender: Tensor, num_rows: int
) -> Tensor:
    """∂F/∂g: Σ_p (B_p W) ∘ v_j, one row per receiver."""
    return filtered(basis, weight, value, receiver, sender, num_rows)


@operator("symmetric_pair_filter")
def symmetric_pair_filter(
    basis: Tensor, weight: Tensor, value: Tensor, receiver: Tensor, sender: Tensor, num_rows: int
) -> Tensor:
    """The same for pairs each of whose reverses is there, with the same basis: see `pairs`."""
    return filtered(basis, weight, value, receiver, sender, num_rows)


@operator("symmetric_pair_filter_gradients")
def symmetric_gradients(
    grad: Tensor, basis: Tensor, weight: Tensor, value: Tensor, receiver: Tensor, sender: Tensor
) -> tuple[Tensor, Tensor]:
    """∂F/∂W and ∂F/∂u, with one look at each pair: of its reverse, g_j stands beside u_i."""
    to_weight, to_value = torch.zeros_like(weight), torch.zeros_like(value)
    with without_autocast(value):
        for chunk in _chunks(receiver, len(value), weight.shape[1]):
            some, rows = basis[chunk.pairs], receiver[chunk.pairs]
            other = grad.index_select(0, sender[chunk.pairs])
            _add_rows(to_value, (some @ weight).mul_(other), chunk)
            to_weight.addmm_(some.mT, other.mul_(value.index_select(0, rows)))
    return to_weight, to_value


@operator("pair_filter_basis")
def pair_filter_basis(x: Tensor, y: Tensor, weight: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """∂F/∂B: (x_i ∘ y_j) Wᵀ, one row per pair."""
    out = x.new_empty(len(i), weight.shape[0])
    with without_autocast(x):
        for step in _steps(len(i), x.shape[1], x.device):
            product = x.index_select(0, i[step]).mul_(y.index_select(0, j[step]))
            torch.mm(product, weight.mT, out=out[step])
    return out


@operator("pair_filter_weight")
def pair_filter_weight(x: Tensor, y: Tensor, basis: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """∂F/∂W: Σ_p B_pᵀ (x_i ∘ y_j)."""
    out = x.new_zeros(basis.shape[1], x.shape[1])
    with without_autocast(x):
        for step in _steps(len(i), x.shape[1], x.device):
            product = x.index_select(0, i[step]).mul_(y.index_select(0, j[step]))
            out.addmm_(basis[step].mT, product)
    return out


@operator("pair_dots")
def pair_dots(x: Tensor, y: Tensor, i: Tensor, j: Tensor) -> Tensor:
    out = x.new_empty(len(i), x.shape[1])
    with without_autocast(x):
        for step in _steps(len(i), x.shape[1] * x.shape[2], x.device):
            product = x.index_select(0, i[step]).mul_(y.index_select(0, j[step]))
            torch.sum(product, -1, out=out[step])
    return out


@operator("pair_weighted_sum")
def weighted_sum(
    weight: Tensor, value: Tensor, receiver: Tensor, sender: Tensor, num_rows: int
) -> Tensor:
    heads, width = value.shape[1:]
    out = value.new_zeros(num_rows, heads * width)
    with without_autocast(value):
        for chunk in _chunks(receiver, num_rows, heads * width):
            terms = value.index_select(0, sender[chunk.pairs])
            _add_rows(out, terms.mul_(weight[chunk.pairs][:, :, None]).flatten(1), chunk)
    return out.view(num_rows, heads, width)


@pair_filter.register_fake
def _(
    basis: Tensor, weight: Tensor, value: Tensor, receiver: Tensor, sender: Tensor, num_rows: int
) -> Tensor:
    return value.new_empty(num_rows, weight.shape[1])


@symmetric_pair_filter.register_fake
def _(
    basis: Tensor, weight: Tensor, value: Tensor, receiver: Tensor, sender: Tensor, num_rows: int
) -> Tensor:
    return value.new_empty(num_rows, weight.shape[1])


@symmetric_gradients.register_fake
def _(
    grad: Tensor, basis: Tensor, weight: Tensor, value: Tensor, receiver: Tensor, sender: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(weight), torch.empty_like(value)


@pair_filter_basis.register_fake
def _(x: Tensor, y: Tensor, weight: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return x.new_empty(i.shape[0], weight.shape[0])


@pair_filter_weight.register_fake
def _(x: Tensor, y: Tensor, basis: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return x.new_empty(basis.shape[1], x.shape[1])


@pair_dots.register_fake
def _(x: Tensor, y: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return x.new_empty(i.shape[0], x.shape[1])


@weighted_sum.register_fake
def _(weight: Tensor, value: Tensor, receiver: Tensor, sender: Tensor, num_rows: int) -> Tensor:
    return value.new_empty(num_rows, value.shape[1], value.shape[2])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))


def _filter_backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    basis, weight, value, i, j = ctx.saved_tensors
    needs = ctx.needs_input_grad
    return (
        pair_filter_basis(g, value, weight, i, j) if needs[0] else None,
        pair_filter_weight(g, value, basis, i, j) if needs[1] else None,
        pair_filter(basis, weight, g, j, i, value.shape[0]) if needs[2] else None,
        *(None, None, None),
    )


def _symmetric_backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    """Σ_p F_p g_{i(p)} over the pairs that end in j is the sum over those that begin there."""
    basis, weight, value, i, j = ctx.saved_tensors
    needs = ctx.needs_input_grad
    to_basis = pair_filter_basis(g, value, weight, i, j) if needs[0] else None
    if needs[1] and needs[2] and not torch.is_grad_enabled():
        return to_basis, *symmetric_gradients(g, basis, weight, value, i, j), None, None, None
    return (
        to_basis,
        pair_filter_weight(g, value, basis, i, j) if needs[1] else None,
        symmetric_pair_filter(basis, weight, g, i, j, len(g)) if needs[2] else None,
        *(None, None, None),
    )


def _filter_basis_backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    x, y, weight, i, j = ctx.saved_tensors
    needs = ctx.needs_input_grad
    return (
        pair_filter(g, weight, y, i, j, x.shape[0]) if needs[0] else None,
        pair_filter(g, weight, x, j, i, y.shape[0]) if needs[1] else None,
        pair_filter_weight(x, y, g, i, j) if needs[2] else None,
        *(None, None),
    )


def _filter_weight_backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    x, y, basis, i, j = ctx.saved_tensors
    needs = ctx.needs_input_grad
    return (
        pair_filter(basis, g, y, i, j, x.shape[0]) if needs[0] else None,
        pair_filter(basis, g, x, j, i, y.shape[0]) if needs[1] else None,
        pair_filter_basis(x, y, g, i, j) if needs[2] else None,
        *(None, None),
    )


def _dots_backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    x, y, i, j = ctx.saved_tensors
    needs = ctx.needs_input_grad
    return (
        weighted_sum(g, y, i, j, x.shape[0]) if needs[0] else None,
        weighted_sum(g, x, j, i, y.shape[0]) if needs[1] else None,
        *(None, None),
    )


def _weighted_sum_backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    weight, value, i, j = ctx.saved_tensors
    needs = ctx.needs_input_grad
    return (
        pair_dots(g, value, i, j) if needs[0] else None,
        weighted_sum(weight, g, j, i, value.shape[0]) if needs[1] else None,
        *(None, None, None),
    )


pair_filter.register_autograd(_filter_backward, setup_context=_save)
symmetric_pair_filter.register_autograd(_symmetric_backward, setup_context=_save)
pair_filter_basis.register_autograd(_filter_basis_backward, setup_context=_save)
pair_filter_weight.register_autograd(_filter_weight_backward, setup_context=_save)
pair_dots.register_autograd(_dots_backward, setup_context=_save)
weighted_sum.register_autograd(_weighted_sum_backward, setup_context=_save)
