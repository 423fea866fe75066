"""Linear attention over packed systems: sums over keys per system, read back per query."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flt_mol.functional.groups import check_ptr, systems_of_both
from flt_mol.functional.numerics import operator, settled, with_ones, without_autocast


def linear_attention(
    query_features: Tensor,
    key_features: Tensor,
    value: Tensor,
    ptr: Tensor,
    key_ptr: Tensor | None = None,
) -> Tensor:
    """out_i = φ(q_i)·S / φ(q_i)·z with S = Σ_j φ(k_j) v_jᵀ, z = Σ_j φ(k_j), j in the system of i.

    Costs O(N·M·V) time and O(N·M + M·V) memory per head. Only the denominator is clamped, at the
    smallest normal number, so rows without any weight give 0, and so do rows without keys.

    Args:
        query_features: φ(q) (N, H, M), not negative.
        key_features: φ(k) (K, H, M), not negative.
        value: (K, H, V).
        ptr: (B + 1,), first row of each system.
        key_ptr: (B + 1,), first key of each system where keys are another set; else K = N.

    Returns:
        (N, H, V), accumulated in at least float32 whatever the autocast dtype, in that dtype.

    Raises:
        ValueError: `ptr` does not describe N rows, or `key_ptr` not K rows of as many systems.

    Example:
        >>> ones = torch.ones(3, 1, 4)
        >>> value = torch.tensor([1.0, 3.0, 7.0]).reshape(3, 1, 1)
        >>> linear_attention(ones, ones, value, torch.tensor([0, 2, 3])).flatten().tolist()
        [2.0, 2.0, 7.0]
    """
    return normalised(linear_sums(query_features, key_features, value, ptr, key_ptr))


def linear_sums(
    query_features: Tensor,
    key_features: Tensor,
    value: Tensor,
    ptr: Tensor,
    key_ptr: Tensor | None = None,
) -> Tensor:
    """Numerator and denominator of linear attention, φ(q_i)·S and φ(q_i)·z, before the division.

    Both are sums over keys, so those of other sets of keys, or of neighbour pairs, can be added to
    them under the same normaliser. The arguments are those of `linear_attention`.

    Returns:
        (N, H, V + 1), the normaliser last; at least float32 whatever the autocast dtype.

    Raises:
        ValueError: `ptr` does not describe N rows, or `key_ptr` not K rows of as many systems.
    """
    key_ptr = check_ptr(ptr, query_features.shape[0], key_ptr, value.shape[0])
    queries, keys, values = (
        x.transpose(0, 1) for x in settled(query_features, key_features, value)
    )
    with without_autocast(values):
        # A column of ones makes z one more column of S.
        return read_back(queries, keys, with_ones(values), ptr, key_ptr).transpose(0, 1)


def normalised(sums: Tensor) -> Tensor:
    """Numerator over denominator: (…, V + 1) → (…, V), the last column being the denominator.

    The denominator is clamped at the smallest normal number, and nothing is added to it. Where it
    is 0 the result is the numerator, which is 0 too, with gradients that stay finite.

    Example:
        >>> normalised(torch.tensor([[6.0, 2.0], [0.0, 0.0]])).tolist()
        [[3.0], [0.0]]
    """
    with without_autocast(sums):
        denominator = sums[..., -1:]
        empty = denominator == 0
        clamped = denominator.clamp(min=torch.finfo(sums.dtype).tiny).masked_fill(empty, 1.0)
        return sums[..., :-1] / clamped


def read_back(
    queries: Tensor, keys: Tensor, values: Tensor, ptr: Tensor, key_ptr: Tensor
) -> Tensor:
    """Q_b (K_bᵀ V_b) for every system b, seen by autograd and by torch.compile as one step.

    Its gradients are read_backs with the roles exchanged, dQ = G (Vᵀ K), dK = V (Gᵀ Q),
    dV = K (Qᵀ G), so it can be differentiated any number of times, as training on forces does.

    Args:
        queries: Q (H, N, M).
        keys: K (H, K, M).
        values: V (H, K, V), all three of one dtype.
        ptr: (B + 1,), first query of each system; queries beyond the last offset are padding.
        key_ptr: (B + 1,), first key of each system; keys beyond the last offset are padding.

    Returns:
        (H, N, V); 0 for padding and for queries without keys.
    """
    out: Tensor = _read_back(queries, keys, values, ptr, key_ptr)
    return out


@operator("read_back")
def _read_back(q: Tensor, k: Tensor, v: Tensor, ptr: Tensor, key_ptr: Tensor) -> Tensor:
    systems = _systems(q, k, ptr, key_ptr)
    parts = [q[:, rows].bmm(k[:, keys].mT.bmm(v[:, keys])) for rows, keys in systems]
    return _joined(parts, q, v.shape[-1])


@_read_back.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, ptr: Tensor, key_ptr: Tensor) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v.shape[-1])


@operator("read_back_gradients")
def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, ptr: Tensor, key_ptr: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """All three gradients at once: the sums Qᵀ G serve two of them."""
    to_queries, to_keys, to_values = [], [], []
    for rows, keys in _systems(q, k, ptr, key_ptr):
        g, k_b, v_b = grad[:, rows], k[:, keys], v[:, keys]
        to_queries.append(g.bmm(v_b.mT.bmm(k_b)))
        to_sums = q[:, rows].mT.bmm(g)
        to_keys.append(v_b.bmm(to_sums.mT))
        to_values.append(k_b.bmm(to_sums))
    return (
        _joined(to_queries, q, q.shape[-1]),
        _joined(to_keys, k, k.shape[-1]),
        _joined(to_values, v, v.shape[-1]),
    )


@_gradients.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, ptr: Tensor, key_ptr: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, ptr, key_ptr = ctx.saved_tensors
    to_queries, to_keys, to_values = ctx.needs_input_grad[:3]
    with without_autocast(grad):
        if to_queries and to_keys and to_values and not torch.is_grad_enabled():
            return *_gradients(grad, q, k, v, ptr, key_ptr), None, None
        return (
            _read_back(grad, v, k, ptr, key_ptr) if to_queries else None,
            _read_back(v, grad, q, key_ptr, ptr) if to_keys else None,
            _read_back(k, q, grad, key_ptr, ptr) if to_values else None,
            None,
            None,
        )


_read_back.register_autograd(_backward, setup_context=_setup_context)


def _systems(
    queries: Tensor, keys: Tensor, ptr: Tensor, key_ptr: Tensor
) -> list[tuple[slice, slice]]:
    """The queries and keys of each system that has any of either."""
    both = systems_of_both(ptr, queries.shape[1], key_ptr, keys.shape[1])
    return [(r, k) for r, k in both if r.start < r.stop or k.start < k.stop]


def _joined(parts: list[Tensor], like: Tensor, width: int) -> Tensor:
    """(H, N, width) from the systems' rows, then zeros for the padding beyond the last system."""
    heads, rows = like.shape[:2]
    padding = rows - sum(part.shape[1] for part in parts)
    if len(parts) == 1 and padding == 0:
        return parts[0]
    return torch.cat([*parts, like.new_zeros(heads, padding, width)], dim=1)
