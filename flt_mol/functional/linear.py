"""Linear attention over packed systems: sums over keys per system, read back per query."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import custom_op

from flt_mol.functional.feature_maps import stabilised_keys, stabilised_queries
from flt_mol.functional.groups import check_ptr, lowest, settled, systems_of, without_autocast


def linear_attention(
    query_features: Tensor,
    key_features: Tensor,
    value: Tensor,
    ptr: Tensor,
    key_ptr: Tensor | None = None,
) -> Tensor:
    """out_i = φ(q_i)·S / φ(q_i)·z with S = Σ_j φ(k_j) v_jᵀ, z = Σ_j φ(k_j), j in the system of i.

    Costs O(N·M·V) time and O(N·M + B·M·V) memory per head. Only the denominator is clamped, at the
    smallest normal number, so rows without any weight give 0, and so do rows without keys.

    Args:
        query_features: φ(q) (N, H, M), not negative.
        key_features: φ(k) (K, H, M), not negative.
        value: (K, H, V).
        ptr: (B + 1,), first row of each system.
        key_ptr: (B + 1,), first key of each system where keys are another set; else K = N.

    Returns:
        (N, H, V), accumulated in at least float32 for any autocast dtype, in that dtype.

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
    """Numerator and denominator of `linear_attention`, φ(q_i)·S and φ(q_i)·z, before the division.

    Both are sums over keys, so those of other sets of keys, or of neighbour pairs, can be added to
    them under the same normaliser: (N, H, V + 1), the normaliser last.
    """
    key_ptr = check_ptr(ptr, query_features.shape[0], key_ptr, value.shape[0])
    sums = KeySums(key_ptr.shape[0] - 1, log=False)
    sums.add(key_features, value, chunks_of(key_ptr, value.shape[0])[0])
    return sums.read(query_features, chunks_of(ptr, query_features.shape[0])[0])[1]


def normalised(sums: Tensor) -> Tensor:
    """Numerator over denominator: (…, V + 1) → (…, V), the last column being the denominator.

    The denominator is clamped at the smallest normal number, and nothing is added to it. Where it
    is 0 the result is the numerator, which is 0 too, with gradients that stay finite.

    Example:
        >>> normalised(torch.tensor([[6.0, 2.0], [0.0, 0.0]])).tolist()
        [[3.0], [0.0]]
    """
    denominator = sums[..., -1:]
    clamped = denominator.clamp(min=torch.finfo(sums.dtype).tiny)
    return sums[..., :-1] / clamped.masked_fill(denominator == 0, 1.0)


def with_ones(value: Tensor) -> Tensor:
    """(…, V) → (…, V + 1): a last column of ones, whose weighted sum is the normaliser."""
    return torch.cat([value, value.new_ones(1).expand(*value.shape[:-1], 1)], -1)


class Chunk(NamedTuple):
    """Some rows, the systems they are of, and where these begin among them."""

    rows: slice
    systems: slice
    ptr: Tensor


def chunks_of(ptr: Tensor, num_rows: int, size: int | None = None) -> list[Chunk]:
    """At most `size` rows at a time, or all at once: systems may be cut."""
    if size is None or num_rows <= size:
        return [Chunk(slice(None), slice(None), ptr)]
    offsets, chunks = ptr.tolist(), []
    for start in range(0, num_rows, size):
        stop = min(start + size, num_rows)
        first, last = bisect_right(offsets, start) - 1, bisect_left(offsets, stop)
        own = ptr[first : last + 1].clamp(start, stop) - start
        chunks.append(Chunk(slice(start, stop), slice(first, last), own))
    return chunks


