"""Gaussians centred at zero."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from flt_mol.functional.numerics import at_least_float32, placed
from flt_mol.nn.spectrum._terms import (
    FORMS,
    check_form,
    drawn_amplitude,
    frequency_columns,
    log_spaced,
)
from flt_mol.nn.spectrum.base import Spectrum, check_dim


class GaussianTerms(Spectrum):
    """T Gaussians per head: their widths, and their amplitudes or weights.

    Attributes:
        log_sigma: log σ (H, T), σ in Å.
        amplitude, weight: a or w (H, T), whichever `form` says.
    """

    def __init__(
        self,
        num_heads: int,
        num_terms: int,
        dim: int,
        form: str,
        sigma_min: float,
        sigma_max: float,
        generator: torch.Generator | None,
    ) -> None:
        super().__init__(num_heads, dim)
        check_form(form, FORMS)
        self.form = form
        log_sigma = log_spaced("sigma", sigma_min, sigma_max, num_terms).repeat(num_heads, 1)
        amplitude = drawn_amplitude(num_heads, num_terms, generator)
        self.log_sigma = nn.Parameter(placed(log_sigma))
        if form == "amplitude":
            self.amplitude = nn.Parameter(placed(amplitude))
        else:
            self.weight = nn.Parameter(placed(amplitude * _volume(log_sigma.exp(), dim)))

    @property
    def num_terms(self) -> int:
        """T."""
        return self.log_sigma.shape[1]

    @property
    def sigma(self) -> Tensor:
        """σ (H, T), Å."""
        return at_least_float32(self.log_sigma).exp()

    def _weights(self, sigma: Tensor) -> Tensor:
        """Peaks of the terms of g (H, T)."""
        if self.form == "amplitude":
            return self.amplitude * _volume(sigma, self.dim)
        return self.weight.to(sigma.dtype)

    def _amplitudes(self, sigma: Tensor) -> Tensor:
        """Peaks of the terms of f (H, T)."""
        if self.form == "amplitude":
            return self.amplitude.to(sigma.dtype)
        return self.weight / _volume(sigma, self.dim)

    def extra_repr(self) -> str:
        """What `repr` shows."""
        return (
            f"num_heads={self.num_heads}, num_terms={self.num_terms}, dim={self.dim}, "
            f"form={self.form!r}"
        )


class GaussianSpectrum(GaussianTerms):
    r"""A sum of T zero-centred Gaussians per head, in any dimension ℓ.

    - ``form="amplitude"``: f(x) = Σ_t a_t exp(−‖x‖²/2σ_t²),
      g(ξ) = Σ_t a_t (√(2π) σ_t)^ℓ exp(−2π²σ_t²‖ξ‖²). Well conditioned: f(0) = Σ_t a_t.
    - ``form="weight"``: f(x) = Σ_t w_t (√(2π) σ_t)^{-ℓ} exp(−‖x‖²/2σ_t²),
      g(ξ) = Σ_t w_t exp(−2π²σ_t²‖ξ‖²): with ℓ = 3 the paper's RPE for OC20 [1].

    Both forms begin as the same function: widths spaced evenly in log σ, amplitudes normal with
    standard deviation 1/√T, so that f(0) has standard deviation 1 over heads.

    Args:
        num_heads: H.
        num_terms: T.
        dim: ℓ.
        form: "amplitude" or "weight".
        sigma_min, sigma_max: narrowest and widest σ_t at the start, Å.
        generator: on CPU; None takes a seed from torch's global one.

    Raises:
        ValueError: unknown form, or widths that are not 0 < sigma_min ≤ sigma_max.

    References:
        [1] Choromanski et al., AISTATS 2024, section 4.3.

    Example:
        >>> spectrum = GaussianSpectrum(num_heads=4, num_terms=8)
        >>> spectrum.mask(torch.zeros(5, 3)).shape, spectrum(torch.zeros(16, 3)).shape
        (torch.Size([5, 4]), torch.Size([4, 16]))
    """

    def __init__(
        self,
        num_heads: int,
        num_terms: int,
        dim: int = 3,
        form: str = "amplitude",
        sigma_min: float = 1.0,
        sigma_max: float = 4.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(num_heads, num_terms, dim, form, sigma_min, sigma_max, generator)

    def forward(self, frequencies: Tensor) -> Tensor:
        """g(ξ): frequencies (R, ℓ) or (H, R, ℓ), cycles/Å → (H, R)."""
        sigma = self.sigma
        xi = frequency_columns(frequencies, self.num_heads, self.dim)
        terms = decay(xi.square().sum(-1), sigma)
        return (self._weights(sigma)[:, :, None] * terms).sum(1)

    def mask(self, displacements: Tensor) -> Tensor:
        """f(x): displacements (…, ℓ), Å → (…, H)."""
        check_dim(displacements, self.dim)
        sigma = self.sigma
        squared = at_least_float32(displacements).square().sum(-1)[..., None, None]
        return (self._amplitudes(sigma) * (-squared / (2 * sigma.square())).exp()).sum(-1)


def decay(squared: Tensor, sigma: Tensor) -> Tensor:
    """exp(−2π²σ_t²‖ξ‖²) for ‖ξ‖² (1 or H, 1 or T, R): (H, T, R)."""
    return (-2 * math.pi**2 * sigma.square()[:, :, None] * squared).exp()


def _volume(sigma: Tensor, dim: int) -> Tensor:
    """(√(2π) σ)^ℓ, the integral of exp(−‖x‖²/2σ²)."""
    return (math.sqrt(2 * math.pi) * sigma) ** dim
