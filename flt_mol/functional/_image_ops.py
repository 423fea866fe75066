"""The operators behind `images`: attention over pairs, one system at a time.

Queries come scaled. All tensors of a call have one dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flt_mol.functional import _pair_ops
from flt_mol.functional.groups import operator, system_offsets, without_autocast
from flt_mol.functional.linear import normalised, with_ones
from flt_mol.functional.pairs import pair_dots, segment_peak, weighted_sum

# What a pair costs over an entry of an n × n matrix in time: 13 to 25 on one core.
_PAIR_COST = 16


def over_pairs(q: Tensor, k: Tensor, v: Tensor, log_weight: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Attention over pairs, (N, H, D), (N, H, D), (N, H, V), (P, H) → (N, H, V), differentiable."""
    logits = pair_dots(q, k, i, j) + log_weight
    weight = (logits - segment_peak(logits, i, q.shape[0])[i]).exp()
    return normalised(weighted_sum(weight, with_ones(v), i, j, q.shape[0]))


class _Pairs(NamedTuple):
    """One system's numbers per (i, j) as a list: (p, H), for a system of n atoms."""

    i: Tensor
    j: Tensor
    size: int

    def of_list(self, x: Tensor) -> Tensor:
        return x

    def to_list(self, x: Tensor) -> Tensor:
        return x

    def of_rows(self, x: Tensor) -> Tensor:
        return x[self.i]

    def peak(self, x: Tensor) -> Tensor:
        return segment_peak(x, self.i, self.size)

    def dots(self, x: Tensor, y: Tensor) -> Tensor:
        """x_i · y_j."""
        out: Tensor = _pair_ops.pair_dots(x, y, self.i, self.j)
        return out

    def times(self, weight: Tensor, x: Tensor) -> Tensor:
        """Σ_j w_ij x_j."""
        out: Tensor = _pair_ops.weighted_sum(weight, x, self.i, self.j, self.size)
        return out

    def transposed_times(self, weight: Tensor, x: Tensor) -> Tensor:
        """Σ_i w_ij x_i."""
        out: Tensor = _pair_ops.weighted_sum(weight, x, self.j, self.i, self.size)
        return out


class _Matrix(NamedTuple):
    """The same as a matrix: (H, n, n), −∞ where a list has no entry."""

    i: Tensor
    j: Tensor
    size: int

    def of_list(self, x: Tensor) -> Tensor:
        dense = x.new_full((self.size**2, x.shape[1]), -torch.inf)
        dense[self.i * self.size + self.j] = x
        return dense.T.reshape(-1, self.size, self.size)

    def to_list(self, x: Tensor) -> Tensor:
        return x.flatten(1).T[self.i * self.size + self.j]

    def of_rows(self, x: Tensor) -> Tensor:
        return x.T[:, :, None]

    def peak(self, x: Tensor) -> Tensor:
        peak = x.amax(-1).T
        return peak.masked_fill(peak.isinf(), 0.0)

    def dots(self, x: Tensor, y: Tensor) -> Tensor:
        return x.transpose(0, 1) @ y.permute(1, 2, 0)

    def times(self, weight: Tensor, x: Tensor) -> Tensor:
        return (weight @ x.transpose(0, 1)).transpose(0, 1)

    def transposed_times(self, weight: Tensor, x: Tensor) -> Tensor:
        return (weight.mT @ x.transpose(0, 1)).transpose(0, 1)


class _Groups(NamedTuple):
    """Distinct (i, j), sorted, and log Σ w of their pairs; and the group of each pair."""

    i: Tensor
    j: Tensor
    log_weight: Tensor
    of_pair: Tensor | None

    def to_pairs(self, grad: Tensor, log_weight: Tensor) -> Tensor:
        """The gradient of the groups' log weights, passed on to the pairs' own."""
        if self.of_pair is None:
            return grad
        whole = self.log_weight.masked_fill(self.log_weight.isinf(), 0.0)
        return grad[self.of_pair] * (log_weight - whole[self.of_pair]).exp()


