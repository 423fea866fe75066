"""Frequencies and weights → position features Φ, Ψ with E[Φ_i·Ψ_j] = f(r_i − r_j).

With ξ_1…ξ_R ~ p and ρ_t = g(ξ_t)/p(ξ_t), the mean of ρ_t cos 2πξ_t·x over t has expectation
f(x) = ∫ g(ξ) e^{2πi x·ξ} dξ. Since cos(a − b) = cos a cos b + sin a sin b, it is a product of
features of r_i and of r_j: attention needs no N × N mask.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flt_mol.functional.groups import settled

SPLITS = ("one_sided", "symmetric", "balanced")


class PositionFeatures(NamedTuple):
    """Φ = T ∘ a for queries and Ψ = T ∘ b + T⊥ ∘ c for keys, not multiplied out.

    T⊥ = [sin, −cos] is T = [cos, sin] a quarter turn later; only directional masks need it.

    Attributes:
        basis: T (N, 2R), shared by all heads, cosines first; or (N, H, 2R).
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
        return self._by_head * self.query_weight

    @property
    def key(self) -> Tensor:
        """Ψ (N, H, 2R)."""
        key = self._by_head * self.key_weight
        return key if self.key_turn is None else key + quarter_turn(self._by_head) * self.key_turn

    def beside(self, queries: PositionFeatures) -> tuple[Tensor, Tensor]:
        """T of queries and T ∘ ab + T⊥ ∘ ac of these keys: of the product Φ·Ψ, for less."""
        a, c = queries.query_weight, self.key_turn
        at = self._replace(key_weight=a * self.key_weight, key_turn=None if c is None else a * c)
        return queries._by_head, at.key

    @property
    def _by_head(self) -> Tensor:
        return self.basis if self.basis.dim() == 3 else self.basis[:, None, :]

    def rows(self, index: Tensor | slice) -> PositionFeatures:
        """The same features for rows `index` (K,) only, in that order."""
        return self._replace(basis=self.basis[index])


def quarter_turn(basis: Tensor) -> Tensor:
    """T⊥ = [sin, −cos] of T = [cos, sin]: (…, 2R) → (…, 2R)."""
    cosines, sines = basis.chunk(2, -1)
    return torch.cat([sines, -cosines], -1)


def phases(positions: Tensor, frequencies: Tensor) -> Tensor:
    """2πξ·r, at least float32 for any autocast dtype.

    Args:
        positions: r (…, ℓ), Å. Centre each system first: a float32 phase of 10⁴ Å is off by 1e-3.
        frequencies: ξ (R, ℓ), cycles/Å, or (H, R, ℓ).

    Returns (…, R), or (…, H, R); ValueError where ℓ differs.
    """
    if positions.dim() < 1 or positions.shape[-1] != frequencies.shape[-1]:
        raise ValueError(
            f"positions have shape {tuple(positions.shape)}, expected (…, {frequencies.shape[-1]})"
        )
    r, xi = settled(positions, frequencies)
    # In float64, which neither TF32 nor autocast shortens: either would cost phases three digits.
    wide = r.dtype if r.device.type == "mps" else torch.float64
    turned = (2 * math.pi * xi.to(wide)).flatten(0, -2)
    phase: Tensor = (r.to(wide) @ turned.mT).to(r.dtype).unflatten(-1, xi.shape[:-1])
    return phase


def fourier_basis(positions: Tensor, frequencies: Tensor) -> Tensor:
    """T(r) = [cos 2πξ_1·r … cos 2πξ_R·r, sin 2πξ_1·r … sin 2πξ_R·r].

    (N, 2R), or (N, H, 2R); arguments and errors as for `phases`, with positions (N, ℓ).
    """
    phase = phases(positions, frequencies)
    return torch.cat([phase.cos(), phase.sin()], -1)


def position_features(basis: Tensor, ratio: Tensor, split: str = "one_sided") -> PositionFeatures:
    r"""Φ, Ψ with Φ_i·Ψ_j = (1/R) Σ_t Re[ρ_t e^{2πiξ_t·(r_i − r_j)}].

    For real ρ these are waves ρ_t cos 2πξ_t·(r_i − r_j). A complex ρ = b + ic has its phase in Ψ,
    where cosines become b cos + c sin and sines b sin − c cos. The size of ρ is shared so:

    - ``one_sided``: Φ = T/√R, Ψ = T ∘ ρ/√R. The gradient to ρ is bounded for every ρ: it trains
      everywhere, at the price of noise in softmax features of small masks, since ‖Φ_i‖² = 1.
    - ``symmetric``: Φ = T ∘ √(\|ρ\|/R), Ψ = T ∘ ρ/√(\|ρ\| R), the paper's: least variance in
      softmax features, but a gradient that grows as \|ρ\|^{-1/2} where one ρ → 0.
    - ``balanced``: Φ = T s/√R, Ψ = T ∘ ρ/(s√R), s⁴ = mean_t \|ρ_t\|² of the head: ‖Φ_i‖ = ‖Ψ_j‖,
      and the gradient grows only where all ρ of a head → 0 together.

    In all of them ‖Φ_i‖² and ‖Ψ_j‖² depend on the head alone since cos² + sin² = 1.

    Args:
        basis: T (N, 2R) or (N, H, 2R).
        ratio: ρ (H, R), of any sign, or complex.
        split: one of these names; ValueError for another, or for shapes that do not fit.
    """
    heads, count = ratio.shape
    if basis.shape[-1] != 2 * count or (basis.dim() == 3 and basis.shape[1] != heads):
        expected = f"expected (N, {2 * count}) or (N, {heads}, {2 * count})"
        raise ValueError(f"basis has shape {tuple(basis.shape)}, {expected}")
    query, key = _shared(ratio, split)
    # Once for cosines and once for sines.
    a, b = (torch.cat([x, x], -1) * count**-0.5 for x in (query, key))
    return PositionFeatures(basis, a, b.real, b.imag if b.is_complex() else None)


def _shared(ratio: Tensor, split: str) -> tuple[Tensor, Tensor]:
    """ρ (H, R) as a product of something real for Φ, (H, R) or (1, R), and the rest for Ψ."""
    if split == "one_sided":
        return ratio.real.new_ones(1, ratio.shape[1]), ratio
    if split == "symmetric":
        # √ has no slope at 0: there, and only there, the gradient is set to 0 instead of NaN.
        zero = ratio == 0
        root = ratio.abs().masked_fill(zero, 1.0).sqrt()
        return root.masked_fill(zero, 0.0), (ratio / root).masked_fill(zero, 0.0)
    if split == "balanced":
        mean = ratio.abs().square().mean(-1, keepdim=True)
        # The small number keeps the slope finite where a head has no mask at all.
        scale = (mean + 1e-12).sqrt().sqrt()
        return scale.expand(ratio.shape), ratio / scale
    raise ValueError(f"split is {split!r}, expected one of {', '.join(SPLITS)}")
