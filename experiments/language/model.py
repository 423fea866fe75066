"""The net around every attention, and the attentions by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from common.attentions import (
    CosFormerAttention,
    LogLinearAttention,
    RandomFeatureAttention,
    StochasticAttention,
)
from flt_mol.nn import (
    BSplineSpectrum,
    FLTAttention,
    FLTBlock,
    FLTEncoder,
    FourierRPE,
    GaussianFrequencies,
    GaussianMixtureSpectrum,
    GaussianSpectrum,
    SoftmaxFeatures,
    Spectrum,
)
from flt_mol.nn.spectrum.terms import TermSpectrum


class Size(NamedTuple):
    """What is common to all models; the defaults are the reduced size, `PAPER` the paper's."""

    layers: int = 2
    length: int = 256
    width: int = 64
    heads: int = 4
    ffn: int = 256
    features: int = 32
    terms: int = 25
    frequencies: int = 32
    vocabulary: int = 512
    dropout: float = 0.0


PAPER = Size(6, 512, 512, 8, 2048, 64, 25, 64, 32_000, 0.1)


def fourier_rpe(spectrum: Spectrum, size: Size) -> FourierRPE:
    """Masks over distances in tokens; frequencies for widths from 1 to 64 tokens, learned."""
    frequencies = GaussianFrequencies(
        size.frequencies, dim=1, sigma=(1 / (128 * math.pi), 1 / (2 * math.pi)), learned_mean=True
    )
    return FourierRPE(spectrum, frequencies)


def mixture(size: Size) -> FourierRPE:
    """The Gaussian mixture with T learned means, widths and weights per head."""
    return fourier_rpe(
        GaussianMixtureSpectrum(
            size.heads, size.terms, dim=1, sigma_min=1.0, sigma_max=64.0, mean_std=0.02
        ),
        size,
    )


def local(size: Size, order: int = 1) -> FourierRPE:
    """Local RPE: boxes of T radii per head."""
    spectrum = BSplineSpectrum(
        size.heads, size.terms, dim=1, order=order, radius_min=2.0, radius_max=64.0
    )
    return fourier_rpe(spectrum, size)


def decaying(
    spectrum: Callable[..., TermSpectrum], **lengths: float
) -> Callable[[Size], nn.Module]:
    """FLT whose M features share one position direction w per head, and eight waves.

    The softmax of the content is then estimated by M features, that of positions by one: all
    features of key j have the factor exp(w·Ψ_j). The waves are far longer than the window, so w·Ψ_j
    is close to a line in j, and attention decays as e^{−λ(i−j)}. Spectrum and frequencies, which
    are learned, decide λ; head h starts with 0.2·0.4^h per token. w is that of the M drawn
    directions in which w·Ψ_j rises most. `lengths` of the terms are in windows.
    """

    def build(size: Size) -> nn.Module:
        scaled = {name: windows * size.length for name, windows in lengths.items()}
        terms = spectrum(size.heads, size.terms, dim=1, **scaled)
        longest, shortest = (1 / (2 * math.pi * windows * size.length) for windows in (20, 5))
        rpe = FourierRPE(terms, GaussianFrequencies(8, 1, (longest, shortest), sampling="sobol"))
        features = SoftmaxFeatures(
            size.heads, size.width // size.heads, rpe.num_features, num_features=size.features
        )
        directions, last = features.position_projection, size.length - 1
        assert directions is not None
        with torch.no_grad():
            terms.amplitude.abs_()
            first_last = rpe(torch.tensor([[0.0], [last]]), origin="first").key
            rise, best = torch.einsum("hr,hmr->hm", first_last.diff(dim=0)[0], directions).max(1)
            heads = torch.arange(size.heads)
            directions.copy_(directions[heads, best][:, None].clone().expand_as(directions))
            terms.amplitude.mul_((0.2 * 0.4**heads * last / rise)[:, None])
        return FLTAttention(size.width, size.heads, causal=True, rpe=rpe, feature_map=features)

    return build


