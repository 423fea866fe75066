"""Pre-norm Transformer block and encoder over packed systems."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flt_mol.functional.fourier import PositionFeatures
from flt_mol.functional.groups import budget_of
from flt_mol.functional.streaming import CausalState
from flt_mol.nn.attention import FLTAttention
from flt_mol.nn.images import PairWeights
from flt_mol.nn.layout import LAYOUT, check_names, layout_of
from flt_mol.nn.local_filter import LocalFilter, LocalGeometry
from flt_mol.nn.rpe import FourierRPE
from flt_mol.nn.spectral_filter import SpectralFilter, SpectralGeometry
from flt_mol.nn.streaming import placed_state, present

EncoderState = tuple[CausalState, ...]
_HIDDEN = 16  # group budgets of one part of the hidden layer: larger tensors leave a CPU's cache


class BlockGeometry(NamedTuple):
    """Geometry for the blocks of a stack, computed once; None where no part needs it.

    Attributes:
        position_features: Φ and Ψ, for attention that shares an RPE.
        positions: (N, ℓ), Å, for attention with an RPE of its own.
        pairs: weights of near pairs, of a `PairCorrection`.
        images: keys that are periodic images, of an `ImageKeys`.
        plane_waves: for spectral filters, of `SpectralFilter.geometry`.
        local: for local filters, of a `LocalBasis`.
    """

    position_features: PositionFeatures | None = None
    positions: Tensor | None = None
    pairs: PairWeights | None = None
    images: PairWeights | None = None
    plane_waves: SpectralGeometry | None = None
    local: LocalGeometry | None = None


class FLTBlock(nn.Module):
    """h = LayerNorm(x); x ← x + Attention(h) + Spectral(h) + Local(h); x ← x + FFN(LayerNorm(x)).

    With ``local_norm=False`` the local filter takes x itself, since a norm divides by the density
    around an atom, which the filters of earlier blocks have measured.

    Attention is a normalised mean over atoms; the two filters are unnormalised sums and so see
    densities: the spectral filter over all atoms and their images, coarse, the local filter over
    neighbours, fine. Each part is optional.

    Args:
        attention: the attention layer, or None.
        ffn_dim: width of the hidden layer of the feed-forward network.
        dropout: probability, applied to the feed-forward network's output.
        spectral: the spectral filter.
        local: the local filter.
        local_norm: whether it takes normalised features. Deep stacks and many recycles need it.

    Raises:
        ValueError: no part at all, parts of different widths, or no hidden channel.
    """

    def __init__(
        self,
        attention: FLTAttention | None,
        ffn_dim: int,
        dropout: float = 0.0,
        *,
        spectral: SpectralFilter | None = None,
        local: LocalFilter | None = None,
        local_norm: bool = True,
    ) -> None:
        super().__init__()
        widths = {part.embed_dim for part in (attention, spectral) if part is not None}
        widths |= {local.channels} if local is not None else set()
        if len(widths) != 1:
            raise ValueError(
                f"a block of parts of widths {sorted(widths)}: give some, of one width"
            )
        (embed_dim,) = widths
        if ffn_dim < 1:
            raise ValueError(f"ffn_dim must be at least 1, got {ffn_dim}")
        normed = local_norm or attention is not None or spectral is not None
        self.attention_norm = nn.LayerNorm(embed_dim) if normed else nn.Identity()
        self.attention = attention
        self.spectral = spectral
        self.local = local
        self.local_norm = local_norm
        self.ffn_norm = nn.LayerNorm(embed_dim)
        self._ffn_dim = ffn_dim
        self.ffn = nn.Sequential(
            nn.Linear(embed_dim, ffn_dim),
            nn.GELU(),
            nn.Linear(ffn_dim, embed_dim),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor, ptr: Tensor, **geometry: Any) -> Tensor:
        """Features (N, C) and ptr (B + 1,) to features (N, C); the rest as in `BlockGeometry`.

        Raises:
            ValueError: a part without its geometry.
        """
        at = BlockGeometry(**geometry)
        h = self.attention_norm(x)
        out = x
        if self.attention is not None:
            out = out + self.attention(
                h,
                at.positions,
                ptr=ptr,
                position_features=at.position_features,
                pairs=at.pairs,
                images=at.images,
            )
        if self.spectral is not None:
            if at.plane_waves is None:
                raise ValueError("this block needs plane_waves, of SpectralFilter.geometry")
            out = out + self.spectral(h, at.plane_waves)
        if self.local is not None:
            if at.local is None:
                raise ValueError("this block needs local, of a LocalBasis")
            out = out + self.local(h if self.local_norm else x, at.local)
        parts: Sequence[Tensor] = [out]
        if not torch.compiler.is_compiling():
            parts = out.split(max(1, _HIDDEN * budget_of(x.device) // self._ffn_dim))
        parts = [part + self.ffn(self.ffn_norm(part)) for part in parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class FLTEncoder(nn.Module):
    """A stack of blocks that share one RPE, applied `recycles` times to its own output.

    Position features are computed once per forward and shared by all blocks and recycles
    (Choromanski, Li et al. 2024, appendix: four recycles on OC20), and padded rows are packed once.

    Args:
        blocks: the blocks in order.
        rpe: the relative positional encoding; without, a Performer takes no positions, unless
            the attention of its blocks has RPEs of its own.
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
        attention = [block.attention for block in blocks if block.attention is not None]
        causal = {layer.causal for layer in attention}
        if len(causal) > 1:
            raise ValueError("some blocks are causal and some are not: they share their positions")
        self.causal = True in causal
        if self.causal and any(block.spectral or block.local for block in blocks):
            raise ValueError("filters see all atoms: they do not go with causal attention")
        own = {layer.rpe is not None for layer in attention}
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
        **geometry: Any,
    ) -> Tensor:
        """Features of packed or padded rows to features of the same rows.

        Args:
            x: (N, C) with `ptr` or `system`, or (B, L, C), with `mask` where some are padding.
            positions: (N, ℓ) or (B, L, ℓ), Å; with ℓ = 1 the default is the place in the sequence.
            ptr: as of `AttentionInputs`.
            system: likewise.
            num_systems: likewise.
            mask: likewise.
            **geometry: pairs, images, plane_waves and local of `BlockGeometry`, of packed rows.

        Raises:
            ValueError: arguments that do not belong together or do not fit `x`.
        """
        check_names(geometry, (*LAYOUT, *BlockGeometry._fields[2:]))
        layout = layout_of(x, ptr=ptr, system=system, num_systems=num_systems, mask=mask)
        layout.refuse_unsorted(*geometry.values())
        rows = layout.pack(x)
        features = places = None
        if self.rpe is not None:
            # Rows of a causal stack may not know of later ones, as they would by the mean.
            origin = "first" if self.causal else "mean"
            packed = layout.positions(positions, self.rpe.dim)
            features = self.rpe(packed, layout.ptr, origin=origin)
        elif positions is not None:
            if not self._blocks_have_rpes:
                raise ValueError("positions, but no rpe: give one to the encoder or its blocks")
            places = layout.pack(positions)
        shared = BlockGeometry(features, places, **geometry)
        for _ in range(self.recycles):
            rows = self.once(rows, layout.ptr, shared)
        return layout.unpack(rows)

    def initial_state(self, num_streams: int) -> EncoderState:
        """States of all layers, recycle by recycle, as `FLTAttention.initial_state`.

        Raises:
            ValueError: an encoder that is not causal, or not in linear mode.
        """
        if not self.causal:
            raise ValueError("only a causal encoder streams tokens")
        layers: list[Any] = [block.attention for block in self.blocks]
        return tuple(layer.initial_state(num_streams) for layer in layers * self.recycles)

    def state_after(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        state: EncoderState | None = None,
        mask: Tensor | None = None,
    ) -> EncoderState:
        """The state after tokens (B, L, C), with a mask (B, L): a plain, slow loop of `step`."""
        state = self.initial_state(len(x)) if state is None else state
        for t in range(x.shape[1]):
            at, real = (None if given is None else given[:, t] for given in (positions, mask))
            _, state = self.step(x[:, t], state, at, real)
        return state

    def step(
        self,
        x: Tensor,
        state: EncoderState,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, EncoderState]:
        """One more token (B, C) of every sequence, as `FLTAttention.step`.

        Raises:
            ValueError: a state of another encoder, or shapes that do not fit.
        """
        if len(state) != (count := len(self.blocks) * self.recycles):
            raise ValueError(f"the state is of {len(state)} layers, this encoder has {count}")
        x = present(mask, x)
        before, after, features = list(state), [], None
        if self.rpe is not None:
            layout = layout_of(x, ptr=torch.arange(len(x) + 1, device=x.device))
            before[0], origin = placed_state(self.rpe, layout, positions, state[0])
            packed = layout.positions(positions, self.rpe.dim)
            features = self.rpe(packed, layout.ptr, origin=origin)
        places = positions if self._blocks_have_rpes else None
        for k, old in enumerate(before):
            block: Any = self.blocks[k % len(self.blocks)]
            h = block.attention_norm(x)
            attended, new = block.attention.step(h, old, places, features, mask)
            x = x + attended
            x = x + block.ffn(block.ffn_norm(x))
            after.append(new)
        return present(mask, x), tuple(after)

    def once(self, x: Tensor, ptr: Tensor, geometry: BlockGeometry) -> Tensor:
        """One recycle: (N, C) → (N, C), for models that read out every recycle."""
        for block in self.blocks:
            x = block(x, ptr, **geometry._asdict())
        return x
