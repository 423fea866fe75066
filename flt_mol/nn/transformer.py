"""Pre-norm Transformer block and encoder over packed systems."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from flt_mol.functional.fourier import PositionFeatures
from flt_mol.nn.attention import FLTAttention
from flt_mol.nn.rpe import FourierRPE


class FLTBlock(nn.Module):
    """x ← x + Attention(LayerNorm(x)), then x ← x + FFN(LayerNorm(x)).

    Args:
        attention: the attention layer; its `embed_dim` is C.
        ffn_dim: width of the hidden layer of the feed-forward net.
        dropout: probability, applied to the feed-forward net's output.
    """

    def __init__(self, attention: FLTAttention, ffn_dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        embed_dim = attention.embed_dim
        self.attention_norm = nn.LayerNorm(embed_dim)
        self.attention = attention
        self.ffn_norm = nn.LayerNorm(embed_dim)
        self.ffn = nn.Sequential(
            nn.Linear(embed_dim, ffn_dim),
            nn.GELU(),
            nn.Linear(ffn_dim, embed_dim),
            nn.Dropout(dropout),
        )

    def forward(
        self, x: Tensor, ptr: Tensor, position_features: PositionFeatures | None = None
    ) -> Tensor:
        """Features (N, C) and ptr (B + 1,) to features (N, C)."""
        x = x + self.attention(self.attention_norm(x), ptr=ptr, position_features=position_features)
        out: Tensor = x + self.ffn(self.ffn_norm(x))
        return out


class FLTEncoder(nn.Module):
    """A stack of blocks that share one RPE, applied `recycles` times to its own output.

    Position features are computed once per forward and shared by all blocks and recycles
    (Choromanski, Li et al. 2024, appendix: four passes of the same blocks on OC20).

    Args:
        blocks: the blocks in order.
        rpe: the relative positional encoding; None leaves positions out (a Performer).
        recycles: how often the stack is applied.
    """

    def __init__(
        self, blocks: Iterable[FLTBlock], rpe: FourierRPE | None = None, recycles: int = 1
    ) -> None:
        super().__init__()
        if recycles < 1:
            raise ValueError(f"recycles must be at least 1, got {recycles}")
        self.blocks = nn.ModuleList(blocks)
        self.rpe = rpe
        self.recycles = recycles

    def forward(self, x: Tensor, positions: Tensor, ptr: Tensor) -> Tensor:
        """Features (N, C), positions (N, ℓ) and ptr (B + 1,) to features (N, C)."""
        features = None if self.rpe is None else self.rpe(positions, ptr)
        for _ in range(self.recycles):
            for block in self.blocks:
                x = block(x, ptr, features)
        return x
