"""Cauchy kernels."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flt_mol.functional.numerics import draw_normal
from flt_mol.nn.spectrum._terms import check_form, norm, product
from flt_mol.nn.spectrum.kernels import KernelSpectrum

CAUCHY_FORMS = ("multivariate", "rational", "separable")


class CauchySpectrum(KernelSpectrum):
    r"""Cauchy kernels: masks with slow, algebraic tails.

    - ``form="multivariate"``: f(x) = Σ_t a_t (1 + ‖x‖²/s_t²)^{−(ℓ+1)/2}, the shape of the
      multivariate Cauchy density, any ℓ;
      g(ξ) = Σ_t a_t π^{(ℓ+1)/2}/Γ((ℓ+1)/2) s_t^ℓ e^{−2πs_t‖ξ‖}.
    - ``form="rational"``: f(x) = Σ_t a_t / (1 + ‖x‖²/s_t²), ℓ = 1 or 3. For ℓ = 1 as above; for
      ℓ = 3, g(ξ) = Σ_t a_t π s_t² e^{−2πs_t‖ξ‖}/‖ξ‖: this mask reaches so far that its integral is
      infinite, and g with it at ξ = 0. There g is held at its value at s‖ξ‖ = 10⁻³, which changes
      the sampled mask by less than 10⁻⁵ a. No lattice sum of it exists.
    - ``form="separable"``: f(x) = Σ_t a_t Π_j 1/(1 + x_j²/s_tj²), a length per dimension, any ℓ:
      with equal ones the "Cauchy kernel" of [1]. It knows the axes.
      g(ξ) = Σ_t a_t Π_j π s_tj e^{−2πs_tj\|ξ_j\|}, a product of Laplace densities.

    The three are the same where ℓ = 1.

    Args:
        num_heads, num_terms, dim: H, T and ℓ.
        form: "multivariate", "rational" or "separable".
        length_min, length_max, generator: see `MaternSpectrum`.

    Attributes:
        log_length: log s (H, T), or (H, T, ℓ) if separable, s in Å.
        amplitude: a (H, T).

    Raises:
        ValueError: unknown form, "rational" in another ℓ, or lengths that are not
            0 < length_min ≤ length_max.

    References:
        [1] Rahimi & Recht, NeurIPS 2007, figure 1.
    """

    def __init__(
        self,
        num_heads: int,
        num_terms: int,
        dim: int = 3,
        form: str = "multivariate",
        length_min: float = 1.0,
        length_max: float = 4.0,
        generator: torch.Generator | None = None,
    ) -> None:
        check_form(form, CAUCHY_FORMS)
        if form == "rational" and dim not in (1, 3):
            raise ValueError(
                f"form 'rational' is known in 1 and 3 dimensions, got dim={dim}: use "
                "'multivariate' or 'separable'"
            )
        lengths = ("length", length_min, length_max)
        super().__init__(num_heads, num_terms, dim, lengths, form == "separable", generator)
        self.form = form

    def _unit_spectrum(self, xi: Tensor, length: Tensor) -> Tensor:
        if self.form == "separable":
            return product(math.pi * length * (-2 * math.pi * length * xi.abs()).exp())
        stretched = length * norm(xi)
        if self.form == "rational" and self.dim == 3:
            held = stretched.clamp(min=1e-3)
            return math.pi * length**3 * (-2 * math.pi * held).exp() / held
        power = (self.dim + 1) / 2
        constant = math.pow(math.pi, power) / math.gamma(power)
        return constant * length**self.dim * (-2 * math.pi * stretched).exp()

    def _unit_mask(self, x: Tensor, length: Tensor) -> Tensor:
        if self.form == "separable":
            return product(1 / (1 + (x / length).square()))
        power = 1.0 if self.form == "rational" else (self.dim + 1) / 2
        return (1 + x.square().sum(-1) / length.square()).pow(-power)

    def _draws(self, count: int, generator: torch.Generator) -> Tensor:
        if self.form == "separable":
            return _exponential(count, self.dim, generator=generator) * _signs(
                count, self.dim, generator=generator
            )
        direction = draw_normal(count, self.dim, generator=generator)
        direction = direction / norm(direction)[:, None]
        # ‖ξ‖ has density ∝ ‖ξ‖^{n−1} e^{−2π‖ξ‖}: a sum of n exponential variables.
        shape = (self.dim + 1) // 2 if self.form == "rational" else self.dim
        return _exponential(count, shape, generator=generator).sum(-1, keepdim=True) * direction

    def extra_repr(self) -> str:
        """What `repr` shows."""
        return f"{super().extra_repr()}, form={self.form!r}"


def _exponential(*shape: int, generator: torch.Generator) -> Tensor:
    """Exponential variables of mean 1/2π, float32 on CPU."""
    uniform = torch.rand(*shape, generator=generator, dtype=torch.float32, device="cpu")
    return -torch.log1p(-uniform) / (2 * math.pi)


def _signs(*shape: int, generator: torch.Generator) -> Tensor:
    """±1 with equal odds, float32 on CPU."""
    coin = torch.randint(2, shape, generator=generator, device="cpu")
    return (2 * coin - 1).to(torch.float32)