def _grouped(log_weight: Tensor, i: Tensor, j: Tensor, num_rows: int) -> _Groups:
    label = i * num_rows + j
    if bool((label.diff() > 0).all()):
        return _Groups(i, j, log_weight, None)
    label, group = torch.unique(label, return_inverse=True)
    peak = segment_peak(log_weight, group, len(label))
    one, zeros = log_weight.new_ones(1, log_weight.shape[1], 1), torch.zeros_like(group)
    terms = (log_weight - peak[group]).exp()
    total = _pair_ops.weighted_sum(terms, one, group, zeros, len(label)).squeeze(-1)
    return _Groups(label // num_rows, label % num_rows, total.log() + peak, group)


def _systems(
    ptr: Tensor, num_rows: int, groups: _Groups
) -> Iterator[tuple[slice, slice, _Pairs | _Matrix]]:
    """Rows, groups and arithmetic of each system that has groups."""
    offsets = system_offsets(ptr, num_rows)
    first = torch.searchsorted(groups.i, ptr.to(groups.i.dtype)).tolist()
    for (start, stop), (low, high) in zip(pairwise(offsets), pairwise(first), strict=True):
        if low < high:
            form = _Matrix if (stop - start) ** 2 <= _PAIR_COST * (high - low) else _Pairs
            i, j = groups.i[low:high] - start, groups.j[low:high] - start
            yield slice(start, stop), slice(low, high), form(i, j, stop - start)


def _weights(form: _Pairs | _Matrix, q: Tensor, k: Tensor, log_weight: Tensor) -> Tensor:
    """exp(q_i·k_j + log w_ij − peak_i), between 0 and 1."""
    logits = form.dots(q, k).add_(form.of_list(log_weight))
    return logits.sub_(form.of_rows(form.peak(logits))).exp_()


@operator("image_attention")
def image_attention(
    q: Tensor, k: Tensor, v: Tensor, log_weight: Tensor, ptr: Tensor, i: Tensor, j: Tensor
) -> Tensor:
    """Attention over pairs, (N, H, D), (N, H, D), (N, H, V), (P, H) → (N, H, V)."""
    out = v.new_zeros(v.shape)
    with without_autocast(v):
        groups = _grouped(log_weight, i, j, q.shape[0])
        for rows, part, form in _systems(ptr, q.shape[0], groups):
            weight = _weights(form, q[rows], k[rows], groups.log_weight[part])
            out[rows] = normalised(form.times(weight, with_ones(v[rows])))
    return out


@operator("image_attention_gradients")
def _gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_weight: Tensor,
    ptr: Tensor,
    i: Tensor,
    j: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """With A = weight / Σ weight: dL = A ∘ (g·v − Σ A (g·v)), dq = dL k, dk = dLᵀ q, dv = Aᵀ g."""
    to_q, to_k, to_v = (torch.zeros_like(x) for x in (q, k, v))
    with without_autocast(v):
        groups = _grouped(log_weight, i, j, q.shape[0])
        to_list = torch.zeros_like(groups.log_weight)
        for rows, part, form in _systems(ptr, q.shape[0], groups):
            g, q_b, k_b, v_b = grad[rows], q[rows], k[rows], v[rows]
            ones = v_b.new_ones(1, 1, 1).expand(*v_b.shape[:2], 1)
            weight = _weights(form, q_b, k_b, groups.log_weight[part])
            total = form.times(weight, ones).squeeze(-1).clamp(min=torch.finfo(v.dtype).tiny)
            weight = weight.div_(form.of_rows(total))
            to_v[rows] = form.transposed_times(weight, g)
            slope = form.dots(g, v_b)
            mean = form.times(weight * slope, ones).squeeze(-1)
            slope = slope.sub_(form.of_rows(mean)).mul_(weight)
            to_q[rows], to_k[rows] = form.times(slope, k_b), form.transposed_times(slope, q_b)
            to_list[part] = form.to_list(slope)
        return to_q, to_k, to_v, groups.to_pairs(to_list, log_weight).clone()


@image_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, log_weight: Tensor, ptr: Tensor, i: Tensor, j: Tensor
) -> Tensor:
    return v.new_empty(v.shape)


@_gradients.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_weight: Tensor,
    ptr: Tensor,
    i: Tensor,
    j: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return tuple(x.new_empty(x.shape) for x in (q, k, v, log_weight))  # type: ignore[return-value]


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, log_weight, ptr, i, j = ctx.saved_tensors
    if not torch.is_grad_enabled():
        return *_gradients(grad, q, k, v, log_weight, ptr, i, j), None, None, None
    # Gradients that will be differentiated themselves: from steps that autograd knows.
    # Aliases: where one input was computed from another, that way is not for this function.
    q, k, v, log_weight = (x.view_as(x) for x in (q, k, v, log_weight))
    inputs = (q, k, v, log_weight)
    needed = [x for x, need in zip(inputs, ctx.needs_input_grad, strict=False) if need]
    out = over_pairs(*inputs, i, j)
    found = iter(torch.autograd.grad(out, needed, grad, create_graph=True))
    gradients = [next(found) if need else None for need in ctx.needs_input_grad[:4]]
    return *gradients, None, None, None


image_attention.register_autograd(_backward, setup_context=_save)
