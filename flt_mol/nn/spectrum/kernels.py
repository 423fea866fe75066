"""Matérn and Cauchy kernels; local masks.

Their spectra have long tails: with Gaussian frequencies the variance of a sampled Matérn or Cauchy
kernel, or of a box, is infinite.
"""

from __future__ import annotations

import math
from functools import reduce

import torch
from torch import Tensor

from flt_mol.functional.neighbors import pair_lengths
from flt_mol.nn.spectrum.terms import TermSpectrum


class MaternSpectrum(TermSpectrum):
    r"""Matérn kernels of smoothness ν, in any dimension ℓ: f(x) = Σ_t a_t K_ν(‖x‖/s_t) per head.

    With u = √(2ν) r/s: K_{1/2} = e^{−u} (Laplace's), K_{3/2} = (1 + u) e^{−u},
    K_{5/2} = (1 + u + u²/3) e^{−u}; ν → ∞ is `GaussianSpectrum`. With κ = √(2ν)/s,
    g(ξ) = Σ_t a_t (4π)^{ℓ/2} Γ(ν + ℓ/2)/Γ(ν) κ_t^{−ℓ} (1 + 4π²‖ξ‖²/κ_t²)^{−ν−ℓ/2} [1, eq. 4.15].
    The gradient of f by x is 0 at x = 0, also where the kernel has a cusp.

    Args:
        num_heads, num_terms, dim, length_min, length_max, generator: see `TermSpectrum`.
        nu: ν, one of 0.5, 1.5 and 2.5.

    Raises:
        ValueError: another ν, or lengths that are not 0 < length_min ≤ length_max.

    References:
        [1] Rasmussen & Williams, "Gaussian Processes for Machine Learning", MIT Press 2006.
    """

    def __init__(
        self,
        num_heads: int,
        num_terms: int = 16,
        dim: int = 3,
        nu: float = 1.5,
        length_min: float = 1.0,
        length_max: float = 4.0,
        generator: torch.Generator | None = None,
    ) -> None:
        if nu not in (0.5, 1.5, 2.5):
            raise ValueError(f"nu is {nu}, expected one of 0.5, 1.5, 2.5")
        super().__init__(num_heads, num_terms, dim, length_min, length_max, generator)
        self.nu = nu

    def _unit_spectrum(self, xi: Tensor, length: Tensor) -> Tensor:
        power = self.nu + self.dim / 2
        constant = math.pow(4 * math.pi, self.dim / 2) * math.gamma(power) / math.gamma(self.nu)
        inverse = length / math.sqrt(2 * self.nu)
        stretched = 4 * math.pi**2 * xi.square().sum(-1) * inverse.square()
        return constant * inverse**self.dim * (1 + stretched).pow(-power)

    def _unit_mask(self, x: Tensor, length: Tensor) -> Tensor:
        u = math.sqrt(2 * self.nu) * pair_lengths(x) / length
        decay = (-u).exp()
        if self.nu == 0.5:
            return decay
        return (1 + u) * decay if self.nu == 1.5 else (1 + u + u.square() / 3) * decay


class CauchySpectrum(TermSpectrum):
    r"""Cauchy kernels, with algebraic tails: f(x) = Σ_t a_t (1 + ‖x‖²/s_t²)^{−(ℓ+1)/2} per head.

    In any ℓ, g(ξ) = Σ_t a_t π^{(ℓ+1)/2}/Γ((ℓ+1)/2) s_t^ℓ e^{−2πs_t‖ξ‖}. Arguments are those of
    `TermSpectrum`.
    """

    def _unit_spectrum(self, xi: Tensor, length: Tensor) -> Tensor:
        power = (self.dim + 1) / 2
        constant = math.pow(math.pi, power) / math.gamma(power)
        return constant * length**self.dim * (-2 * math.pi * length * pair_lengths(xi)).exp()

    def _unit_mask(self, x: Tensor, length: Tensor) -> Tensor:
        return (1 + x.square().sum(-1) / length.square()).pow(-(self.dim + 1) / 2)


