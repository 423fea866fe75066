"""Causal linear attention over packed systems: row i sees the rows j ≤ i of its own system.

Rows are cut into blocks. Within a block the weights are written out as a small masked matrix; from
block to block only Σ_j φ(k_j) v_jᵀ is carried, so time is O(N·M·V). The backward pass runs the
forward steps again: nothing but inputs is kept.

**Log features.** With r_i = max_m (q_im + max_{j≤i} k_jm), which no later key can change, the
weight of key j is A_ij = Σ_m exp(q_im + k_jm − r_i): every term is ≤ 1 and every normaliser ≥ 1.
For a product of matrices the exponential has to be split, exp(q + s − r) exp(k − s), at a level s_m
that neither over- nor underflows: the running maximum at the block's first row. Then exp(q + s − r)
≤ 1, and keys of the block reach exp(g), g being how much the running maximum grows within it. What
exp(q + s − r) loses to underflow is less than exp(g − 87) of the normaliser; blocks of larger g are
cut again, and small ones summed term by term. r and s cancel, so they carry no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from flt_mol.functional.groups import (
    LOWEST,
    PaddedRows,
    check_ptr,
    gradients_of,
    operator,
    real_only,
)
from flt_mol.functional.linear import normalised, with_ones

BLOCK, SMALL = 64, 8
LARGEST_GROWTH = 36.0
# Smaller factors are 0 instead of the makers of denormal numbers, which slow products tenfold: the
# first times exp(LARGEST_GROWTH), and the second, are lost in a sum that is at least 1.
LEAST = {torch.float32: (-57.0, -30.0), torch.float64: (-460.0, -140.0)}


def causal_log_attention(
    query_logits: Tensor, key_logits: Tensor, value: Tensor, ptr: Tensor
) -> Tensor:
    """out_i = Σ_{j≤i} A_ij v_j / Σ_{j≤i} A_ij with A_ij = Σ_m exp(q_im + k_jm), for logits q, k.

    Logits may be of any size. What keeps the exponentials in range depends on rows j ≤ i alone,
    so a later row changes earlier outputs by no more than rounding, however large it is. A logit of
    −∞ is a feature of 0; rows that see no weight at all give 0. Second and higher derivatives exist
    in eager mode.

    Args:
        query_logits: q = log φ(query) (N, H, M).
        key_logits: k = log φ(key) (N, H, M).
        value: (N, H, V).
        ptr: (B + 1,), first row of each system.

    Returns:
        (N, H, V), computed in at least float32 for any autocast dtype, in that dtype.

    Raises:
        ValueError: `ptr` does not describe N rows, or shapes that do not belong together.

    References:
        Katharopoulos et al., "Transformers are RNNs", ICML 2020, section 3.3 (causal sums);
        Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018 (rescaled sums).

    Examples:
        >>> logits = torch.tensor([0.0, 0.0, 1e4]).reshape(3, 1, 1)
        >>> value = torch.tensor([1.0, 3.0, 7.0]).reshape(3, 1, 1)
        >>> causal_log_attention(logits, logits, value, torch.tensor([0, 3])).flatten().tolist()
        [1.0, 2.0, 7.0]
    """
    return _checked(query_logits, key_logits, value, ptr, log=True)


def causal_attention(
    query_features: Tensor, key_features: Tensor, value: Tensor, ptr: Tensor
) -> Tensor:
    """out_i = Σ_{j≤i} A_ij v_j / Σ_{j≤i} A_ij with A_ij = φ(q_i)·φ(k_j), for given features φ ≥ 0.

    For features that are not exponentials, such as ReLU(Wx) or elu(x) + 1: used as they are,
    without stabiliser. All else as for `causal_log_attention`.

    Examples:
        >>> ones = torch.ones(4, 1, 2)
        >>> value = torch.tensor([1.0, 3.0, 7.0, 9.0]).reshape(4, 1, 1)
        >>> causal_attention(ones, ones, value, torch.tensor([0, 2, 4])).flatten().tolist()
        [1.0, 2.0, 7.0, 8.0]
    """
    return _checked(query_features, key_features, value, ptr, log=False)


def _checked(queries: Tensor, keys: Tensor, value: Tensor, ptr: Tensor, *, log: bool) -> Tensor:
    check_ptr(ptr, value.shape[0])
    if value.dim() != 3 or queries.shape != keys.shape or queries.shape[:-1] != value.shape[:-1]:
        raise ValueError(
            f"queries {tuple(queries.shape)}, keys {tuple(keys.shape)} and value "
            f"{tuple(value.shape)} must be (N, H, M), (N, H, M) and (N, H, V) of the same N and H"
        )
    return _causal(queries, keys, value, ptr, ptr, "log" if log else "features")


def _attend(
    q: Tensor, k: Tensor, v: Tensor, rows: PaddedRows, keys: PaddedRows, mode: str
) -> tuple[Tensor]:
    """Rows (B, L, ·) of systems, whose repeated slots are behind all others."""
    sums_of = _log_sums if mode == "log" else _sums
    sums = sums_of(*(_blocks(x, BLOCK) for x in (q, k, with_ones(v))))
    return (normalised(sums.flatten(1, 2)[:, : q.shape[1]]),)


def _blocks(x: Tensor, size: int) -> Tensor:
    """(B, L, F) → (B, T, n, F), n ≤ size, the last block filled up with its last row."""
    length = x.shape[1]
    n = min(size, length)
    missing = -length % n
    if missing:
        x = torch.cat([x, x[:, -1:].expand(-1, missing, -1)], 1)
    return x.reshape(x.shape[0], -1, n, x.shape[2])


def _sums(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Σ_{j≤i} (q_i·k_j) v_j of blocks (B, T, n, ·)."""
    own = (q @ k.mT).tril() @ v
    if q.shape[1] == 1:
        return own
    after = (k.mT @ v).cumsum(1)
    return own + q @ torch.cat([torch.zeros_like(after[:, :1]), after[:, :-1]], 1)


