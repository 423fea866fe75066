"""Causal attention from log features, in blocks: the op behind `causal.causal_log_attention`.

With r_i = max_m (q_im + max_{j ≤ i} k_jm), which no later key can change, the weight of key j is
A_ij = Σ_m exp(q_im + k_jm − r_i), every term is ≤ 1 and every normaliser Σ_{j ≤ i} A_ij is ≥ 1.
For a product of matrices the exponential has to be split, exp(q + s − r) exp(k − s), at a level
s_m that neither over- nor underflows. With s the running maximum at the block's first row,

- keys of earlier blocks have exp(k − s) ≤ 1, and as s_m ≤ max_{j ≤ i} k_jm also exp(q + s − r) ≤ 1;
- keys of the same block have exp(k − s) ≤ exp(g), g being the growth of the running maximum within
  the block. What exp(q + s − r) loses to underflow is then less than exp(g − 87) of the normaliser.
  A block with g above a bound is halved: its second half meets the first half's keys as "earlier
  keys", and each half is treated as a block, down to single rows, whose g is 0.

Which way a block goes may depend on its later rows; the results of earlier rows then differ by
rounding alone. s and r cancel, so they carry no gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from flt_mol.functional._blocks import (
    Blocks,
    Decays,
    blocks_of,
    carried_back,
    carried_in,
)
from flt_mol.functional.numerics import with_ones

LARGEST_GROWTH = 36.0
# Factors below these are 0 instead of denormal numbers or the makers of them in products, which
# slow products down tenfold. The first times exp(LARGEST_GROWTH), and the second, bound what a
# term that is left out could have been, in a sum that is at least 1.
LOG_SMALLEST = {torch.float32: (-57.0, -30.0), torch.float64: (-460.0, -140.0)}


def lowest(dtype: torch.dtype) -> float:
    """Stands for log 0 where −∞ − (−∞) would be NaN; differences of two such are finite."""
    return torch.finfo(dtype).min / 4


class _Factors(NamedTuple):
    """exp(q + s − r), exp(k − t) and t, with t = s in blocks that `fits`; else t ≥ all keys.

    Shapes (…, n, M), (…, n, M), (…, M), (…).
    """

    queries: Tensor
    keys: Tensor
    reference: Tensor
    fits: Tensor


def _factors(q: Tensor, k: Tensor, r: Tensor, start: Tensor) -> _Factors:
    end = torch.maximum(start, k.detach().amax(-2))
    # A NaN does not fit, so that it is kept from the rows before it. A single row always fits.
    fits = (end - start).amax(-1) <= LARGEST_GROWTH
    if k.shape[-2] == 1:
        fits = torch.ones_like(fits)
    reference = torch.where(fits[..., None], start, end)
    queries, keys = _exponentials(q, k, r, start, reference)
    return _Factors(queries, keys, reference, fits)


def _exponentials(
    q: Tensor, k: Tensor, r: Tensor, start: Tensor, reference: Tensor
) -> tuple[Tensor, Tensor]:
    """exp(q + s − r), exp(k − t), and 0 where too small."""
    smallest, smallest_key = LOG_SMALLEST[q.dtype]
    queries, keys = (q + start[..., None, :]).sub_(r), k - reference[..., None, :]
    if torch.is_grad_enabled():
        queries = F.threshold(queries, smallest, -torch.inf)
        keys = F.threshold(keys, smallest_key, -torch.inf)
        return queries.exp(), keys.exp()
    F.threshold(queries, smallest, -torch.inf, inplace=True)
    F.threshold(keys, smallest_key, -torch.inf, inplace=True)
    return queries.exp_(), keys.exp_()


def _running_maximum(k: Tensor, blocks: Blocks) -> Tensor:
    """s_m at each block's first row: (H, T, n, M) → (H, T, M)."""
    steps = zip(blocks.steps(k[:, :, 0]), blocks.steps(k.amax(2)), strict=True)
    carried = k.new_full((k.shape[0], blocks.active[0], k.shape[-1]), lowest(k.dtype))
    starts = []
    for first, whole in steps:
        carried = carried[:, : first.shape[1]]
        starts.append(torch.maximum(carried, first))
        carried = torch.maximum(carried, whole)
    return torch.cat(starts, 1)