class BSplineSpectrum(TermSpectrum):
    r"""Local B-splines of order k: masks that vanish where any \|x_j\| ≥ v_j.

    The k-fold convolution with itself of a box of half-width v/k, the cardinal B-spline β_k(kx/2v):
    k = 1 is a box, k = 2 a tent (1 − \|x\|/v)_+; large k tends to a Gaussian of width v/√(3k). Per
    head, with radii per term and dimension, f(x) = Σ_t a_t Π_j β_k(kx_j/2v_tj)/β_k(0),
    g(ξ) = Σ_t a_t Π_j (2v_tj/k) [sin(2πv_tjξ_j/k)/(2πv_tjξ_j/k)]^k / β_k(0).

    The paper's "continuous local RPE" [1], whose power is on the sine alone: for even k the
    spectrum of an odd, imaginary mask, for odd k ≥ 3 of one with jumps.
    \|g\| decays as \|ξ_j\|^{−k}: a sampled box has infinite variance under every density of
    frequencies, and its exact `mask` no gradient to the radii. Masks know the axes.

    Args:
        num_heads, num_terms, dim, generator: see `TermSpectrum`.
        order: k ≥ 1.
        radius_min, radius_max: smallest and largest v_t at the start, Å, evenly spaced in log v.
            The parameter is `log_radius` (H, T, ℓ).

    Raises:
        ValueError: order below 1, or radii that are not 0 < radius_min ≤ radius_max.

    References:
        [1] Choromanski et al., AISTATS 2024, "local RPEs".

    Examples:
        >>> spectrum = BSplineSpectrum(num_heads=1, num_terms=1, dim=1, order=3, radius_max=3.0)
        >>> mask = spectrum.mask(torch.tensor([[0.0], [1.0], [2.9], [3.1]])) / spectrum.amplitude
        >>> mask.detach().abs().flatten()
        tensor([1.0000, 0.6667, 0.0017, 0.0000])
    """

    _name = "radius"
    _per_dimension = True

    def __init__(
        self,
        num_heads: int,
        num_terms: int = 16,
        dim: int = 3,
        order: int = 4,
        radius_min: float = 3.0,
        radius_max: float = 6.0,
        generator: torch.Generator | None = None,
    ) -> None:
        if order < 1:
            raise ValueError(f"order is {order}, expected k ≥ 1 (1 box, 2 tent, 3 smooth)")
        super().__init__(num_heads, num_terms, dim, radius_min, radius_max, generator)
        self.order = order
        self._peak = _cardinal_bspline(torch.zeros((), dtype=torch.float64), order).item()

    def _unit_spectrum(self, xi: Tensor, length: Tensor) -> Tensor:
        width = 2 * length / self.order
        return _product(width * torch.sinc(width * xi) ** self.order / self._peak)

    def _unit_mask(self, x: Tensor, length: Tensor) -> Tensor:
        return _product(_cardinal_bspline(0.5 * self.order * x / length, self.order) / self._peak)


def _cardinal_bspline(x: Tensor, order: int) -> Tensor:
    """β_k(x) by the recurrence of Cox and de Boor, whose summands are positive."""
    # The function is even. |x| sets the slope at a kink at 0 to zero, but would lose a curvature.
    u = order / 2 - (x.abs() if order <= 2 else x)
    pieces = [((u >= i) & (u < i + 1)).to(u.dtype) for i in range(order)]
    for m in range(2, order + 1):
        pieces = [
            ((u - i) * pieces[i] + (i + m - u) * pieces[i + 1]) / (m - 1)
            for i in range(order - m + 1)
        ]
    return pieces[0]


def _product(x: Tensor) -> Tensor:
    """Π over the last, short axis: (…, ℓ) → (…); `torch.prod`'s gradient divides by factors."""
    return reduce(torch.mul, x.unbind(-1))
