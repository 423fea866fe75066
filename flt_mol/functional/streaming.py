"""Causal linear attention one token at a time: a state of fixed size instead of all former keys.

The state after j tokens is Σ_j φ(k_j) [v_jᵀ, 1] and, for log features, the level c_m that it is
relative to, the running maximum of key logits, so that it neither over- nor underflows. A step
costs O(M·V) per head at any length. Steps are plain differentiable operations.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flt_mol.functional.groups import (
    check_ptr,
    max_per_system,
    settled,
    spread,
    without_autocast,
)
from flt_mol.functional.linear import normalised, system_sums, with_ones


class CausalState(NamedTuple):
    """All that causal attention remembers of B streams.

    Attributes:
        sums: Σ_j φ(k_j) [v_jᵀ, 1] (B, H, M, V + 1); of exp(k_j − c) for log features.
        largest: c (B, H, M), the largest key logits so far; None for features given directly.
        length: (B,) int64, tokens so far: the index of the next one.
    """

    sums: Tensor
    largest: Tensor | None
    length: Tensor

    def streams(self, index: Tensor) -> CausalState:
        """The states of streams `index` (K,), in that order and as often as they are named."""
        largest = None if self.largest is None else self.largest[index]
        return CausalState(self.sums[index], largest, self.length[index])

    def detach(self) -> CausalState:
        """The same numbers without the history that gradients follow."""
        largest = None if self.largest is None else self.largest.detach()
        return CausalState(self.sums.detach(), largest, self.length)

    def to(self, device: torch.device | str) -> CausalState:
        """The same numbers on `device`."""
        largest = None if self.largest is None else self.largest.to(device)
        return CausalState(self.sums.to(device), largest, self.length.to(device))


def initial_state(
    num_streams: int,
    num_heads: int,
    num_features: int,
    value_dim: int,
    *,
    log: bool,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> CausalState:
    """The state before the first token.

    Args:
        num_streams: B.
        num_heads: H.
        num_features: M.
        value_dim: V.
        log: whether `step` will be given log features.
        dtype: float32 or float64.
        device: where the state lives.

    Raises:
        ValueError: a dtype too narrow to sum in.

    Example:
        >>> state = initial_state(2, 1, 4, 3, log=True)
        >>> state.sums.shape, state.length.tolist()
        (torch.Size([2, 1, 4, 4]), [0, 0])
    """
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype is {dtype}: sums over many tokens need float32 or float64")
    shape = (num_streams, num_heads, num_features)
    sums = torch.zeros(*shape, value_dim + 1, dtype=dtype, device=device)
    length = torch.zeros(num_streams, dtype=torch.int64, device=device)
    largest = torch.full(shape, _lowest(dtype), dtype=dtype, device=device) if log else None
    return CausalState(sums, largest, length)


def step(
    queries: Tensor, keys: Tensor, value: Tensor, state: CausalState
) -> tuple[Tensor, CausalState]:
    """One more token of `causal_log_attention` or `causal_attention` for each stream.

    Args:
        queries: log φ(q) (B, H, M) where the state is one of log features, else φ(q) ≥ 0.
        keys: log φ(k) (B, H, M), or φ(k) ≥ 0.
        value: (B, H, V).
        state: from `initial_state`, `state_of` or the step before.

    Returns:
        out (B, H, V), this token included, and the state after it. The old state stays as it is.

    Raises:
        ValueError: shapes that do not belong together.

    Example:
        >>> state = initial_state(1, 1, 1, 1, log=True)
        >>> for logit, token in ((0.0, 1.0), (0.0, 3.0), (1e4, 7.0)):
        ...     logits, value = torch.full((1, 1, 1), logit), torch.full((1, 1, 1), token)
        ...     out, state = step(logits, logits, value, state)
        ...     print(out.item())
        1.0
        2.0
        7.0
    """
    streams, heads, features, width = state.sums.shape
    expected = ((streams, heads, features),) * 2 + ((streams, heads, width - 1),)
    found = tuple(tuple(x.shape) for x in (queries, keys, value))
    if found != expected:
        raise ValueError(
            f"queries, keys and value have shapes {found}, but the state is one for {expected}"
        )
    q, k, value, sums = settled(queries, keys, value, state.sums)
    c = None
    if state.largest is not None:
        largest = state.largest.to(k.dtype)
        c = torch.maximum(largest, k.detach())
        row = (q.detach() + c).amax(-1, keepdim=True).clamp(min=_lowest(q.dtype))
        q, k = ((q + c) - row).exp(), (k - c).exp()
        sums = sums * (largest - c).exp()[..., None]
    sums = sums + k[..., None] * with_ones(value)[..., None, :]
    with without_autocast(q):
        read = (q[..., None, :] @ sums).squeeze(-2)
    return normalised(read), CausalState(sums, c, state.length + 1)


def state_of(keys: Tensor, value: Tensor, ptr: Tensor, *, log: bool) -> CausalState:
    """The state at the end of every system: what `step` has after its tokens one by one.

    Args:
        keys: log φ(k) (N, H, M), or φ(k) ≥ 0.
        value: (N, H, V).
        ptr: (B + 1,), first row of each system; each becomes a stream.
        log: whether keys are log features.

    Raises:
        ValueError: `ptr` does not describe N rows.
    """
    check_ptr(ptr, value.shape[0])
    keys, value = settled(keys, value)
    largest = None
    if log:
        largest = max_per_system(keys.detach(), ptr).clamp(min=_lowest(keys.dtype))
        keys = (keys - spread(largest, ptr, keys.shape[0])).exp()
    with without_autocast(keys):
        sums = system_sums(keys.transpose(0, 1), with_ones(value).transpose(0, 1), ptr)
    return CausalState(sums, largest, ptr.diff().to(torch.int64))


def _lowest(dtype: torch.dtype) -> float:
    """Stands for log 0 where −∞ − (−∞) would be NaN; differences of two such are finite."""
    return torch.finfo(dtype).min / 4