def _row_maximum(q: Tensor, k: Tensor, start: Tensor) -> Tensor:
    """r_i (H, T, n, 1); row by row, as the running maximum of all rows need not be kept."""
    largest = start.clone()
    rows = []
    for i in range(k.shape[2]):
        torch.maximum(largest, k[:, :, i], out=largest)
        rows.append((q[:, :, i] + largest).amax(-1, keepdim=True))
    return torch.stack(rows, 2).clamp_(min=lowest(q.dtype))


def _decays(blocks: Blocks, start: Tensor, reference: Tensor) -> Decays:
    """Factors that take sums to the level of the next block, all ≤ 1, for `carried_in`."""
    starts, references = blocks.steps(start), blocks.steps(reference)
    decays = []
    for p, following in enumerate(starts[1:]):
        levels = (x[p][:, : following.shape[1]] for x in (starts, references))
        keep, add = ((level - following).exp_()[..., None] for level in levels)
        decays.append((keep, add))
    return decays


class _Halves(NamedTuple):
    """Blocks (G, n, ·) cut in two: the halves as (2G, n/2, ·), and how the second sees the first.

    `queries` exp(q + c − r) of second halves and `keys` exp(k − c) of first halves, (G, n/2, M),
    with c the largest key of the first half.
    """

    q: Tensor
    k: Tensor
    r: Tensor
    start: Tensor
    queries: Tensor
    keys: Tensor


