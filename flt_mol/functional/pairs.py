"""Sums over neighbour pairs, linear in P in time and memory.

All are derivatives of one form, F = Σ_p Σ_c (B_p W)_c x_{i(p) c} y_{j(p) c}, linear in B, W, x and
y, so gradients of any order are of the same family. Nothing of size pairs × channels is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from flt_mol.functional.groups import budget_of, eager_step, save_inputs, settled, without_autocast
from flt_mol.functional.linear import with_ones


def pair_filter(
    basis: Tensor, weight: Tensor, value: Tensor, index_i: Tensor, index_j: Tensor, num_rows: int
) -> Tensor:
    """out_ic = Σ_p (Σ_t B_pt W_tc) v_{j(p) c} over the pairs p of receiver i: a filter per channel.

    Time O(P·T·C), memory O(P·T + N·C).

    Args:
        basis: B (P, T), basis functions of each pair.
        weight: W (T, C).
        value: v (K, C).
        index_i: (P,) int64, receiver of each pair, a row of the result.
        index_j: (P,) int64, sender of each pair, a row of `value`.
        num_rows: N.

    Returns:
        (N, C), at least float32 for any autocast dtype; 0 for rows without pairs.

    Raises:
        ValueError: shapes that do not belong together.

    References:
        Schütt et al., "SchNet", NeurIPS 2017, equation 3.

    Examples:
        >>> i, j = torch.tensor([0, 0, 1]), torch.tensor([1, 2, 0])
        >>> basis, value = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[1.0], [10.0], [5.0]])
        >>> pair_filter(basis, torch.ones(1, 1), value, i, j, num_rows=3).flatten().tolist()
        [20.0, 3.0, 0.0]
    """
    if basis.shape != (len(index_i), weight.shape[0]) or value.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"basis {tuple(basis.shape)}, weight {tuple(weight.shape)}, value {tuple(value.shape)}:"
            f" expected (P, T), (T, C) and (K, C) for P = {len(index_i)} pairs"
        )
    return _filter(*settled(basis, weight, value), index_i, index_j, num_rows)


def filtered_dots(x: Tensor, y: Tensor, weight: Tensor, index_i: Tensor, index_j: Tensor) -> Tensor:
    """s_pt = Σ_c x_{i(p) c} W_tc y_{j(p) c}: (N, C), (K, C), W (T, C) → (P, T), at least float32.

    Times the basis and summed over t it is Σ_c x_ic F_c(r_p) y_jc, without anything of size P × C.
    """
    return _to_basis(*settled(x, y, weight), index_i, index_j)


def segment_sum(x: Tensor, index: Tensor, num_rows: int) -> Tensor:
    """Σ of the rows with the same index: (P, H) → (num_rows, H)."""
    return x.new_zeros(num_rows, x.shape[1]).index_add(0, index, x)


def segment_peak(x: Tensor, index: Tensor, num_rows: int) -> Tensor:
    """Largest of the rows with the same index, 0 where none is finite: (P, H) → (num_rows, H)."""
    x = x.detach()
    peak = x.new_full((num_rows, x.shape[1]), -torch.inf)
    peak = peak.scatter_reduce(0, index[:, None].expand_as(x), x, "amax")
    return peak.masked_fill(peak.isinf(), 0.0)


def pair_sums(
    query_features: Tensor,
    key_features: Tensor,
    value: Tensor,
    weight: Tensor,
    index_i: Tensor,
    index_j: Tensor,
) -> Tensor:
    """Σ_p φ(q_i)·φ(k_j) w_p [v_j, 1]: what pairs add to `linear.linear_sums` before the division.

    With w = exp(f) − 1 the weight of (i, j) becomes φ(q_i)·φ(k_j)·exp(f_ij) under attention's one
    normaliser, exactly, provided every (i, j) occurs once (`NeighborPairs.groups`).

    φ(q) (N, H, M), φ(k) (K, H, M) and v (K, H, V) are those of `linear_sums`, w is (P, H), and
    `index_i` and `index_j` (P,) are the query and key of each pair. Returns (N, H, V + 1), the
    normaliser last; at least float32 for any autocast dtype.
    """
    q, k, v, w = settled(query_features, key_features, value, weight)
    with without_autocast(v):
        values = with_ones(v)
        w = w * filtered_dots(q.flatten(1), k.flatten(1), _heads(q), index_i, index_j)
        summed = pair_filter(w, _heads(values), values.flatten(1), index_i, index_j, len(q))
        return summed.view(len(q), *values.shape[1:])


def _heads(x: Tensor) -> Tensor:
    # (H, H·M): a channel's weight is that of its head, for x (N, H, M).
    heads, width = x.shape[1:]
    return torch.eye(heads, dtype=x.dtype, device=x.device).repeat_interleave(width, 1)


def _chunks(num_pairs: int, width: int, device: torch.device) -> Iterator[slice]:
    size = max(1, budget_of(device) // max(1, width))
    return (slice(k, k + size) for k in range(0, num_pairs, size))


def _step(
    name: str, inputs: str, output: str, fake: Callable[..., Tensor]
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """The operator ∂F/∂output, with gradients to its three first inputs, by their letters in F."""

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *factors, i, j = ctx.saved_tensors
        f = {**dict(zip(inputs, factors, strict=True)), output: grad}
        partial = {
            "b": lambda: _to_basis(f["x"], f["y"], f["w"], i, j),
            "w": lambda: _to_weight(f["x"], f["y"], f["b"], i, j),
            "x": lambda: _filter(f["b"], f["w"], f["y"], i, j, f["x"].shape[0]),
            "y": lambda: _filter(f["b"], f["w"], f["x"], j, i, f["y"].shape[0]),
        }
        needs = ctx.needs_input_grad
        found = [partial[x]() if need else None for x, need in zip(inputs, needs, strict=False)]
        return (*found, *[None] * (len(needs) - len(found)))

    def made(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        compiled = custom_op(f"flt_mol::{name}", run, mutates_args=())
        compiled.register_fake(fake)
        compiled.register_autograd(backward, setup_context=save_inputs)
        return eager_step(compiled, run, backward)

    return made


@_step("pair_filter", "bwy", "x", lambda b, w, y, i, j, rows: y.new_empty(rows, w.shape[1]))
def _filter(b: Tensor, w: Tensor, y: Tensor, i: Tensor, j: Tensor, num_rows: int) -> Tensor:
    """∂F/∂x: Σ_p (B_p W) ∘ y_j, one row per receiver."""
    out = y.new_zeros(num_rows, w.shape[1])
    with without_autocast(y):
        for some in _chunks(len(i), w.shape[1], y.device):
            out.index_add_(0, i[some], (b[some] @ w).mul_(y.index_select(0, j[some])))
    return out


@_step("pair_filter_basis", "xyw", "b", lambda x, y, w, i, j: x.new_empty(i.shape[0], w.shape[0]))
def _to_basis(x: Tensor, y: Tensor, w: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """∂F/∂B: (x_i ∘ y_j) Wᵀ, one row per pair."""
    out = x.new_empty(len(i), w.shape[0])
    with without_autocast(x):
        for some in _chunks(len(i), x.shape[1], x.device):
            both = x.index_select(0, i[some]).mul_(y.index_select(0, j[some]))
            torch.mm(both, w.mT, out=out[some])
    return out


@_step("pair_filter_weight", "xyb", "w", lambda x, y, b, i, j: x.new_empty(b.shape[1], x.shape[1]))
def _to_weight(x: Tensor, y: Tensor, b: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """∂F/∂W: Σ_p B_pᵀ (x_i ∘ y_j)."""
    out = x.new_zeros(b.shape[1], x.shape[1])
    with without_autocast(x):
        for some in _chunks(len(i), x.shape[1], x.device):
            both = x.index_select(0, i[some]).mul_(y.index_select(0, j[some]))
            out.addmm_(b[some].mT, both)
    return out
