"""A Performer with a Toeplitz mask of relative positions, by Fourier transforms: O(N log N).

What sequence models do who want a mask f(i − j) of any shape in linear attention: the sums over
keys become convolutions, one for each entry of φ(k) vᵀ. It is here to be compared with.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flt_mol.functional.feature_maps import (
    orthogonal_projection,
    softmax_log_features,
    stabilised_features,
)

__all__ = ["LogLinearAttention", "masked_attention", "masked_attention_reference"]

_AT_ONCE = 4  # features


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """out_i = Σ_j c_{i−j} φ(q_i)·φ(k_j) v_j / Σ_j c_{i−j} φ(q_i)·φ(k_j), by FFT.

    O(H·M·D·N log N) time. Heads and features are done a few at a time, so without gradients memory
    is that of these, O(D·N); with gradients it is that of all, O(H·M·D·N).

    Args:
        query: φ(q) (N, H, M), not negative.
        key: φ(k) (N, H, M), not negative.
        value: (N, H, D).
        mask: c (H, 2N − 1), from c_{1−N} to c_{N−1}, positive.

    Returns:
        (N, H, D).

    References:
        Luo et al., "Stable, Fast and Accurate: Kernelized Attention with Relative Positional
        Encoding", NeurIPS 2021.

    Example:
        >>> ones = torch.ones(3, 1, 1)
        >>> value, mask = torch.tensor([0.0, 6.0, 3.0]).view(3, 1, 1), torch.ones(1, 5)
        >>> masked_attention(ones, ones, value, mask).flatten()
        tensor([3., 3., 3.])
    """
    length = value.shape[0]
    values = torch.cat([value, value.new_ones(*value.shape[:2], 1)], -1)
    # c_0 … c_{N−1}, then c_{−N} (never met: 0), c_{1−N} … c_{−1}: a circle of 2N.
    circle = torch.cat([mask[:, length - 1 :], mask.new_zeros(len(mask), 1), mask[:, : length - 1]],
                       -1)  # fmt: skip
    heads = [
        _head(query[:, h], key[:, h], values[:, h], torch.fft.rfft(circle[h]))
        for h in range(len(mask))
    ]
    sums = torch.stack(heads, 1)
    return sums[..., :-1] / sums[..., -1:]


def _head(query: Tensor, key: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Σ_j c_{i−j} φ(q_i)·φ(k_j) v_j of one head: (N, M), (N, M), (N, V) → (N, V).

    A few features at a time stay in the cache: measured, four to six times as fast as all at once.
    """
    length, columns = len(key), values.T.contiguous()
    sums = torch.zeros_like(columns)
    for q, k in zip(query.T.split(_AT_ONCE), key.T.split(_AT_ONCE), strict=True):
        outer = k[:, None, :] * columns  # (m, V, N): transforms along rows
        spectrum = torch.fft.rfft(outer, n=2 * length) * mask
        convolved = torch.fft.irfft(spectrum, n=2 * length)[..., :length]
        sums = sums + (convolved * q[:, None, :]).sum(0)
    return sums.T


def masked_attention_reference(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """What `masked_attention` computes, with all pairs written out: O(N²)."""
    length = value.shape[0]
    place = torch.arange(length)
    toeplitz = mask[:, place[:, None] - place + length - 1]
    weights = torch.einsum("ihm,jhm->hij", query, key) * toeplitz
    return torch.einsum("hij,jhd->ihd", weights / weights.sum(-1, keepdim=True), value)


class LogLinearAttention(nn.Module):
    """Multi-head Performer attention whose weights have a factor exp(b_h,i−j), b learned.

    Args:
        embed_dim: C.
        num_heads: H.
        num_features: M, positive random features.
        length: N of all sequences it will see.
    """

    def __init__(self, embed_dim: int, num_heads: int, num_features: int, length: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim)
        self.out = nn.Linear(embed_dim, embed_dim)
        self.log_mask = nn.Parameter(0.1 * torch.randn(num_heads, 2 * length - 1))
        head_dim = embed_dim // num_heads
        self.register_buffer("projection", orthogonal_projection(num_features, head_dim))

    projection: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """One sequence: (N, C) → (N, C)."""
        q, k, v = self.qkv(x).view(len(x), 3, self.num_heads, -1).unbind(1)
        projection = self.projection.expand(self.num_heads, -1, -1)
        logits, key_logits = (softmax_log_features(rows, projection) for rows in (q, k))
        query, key = stabilised_features(logits, key_logits, torch.tensor([0, len(x)]))
        out: Tensor = self.out(masked_attention(query, key, v, self.log_mask.exp()).flatten(1))
        return out
