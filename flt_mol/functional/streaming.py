"""Causal linear attention one token at a time: a state of fixed size instead of all former keys.

The state after j tokens is Σ_j φ(k_j) [v_jᵀ, 1] and, for exponential features, the level c_m that
it is relative to, the running maximum of key logits, so that it neither over- nor underflows. A
step costs O(M·V) per head, whatever came before. Steps are plain differentiable operations.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flt_mol.functional._causal_log import lowest
from flt_mol.functional.groups import check_ptr, max_per_system, spread
from flt_mol.functional.linear import normalised, read_back
from flt_mol.functional.numerics import settled, with_ones, without_autocast


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
        log: whether for `step_log`, else for `step`.
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
    largest = torch.full(shape, lowest(dtype), dtype=dtype, device=device) if log else None
    return CausalState(sums, largest, length)


def step_log(
    query_logits: Tensor, key_logits: Tensor, value: Tensor, state: CausalState
) -> tuple[Tensor, CausalState]:
    """One more token of `causal.causal_log_attention` for each stream, itself included.

    Args:
        query_logits: q = log φ(query) (B, H, M).
        key_logits: k = log φ(key) (B, H, M).
        value: (B, H, V).
        state: from `initial_state`, `state_of_log` or the step before.

    Returns:
        out (B, H, V) and the state after this token. The old state stays as it is.

    Raises:
        ValueError: a state of direct features, or shapes that do not belong together.

    Example:
        >>> state = initial_state(1, 1, 1, 1, log=True)
        >>> for logit, token in ((0.0, 1.0), (0.0, 3.0), (1e4, 7.0)):
        ...     logits, value = torch.full((1, 1, 1), logit), torch.full((1, 1, 1), token)
        ...     out, state = step_log(logits, logits, value, state)
        ...     print(out.item())
        1.0
        2.0
        7.0
    """
    if state.largest is None:
        raise ValueError("the state is one of direct features: start with log=True, or use step")
    _check(query_logits, key_logits, value, state)
    q, k, value, sums, largest = settled(query_logits, key_logits, value, state.sums, state.largest)
    with without_autocast(q):
        c = torch.maximum(largest, k.detach())
        added = (k - c).exp()[..., None] * with_ones(value)[..., None, :]
        sums = sums * (largest - c).exp()[..., None] + added
        row = (q.detach() + c).amax(-1, keepdim=True).clamp(min=lowest(q.dtype))
        read = ((q + c) - row).exp()[..., None, :] @ sums
    read = read.squeeze(-2)
    alone = (state.length == 0)[:, None, None] & (read[..., -1:] > 0)
    out = torch.where(alone, value, normalised(read))
    return out, CausalState(sums, c, state.length + 1)


def step(
    query_features: Tensor, key_features: Tensor, value: Tensor, state: CausalState
) -> tuple[Tensor, CausalState]:
    """One more token of `causal.causal_attention` for each stream, itself included.

    Args:
        query_features: φ(q) (B, H, M), not negative.
        key_features: φ(k) (B, H, M), not negative.
        value: (B, H, V).
        state: from `initial_state`, `state_of` or the step before.

    Returns:
        out (B, H, V) and the state after this token. The old state stays as it is.

    Raises:
        ValueError: a state of log features, or shapes that do not belong together.
    """
    if state.largest is not None:
        raise ValueError("the state is one of log features: start with log=False, or use step_log")
    _check(query_features, key_features, value, state)
    q, k, value, sums = settled(query_features, key_features, value, state.sums)
    with without_autocast(q):
        sums = sums + k[..., None] * with_ones(value)[..., None, :]
        read = (q[..., None, :] @ sums).squeeze(-2)
    return normalised(read), CausalState(sums, None, state.length + 1)


def state_of_log(key_logits: Tensor, value: Tensor, ptr: Tensor) -> CausalState:
    """The state at the end of every system: what `step_log` has after its tokens one by one.

    Args:
        key_logits: k = log φ(key) (N, H, M).
        value: (N, H, V).
        ptr: (B + 1,), first row of each system; each becomes a stream.

    Raises:
        ValueError: `ptr` does not describe N rows.
    """
    check_ptr(ptr, value.shape[0])
    keys, value = settled(key_logits, value)
    largest = max_per_system(keys.detach(), ptr).clamp(min=lowest(keys.dtype))
    sums = _sums_per_system((keys - spread(largest, ptr, keys.shape[0])).exp(), value, ptr)
    return CausalState(sums, largest, ptr.diff().to(torch.int64))


def state_of(key_features: Tensor, value: Tensor, ptr: Tensor) -> CausalState:
    """The state at the end of every system: what `step` has after its tokens one by one.

    Args:
        key_features: φ(k) (N, H, M), not negative.
        value: (N, H, V).
        ptr: (B + 1,), first row of each system; each becomes a stream.

    Raises:
        ValueError: `ptr` does not describe N rows.
    """
    check_ptr(ptr, value.shape[0])
    keys, value = settled(key_features, value)
    return CausalState(_sums_per_system(keys, value, ptr), None, ptr.diff().to(torch.int64))


def _sums_per_system(keys: Tensor, value: Tensor, ptr: Tensor) -> Tensor:
    """Σ_j φ(k_j) [v_jᵀ, 1] per system (B, H, M, V + 1), read back with unit vectors as queries."""
    num_systems, (_, heads, features) = ptr.numel() - 1, keys.shape
    unit = torch.eye(features, dtype=keys.dtype, device=keys.device)
    queries = unit.repeat(num_systems, 1).expand(heads, -1, -1)
    unit_ptr = torch.arange(num_systems + 1, device=ptr.device) * features
    with without_autocast(keys):
        sums = read_back(
            queries, keys.transpose(0, 1), with_ones(value).transpose(0, 1), unit_ptr, ptr
        )
    return sums.reshape(heads, num_systems, features, value.shape[-1] + 1).transpose(0, 1)


def _check(queries: Tensor, keys: Tensor, value: Tensor, state: CausalState) -> None:
    streams, heads, features, width = state.sums.shape
    expected = ((streams, heads, features),) * 2 + ((streams, heads, width - 1),)
    found = tuple(tuple(x.shape) for x in (queries, keys, value))
    if found != expected:
        raise ValueError(
            f"queries, keys and value have shapes {found}, but the state is one for {expected}"
        )