def _log_sums(q: Tensor, k: Tensor, v: Tensor, r: Tensor | None = None) -> Tensor:
    """Σ_{j≤i} Σ_m exp(q_im + k_jm − r_i) v_j of blocks (B, T, n, ·)."""
    floor = LOWEST[q.dtype]
    running = k.detach().flatten(1, 2).cummax(1).values.clamp(min=floor).view_as(k)
    if r is None:
        r = (q.detach() + running).amax(-1, keepdim=True).clamp(min=floor)
    first, last = running[..., :1, :], running[..., -1:, :]
    least, least_key = LEAST[q.dtype]
    queries = F.threshold(q + first - r, least, -torch.inf).exp()
    steep = (last - first).amax((-1, -2)) > LARGEST_GROWTH
    level = torch.where(steep[..., None, None], last, first)
    keys = F.threshold(k - level, least_key, -torch.inf).exp()
    sums = (queries @ keys.mT).tril() @ v
    if bool(steep.any()):
        own, n = [x[steep] for x in (q, k, v, r)], q.shape[2]
        if n <= SMALL:
            again = _term_by_term(*own)
        else:
            again = _log_sums(*(_blocks(x, SMALL) for x in own)).flatten(1, 2)[:, :n]
        sums = sums.index_put((steep,), again)
    if q.shape[1] == 1:
        return sums
    states = _carried(keys.mT @ v, *(x.squeeze(-2)[..., None] for x in (first, level)))
    return sums + queries @ states


def _term_by_term(q: Tensor, k: Tensor, v: Tensor, r: Tensor) -> Tensor:
    """The same within blocks (S, n, ·), one row of weights after the other."""
    out = []
    for i in range(q.shape[1]):
        terms = q[:, i, None] + k[:, : i + 1] - r[:, i, None]
        out.append(terms.exp().sum(-1)[:, None] @ v[:, : i + 1])
    return torch.cat(out, 1)


def _carried(sums: Tensor, first: Tensor, level: Tensor) -> Tensor:
    """Σ over earlier blocks relative to each block's `first`: (B, T, M, V) → the same shape.

    `sums` are of each block, relative to its `level`; levels (B, T, M, 1) never fall.
    """
    states = [torch.zeros_like(sums[:, 0])]
    for t in range(sums.shape[1] - 1):
        keep = (first[:, t] - first[:, t + 1]).exp()
        add = (level[:, t] - first[:, t + 1]).exp()
        states.append(states[-1] * keep + sums[:, t] * add)
    return torch.stack(states, 1)


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: PaddedRows, keys: PaddedRows, mode: str
) -> tuple[Tensor, ...]:
    return gradients_of(
        lambda q, k, v: _attend(q, k, v, rows, keys, mode)[0], real_only(grad, rows), (q, k, v)
    )


_causal = operator(
    "causal_attention",
    _attend,
    _gradients,
    lambda rows, keys, features: rows * features,
    lambda channels, mode: channels,
)
