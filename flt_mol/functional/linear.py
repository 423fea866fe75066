"""Linear attention over packed systems: sums over keys per system, read back per query."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flt_mol.functional._common import at_least_float32, without_autocast
from flt_mol.functional.packed import system_sizes


def linear_attention(
    query_features: Tensor, key_features: Tensor, value: Tensor, ptr: Tensor
) -> Tensor:
    """out_i = φ(q_i)·S / φ(q_i)·z with S = Σ_j φ(k_j) v_jᵀ, z = Σ_j φ(k_j), j in the system of i.

    Costs O(N·M·V) time and O(N·M + M·V) memory per head. Only the denominator is clamped, at the
    smallest normal number, so rows without any weight give 0.

    Args:
        query_features: φ(q) (N, H, M), not negative.
        key_features: φ(k) (N, H, M), not negative.
        value: (N, H, V).
        ptr: (B + 1,), first row of each system.

    Returns:
        (N, H, V), accumulated in at least float32 whatever the autocast dtype, in that dtype.

    Raises:
        ValueError: `ptr` does not describe N rows.

    Example:
        >>> ones = torch.ones(3, 1, 4)
        >>> value = torch.tensor([1.0, 3.0, 7.0]).reshape(3, 1, 1)
        >>> linear_attention(ones, ones, value, torch.tensor([0, 2, 3])).flatten().tolist()
        [2.0, 2.0, 7.0]
    """
    sizes = [size for size in system_sizes(ptr, value.shape[0]) if size > 0] or [0]
    queries, keys, values = (
        at_least_float32(x).transpose(0, 1) for x in (query_features, key_features, value)
    )
    with without_autocast(values):
        # A column of ones makes z one more column of S.
        values = torch.cat([values, values.new_ones(1).expand(*values.shape[:-1], 1)], dim=-1)
        sums: Tensor = _ReadBack.apply(queries, keys, values, sizes)  # type: ignore[no-untyped-call]
        normaliser = sums[..., -1:].clamp(min=torch.finfo(sums.dtype).tiny)
        return (sums[..., :-1] / normaliser).transpose(0, 1)


class _ReadBack(torch.autograd.Function):
    """Q_b (K_bᵀ V_b) for every system b: (H, N, M), (H, N, M), (H, N, V) → (H, N, V).

    The same as a loop over slices, but autograd sees one step instead of several per system. The
    backward pass starts from the inputs again and consists of differentiable products, so it can
    itself be differentiated, as training on forces does.
    """

    @staticmethod
    def forward(queries: Tensor, keys: Tensor, values: Tensor, sizes: list[int]) -> Tensor:
        systems = zip(*(torch.split(x, sizes, dim=1) for x in (queries, keys, values)), strict=True)
        return torch.cat([q.bmm(k.mT.bmm(v)) for q, k, v in systems], dim=1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        queries, keys, values, ctx.sizes = inputs
        ctx.save_for_backward(queries, keys, values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        tensors = (*ctx.saved_tensors, grad)
        to_queries, to_keys, to_values = [], [], []
        with without_autocast(grad):
            for q, k, v, g in zip(*(torch.split(x, ctx.sizes, 1) for x in tensors), strict=True):
                to_sums = q.mT.bmm(g)
                to_queries.append(g.bmm(v.mT.bmm(k)))
                to_keys.append(v.bmm(to_sums.mT))
                to_values.append(k.bmm(to_sums))
        return torch.cat(to_queries, 1), torch.cat(to_keys, 1), torch.cat(to_values, 1), None
