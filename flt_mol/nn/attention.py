"""Multi-head attention with learned relative positions at linear cost, and its quadratic twin."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor, nn

from flt_mol.functional.fourier import PositionFeatures
from flt_mol.functional.numerics import seeded_generator
from flt_mol.nn import streaming
from flt_mol.nn.attend import Rule, attend, check_mode
from flt_mol.nn.feature_map import FeatureMap, current_names, feature_map_of
from flt_mol.nn.images import PairWeights
from flt_mol.nn.inputs import AttentionInputs
from flt_mol.nn.inspection import Fidelity, attention_matrices, fidelity
from flt_mol.nn.projections import Projections
from flt_mol.nn.rpe import FourierRPE
from flt_mol.nn.streaming import AttentionState

# Where exact and linear attention take the same time, in units of M/D^¼: see `exact_below`.
CROSSOVER, CAUSAL_CROSSOVER = 6.5, 18.0


class FLTAttention(Projections):
    r"""Attention among the rows of each system, weights exp(q_i·k_j/√D + N̂(r_i − r_j)).

    ``mode="linear"`` estimates them with M random features [2] of the concatenations [Φ, q] and
    [Ψ, k] (FLT [1]; without positions: Performer), in time linear in N. ``mode="exact"`` is the
    softmax they estimate, with the same sampled mask N̂, parameters and state_dict, in time
    quadratic in the size of a system. ``mode="auto"`` takes the exact form for systems of fewer
    than `exact_below` keys, where it is the faster one, and the linear form for the others; what a
    system gets depends on its own size alone. Set `.mode` at any time.

    Rows come packed, (N, C) with `ptr` or `system`, or padded, (B, L, C) with `mask`; see
    `forward`. Positions come from `rpe`, owned by this layer, or, where several layers share an
    RPE, as `position_features`, computed once by whoever owns it (``position_dim=rpe.num_features``
    then).

    Args:
        embed_dim: C.
        num_heads: H; D = C/H.
        feature_map: φ of the linear mode: a name in `nn.FEATURE_MAPS`, or a `FeatureMap` of H, D
            and the width of the position features.
        num_features: M, where `feature_map` is a name; the default is 64. "elu" has a fixed number.
        rpe: an RPE of this layer's own.
        position_dim: width 2R of the position features that `forward` will be given; needs no
            value where `rpe` is given.
        context_dim: channels of `context`, if not C.
        orthogonal: whether random directions are orthogonal in blocks (the default), else
            independent.
        dropout: probability, on the attended values. There is no attention matrix to drop from.
        bias: whether the four linear maps have one.
        mode: "linear", "exact" or "auto".
        exact_below: number of keys from which "auto" is linear. The default, 6.5 M/D^¼ divided by
            1 + R/(D + 32), is about where the two take the same time on one thread of a CPU, a
            layer forward, and forward and backward (``scripts/crossover.py``): without positions
            152 and 171 keys at D = M = 64, 241 and 252 at D = 16, 279 and 300 at M = 128; with
            R = 16 frequencies 134 and 130, 142 and 185, 229 and 272.
            Causal layers: 18 M/D^¼ (429 keys forward and backward at D = M = 64, 430 at D = 16,
            752 at M = 128).
        causal: whether row i attends to the rows of its system up to itself only.
        redraw_every: training steps after which training draws random features anew; eval keeps
            to those saved (see `nn.redraw.Redrawn`). None: training keeps to them, too.
        generator: on CPU, for weights and random features; None takes a seed from torch's global
            one. Random features are buffers, saved with the weights.

    Raises:
        ValueError: sizes that do not fit together, unknown mode or feature map, or mode "auto"
            with a feature map that does not estimate the softmax.

    References:
        [1] Choromanski et al., "Learning a Fourier Transform for Linear Relative Positional
        Encodings in Transformers", AISTATS 2024.
        [2] Choromanski et al., "Rethinking Attention with Performers", ICLR 2021.

    Example:
        >>> import torch
        >>> from flt_mol.nn import FLTAttention, FourierRPE, GaussianFrequencies, GaussianSpectrum
        >>> class Block(torch.nn.Module):
        ...     def __init__(self, width: int, heads: int) -> None:
        ...         super().__init__()
        ...         spectrum = GaussianSpectrum(heads, num_terms=8)
        ...         rpe = FourierRPE(spectrum, GaussianFrequencies(num_frequencies=16))
        ...         self.attention = FLTAttention(width, heads, rpe=rpe)
        ...         self.norm = torch.nn.LayerNorm(width)
        ...     def forward(self, x, positions, system):
        ...         return x + self.attention(self.norm(x), positions, system=system)
        >>> block = Block(width=32, heads=4)
        >>> system = torch.tensor([0, 0, 0, 1, 1])
        >>> block(torch.randn(5, 32), torch.rand(5, 3), system).shape
        torch.Size([5, 32])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        feature_map: str | FeatureMap = "softmax",
        num_features: int | None = None,
        rpe: FourierRPE | None = None,
        position_dim: int | None = None,
        context_dim: int | None = None,
        orthogonal: bool | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        mode: str = "linear",
        exact_below: int | None = None,
        causal: bool = False,
        redraw_every: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        generator = seeded_generator(generator)
        super().__init__(
            embed_dim, num_heads, rpe, position_dim, context_dim, bias, causal, generator
        )
        self.dropout = nn.Dropout(dropout)
        self.feature_map = feature_map_of(
            feature_map,
            (num_heads, embed_dim // num_heads, self.position_dim),
            generator,
            num_features=num_features,
            orthogonal=orthogonal,
            redraw_every=redraw_every,
        )
        head_dim = embed_dim // num_heads
        default = default_crossover(self.num_features, head_dim, self.position_dim, causal)
        self.exact_below = default if exact_below is None else exact_below
        self.mode = mode
        self.register_load_state_dict_pre_hook(_rename)  # type: ignore[no-untyped-call]

    @property
    def mode(self) -> str:
        """How attention is computed: "linear", "exact" or "auto"."""
        return self._mode

    @mode.setter
    def mode(self, mode: str) -> None:
        check_mode(mode, self.feature_map)
        self._mode = mode

    @property
    def num_features(self) -> int:
        """M."""
        return self.feature_map.num_features

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        *,
        ptr: Tensor | None = None,
        system: Tensor | None = None,
        num_systems: int | None = None,
        mask: Tensor | None = None,
        position_features: PositionFeatures | None = None,
        context: Tensor | None = None,
        context_positions: Tensor | None = None,
        context_ptr: Tensor | None = None,
        context_system: Tensor | None = None,
        context_mask: Tensor | None = None,
        context_features: PositionFeatures | None = None,
        context_values: Tensor | None = None,
        pairs: PairWeights | None = None,
        images: PairWeights | None = None,
    ) -> Tensor:
        """Attend within each system.

        Args:
            x: (N, C), rows of all systems; or (B, L, C), one system for each b.
            positions: (N, ℓ) or (B, L, ℓ), Å, for a layer with an RPE of its own. With ℓ = 1 the
                default is the place of each row in its system: 0, 1, 2, …, padding not counted.
            ptr: (B + 1,), first row of each system, for packed rows. **Without `ptr` and `system`,
                rows (N, C) are all one system.**
            system: (N,), the system of each row in any order, instead of `ptr`.
            num_systems: B, with `system` only: indices beyond it are refused.
            mask: (B, L) bool, True for real rows, for padded rows. What stands in the others has no
                influence, not even NaN; they come out as 0.
            position_features: Φ, Ψ of the rows as given, instead of `positions`.
            context: (K, C') or (B, L', C'), the rows that keys and values are made of, where they
                are another set (cross-attention). Rows whose system has no context get ``out(0)``.
            context_positions: of the context, as `positions`.
            context_ptr: of the context, as `ptr`.
            context_system: of the context, as `system`.
            context_mask: of the context, as `mask`.
            context_features: of the context, as `position_features`.
            context_values: rows that values are made of, where keys are made of others.
            pairs: what `PairCorrection` gives, of packed rows.
            images: what `ImageKeys` gives, of packed rows, for mode "exact": positions are not
                needed then.

        Returns:
            Rows as they came, (N, C) or (B, L, C).

        Raises:
            ValueError: shapes that do not fit, positions missing where the layer needs them or
                given where it has no use for them.
        """
        layout, rows = self.projected(
            x,
            positions,
            ptr=ptr,
            system=system,
            num_systems=num_systems,
            mask=mask,
            position_features=position_features,
            context=context,
            context_positions=context_positions,
            context_ptr=context_ptr,
            context_system=context_system,
            context_mask=context_mask,
            context_features=context_features,
            context_values=context_values,
            pairs=pairs,
            images=images,
        )
        out = attend(self._rule, rows)
        out = self.out(self.dropout(out.flatten(1).to(rows.value.dtype)))
        return layout.unpack(out)

    def initial_state(self, num_streams: int) -> AttentionState:
        """What a causal layer in linear mode knows of `num_streams` sequences before they begin.

        Raises:
            ValueError: a layer that is not causal, or not in linear mode.
        """
        return streaming.initial_state(self, num_streams)

    def state_after(
        self, x: Tensor, positions: Tensor | None = None, **given: Unpack[AttentionInputs]
    ) -> AttentionState:
        """The state of `step` after whole sequences, one a system; takes what `forward` takes.

        Raises:
            ValueError: as `initial_state` and `forward`.
        """
        return streaming.state_after(self, x, positions, given)

    def step(
        self,
        x: Tensor,
        state: AttentionState,
        positions: Tensor | None = None,
        position_features: PositionFeatures | None = None,
    ) -> tuple[Tensor, AttentionState]:
        """One more token of every sequence, at a cost that does not depend on what came before.

        Steps give what `forward` gives for the whole sequence, token by token.

        Args:
            x: (B, C), the next token of each.
            state: from `initial_state`, `state_after` or the step before; it stays as it is.
            positions: (B, ℓ); with ℓ = 1 the default is the number of tokens before.
            position_features: of these tokens, used instead of `positions`.

        Returns:
            (B, C), and the state after these tokens.

        Raises:
            ValueError: as `initial_state`, or shapes that do not fit.
        """
        return streaming.step(self, x, state, positions, position_features)

    def matrices(
        self, x: Tensor, positions: Tensor | None = None, **given: Unpack[AttentionInputs]
    ) -> list[Tensor]:
        """The weights in use, written out: B matrices (H, n, m) whose rows sum to 1.

        Takes what `forward` takes. Costs O(N·n·H): for looking, not for training.
        """
        rows = self.projected(x, positions, refresh=False, **given)[1]
        return attention_matrices(self._rule, rows)

    @torch.no_grad()
    def fidelity(
        self, x: Tensor, positions: Tensor | None = None, **given: Unpack[AttentionInputs]
    ) -> Fidelity:
        """How far the linear mode is from the exact one on this batch, per head; see `Fidelity`.

        Takes what `forward` takes. Quadratic in the size of systems.
        """
        return fidelity(self._rule, self.projected(x, positions, refresh=False, **given)[1])

    def refresh(self) -> None:
        """Draw random features anew, if their time has come."""
        self.feature_map.refresh()

    @property
    def _rule(self) -> Rule:
        return Rule(self.feature_map, self.mode, self.causal, self.exact_below)

    def extra_repr(self) -> str:
        """What `repr` shows."""
        return (
            f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, "
            f"position_dim={self.position_dim}, mode={self.mode!r}, causal={self.causal}"
        )


def default_crossover(
    num_features: int, head_dim: int, position_dim: int, causal: bool = False
) -> int:
    """Keys from which linear attention is taken to be faster: see `FLTAttention`."""
    scale: float = num_features * head_dim**-0.25
    if causal:
        return round(CAUSAL_CROSSOVER * scale)
    # Exact attention multiplies rows of D + 2R numbers.
    return round(CROSSOVER * scale / (1 + 0.5 * position_dim / (head_dim + 32)))


def _rename(layer: FLTAttention, weights: Any, prefix: str, *rest: Any) -> None:
    """Weights saved when attention held its projections itself."""
    own = [key for key in weights if key.startswith(prefix)]
    for old, new in current_names(own).items():
        weights[new] = weights.pop(old)
