"""Layers compared over lengths: ours, those of other packages, and what they replace.

All are one pre-norm block, x ← x + Attention(LayerNorm(x)); x ← x + FFN(LayerNorm(x)), of the same
sizes; only the attention differs. All call `forward(x, positions)` with rows (N, C), of one
sequence of `tokens` rows; ours and what they replace also take several, one after another.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from common.attentions import masked_attention
from flt_mol.functional import orthogonal_projection
from flt_mol.nn import (
    BSplineSpectrum,
    FLTAttention,
    FLTBlock,
    FourierRPE,
    GaussianFrequencies,
    GaussianSpectrum,
)


class Size(NamedTuple):
    """Tokens N, width C, heads H, random features M, frequencies R, hidden width of the FFN."""

    tokens: int = 4096
    embed_dim: int = 768
    num_heads: int = 12
    num_features: int = 64
    num_frequencies: int = 32
    ffn_dim: int = 3072


class OurBlock(nn.Module):
    """`FLTBlock` of linear attention; position features are computed in every call."""

    def __init__(self, size: Size, rpe: FourierRPE | None) -> None:
        super().__init__()
        attention = FLTAttention(
            size.embed_dim, size.num_heads, num_features=size.num_features, rpe=rpe
        )
        self.block, self.with_positions = FLTBlock(attention, size.ffn_dim), rpe is not None
        self.tokens = size.tokens

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """(N, C), (N, 3) Å → (N, C)."""
        ptr = torch.arange(0, len(x) + 1, self.tokens)
        return self.block(x, ptr, positions=positions if self.with_positions else None)  # type: ignore[no-any-return]


class Block(nn.Module):
    """The same block around any attention (N, C) → (N, C)."""

    def __init__(self, size: Size, attention: nn.Module, batched: bool = False) -> None:
        super().__init__()
        c = size.embed_dim
        self.attention, self.batched = attention, batched
        self.attention_norm, self.ffn_norm = nn.LayerNorm(c), nn.LayerNorm(c)
        self.ffn = nn.Sequential(nn.Linear(c, size.ffn_dim), nn.GELU(), nn.Linear(size.ffn_dim, c))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rows to rows; where something is, is the attention's own business."""
        h = self.attention_norm(x)
        x = x + (self.attention(h[None])[0] if self.batched else self.attention(h))
        return x + self.ffn(self.ffn_norm(x))  # type: ignore[no-any-return]


class DenseBiasAttention(nn.Module):
    """Softmax attention with a learned bias b_h,i−j, written out (H, N, N) in every call."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens, self.num_heads = size.tokens, size.num_heads
        self.qkv = nn.Linear(size.embed_dim, 3 * size.embed_dim)
        self.out = nn.Linear(size.embed_dim, size.embed_dim)
        self.table = nn.Parameter(0.1 * torch.randn(size.num_heads, 2 * size.tokens - 1))

    def forward(self, x: Tensor) -> Tensor:
        """Sequences one after another: (N, C) → (N, C)."""
        rows = self.qkv(x).view(-1, self.tokens, 3, self.num_heads, x.shape[-1] // self.num_heads)
        q, k, v = rows.transpose(1, 3).unbind(2)
        bias = self.table.flip(-1).unfold(-1, self.tokens, 1).flip(1)  # (H, N, N), b of i − j
        out = nn.functional.scaled_dot_product_attention(q, k, v, bias[None])
        return self.out(out.transpose(1, 2).reshape(x.shape))  # type: ignore[no-any-return]


class LogLinearAttention(nn.Module):
    """Performer attention whose weights have a factor exp(b_h,i−j), b learned: O(N log N) by FFT.

    Luo et al., "Stable, Fast and Accurate: Kernelized Attention with Relative Positional Encoding",
    NeurIPS 2021; our own form of it.
    """

    projection: Tensor

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens, self.num_heads = size.tokens, size.num_heads
        self.qkv = nn.Linear(size.embed_dim, 3 * size.embed_dim)
        self.out = nn.Linear(size.embed_dim, size.embed_dim)
        self.log_mask = nn.Parameter(0.1 * torch.randn(size.num_heads, 2 * size.tokens - 1))
        head_dim = size.embed_dim // size.num_heads
        self.register_buffer("projection", orthogonal_projection(size.num_features, head_dim))

    def forward(self, x: Tensor) -> Tensor:
        """Sequences one after another: (N, C) → (N, C)."""
        mask, rows = self.log_mask.exp(), self.qkv(x).view(len(x), 3, self.num_heads, -1)
        each = []
        for part in rows.split(self.tokens):
            q, k, v = part.unbind(1)
            query, key = self._features(q, -1), self._features(k, (0, 2))
            each.append(masked_attention(query, key, v, mask).flatten(1))
        return self.out(torch.cat(each))  # type: ignore[no-any-return]

    def _features(self, rows: Tensor, over: int | tuple[int, int]) -> Tensor:
        """Positive softmax features exp(w·x − ‖x‖²/2 − max), (N, H, M)."""
        rows = rows * rows.shape[-1] ** -0.25
        logits = rows @ self.projection.T - 0.5 * rows.square().sum(-1, keepdim=True)
        return (logits - logits.amax(over, keepdim=True)).exp()


def _gaussian(size: Size) -> FourierRPE:
    spectrum = GaussianSpectrum(size.num_heads, num_terms=16)
    return FourierRPE(spectrum, GaussianFrequencies(size.num_frequencies))


def _local(size: Size) -> FourierRPE:
    """The paper's local RPE: boxes."""
    spectrum = BSplineSpectrum(size.num_heads, num_terms=16, order=1)
    return FourierRPE(spectrum, GaussianFrequencies(size.num_frequencies))


def _performer_pytorch(size: Size) -> nn.Module:
    attention = import_module("performer_pytorch").SelfAttention(
        size.embed_dim, heads=size.num_heads, dim_head=size.embed_dim // size.num_heads,
        nb_features=size.num_features, qkv_bias=True, attn_out_bias=True,
    )  # fmt: skip
    return Block(size, attention, batched=True)


def _pyg(size: Size) -> nn.Module:
    """With M features as the others have; as it comes it has D log D, 266 for D = 64."""
    module: Any = import_module("torch_geometric.nn.attention.performer")
    attention = module.PerformerAttention(
        size.embed_dim, size.num_heads, size.embed_dim // size.num_heads, qkv_bias=True
    )
    projection = attention.fast_attn
    projection.num_rows = size.num_features
    projection.projection_matrix = module.orthogonal_matrix(size.num_features, projection.num_cols)
    return Block(size, attention, batched=True)


OURS = "Performer (ours)"
LAYERS: dict[str, Callable[[Size], nn.Module]] = {
    OURS: lambda size: OurBlock(size, None),
    "FLT, Gaussian RPE": lambda size: OurBlock(size, _gaussian(size)),
    "FLT, local RPE": lambda size: OurBlock(size, _local(size)),
    "log-linear Performer": lambda size: Block(size, LogLinearAttention(size)),
    "softmax, dense bias": lambda size: Block(size, DenseBiasAttention(size)),
    "performer-pytorch": _performer_pytorch,
    "PyG PerformerAttention": _pyg,
}
PACKAGES = {"performer-pytorch": "performer_pytorch", "PyG PerformerAttention": "torch_geometric"}


def installed(names: list[str]) -> list[str]:
    """Those of `names` whose packages are installed."""
    return [n for n in names if n not in PACKAGES or importlib.util.find_spec(PACKAGES[n])]
