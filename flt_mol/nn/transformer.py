"""Pre-norm Transformer block and encoder over packed systems."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from flt_mol.functional.fourier import PositionFeatures
from flt_mol.nn.attention import FLTAttention
from flt_mol.nn.inputs import Place
from flt_mol.nn.layout import layout_of
from flt_mol.nn.local import PairWeights
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
        self,
        x: Tensor,
        ptr: Tensor,
        position_features: PositionFeatures | None = None,
        *,
        positions: Tensor | None = None,
        pairs: PairWeights | None = None,
        images: PairWeights | None = None,
    ) -> Tensor:
        """Features (N, C) and ptr (B + 1,) to features (N, C); the rest is for the attention."""
        x = x + self.attention(
            self.attention_norm(x),
            positions,
            ptr=ptr,
            position_features=position_features,
            pairs=pairs,
            images=images,
        )
        out: Tensor = x + self.ffn(self.ffn_norm(x))
        return out


class FLTEncoder(nn.Module):
    """A stack of blocks that share one RPE, applied `recycles` times to its own output.

    Position features are computed once per forward and shared by all blocks and recycles
    (Choromanski, Li et al. 2024, appendix: four passes of the same blocks on OC20), and padded
    rows are packed once.

    Args:
        blocks: the blocks in order.
        rpe: the relative positional encoding; None leaves positions out (a Performer), or to the
            blocks, whose attention may have an RPE of its own.
        recycles: how often the stack is applied.

    Raises:
        ValueError: no recycle; blocks of which some are causal or have an RPE and some do not;
            RPEs of both the encoder and the blocks.
    """

    def __init__(
        self, blocks: Iterable[FLTBlock], rpe: FourierRPE | None = None, recycles: int = 1
    ) -> None:
        super().__init__()
        if recycles < 1:
            raise ValueError(f"recycles must be at least 1, got {recycles}")
        blocks = list(blocks)
        self.blocks = nn.ModuleList(blocks)
        self.rpe = rpe
        self.recycles = recycles
        causal = {block.attention.causal for block in blocks}
        if len(causal) > 1:
            raise ValueError("some blocks are causal and some are not: they share their positions")
        self.causal = True in causal
        own = {block.attention.rpe is not None for block in blocks}
        if len(own) > 1 or (rpe is not None and True in own):
            raise ValueError("give one rpe for the encoder, or one for each block, or none")
        self._blocks_have_rpes = True in own

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        ptr: Tensor | None = None,
        *,
        system: Tensor | None = None,
        num_systems: int | None = None,
        mask: Tensor | None = None,
        pairs: PairWeights | None = None,
        images: PairWeights | None = None,
    ) -> Tensor:
        """Features of packed or padded rows to features of the same rows.

        Args:
            x: (N, C) with `ptr` or `system`, or (B, L, C), with `mask` where some are padding.
            positions: (N, ℓ) or (B, L, ℓ), Å; with ℓ = 1 the default is the place in the sequence.
            ptr: (B + 1,), first row of each system, for packed rows.
            system: (N,), the system of each row in any order, instead of `ptr`.
            num_systems: B, with `system` only.
            mask: (B, L) bool, True for real rows, for padded rows.
            pairs: weights of near pairs of packed rows, see `FLTAttention`.
            images: keys that are periodic images, see `FLTAttention`.

        Raises:
            ValueError: arguments that do not belong together or do not fit `x`.
        """
        layout = layout_of(x, ptr=ptr, system=system, num_systems=num_systems, mask=mask)
        layout.refuse_unsorted(pairs, images)
        rows = layout.pack(x)
        features = places = None
        if self.rpe is not None:
            place = Place(layout, positions, None)
            origin = "first" if self.causal else "mean"
            features = place.position_features(self.rpe, rows.shape[0], origin)
        elif positions is not None and self._blocks_have_rpes:
            places = layout.pack(positions)
        for _ in range(self.recycles):
            for block in self.blocks:
                rows = block(
                    rows, layout.ptr, features, positions=places, pairs=pairs, images=images
                )
        return layout.unpack(rows)
