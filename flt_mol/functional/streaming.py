"""Causal linear attention one token at a time: a state of fixed size instead of all former keys.

A step costs O(M·V) per head at any length. Steps are plain differentiable operations.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flt_mol.functional.feature_maps import row_level
from flt_mol.functional.groups import largest_per_system, settled, spread, without_autocast
from flt_mol.functional.linear import linear_sums, normalised, with_ones


class CausalState(NamedTuple):
    """All that causal attention remembers of B streams; its size does not grow with their length.

    Attributes:
        sums: Σ_j φ(k_j) [v_jᵀ, 1] (B, H, M, V + 1); of exp(k_j − c) for log features.
        largest: c (B, H, M), the largest key logits so far; None for features given directly.
        length: (B,) int64, tokens so far: the index of the next one.
        origin: (B, ℓ), Å, position of the first token; None for layers without an RPE of their own.
    """

    sums: Tensor
    largest: Tensor | None
    length: Tensor
    origin: Tensor | None = None

    def streams(self, index: Tensor) -> CausalState:
        """The states of streams `index` (K,), in that order and as often as they are named."""
        return CausalState._make(None if x is None else x[index] for x in self)

    def joined(self, later: CausalState) -> CausalState:
        """The states after these tokens and then those of `later`."""
        sums, more, largest = self.sums, later.sums, None
        if self.largest is not None and later.largest is not None:
            largest = torch.maximum(self.largest, later.largest)
            sums = sums * (self.largest - largest).exp()[..., None]
            more = more * (later.largest - largest).exp()[..., None]
        return CausalState(sums + more, largest, self.length + later.length, self.origin)

    def detach(self) -> CausalState:
        """The same state, detached from autograd."""
        return CausalState._make(None if x is None else x.detach() for x in self)


def state_of(keys: Tensor, value: Tensor, ptr: Tensor, *, log: bool) -> CausalState:
    """The state at the end of every system; of systems without rows, that before the first token.

    Args:
        keys: log φ(k) (N, H, M), or φ(k) ≥ 0.
        value: (N, H, V).
        ptr: (B + 1,), first row of each system; each becomes a stream.
        log: whether keys are log features.

    Raises:
        ValueError: `ptr` does not describe N rows.
    """
    keys, value = settled(keys, value)
    (count, heads, features), streams = keys.shape, ptr.shape[0] - 1
    largest = None
    if log:
        largest = largest_per_system(keys, ptr)[:-1]
        keys = (keys - spread(largest, ptr, count)).exp()
    # What M queries read whose features are the rows of a unit matrix.
    unit = torch.eye(features, dtype=keys.dtype, device=keys.device).repeat(streams, 1)
    own = torch.arange(streams + 1, device=ptr.device) * features
    sums = linear_sums(unit[:, None].expand(-1, heads, -1), keys, value, own, ptr)
    sums = sums.unflatten(0, (streams, features)).transpose(1, 2).contiguous()
    return CausalState(sums, largest, ptr.diff().to(torch.int64))


def step(
    queries: Tensor, keys: Tensor, value: Tensor, state: CausalState
) -> tuple[Tensor, CausalState]:
    """One more token of `causal_log_attention` or `causal_attention` for each stream.

    Args:
        queries: log φ(q) (B, H, M) where the state is one of log features, else φ(q) ≥ 0.
        keys: log φ(k) (B, H, M), or φ(k) ≥ 0.
        value: (B, H, V).
        state: from `state_of` or the step before.

    Returns:
        out (B, H, V), this token included, and the state after it. The old state stays as it is.

    Raises:
        ValueError: shapes that do not belong together.

    Examples:
        >>> one = torch.ones(1, 1, 1)
        >>> state = state_of(0 * one, one, torch.tensor([0, 1]), log=True)
        >>> for logit, token in ((0.0, 3.0), (1e4, 7.0)):
        ...     out, state = step(logit * one, logit * one, token * one, state)
        ...     print(out.item())
        2.0
        7.0
    """
    streams, heads, features, width = state.sums.shape
    expected = ((streams, heads, features),) * 2 + ((streams, heads, width - 1),)
    found = tuple(tuple(x.shape) for x in (queries, keys, value))
    if found != expected:
        raise ValueError(f"queries, keys and value have shapes {found}, the state {expected}")
    q, k, value, sums = settled(queries, keys, value, state.sums)
    c = None
    if state.largest is not None:
        largest = state.largest.to(k.dtype)
        c = torch.maximum(largest, k.detach())
        q = q + c
        q, k = (q - row_level(q)).exp(), (k - c).exp()
        sums = sums * (largest - c).exp()[..., None]
    sums = sums + k[..., None] * with_ones(value)[..., None, :]
    with without_autocast(q):
        read = (q[..., None, :] @ sums).squeeze(-2)
    return normalised(read), CausalState(sums, c, state.length + 1, state.origin)
