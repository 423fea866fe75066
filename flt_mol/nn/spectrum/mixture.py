"""Gaussians at frequencies of their own, with phases: wave packets."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from flt_mol.functional.numerics import at_least_float32, draw_normal, placed, seeded_generator
from flt_mol.nn.spectrum._terms import frequency_columns
from flt_mol.nn.spectrum.base import check_dim
from flt_mol.nn.spectrum.gaussian import GaussianTerms, decay


class GaussianMixtureSpectrum(GaussianTerms):
    r"""A mixture of T Gaussians per head at frequencies ±μ_t: wave packets in real space.

    With G_t(ξ) = exp(−2π²σ_t²‖ξ‖²), a Gaussian of width 1/(2πσ_t) around μ_t in frequency,

    - ``form="amplitude"``: f(x) = Σ_t a_t exp(−‖x‖²/2σ_t²) cos 2πμ_t·x,
      g(ξ) = ½ Σ_t a_t (√(2π) σ_t)^ℓ [G_t(ξ − μ_t) + G_t(ξ + μ_t)];
    - ``form="weight"``: the same with w_t in place of a_t (√(2π) σ_t)^ℓ, so that w_t is the weight
      of a component of g, as in the paper [1].

    A mixture without the second half has a complex mask; this is its real part. μ_t begin normal;
    at μ_t = 0 the family is `GaussianSpectrum`. Masks are symmetric, but not rotation-invariant.

    Args:
        num_heads, num_terms, dim, form, sigma_min, sigma_max, generator: see `GaussianSpectrum`.
        mean_std: standard deviation of each coordinate of μ_t at the start, cycles/Å.

    Attributes:
        mean: μ (H, T, ℓ), cycles/Å.

    Raises:
        ValueError: see `GaussianSpectrum`; a negative mean_std.

    References:
        [1] Choromanski et al., AISTATS 2024.

    Example:
        >>> GaussianMixtureSpectrum(num_heads=4, num_terms=8, dim=1)
        GaussianMixtureSpectrum(num_heads=4, num_terms=8, dim=1, form='amplitude')
    """

    def __init__(
        self,
        num_heads: int,
        num_terms: int,
        dim: int = 3,
        form: str = "amplitude",
        sigma_min: float = 1.0,
        sigma_max: float = 4.0,
        mean_std: float = 0.1,
        generator: torch.Generator | None = None,
    ) -> None:
        if not 0 <= mean_std < math.inf:
            raise ValueError(f"mean_std is {mean_std}, expected a number ≥ 0, cycles/Å")
        generator = seeded_generator(generator)
        super().__init__(num_heads, num_terms, dim, form, sigma_min, sigma_max, generator)
        mean = mean_std * draw_normal(num_heads, num_terms, dim, generator=generator)
        self.mean = nn.Parameter(placed(mean))

    def forward(self, frequencies: Tensor) -> Tensor:
        """g(ξ): frequencies (R, ℓ) or (H, R, ℓ), cycles/Å → (H, R)."""
        ahead, behind = self._packets(frequencies)
        return (ahead + behind).sum(1)

    def mask(self, displacements: Tensor) -> Tensor:
        """f(x): displacements (…, ℓ), Å → (…, H)."""
        return self._waves(displacements, 0.0)

    def _packets(self, frequencies: Tensor) -> tuple[Tensor, Tensor]:
        """½ w_t G_t(ξ − μ_t) and ½ w_t G_t(ξ + μ_t), each (H, T, R)."""
        sigma = self.sigma
        half = 0.5 * self._weights(sigma)[:, :, None]
        xi = frequency_columns(frequencies, self.num_heads, self.dim)
        mean = at_least_float32(self.mean)[:, :, None]
        ahead = half * decay((xi - mean).square().sum(-1), sigma)
        return ahead, half * decay((xi + mean).square().sum(-1), sigma)

    def _waves(self, displacements: Tensor, phase: Tensor | float) -> Tensor:
        """Σ_t a_t exp(−‖x‖²/2σ_t²) cos(2πμ_t·x + α_t)."""
        check_dim(displacements, self.dim)
        sigma = self.sigma
        x = at_least_float32(displacements)[..., None, None, :]
        envelope = (-x.square().sum(-1) / (2 * sigma.square())).exp()
        turns = (x * self.mean).sum(-1)
        wave = (2 * math.pi * turns + phase).cos()
        return (self._amplitudes(sigma) * envelope * wave).sum(-1)


class DirectionalSpectrum(GaussianMixtureSpectrum):
    r"""A mixture of Gaussians with phases: masks that tell x from −x.

    f(x) = Σ_t a_t exp(−‖x‖²/2σ_t²) cos(2πμ_t·x + α_t), of spectrum
    g(ξ) = ½ Σ_t a_t (√(2π) σ_t)^ℓ [e^{iα_t} G_t(ξ − μ_t) + e^{−iα_t} G_t(ξ + μ_t)], with G_t and
    ``form="weight"`` as in `GaussianMixtureSpectrum`. g is complex, with g(−ξ) the conjugate of
    g(ξ). α_t begin uniform on the circle. For sequences, where before and after differ; the
    paper's real g can give symmetric masks only.

    Args:
        num_heads, num_terms, dim, form, sigma_min, sigma_max, mean_std, generator: see
            `GaussianMixtureSpectrum`.

    Attributes:
        phase: α (H, T).

    Raises:
        ValueError: see `GaussianMixtureSpectrum`.

    Example:
        >>> DirectionalSpectrum(num_heads=4, num_terms=8, dim=1)(torch.zeros(16, 1)).dtype
        torch.complex64
    """

    is_complex = True

    def __init__(
        self,
        num_heads: int,
        num_terms: int,
        dim: int = 3,
        form: str = "amplitude",
        sigma_min: float = 1.0,
        sigma_max: float = 4.0,
        mean_std: float = 0.1,
        generator: torch.Generator | None = None,
    ) -> None:
        generator = seeded_generator(generator)
        super().__init__(num_heads, num_terms, dim, form, sigma_min, sigma_max, mean_std, generator)
        turns = torch.rand(
            num_heads, num_terms, generator=generator, dtype=torch.float32, device="cpu"
        )
        self.phase = nn.Parameter(placed(2 * math.pi * turns))

    def forward(self, frequencies: Tensor) -> Tensor:
        """g(ξ): frequencies (R, ℓ) or (H, R, ℓ), cycles/Å → (H, R), complex."""
        ahead, behind = self._packets(frequencies)
        phase = at_least_float32(self.phase)[:, :, None]
        real = (phase.cos() * (ahead + behind)).sum(1)
        imaginary = (phase.sin() * (ahead - behind)).sum(1)
        return torch.complex(real, imaginary)

    def mask(self, displacements: Tensor) -> Tensor:
        """f(x): displacements (…, ℓ), Å → (…, H)."""
        return self._waves(displacements, at_least_float32(self.phase))
