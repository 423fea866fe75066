"""Frequencies and weights → position features Φ, Ψ with E[Φ_i·Ψ_j] = f(r_i − r_j).

With ξ_1…ξ_R ~ p and ρ_t = g(ξ_t)/p(ξ_t), the mean of ρ_t cos 2πξ_t·x over t has expectation
f(x) = ∫ g(ξ) e^{2πi x·ξ} dξ. Since cos(a − b) = cos a cos b + sin a sin b, this is a product of
something that knows r_i and something that knows r_j: attention needs no N × N mask.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flt_mol.functional.numerics import at_least_float32, without_autocast

SPLITS = ("one_sided", "symmetric", "balanced")

# Keeps the slope of the fourth root finite where a head has no mask at all.
_LEAST_SQUARE = 1e-12


class PositionFeatures(NamedTuple):
    """Φ = T ∘ a for queries and Ψ = T ∘ b + T⊥ ∘ c for keys, unmultiplied.

    T is shared by all heads unless each has frequencies of its own. T⊥ = [sin, −cos] is T = [cos,
    sin] a quarter of a turn later; it is there for directional masks only, see `position_features`.

    Attributes:
        basis: T (N, 2R), cosines first, then sines of the same phases; or (N, H, 2R).
        query_weight: a (H, 2R), or (1, 2R) where it is the same for all heads.
        key_weight: b (H, 2R).
        key_turn: c (H, 2R), or None where it is 0.
    """

    basis: Tensor
    query_weight: Tensor
    key_weight: Tensor
    key_turn: Tensor | None = None

    @property
    def query(self) -> Tensor:
        """Φ (N, H, 2R), or (N, 1, 2R) where it is the same for all heads."""
        return self._basis_of_heads * self.query_weight

    @property
    def key(self) -> Tensor:
        """Ψ (N, H, 2R)."""
        basis = self._basis_of_heads
        if self.key_turn is None:
            return basis * self.key_weight
        return basis * self.key_weight + quarter_turn(basis) * self.key_turn

    @property
    def _basis_of_heads(self) -> Tensor:
        return self.basis if self.basis.dim() == 3 else self.basis[:, None, :]

    def rows(self, index: Tensor) -> PositionFeatures:
        """The same features for rows `index` (K,) only, in that order."""
        return self._replace(basis=self.basis[index])


def quarter_turn(basis: Tensor) -> Tensor:
    """T⊥ = [sin, −cos] of T = [cos, sin]: (…, 2R) → (…, 2R)."""
    cosines, sines = basis.chunk(2, -1)
    return torch.cat([sines, -cosines], -1)


def phases(positions: Tensor, frequencies: Tensor) -> Tensor:
    """2πξ·r, at least float32 whatever the autocast dtype.

    Args:
        positions: r (…, ℓ), Å.
        frequencies: ξ (R, ℓ), cycles/Å, or (H, R, ℓ).

    Returns:
        (…, R), or (…, H, R).

    Raises:
        ValueError: positions and frequencies of different dimension ℓ.
    """
    if positions.dim() < 1 or positions.shape[-1] != frequencies.shape[-1]:
        raise ValueError(
            f"positions have shape {tuple(positions.shape)}, expected (…, {frequencies.shape[-1]})"
        )
    r, xi = at_least_float32(positions), at_least_float32(frequencies)
    if xi.dim() == 3:
        r = r.unsqueeze(-2)
    with without_autocast(r):
        # Not a matmul: TF32, which many training scripts allow, would cost phases three digits.
        # One dimension after the other, so that no (…, R, ℓ) is formed.
        turns = r[..., 0, None] * xi[..., 0]
        for axis in range(1, xi.shape[-1]):
            turns = turns + r[..., axis, None] * xi[..., axis]
        return 2 * math.pi * turns


def fourier_basis(positions: Tensor, frequencies: Tensor) -> Tensor:
    """T(r) = [cos 2πξ_1·r … cos 2πξ_R·r, sin 2πξ_1·r … sin 2πξ_R·r].

    Args:
        positions: r (N, ℓ), Å. Centre each system first: a float32 phase of 10⁴ Å is wrong by 1e-3.
        frequencies: ξ (R, ℓ), cycles/Å, shared by all heads, or (H, R, ℓ).

    Returns:
        (N, 2R), or (N, H, 2R); at least float32 whatever the autocast dtype.

    Raises:
        ValueError: positions and frequencies of different dimension ℓ, or of other shapes.

    Example:
        >>> fourier_basis(torch.tensor([[0.0], [0.5]]), torch.tensor([[1.0]])).round()
        tensor([[ 1.,  0.],
                [-1., -0.]])
    """
    if frequencies.dim() not in (2, 3):
        raise ValueError(
            f"frequencies have shape {tuple(frequencies.shape)}, expected (R, ℓ) or (H, R, ℓ)"
        )
    if positions.dim() != 2 or positions.shape[-1] != frequencies.shape[-1]:
        raise ValueError(
            f"positions have shape {tuple(positions.shape)}, expected (N, {frequencies.shape[-1]})"
        )
    phase = phases(positions, frequencies)
    return torch.cat([phase.cos(), phase.sin()], dim=-1)


def position_features(basis: Tensor, ratio: Tensor, split: str = "one_sided") -> PositionFeatures:
    r"""Φ, Ψ with Φ_i·Ψ_j = (1/R) Σ_t Re[ρ_t e^{2πiξ_t·(r_i − r_j)}].

    For real ρ these are the waves ρ_t cos 2πξ_t·(r_i − r_j). The phase of a complex ρ = b + ic goes
    into Ψ alone, as `PositionFeatures` says: in Ψ, cosines become b cos + c sin and sines
    b sin − c cos. The size of ρ is shared by Φ and Ψ in one of three ways:

    - ``one_sided``: Φ = T/√R, Ψ = T ∘ ρ/√R. The gradient to ρ is bounded for every ρ.
    - ``symmetric``: Φ = T ∘ √(\|ρ\|/R), Ψ = T ∘ ρ/√(\|ρ\| R). The paper's, and of least variance in
      softmax features, but its gradient grows as \|ρ\|^{-1/2} where one ρ → 0.
    - ``balanced``: Φ = T s/√R, Ψ = T ∘ ρ/(s√R), with s⁴ = mean_t \|ρ_t\|² of the head.
      ‖Φ_i‖ = ‖Ψ_j‖, so that the noise of softmax features goes away with the mask, where
      ``one_sided`` leaves that of ‖Φ_i‖² = 1. One small ρ has a bounded gradient; where all are
      small together it grows as \|ρ\|^{-1/2}.

    Mean size of the gradient to ρ through softmax features of attention (R = 16), where one ρ is
    small while the others are ±1, and where all are:

    | | one, 1 | 1e-4 | 1e-8 | all, 1 | 1e-4 | 1e-8 |
    |---|---|---|---|---|---|---|
    | one_sided | 0.29 | 0.29 | 0.29 | 0.28 | 0.20 | 0.20 |
    | symmetric | 0.18 | 17 | 1650 | 0.17 | 6.9 | 690 |
    | balanced | 0.28 | 0.30 | 0.30 | 0.28 | 14 | 138 |

    ``one_sided`` is the default because it trains everywhere: tails of a spectrum have tiny ρ all
    the time, and a head that switches its mask off can switch it on again. What it costs is noise:
    the relative rms error of 64 softmax features of exp(Φ·Ψ), ρ normal with standard deviation
    3 / 1 / 0.1 / 0.01, is 7.6 / 0.35 / 0.17 / 0.17, against 2.2 / 0.34 / 0.06 / 0.02 for
    ``balanced`` and 2.0 / 0.28 / 0.05 / 0.02 for ``symmetric``. Maps with learned weights on
    positions have no such noise.

    In all of them ‖Φ_i‖² and ‖Ψ_j‖² depend on the head alone since cos² + sin² = 1.

    Args:
        basis: T (N, 2R) or (N, H, 2R).
        ratio: ρ (H, R), of any sign, or complex.
        split: "one_sided", "symmetric" or "balanced".

    Raises:
        ValueError: unknown split, or shapes that do not belong together.
    """
    num_heads, num_frequencies = ratio.shape
    if basis.shape[-1] != 2 * num_frequencies:
        raise ValueError(
            f"basis has {basis.shape[-1]} columns, expected {2 * num_frequencies} for "
            f"{num_frequencies} frequencies"
        )
    if basis.dim() == 3 and basis.shape[1] != num_heads:
        raise ValueError(f"basis is for {basis.shape[1]} heads, the ratio for {num_heads}")
    query, key = _shared(ratio, split)
    scale = num_frequencies**-0.5
    weight, turn = (key.real, key.imag) if key.is_complex() else (key, None)
    return PositionFeatures(
        basis,
        _twice(query * scale),
        _twice(weight * scale),
        None if turn is None else _twice(turn * scale),
    )


def _shared(ratio: Tensor, split: str) -> tuple[Tensor, Tensor]:
    """ρ (H, R) as a product of something real for Φ, (H, R) or (1, R), and the rest for Ψ."""
    if split == "one_sided":
        return torch.ones_like(ratio[:1].real), ratio
    if split == "symmetric":
        # √ has no slope at 0: there, and only there, the gradient is set to 0 instead of NaN.
        zero = ratio == 0
        root = ratio.abs().masked_fill(zero, 1.0).sqrt()
        return root.masked_fill(zero, 0.0), (ratio / root).masked_fill(zero, 0.0)
    if split == "balanced":
        mean = ratio.abs().square().mean(-1, keepdim=True)
        scale = (mean + _LEAST_SQUARE).sqrt().sqrt()
        return scale.expand(ratio.shape), ratio / scale
    raise ValueError(f"split is {split!r}, expected one of {', '.join(SPLITS)}")


def _twice(weight: Tensor) -> Tensor:
    """(…, R) → (…, 2R), once for cosines and once for sines."""
    return torch.cat([weight, weight], -1)