def _halved(x: Tensor) -> Tensor:
    """Both halves of blocks: (G, n, F) → (G, 2, n/2, F)."""
    return x.reshape(x.shape[0], 2, x.shape[1] // 2, x.shape[2])


def _halves(q: Tensor, k: Tensor, r: Tensor, start: Tensor) -> _Halves:
    q, k, r = _halved(q), _halved(k), _halved(r)
    c = k[:, 0].detach().amax(1).clamp(min=lowest(k.dtype))
    later = torch.maximum(torch.maximum(start, c), k[:, 1, 0].detach())
    starts = torch.stack([start, later], 1)
    queries, keys = _exponentials(q[:, 1], k[:, 0], r[:, 1], c, c)
    q, k, r, starts = (x.flatten(0, 1) for x in (q, k, r, starts))
    return _Halves(q, k, r, starts, queries, keys)


def _within(q: Tensor, k: Tensor, v: Tensor, r: Tensor, start: Tensor, f: _Factors) -> Tensor:
    """Σ_{j ≤ i} A_ij v_j over the keys of the row's own block: (…, n, V)."""
    sums = (f.queries @ f.keys.mT).tril_() @ v
    if bool(f.fits.all()):
        return sums
    steep = ~f.fits
    two = _halves(q[steep], k[steep], r[steep], start[steep])
    values = _halved(v[steep])
    factors = _factors(two.q, two.k, two.r, two.start)
    parts = _within(two.q, two.k, values.flatten(0, 1), two.r, two.start, factors)
    first, second = parts.unflatten(0, (-1, 2)).unbind(1)
    second = second + (two.queries @ two.keys.mT) @ values[:, 0]
    return sums.index_put((steep,), torch.cat([first, second], 1))


Gradients = tuple[Tensor, Tensor, Tensor]


def _gradients_within(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    start: Tensor,
    grad: Tensor,
    f: _Factors,
    others: Gradients | None = None,
) -> Gradients:
    """Gradients of `_within` with respect to q, k and v.

    `others` are those from products with other blocks, before they are multiplied by the factors.
    """
    steep = None if bool(f.fits.all()) else ~f.fits
    weights, slopes = (f.queries @ f.keys.mT).tril_(), (grad @ v.mT).tril_()
    if steep is not None:
        weights.masked_fill_(steep[..., None, None], 0.0)
        slopes.masked_fill_(steep[..., None, None], 0.0)
    to_q, to_k, to_v = slopes @ f.keys, slopes.mT @ f.queries, weights.mT @ grad
    if others is not None:
        for own, other in zip((to_q, to_k, to_v), others, strict=True):
            own.add_(other)
    to_q.mul_(f.queries)
    to_k.mul_(f.keys)
    if steep is not None:
        parts = _gradients_of_halves(*(x[steep] for x in (q, k, v, r, start, grad)))
        for whole, part in zip((to_q, to_k, to_v), parts, strict=True):
            whole[steep] += part
    return to_q, to_k, to_v


def _gradients_of_halves(
    q: Tensor, k: Tensor, v: Tensor, r: Tensor, start: Tensor, grad: Tensor
) -> Gradients:
    two = _halves(q, k, r, start)
    v, grad = _halved(v), _halved(grad)
    flat = (two.q, two.k, v.flatten(0, 1), two.r, two.start, grad.flatten(0, 1))
    factors = _factors(two.q, two.k, two.r, two.start)
    parts = _gradients_within(*flat, factors)
    to_q, to_k, to_v = (x.unflatten(0, (-1, 2)) for x in parts)
    weights, slopes = two.queries @ two.keys.mT, grad[:, 1] @ v[:, 0].mT
    to_q[:, 1].addcmul_(two.queries, slopes @ two.keys)
    to_k[:, 0].addcmul_(two.keys, slopes.mT @ two.queries)
    to_v[:, 0].add_(weights.mT @ grad[:, 1])
    return to_q.flatten(1, 2), to_k.flatten(1, 2), to_v.flatten(1, 2)


def attend(q: Tensor, k: Tensor, value: Tensor, ptr: Tensor) -> tuple[Tensor, Tensor]:
    """The output (H, N, V), and r with the normaliser (H, N, 2), by differentiable operations."""
    heads, num_rows, _ = q.shape
    blocks = blocks_of(ptr, num_rows)
    if not blocks.active:
        return torch.zeros_like(value), q.new_zeros(heads, num_rows, 2)
    q, k, value = (blocks.cut(x) for x in (q, k, value))
    start = _running_maximum(k.detach(), blocks)
    r = _row_maximum(q.detach(), k.detach(), start)
    f, v = _factors(q, k, r, start), with_ones(value)
    sums = _within(q, k, v, r, start, f)
    if len(blocks.active) > 1:
        states = carried_in(blocks, f.keys.mT @ v, _decays(blocks, start, f.reference))
        sums = sums + f.queries @ states
    # At least 1, except for rows that see no weight: 0/1 has finite derivatives, 0/tiny has not.
    normaliser = sums[..., -1:].masked_fill(sums[..., -1:] <= 0, 1.0)
    out = sums[..., :-1] / normaliser
    # A first row sees itself alone: its value to the last bit, unless its key is masked by −∞.
    first, alone = out[:, : blocks.active[0], 0], value[:, : blocks.active[0], 0]
    seen = sums[:, : blocks.active[0], 0, -1:] > 0
    out[:, : blocks.active[0], 0] = torch.where(seen, alone, first)
    rows = torch.cat([r, normaliser.detach()], -1)
    return blocks.join(out, num_rows), blocks.join(rows, num_rows)


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, rows: Tensor, ptr: Tensor
) -> Gradients:
    num_rows = q.shape[1]
    blocks = blocks_of(ptr, num_rows)
    if not blocks.active:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    q, k, v, out, rows = (blocks.cut(x) for x in (q, k, v, out, rows))
    r, normaliser = rows.split(1, -1)
    grad = blocks.cut_zero_filled(grad) / normaliser
    grad = torch.cat([grad, -(grad * out).sum(-1, keepdim=True)], -1)
    start = _running_maximum(k, blocks)
    f, v = _factors(q, k, r, start), with_ones(v)
    others = None
    if len(blocks.active) > 1:
        decays = _decays(blocks, start, f.reference)
        states = carried_in(blocks, f.keys.mT @ v, decays)
        to_sums = carried_back(blocks, f.queries.mT @ grad, decays)
        others = (grad @ states.mT, v @ to_sums.mT, f.keys @ to_sums)
    to_q, to_k, to_v = _gradients_within(q, k, v, r, start, grad, f, others)
    to_q, to_k, to_v = (blocks.join(x, num_rows) for x in (to_q, to_k, to_v[..., :-1]))
    return to_q, to_k, to_v.contiguous()
