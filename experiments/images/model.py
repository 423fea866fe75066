"""A vision Transformer whose attention is FLT's, or that of one of the models beside it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flt_mol.functional import PositionFeatures
from flt_mol.nn import (
    FeatureMap,
    FLTAttention,
    FLTBlock,
    FLTEncoder,
    FourierRPE,
    GaussianFrequencies,
    GaussianMixtureSpectrum,
)
from flt_mol.nn.attention import AttentionRows


@dataclass(frozen=True)
class Config:
    """A model and its training; the defaults are the reduced size, `paper.yaml` is the paper's.

    Attributes:
        size: pixels of a side; other images are interpolated.
        patch: pixels of a patch's side.
        terms: T of the Gaussian mixture.
        frequencies: R.
        width: σ of its Gaussians at the start, from and to, in patches.
        absolute: whether learned vectors of the places are added to the tokens, as in ViT.
        train_images, test_images: how many, the first of the files, are used; None is all.
    """

    size: int = 28
    patch: int = 4
    dim: int = 64
    heads: int = 4
    layers: int = 2
    hidden: int = 128
    num_features: int = 32
    terms: int = 25
    frequencies: int = 64
    width: tuple[float, float] = (0.7, 3.0)
    absolute: bool = True
    dropout: float = 0.0
    epochs: int = 1
    train_images: int | None = 6_000
    test_images: int | None = 5_000
    batch: int = 32
    learning_rate: float = 4e-3
    weight_decay: float = 0.01


class CosFormerFeatures(FeatureMap):
    """Weights ReLU(q_i)·ReLU(k_j) cos(π(i − j)/2L), i and j the places of L tokens in raster order.

    The features are ReLU(x) cos(πi/2L) and ReLU(x) sin(πi/2L): Qin et al., "cosFormer", ICLR 2022.
    """

    def __init__(self, num_heads: int, head_dim: int, length: int) -> None:
        super().__init__(num_heads, head_dim, 0, 2 * head_dim)
        self.length = length

    def forward(self, x: Tensor, at: PositionFeatures | None, *, key: bool) -> Tensor:
        """φ of rows (B·L, H, D) → (B·L, H, 2D)."""
        place = torch.arange(self.length, dtype=x.dtype, device=x.device)
        angle = (place * (0.5 * math.pi / self.length)).repeat(len(x) // self.length)[:, None, None]
        return torch.cat([x.relu() * angle.cos(), x.relu() * angle.sin()], dim=-1)


class GridMaskAttention(FLTAttention):
    """Weights φ(q_i)·φ(k_j) exp(b_h(r_i − r_j)), b learned for each difference on a grid.

    The mask of Luo et al., "Stable, Fast and Accurate: Kernelized Attention with Relative
    Positional Encoding", NeurIPS 2021, in two dimensions. Weights are written out, O(L²): at L = 49
    that takes less time than the Fourier transforms in O(L log L), which give the same.
    """

    def __init__(self, *args: Any, side: int, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.log_mask = nn.Parameter(torch.zeros(self.num_heads, 2 * side - 1, 2 * side - 1))
        places = torch.cartesian_prod(torch.arange(side), torch.arange(side)).T
        self.y, self.x = places[:, :, None] - places[:, None, :] + side - 1

    def attend(self, rows: AttentionRows, mode: str | None = None) -> Tensor:
        """Attended values (B·L, H, D)."""
        grid = (-1, len(self.y))
        query = self.feature_map(rows.query, None, key=False).unflatten(0, grid)
        key = self.feature_map(rows.key, None, key=True).unflatten(0, grid)
        mask = self.log_mask[:, self.y, self.x].exp()
        weights = torch.einsum("bihm,bjhm->bhij", query, key) * mask
        sums = torch.einsum("bhij,bjhd->bihd", weights, rows.value.unflatten(0, grid))
        normaliser = weights.sum(-1).mT.clamp(min=torch.finfo(sums.dtype).tiny)
        return (sums / normaliser[..., None]).flatten(0, 1)


class ImageTransformer(nn.Module):
    """Patches → tokens → `FLTEncoder` → mean over tokens → logits of ten classes.

    Args:
        config: see `Config`.
        kind: "flt", "performer", "cosformer" or "log_linear".
        generator: on CPU, for attention; the other weights are of torch's global one.
    """

    def __init__(self, config: Config, kind: str, generator: torch.Generator) -> None:
        super().__init__()
        self.config, self.side = config, config.size // config.patch
        self.embed = nn.Linear(config.patch**2, config.dim)
        place = 0.02 * torch.randn(self.side**2, config.dim)
        self.place = nn.Parameter(place) if config.absolute else None
        rpe = self._rpe(generator) if kind == "flt" else None
        blocks = [
            FLTBlock(self._attention(kind, rpe, generator), config.hidden, config.dropout)
            for _ in range(config.layers)
        ]
        self.encoder = FLTEncoder(blocks, rpe)
        self.head = nn.Sequential(nn.LayerNorm(config.dim), nn.Linear(config.dim, 10))

    def _rpe(self, generator: torch.Generator) -> FourierRPE:
        """The paper's Gaussian mixture in two dimensions, in units of a patch."""
        config, (low, high) = self.config, self.config.width
        spectrum = GaussianMixtureSpectrum(
            config.heads, config.terms, 2, sigma_min=low, sigma_max=high, generator=generator
        )
        sigma = (1 / (2 * math.pi * high), 1 / (2 * math.pi * low))
        drawn = GaussianFrequencies(config.frequencies, 2, sigma, generator=generator)
        return FourierRPE(spectrum, drawn)

    def _attention(
        self, kind: str, rpe: FourierRPE | None, generator: torch.Generator
    ) -> FLTAttention:
        dim, heads = shape = self.config.dim, self.config.heads
        if kind == "cosformer":
            phi = CosFormerFeatures(heads, dim // heads, self.side**2)
            return FLTAttention(*shape, feature_map=phi, generator=generator)
        settings: dict[str, Any] = {"feature_map": "learned_relu", "generator": generator}
        settings["num_features"] = self.config.num_features
        if kind == "log_linear":
            return GridMaskAttention(*shape, side=self.side, **settings)
        return FLTAttention(*shape, position_dim=rpe.num_features if rpe else 0, **settings)

    def forward(self, pixels: Tensor) -> Tensor:
        """Pixels (B, S, S) → logits (B, 10)."""
        size, patch = 2 * [self.config.size], self.config.patch
        if list(pixels.shape[1:]) != size:
            pixels = nn.functional.interpolate(pixels[:, None], size, mode="bilinear")[:, 0]
        tokens = self.embed(nn.functional.unfold(pixels[:, None], patch, stride=patch).mT)
        tokens = tokens if self.place is None else tokens + self.place
        grid = None
        if self.encoder.rpe is not None:
            places = torch.arange(self.side, dtype=tokens.dtype, device=tokens.device)
            grid = torch.cartesian_prod(places, places).expand(len(tokens), -1, -1)
        return self.head(self.encoder(tokens, grid).mean(1))
