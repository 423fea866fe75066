"""RPE families: the spectrum g that is learned, and the mask f it stands for.

f(x) = ∫ g(ξ) e^{2πi x·ξ} dξ; lengths in Å, frequencies ξ in cycles/Å.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from flt_mol.functional._common import at_least_float32, draw_normal, placed, seeded_generator

FORMS = ("amplitude", "weight")


class Spectrum(nn.Module):
    """A real spectrum per head. A family of your own needs `forward`, and `mask` where f is known.

    Attributes:
        num_heads: H.
        dim: ℓ, the dimension of positions.
    """

    def __init__(self, num_heads: int, dim: int) -> None:
        super().__init__()
        if num_heads < 1 or dim < 1:
            raise ValueError(f"num_heads and dim must be ≥ 1, got {num_heads} and {dim}")
        self.num_heads = num_heads
        self.dim = dim

    def forward(self, frequencies: Tensor) -> Tensor:
        """g(ξ): frequencies (R, ℓ) → (H, R)."""
        raise NotImplementedError(f"{type(self).__name__} has no spectrum: define forward")

    def mask(self, displacements: Tensor) -> Tensor:
        """f(x) in closed form: displacements (…, ℓ), Å → (…, H)."""
        raise NotImplementedError(f"{type(self).__name__} has no closed form: define mask")


class GaussianSpectrum(Spectrum):
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
        super().__init__(num_heads, dim)
        if form not in FORMS:
            raise ValueError(f"form is {form!r}, expected one of {', '.join(FORMS)}")
        if not 0 < sigma_min <= sigma_max or num_terms < 1:
            raise ValueError(
                f"need 0 < sigma_min ≤ sigma_max and num_terms ≥ 1, got sigma_min={sigma_min}, "
                f"sigma_max={sigma_max}, num_terms={num_terms}"
            )
        self.form = form
        steps = torch.linspace(
            math.log(sigma_min), math.log(sigma_max), num_terms, dtype=torch.float32, device="cpu"
        )
        log_sigma = steps.repeat(num_heads, 1)
        amplitude = draw_normal(num_heads, num_terms, generator=seeded_generator(generator))
        amplitude = amplitude * num_terms**-0.5
        self.log_sigma = nn.Parameter(placed(log_sigma))
        if form == "amplitude":
            self.amplitude = nn.Parameter(placed(amplitude))
        else:
            self.weight = nn.Parameter(placed(amplitude * _volume(log_sigma.exp(), dim)))

    def forward(self, frequencies: Tensor) -> Tensor:
        """g(ξ): frequencies (R, ℓ), cycles/Å → (H, R)."""
        sigma = at_least_float32(self.log_sigma).exp()
        if self.form == "amplitude":
            weight = self.amplitude * _volume(sigma, self.dim)
        else:
            weight = self.weight.to(sigma.dtype)
        squared = at_least_float32(frequencies).square().sum(-1)
        decay = (-2 * math.pi**2 * sigma.square()[:, :, None] * squared).exp()
        return (weight[:, :, None] * decay).sum(1)

    def mask(self, displacements: Tensor) -> Tensor:
        """f(x): displacements (…, ℓ), Å → (…, H)."""
        sigma = at_least_float32(self.log_sigma).exp()
        if self.form == "amplitude":
            amplitude = self.amplitude.to(sigma.dtype)
        else:
            amplitude = self.weight / _volume(sigma, self.dim)
        squared = at_least_float32(displacements).square().sum(-1)[..., None, None]
        return (amplitude * (-squared / (2 * sigma.square())).exp()).sum(-1)

    def extra_repr(self) -> str:
        """What `repr` shows."""
        heads, terms = self.log_sigma.shape
        return f"num_heads={heads}, num_terms={terms}, dim={self.dim}, form={self.form!r}"


def _volume(sigma: Tensor, dim: int) -> Tensor:
    """(√(2π) σ)^ℓ, the integral of exp(−‖x‖²/2σ²)."""
    return (math.sqrt(2 * math.pi) * sigma) ** dim
