"""A spectrum and its frequencies → position features Φ, Ψ per head."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from flt_mol.functional.fourier import SPLITS, PositionFeatures, fourier_basis, position_features
from flt_mol.functional.packed import centred, system_sizes
from flt_mol.nn.frequencies import GaussianFrequencies
from flt_mol.nn.spectrum import Spectrum

__all__ = ["FourierRPE", "PositionFeatures"]


class FourierRPE(nn.Module):
    r"""A learned relative positional encoding f(r_i − r_j), as features whose product is its mean.

    Φ_i·Ψ_j = N̂(r_i − r_j) = (1/R) Σ_t ρ_t cos 2πξ_t·(r_i − r_j), with ρ_t = g(ξ_t)/p(ξ_t) and
    E[N̂] = f, Var N̂ ≤ (‖g/p‖²_∞ − f²)/R [1, Theorem 4.2]. At a few dozen frequencies in three
    dimensions N̂ is far from f: it is a learned pattern of waves, and it is not rotation-invariant.

    Args:
        spectrum: g, per head.
        frequencies: ξ and their density p.
        split: how ρ is shared between Φ and Ψ, see `functional.position_features`.

    Raises:
        ValueError: spectrum and frequencies of different ℓ, or an unknown split.

    References:
        [1] Choromanski et al., "Learning a Fourier Transform for Linear Relative Positional
        Encodings in Transformers", AISTATS 2024.

    Example:
        >>> from flt_mol.nn import GaussianFrequencies, GaussianSpectrum
        >>> rpe = FourierRPE(GaussianSpectrum(num_heads=4, num_terms=8), GaussianFrequencies(16))
        >>> features = rpe(torch.rand(10, 3))
        >>> features.query.shape, features.key.shape
        (torch.Size([10, 1, 32]), torch.Size([10, 4, 32]))
    """

    def __init__(
        self, spectrum: Spectrum, frequencies: GaussianFrequencies, split: str = "one_sided"
    ) -> None:
        super().__init__()
        if spectrum.dim != frequencies.dim:
            raise ValueError(
                f"the spectrum is over {spectrum.dim} dimensions, the frequencies over "
                f"{frequencies.dim}"
            )
        if split not in SPLITS:
            raise ValueError(f"split is {split!r}, expected one of {', '.join(SPLITS)}")
        self.spectrum = spectrum
        self.frequencies = frequencies
        self.split = split

    @property
    def num_heads(self) -> int:
        """H."""
        return self.spectrum.num_heads

    @property
    def dim(self) -> int:
        """ℓ, the dimension of positions."""
        return self.spectrum.dim

    @property
    def num_features(self) -> int:
        """2R, the width of Φ and Ψ."""
        return 2 * self.frequencies.num_frequencies

    def ratio(self) -> tuple[Tensor, Tensor]:
        """ξ (R, ℓ), cycles/Å, and ρ = g(ξ)/p(ξ) (H, R)."""
        frequencies, log_density = self.frequencies()
        return frequencies, self.spectrum(frequencies) * (-log_density).exp()

    def forward(self, positions: Tensor, ptr: Tensor | None = None) -> PositionFeatures:
        """Φ and Ψ of positions (N, ℓ), Å, each system centred on its own mean first.

        Args:
            positions: (N, ℓ), Å.
            ptr: (B + 1,), first row of each system; None is one system.

        Raises:
            ValueError: positions that are not (N, ℓ), or `ptr` that does not describe N rows.
        """
        if positions.dim() != 2 or positions.shape[-1] != self.dim:
            raise ValueError(
                f"positions have shape {tuple(positions.shape)}, expected (N, {self.dim})"
            )
        if ptr is None:
            ptr = torch.tensor([0, positions.shape[0]], dtype=torch.int64, device=positions.device)
        system_sizes(ptr, positions.shape[0])
        frequencies, ratio = self.ratio()
        basis = fourier_basis(centred(positions, ptr), frequencies)
        return position_features(basis, ratio, self.split)

    def mask(self, displacements: Tensor) -> Tensor:
        """f(x), what the features estimate: displacements (…, ℓ), Å → (…, H)."""
        mask: Tensor = self.spectrum.mask(displacements)
        return mask

    def sampled_mask(self, displacements: Tensor) -> Tensor:
        """N̂(x), what the features give: displacements (…, ℓ), Å → (…, H)."""
        frequencies, ratio = self.ratio()
        turns = (displacements[..., None, :] * frequencies).sum(-1)
        waves = (2 * math.pi * turns).cos()
        return (waves[..., None, :] * ratio).mean(-1)

    def extra_repr(self) -> str:
        """What `repr` shows."""
        return f"split={self.split!r}"
