"""Multi-head attention with learned relative positions at linear cost, and its quadratic twin."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flt_mol.functional._common import at_least_float32, placed, seeded_generator
from flt_mol.functional.feature_maps import (
    gaussian_projection,
    orthogonal_projection,
    project_positions,
    softmax_log_features,
    stabilised_features,
)
from flt_mol.functional.fourier import PositionFeatures
from flt_mol.functional.linear import linear_attention
from flt_mol.functional.packed import offsets_of, system_sizes
from flt_mol.functional.reference import softmax_attention
from flt_mol.nn.rpe import FourierRPE

MODES = ("linear", "exact")


class FLTAttention(nn.Module):
    r"""Attention among the rows of each system, weights exp(q_i·k_j/√D + N̂(r_i − r_j)).

    ``mode="linear"`` estimates them with M positive random features [2] of the concatenations
    [Φ, q] and [Ψ, k] (FLT [1]; without positions: Performer), in time linear in N.
    ``mode="exact"`` is the softmax they estimate, with the same sampled mask N̂, parameters and
    state_dict, in time quadratic in the size of a system. Set `.mode` at any time.

    Positions come from `rpe`, owned by this layer, or, where several layers share an RPE, as
    `position_features`, computed once by whoever owns it (``position_dim=rpe.num_features`` then).

    Args:
        embed_dim: C.
        num_heads: H; D = C/H.
        num_features: M.
        rpe: an RPE of this layer's own.
        position_dim: width 2R of the position features that `forward` will be given; needs no
            value where `rpe` is given.
        orthogonal: whether random directions are orthogonal in blocks, else independent.
        dropout: probability, on the attended values. There is no attention matrix to drop from.
        bias: whether the four linear maps have one.
        mode: "linear" or "exact".
        generator: on CPU, for weights and random features; None takes a seed from torch's global
            one. Random features are buffers: saved, never redrawn.

    Raises:
        ValueError: sizes that do not fit together, unknown mode.

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

    content_projection: Tensor
    position_projection: Tensor | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_features: int = 64,
        rpe: FourierRPE | None = None,
        position_dim: int | None = None,
        orthogonal: bool = True,
        dropout: float = 0.0,
        bias: bool = True,
        mode: str = "linear",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if num_heads < 1 or embed_dim < 1 or embed_dim % num_heads:
            raise ValueError(f"embed_dim {embed_dim} is not a multiple of num_heads {num_heads}")
        if num_features < 1:
            raise ValueError(f"num_features must be ≥ 1, got {num_features}")
        if mode not in MODES:
            raise ValueError(f"mode is {mode!r}, expected one of {', '.join(MODES)}")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_features = num_features
        self.position_dim = _width_of_positions(rpe, position_dim, num_heads)
        self.mode = mode
        self.rpe = rpe
        generator = seeded_generator(generator)
        self.query = _linear(embed_dim, bias, generator)
        self.key = _linear(embed_dim, bias, generator)
        self.value = _linear(embed_dim, bias, generator)
        self.out = _linear(embed_dim, bias, generator)
        self.dropout = nn.Dropout(dropout)
        self._draw_projections(orthogonal, generator)

    def _draw_projections(self, orthogonal: bool, generator: torch.Generator) -> None:
        draw = orthogonal_projection if orthogonal else gaussian_projection
        width = self.position_dim + self.embed_dim // self.num_heads
        projection = torch.stack(
            [draw(self.num_features, width, generator=generator) for _ in range(self.num_heads)]
        )
        sizes = [self.position_dim, width - self.position_dim]
        positions, content = torch.split(projection, sizes, dim=-1)
        self.register_buffer("content_projection", placed(content.contiguous()))
        self.register_buffer(
            "position_projection", placed(positions.contiguous()) if self.position_dim else None
        )

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        *,
        ptr: Tensor | None = None,
        system: Tensor | None = None,
        num_systems: int | None = None,
        position_features: PositionFeatures | None = None,
    ) -> Tensor:
        """Attend within each system.

        Args:
            x: (N, C), rows of all systems.
            positions: (N, ℓ), Å, for a layer with an RPE of its own.
            ptr: (B + 1,), first row of each system, for packed rows.
            system: (N,), the system of each row in any order, instead of `ptr`. Without either,
                all rows are one system.
            num_systems: B, with `system` only: indices beyond it are refused.
            position_features: of the same rows, used instead of `positions`.

        Returns:
            (N, C).

        Raises:
            ValueError: shapes that do not fit, positions missing where the layer needs them or
                given where it has no use for them.
        """
        if x.dim() != 2 or x.shape[-1] != self.embed_dim:
            raise ValueError(f"x has shape {tuple(x.shape)}, expected (N, {self.embed_dim})")
        ptr, order = self._packing(x, ptr, system, num_systems)
        if order is not None:
            x = x[order]
            positions = None if positions is None else positions[order]
            if position_features is not None:
                position_features = position_features.rows(order)
        features = self._position_features(x, positions, ptr, position_features)
        heads = (x.shape[0], self.num_heads, self.embed_dim // self.num_heads)
        query, key, value = self.query(x), self.key(x), self.value(x)
        attend = self._linear_attention if self.mode == "linear" else self._exact_attention
        out = attend(query.view(heads), key.view(heads), value.view(heads), ptr, features)
        out = self.out(self.dropout(out.reshape(x.shape).to(value.dtype)))
        return out if order is None else torch.empty_like(out).index_copy(0, order, out)

    def _packing(
        self, x: Tensor, ptr: Tensor | None, system: Tensor | None, num_systems: int | None
    ) -> tuple[Tensor, Tensor | None]:
        """`ptr` of the rows of `x`, and the order that packs them, None if they are packed."""
        rows = x.shape[0]
        if ptr is not None and system is not None:
            raise ValueError("give ptr or system, not both")
        if system is None and num_systems is not None:
            raise ValueError("num_systems belongs to system; ptr says it already")
        if system is not None:
            if system.shape != (rows,):
                raise ValueError(f"system has shape {tuple(system.shape)}, expected ({rows},)")
            return offsets_of(system, num_systems)
        if ptr is None:
            return torch.tensor([0, rows], dtype=torch.int64, device=x.device), None
        system_sizes(ptr, rows)
        return ptr, None

    def _position_features(
        self, x: Tensor, positions: Tensor | None, ptr: Tensor, given: PositionFeatures | None
    ) -> PositionFeatures | None:
        """Those given, or those of this layer's own RPE, or None for a layer without positions."""
        rows = x.shape[0]
        if self.position_dim == 0:
            if positions is not None or given is not None:
                raise ValueError(
                    "this layer was built without positions: build it with rpe=… or position_dim=…"
                )
            return None
        if given is None:
            if self.rpe is None:
                raise ValueError("position_features are missing: this layer has no rpe of its own")
            if positions is None or positions.shape[0] != rows:
                found = "are missing" if positions is None else f"have {positions.shape[0]} rows"
                raise ValueError(
                    f"positions {found}: this layer's rpe needs one for each of {rows}"
                )
            given = self.rpe(positions, ptr)
        expected = (rows, self.position_dim)
        if given.basis.shape != expected or given.key_weight.shape[0] != self.num_heads:
            raise ValueError(
                f"position_features have a basis of shape {tuple(given.basis.shape)} for "
                f"{given.key_weight.shape[0]} heads, expected {expected} for {self.num_heads}"
            )
        return given

    def _linear_attention(
        self, query: Tensor, key: Tensor, value: Tensor, ptr: Tensor, at: PositionFeatures | None
    ) -> Tensor:
        """φ(q ⊕ Φ), φ(k ⊕ Ψ), then sums per system; ⊕ is an addition of logits."""
        query_positions = key_positions = None
        if at is not None and self.position_projection is not None:
            # Positions may be float64 beside float32 rows, as NumPy and ASE give them.
            dtype = at_least_float32(query).dtype
            query_positions, key_positions = (
                project_positions(at.basis, weight, self.position_projection).to(dtype)
                for weight in (at.query_weight, at.key_weight)
            )
        query_logits = softmax_log_features(
            query, self.content_projection, query_positions, subtract_norm=False
        )
        key_logits = softmax_log_features(key, self.content_projection, key_positions)
        query_features, key_features = stabilised_features(query_logits, key_logits, ptr)
        return linear_attention(query_features, key_features, value, ptr)

    def _exact_attention(
        self, query: Tensor, key: Tensor, value: Tensor, ptr: Tensor, at: PositionFeatures | None
    ) -> Tensor:
        """softmax(q·k/√D + Φ·Ψ), the sum of products as one product of concatenations."""
        scale = query.shape[-1] ** -0.25
        query, key = at_least_float32(query) * scale, at_least_float32(key) * scale
        if at is not None:
            positions = at.query.expand(-1, self.num_heads, -1)
            query = torch.cat([query, positions.to(query.dtype)], dim=-1)
            key = torch.cat([key, at.key.to(key.dtype)], dim=-1)
        return softmax_attention(query, key, at_least_float32(value), ptr, scale=1.0)

    def extra_repr(self) -> str:
        """What `repr` shows."""
        return (
            f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, "
            f"num_features={self.num_features}, position_dim={self.position_dim}, "
            f"mode={self.mode!r}"
        )


def _width_of_positions(rpe: FourierRPE | None, position_dim: int | None, num_heads: int) -> int:
    """2R, from whichever of the two is given, checked against the other."""
    if rpe is None:
        if position_dim is not None and position_dim < 0:
            raise ValueError(f"position_dim must be ≥ 0, got {position_dim}")
        return position_dim or 0
    if rpe.num_heads != num_heads:
        raise ValueError(f"the rpe has {rpe.num_heads} heads, the attention {num_heads}")
    if position_dim not in (None, rpe.num_features):
        raise ValueError(
            f"position_dim is {position_dim}, but the rpe gives {rpe.num_features} features"
        )
    return rpe.num_features


def _linear(width: int, bias: bool, generator: torch.Generator) -> nn.Linear:
    """A square linear map with Xavier-uniform weights drawn on CPU, and no bias at first."""
    weight = torch.empty(width, width, dtype=torch.float32, device="cpu")
    nn.init.xavier_uniform_(weight, generator=generator)
    # Built without storage, so that torch's own initialisation draws nothing from the global RNG.
    layer = nn.Linear(width, width, bias=bias, device="meta")
    layer.weight = nn.Parameter(placed(weight))
    if bias:
        layer.bias = nn.Parameter(torch.zeros_like(layer.weight[0]))
    return layer
