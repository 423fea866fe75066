r"""Shift-invariant kernels: sums of scaled copies of one kernel K with K(0) = 1.

Such a kernel is the mean of a wave over a density: K(x) = E[cos 2πξ·x] for ξ ~ p_K, the principle
of random Fourier features [1]. Textbooks take angular frequencies ω = 2πξ: here all frequencies
are in cycles/Å. If ξ is drawn from p_K itself, every ρ = g/p is the amplitude: `standard_draws`
gives such ξ for a length of 1 Å; divide them by s. These spectra decay as powers or exponentials
of ‖ξ‖: with Gaussian frequencies the variance of the sampled mask is infinite, since what makes
the kernel's peak at 0 sharp is then drawn too rarely.

References:
    [1] Rahimi & Recht, "Random features for large-scale kernel machines", NeurIPS 2007.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flt_mol.functional.numerics import draw_normal, seeded_generator
from flt_mol.nn.spectrum._terms import TermSpectrum, check_form, norm, product

SMOOTHNESS = (0.5, 1.5, 2.5)
LAPLACE_FORMS = ("isotropic", "separable")


class KernelSpectrum(TermSpectrum):
    """A sum of kernels whose spectra are densities that can be drawn from: see its subclasses."""

    def standard_draws(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """ξ (R, ℓ) from the density p_K of the kernel of length 1 Å, float32 on CPU.

        ξ/s has the density of the kernel of length s, so that for one of those
        E[a cos(2πξ·x/s)] = a K(x/s). With a length per dimension, divide coordinate by coordinate.

        Args:
            count: R.
            generator: on CPU; None takes a seed from torch's global one.

        Example:
            >>> spectrum = LaplaceSpectrum(num_heads=1, num_terms=1, length_max=1.0)
            >>> spectrum.standard_draws(16).shape
            torch.Size([16, 3])
        """
        return self._draws(count, seeded_generator(generator))

    def _draws(self, count: int, generator: torch.Generator) -> Tensor:
        raise NotImplementedError


class MaternSpectrum(KernelSpectrum):
    r"""Matérn kernels of smoothness ν, in any dimension ℓ: f(x) = Σ_t a_t K_ν(‖x‖/s_t) per head.

    With u = √(2ν) r/s: K_{1/2} = e^{−u}, K_{3/2} = (1 + u) e^{−u},
    K_{5/2} = (1 + u + u²/3) e^{−u}; ν → ∞ is `GaussianSpectrum`. With κ = √(2ν)/s,
    g(ξ) = Σ_t a_t (4π)^{ℓ/2} Γ(ν + ℓ/2)/Γ(ν) κ_t^{−ℓ} (1 + 4π²‖ξ‖²/κ_t²)^{−ν−ℓ/2} [1, eq. 4.15],
    a multivariate Student t density with 2ν degrees of freedom. The gradient of f by x is 0 at
    x = 0, also where the kernel has a cusp; so are further derivatives, at that point only.

    Args:
        num_heads, num_terms, dim: H, T and ℓ.
        nu: ν, one of 0.5, 1.5 and 2.5.
        length_min, length_max: shortest and longest s_t at the start, Å, evenly spaced in log s.
        generator: on CPU; None takes a seed from torch's global one.

    Attributes:
        log_length: log s (H, T), s in Å.
        amplitude: a (H, T), normal with standard deviation 1/√T at the start.

    Raises:
        ValueError: another ν, or lengths that are not 0 < length_min ≤ length_max.

    References:
        [1] Rasmussen & Williams, "Gaussian Processes for Machine Learning", MIT Press 2006.

    Example:
        >>> MaternSpectrum(num_heads=4, num_terms=8, nu=2.5).mask(torch.zeros(5, 3)).shape
        torch.Size([5, 4])
    """

    def __init__(
        self,
        num_heads: int,
        num_terms: int,
        dim: int = 3,
        nu: float = 1.5,
        length_min: float = 1.0,
        length_max: float = 4.0,
        generator: torch.Generator | None = None,
    ) -> None:
        if nu not in SMOOTHNESS:
            raise ValueError(f"nu is {nu}, expected one of {', '.join(map(str, SMOOTHNESS))}")
        lengths = ("length", length_min, length_max)
        super().__init__(num_heads, num_terms, dim, lengths, generator=generator)
        self.nu = nu

    def _unit_spectrum(self, xi: Tensor, length: Tensor) -> Tensor:
        power = self.nu + self.dim / 2
        constant = math.pow(4 * math.pi, self.dim / 2) * math.gamma(power) / math.gamma(self.nu)
        inverse = length / math.sqrt(2 * self.nu)
        stretched = 4 * math.pi**2 * xi.square().sum(-1) * inverse.square()
        return constant * inverse**self.dim * (1 + stretched).pow(-power)

    def _unit_mask(self, x: Tensor, length: Tensor) -> Tensor:
        u = math.sqrt(2 * self.nu) * norm(x) / length
        decay = (-u).exp()
        if self.nu == 0.5:
            return decay
        return (1 + u) * decay if self.nu == 1.5 else (1 + u + u.square() / 3) * decay

    def _draws(self, count: int, generator: torch.Generator) -> Tensor:
        normal = draw_normal(count, self.dim, generator=generator)
        # χ² with 2ν degrees of freedom over 2ν: a Student t is a normal over its root.
        scale = draw_normal(count, int(2 * self.nu), generator=generator).square().mean(-1)
        return normal / (2 * math.pi * scale.sqrt()[:, None])

    def extra_repr(self) -> str:
        """What `repr` shows."""
        return f"{super().extra_repr()}, nu={self.nu}"


class LaplaceSpectrum(KernelSpectrum):
    r"""Laplace kernels, in any dimension ℓ.

    - ``form="isotropic"``: f(x) = Σ_t a_t exp(−‖x‖/s_t), the Matérn kernel of ν = 1/2;
      g(ξ) = Σ_t a_t 2^ℓ π^{(ℓ−1)/2} Γ((ℓ+1)/2) s_t^ℓ (1 + 4π²s_t²‖ξ‖²)^{−(ℓ+1)/2}, a multivariate
      Cauchy density.
    - ``form="separable"``: f(x) = Σ_t a_t Π_j exp(−\|x_j\|/s_tj), a length per dimension; with
      equal ones the "Laplacian kernel" exp(−‖x‖₁/s) of [1]. It knows the axes: not for molecules
      free to turn. g(ξ) = Σ_t a_t Π_j 2s_tj/(1 + (2πs_tj ξ_j)²), a product of Cauchy densities.

    Both have a cusp at 0. They are the same where ℓ = 1.

    Args:
        num_heads, num_terms, dim: H, T and ℓ.
        form: "isotropic" or "separable".
        length_min, length_max, generator: see `MaternSpectrum`.

    Attributes:
        log_length: log s (H, T), or (H, T, ℓ) if separable, s in Å.
        amplitude: a (H, T).

    Raises:
        ValueError: unknown form, or lengths that are not 0 < length_min ≤ length_max.

    References:
        [1] Rahimi & Recht, NeurIPS 2007, figure 1.
    """

    def __init__(
        self,
        num_heads: int,
        num_terms: int,
        dim: int = 3,
        form: str = "isotropic",
        length_min: float = 1.0,
        length_max: float = 4.0,
        generator: torch.Generator | None = None,
    ) -> None:
        check_form(form, LAPLACE_FORMS)
        lengths = ("length", length_min, length_max)
        super().__init__(num_heads, num_terms, dim, lengths, form == "separable", generator)
        self.form = form

    def _unit_spectrum(self, xi: Tensor, length: Tensor) -> Tensor:
        if self.form == "separable":
            return product(2 * length / (1 + (2 * math.pi * length * xi).square()))
        power = (self.dim + 1) / 2
        constant = math.pow(2, self.dim) * math.pow(math.pi, (self.dim - 1) / 2) * math.gamma(power)
        stretched = 4 * math.pi**2 * xi.square().sum(-1) * length.square()
        return constant * length**self.dim * (1 + stretched).pow(-power)

    def _unit_mask(self, x: Tensor, length: Tensor) -> Tensor:
        if self.form == "separable":
            return (-(x.abs() / length).sum(-1)).exp()
        return (-norm(x) / length).exp()

    def _draws(self, count: int, generator: torch.Generator) -> Tensor:
        columns = self.dim if self.form == "separable" else 1
        normal = draw_normal(count, self.dim, generator=generator)
        # A Cauchy variable is a ratio of normals; the isotropic one has one denominator.
        return normal / (2 * math.pi * draw_normal(count, columns, generator=generator))

    def extra_repr(self) -> str:
        """What `repr` shows."""
        return f"{super().extra_repr()}, form={self.form!r}"