@dataclass
class KeySums:
    """Σ_j φ(k_j) [v_j, 1] of every system, of all keys at once or, without gradients, by chunks.

    Attributes:
        num_systems: B.
        log: whether keys are log φ.
        sums: (B, H, M, V + 1).
        level: c (B, H, M), what was taken off log φ; None for features as they are.
    """

    num_systems: int
    log: bool
    sums: Tensor = field(init=False)
    level: Tensor | None = None

    def add(self, keys: Tensor, value: Tensor, chunk: Chunk) -> Tensor:
        """Add a chunk's (K, H, M) and (K, H, V); returns φ(k), as it enters the sums."""
        keys, value = (x.transpose(0, 1) for x in settled(keys, value))
        level = None
        if self.log:
            keys, level = stabilised_keys(keys, chunk.ptr)
            level = level.detach()
        with torch.autocast(keys.device.type, enabled=False):
            sums = system_sums(keys, with_ones(value), chunk.ptr)
        if chunk.rows == slice(None):
            self.sums, self.level = sums, level
            return keys.transpose(0, 1)
        if chunk.rows.start == 0:
            self.sums = sums.new_zeros(self.num_systems, *sums.shape[1:])
            if level is not None:
                self.level = level.new_full(self.sums.shape[:3], lowest(level.dtype))
        own = self.sums[chunk.systems]
        if level is not None and self.level is not None:
            former = self.level[chunk.systems]
            largest = torch.maximum(former, level)
            own.mul_((former - largest).exp_()[..., None])
            sums.mul_((level - largest).exp_()[..., None])
            former.copy_(largest)
        own.add_(sums)
        return keys.transpose(0, 1)

    def read(self, queries: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """φ(q) (N, H, M) and φ(q_i)·[S, z] (N, H, V + 1), the normaliser last."""
        queries, sums = settled(queries, self.sums[chunk.systems])
        queries = queries.transpose(0, 1)
        if self.level is not None:
            level = self.level[chunk.systems].to(queries.dtype)
            queries = stabilised_queries(queries, level, chunk.ptr)
        with torch.autocast(queries.device.type, enabled=False):
            read: Tensor = read_sums(queries, sums, chunk.ptr)
        return queries.transpose(0, 1), read.transpose(0, 1)


@custom_op("flt_mol::system_sums", mutates_args=())
def system_sums(x: Tensor, y: Tensor, ptr: Tensor) -> Tensor:
    """X_bᵀ Y_b of every system b: (H, N, I), (H, N, J) → (B, H, I, J), 0 for empty systems.

    With `read_sums` closed under differentiation: any number of derivatives, and one step for
    autograd and torch.compile. Both tensors have one dtype; rows beyond ``ptr[B]`` are skipped.
    """
    systems = systems_of(ptr, x.shape[1])
    out = x.new_empty(len(systems), x.shape[0], x.shape[2], y.shape[2])
    for rows, sums in zip(systems, out, strict=True):
        torch.bmm(x[:, rows].mT, y[:, rows], out=sums)
    return out


@custom_op("flt_mol::read_sums", mutates_args=())
def read_sums(x: Tensor, sums: Tensor, ptr: Tensor) -> Tensor:
    """X_b S_b of every system b: (H, N, I), (B, H, I, J) → (H, N, J), 0 beyond ``ptr[B]``."""
    systems = systems_of(ptr, x.shape[1])
    parts = [x[:, rows].bmm(own) for rows, own in zip(systems, sums, strict=True)]
    beyond = x.shape[1] - systems[-1].stop if systems else x.shape[1]
    if len(parts) == 1 and beyond == 0:
        return parts[0]
    return torch.cat([*parts, x.new_zeros(x.shape[0], beyond, sums.shape[-1])], 1)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _system_sums_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, y, ptr = ctx.saved_tensors
    with without_autocast(grad):
        to_x = read_sums(y, grad.mT, ptr) if ctx.needs_input_grad[0] else None
        to_y = read_sums(x, grad, ptr) if ctx.needs_input_grad[1] else None
    return to_x, to_y, None


def _read_sums_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, sums, ptr = ctx.saved_tensors
    with without_autocast(grad):
        to_x = read_sums(grad, sums.mT, ptr) if ctx.needs_input_grad[0] else None
        to_sums = system_sums(x, grad, ptr) if ctx.needs_input_grad[1] else None
    return to_x, to_sums, None


system_sums.register_fake(
    lambda x, y, ptr: x.new_empty(ptr.shape[0] - 1, x.shape[0], x.shape[2], y.shape[2])
)
read_sums.register_fake(lambda x, sums, ptr: x.new_empty(*x.shape[:2], sums.shape[-1]))
system_sums.register_autograd(_system_sums_backward, setup_context=_save)
read_sums.register_autograd(_read_sums_backward, setup_context=_save)
