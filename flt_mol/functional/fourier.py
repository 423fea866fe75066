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

from flt_mol.functional._common import at_least_float32, without_autocast

SPLITS = ("one_sided", "symmetric")


class PositionFeatures(NamedTuple):
    """Φ = T ∘ a for queries and Ψ = T ∘ b for keys, unmultiplied: T is shared by all heads.

    Attributes:
        basis: T (N, 2R), cosines first, then sines of the same phases.
        query_weight: a (H, 2R), or (1, 2R) where it is the same for all heads.
        key_weight: b (H, 2R).
    """

    basis: Tensor
    query_weight: Tensor
    key_weight: Tensor

    @property
    def query(self) -> Tensor:
        """Φ (N, H, 2R), or (N, 1, 2R) where it is the same for all heads."""
        return self.basis[:, None, :] * self.query_weight

    @property
    def key(self) -> Tensor:
        """Ψ (N, H, 2R)."""
        return self.basis[:, None, :] * self.key_weight

    def rows(self, index: Tensor) -> PositionFeatures:
        """The same features for rows `index` (K,) only, in that order."""
        return self._replace(basis=self.basis[index])


def fourier_basis(positions: Tensor, frequencies: Tensor) -> Tensor:
    """T(r) = [cos 2πξ_1·r … cos 2πξ_R·r, sin 2πξ_1·r … sin 2πξ_R·r].

    Args:
        positions: r (N, ℓ), Å. Centre each system first: a float32 phase of 10⁴ Å is wrong by 1e-3.
        frequencies: ξ (R, ℓ), cycles/Å.

    Returns:
        (N, 2R), at least float32 whatever the autocast dtype.

    Raises:
        ValueError: positions and frequencies of different dimension ℓ.

    Example:
        >>> fourier_basis(torch.tensor([[0.0], [0.5]]), torch.tensor([[1.0]])).round()
        tensor([[ 1.,  0.],
                [-1., -0.]])
    """
    if positions.dim() != 2 or positions.shape[-1] != frequencies.shape[-1]:
        raise ValueError(
            f"positions have shape {tuple(positions.shape)}, expected (N, {frequencies.shape[-1]})"
        )
    r, xi = at_least_float32(positions), at_least_float32(frequencies)
    with without_autocast(r):
        # Not a matmul: TF32, which many training scripts allow, would cost phases three digits.
        turns = (r[:, None, :] * xi).sum(-1)
        phase = 2 * math.pi * turns
        return torch.cat([phase.cos(), phase.sin()], dim=-1)


def position_features(basis: Tensor, ratio: Tensor, split: str = "one_sided") -> PositionFeatures:
    r"""Φ, Ψ with Φ_i·Ψ_j = (1/R) Σ_t ρ_t cos 2πξ_t·(r_i − r_j).

    - ``one_sided``: Φ = T/√R, Ψ = T ∘ ρ/√R. The gradient to ρ is bounded for every ρ: the one
      that trains, hence the default.
    - ``symmetric``: Φ = T ∘ √(\|ρ\|/R), Ψ = T ∘ sign(ρ) √(\|ρ\|/R). The paper's, and of least
      variance in softmax features, but its gradient grows as \|ρ\|^{-1/2} where ρ → 0.

    In both, ‖Φ_i‖² and ‖Ψ_j‖² depend on the head alone since cos² + sin² = 1.

    Args:
        basis: T (N, 2R).
        ratio: ρ (H, R), any sign.
        split: "one_sided" or "symmetric".

    Raises:
        ValueError: unknown split, or shapes that do not belong together.
    """
    num_frequencies = ratio.shape[-1]
    if basis.shape[-1] != 2 * num_frequencies:
        raise ValueError(
            f"basis has {basis.shape[-1]} columns, expected {2 * num_frequencies} for "
            f"{num_frequencies} frequencies"
        )
    if split == "one_sided":
        query = ratio.new_full((1, num_frequencies), num_frequencies**-0.5)
        key = ratio * num_frequencies**-0.5
    elif split == "symmetric":
        # √ has no slope at 0: there, and only there, the gradient is set to 0 instead of NaN.
        zero = ratio == 0
        root = (ratio.abs().masked_fill(zero, 1.0) / num_frequencies).sqrt().masked_fill(zero, 0.0)
        query, key = root, ratio.sign() * root
    else:
        raise ValueError(f"split is {split!r}, expected one of {', '.join(SPLITS)}")
    return PositionFeatures(basis, torch.cat([query, query], -1), torch.cat([key, key], -1))