def ours(
    mode: str = "linear",
    rpe: Callable[[Size], FourierRPE] | None = None,
    feature_map: str = "softmax",
) -> Callable[[Size], nn.Module]:
    """The library's causal attention, with a mask of each layer's own or without."""

    def build(size: Size) -> nn.Module:
        features = None if feature_map == "elu" else size.features
        return FLTAttention(
            size.width, size.heads, causal=True, mode=mode, feature_map=feature_map,
            num_features=features, rpe=rpe and rpe(size),
        )  # fmt: skip

    return build


def _rfa(kernel: str, gated: bool) -> Callable[[Size], nn.Module]:
    return lambda s: RandomFeatureAttention(
        s.width, s.heads, kernel=kernel, gated=gated, num_features=s.features
    )


def _spe(kind: str) -> Callable[[Size], nn.Module]:
    return lambda s: StochasticAttention(s.width, s.heads, kind=kind, num_features=s.features)


def _log_linear(size: Size) -> nn.Module:
    """Written out, which is the same function, and faster at these lengths."""
    return LogLinearAttention(
        size.width, size.heads, max_length=size.length, num_features=size.features, fft=False
    )


OURS = "FLT (Gaussian mixture)"
ATTENTIONS: dict[str, Callable[[Size], nn.Module]] = {
    "Linear Transformer": ours(feature_map="elu"),
    "RFA-Gaussian": _rfa("gaussian", gated=False),
    "RFA-arccos": _rfa("arccos", gated=False),
    "RFA-Gaussian, gated": _rfa("gaussian", gated=True),
    "RFA-arccos, gated": _rfa("arccos", gated=True),
    "Performer": ours(),
    "cosFormer": lambda s: CosFormerAttention(s.width, s.heads, max_length=s.length),
    "Performer-sineSPE": _spe("sine"),
    "Performer-convSPE": _spe("conv"),
    "log-linear Performer": _log_linear,
    OURS: ours(rpe=mixture),
    "FLT (local)": ours(rpe=local),
    "FLT (Gaussian mixture), decaying": decaying(GaussianSpectrum, sigma_min=5, sigma_max=20),
    "FLT (local), decaying": decaying(
        partial(BSplineSpectrum, order=1), radius_min=1, radius_max=4
    ),
    "exact, no mask": ours("exact"),
    "exact, FLT's mask": ours("exact", mixture),
}


class LanguageModel(nn.Module):
    """Token and sinusoidal embeddings, `FLTEncoder`, norm, logits by the token embedding.

    Args:
        size: of the net.
        attention: one layer's attention.
    """

    def __init__(self, size: Size, attention: Callable[[Size], nn.Module]) -> None:
        super().__init__()
        self.size = size
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        nn.init.normal_(self.tokens.weight, std=size.width**-0.5)
        self.encoder = FLTEncoder(
            FLTBlock(attention(size), size.ffn, size.dropout) for _ in range(size.layers)
        )
        self.norm = nn.LayerNorm(size.width)

    def embedded(self, tokens: Tensor, start: int = 0) -> Tensor:
        """Tokens (B, L), the first at place `start`, → (B, L, C)."""
        width = self.size.width
        place = torch.arange(start, start + tokens.shape[1], dtype=torch.get_default_dtype())
        angle = place[:, None] * (1e4 ** -torch.linspace(0, 1, width // 2))
        places = torch.cat([angle.sin(), angle.cos()], -1)
        return self.tokens(tokens) * width**0.5 + places

    def logits(self, rows: Tensor) -> Tensor:
        """Features of the encoder → logits of the next token."""
        return self.norm(rows) @ self.tokens.weight.T

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (B, L) → logits (B, L, V)."""
        return self.logits(self.encoder(self.embedded(tokens)))

    @torch.no_grad()
    def generate(self, tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The `count` most probable next tokens after (B, L), one by one at constant cost.

        Returns:
            Tokens (B, count) and the logits (B, count, V) that they have been chosen by.
        """
        embedded = self.embedded(tokens)
        state = self.encoder.state_after(embedded[:, :-1])
        row, chosen, seen = embedded[:, -1], [], []
        for place in range(tokens.shape[1], tokens.shape[1] + count):
            out, state = self.encoder.step(row, state)
            seen.append(self.logits(out))
            chosen.append(seen[-1].argmax(-1))
            row = self.embedded(chosen[-1][:, None], place)[:, 0]
        return torch.stack(chosen, 1), torch.stack(seen, 1)
