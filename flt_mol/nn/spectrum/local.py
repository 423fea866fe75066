"""Local masks: zero outside learned radii. Box, tent, and B-splines of any order."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from flt_mol.functional.numerics import at_least_float32
from flt_mol.nn.spectrum._shapes import cardinal_bspline, sine_ratio
from flt_mol.nn.spectrum._terms import FORMS, TermSpectrum, check_form, product


class BSplineSpectrum(TermSpectrum):
    r"""Local B-splines of order k: masks that vanish where any \|x_j\| ≥ v_j.

    The k-fold convolution with itself of a box of half-width v/k is a piecewise polynomial of
    degree k − 1 with k − 2 continuous derivatives and support \|x\| ≤ v, the cardinal B-spline
    β_k(kx/2v). Per head, with T terms and a radius per term and dimension:

    - ``form="amplitude"``: f(x) = Σ_t a_t Π_j β_k(kx_j/2v_tj)/β_k(0), of peak f(0) = Σ_t a_t;
      g(ξ) = Σ_t a_t Π_j (2v_tj/k) [sin(2πv_tjξ_j/k)/(2πv_tjξ_j/k)]^k / β_k(0).
    - ``form="weight"``: g(ξ) = Σ_t w_t Π_j [sin(2πv_tjξ_j/k)/(πξ_j)]^k, the paper's "continuous
      local RPE" [1] put right: there the power is on the sine alone, sin^k(2πvξ)/(πξ), which for
      even k is the spectrum of an odd, imaginary mask and for odd k ≥ 3 that of a mask with jumps
      and support k·v. And the paper's C is w here, outside of the product over dimensions.

    Both begin as the same function. k = 1 is `BoxSpectrum`, k = 2 `TentSpectrum`; large k tends to
    a Gaussian of width v/√(3k). \|g\| decays as \|ξ_j\|^{−k}: from k = 2 on, the variance of a
    sampled mask can be finite. Support is a box, so these masks know the axes.

    Args:
        num_heads, num_terms, dim: H, T and ℓ.
        order: k ≥ 1.
        form: "amplitude" or "weight".
        radius_min, radius_max: smallest and largest v_t at the start, Å, evenly spaced in log v.
        generator: on CPU; None takes a seed from torch's global one.

    Attributes:
        log_length: log v (H, T, ℓ), v in Å.
        amplitude, weight: a or w (H, T), whichever `form` says.

    Raises:
        ValueError: order below 1, unknown form, or radii that are not 0 < radius_min ≤ radius_max.

    References:
        [1] Choromanski et al., AISTATS 2024, "local RPEs".

    Example:
        >>> spectrum = BSplineSpectrum(num_heads=1, num_terms=1, dim=1, order=3, radius_max=3.0)
        >>> mask = spectrum.mask(torch.tensor([[0.0], [1.0], [2.9], [3.1]])) / spectrum.amplitude
        >>> mask.detach().abs().flatten()
        tensor([1.0000, 0.6667, 0.0017, 0.0000])
    """

    def __init__(
        self,
        num_heads: int,
        num_terms: int,
        dim: int = 3,
        order: int = 4,
        form: str = "amplitude",
        radius_min: float = 3.0,
        radius_max: float = 6.0,
        generator: torch.Generator | None = None,
    ) -> None:
        check_form(form, FORMS)
        if order < 1:
            raise ValueError(f"order is {order}, expected k ≥ 1 (1 box, 2 tent, 3 smooth)")
        radii = ("radius", radius_min, radius_max)
        super().__init__(num_heads, num_terms, dim, radii, True, generator)
        self.order = order
        self.form = form
        origin = torch.zeros((), dtype=torch.float64, device="cpu")
        self._peak = cardinal_bspline(origin, order).item()
        if form == "weight":
            weight = self.amplitude.detach() / self._heights().detach()
            self.weight = nn.Parameter(weight.to(self.amplitude.dtype))
            del self.amplitude

    def _amplitudes(self) -> Tensor:
        if self.form == "amplitude":
            return super()._amplitudes()
        return at_least_float32(self.weight) * self._heights()

    def _heights(self) -> Tensor:
        """f(0) of a term of weight 1: Π_j (2v_j/k)^{k−1} β_k(0), (H, T)."""
        width = 2 * self.lengths / self.order
        return product(width ** (self.order - 1) * self._peak)

    def _unit_spectrum(self, xi: Tensor, length: Tensor) -> Tensor:
        width = 2 * length / self.order
        return product(width * sine_ratio(math.pi * width * xi) ** self.order / self._peak)

    def _unit_mask(self, x: Tensor, length: Tensor) -> Tensor:
        return product(cardinal_bspline(0.5 * self.order * x / length, self.order) / self._peak)

    def extra_repr(self) -> str:
        """What `repr` shows."""
        return f"{super().extra_repr()}, order={self.order}, form={self.form!r}"


class BoxSpectrum(BSplineSpectrum):
    r"""Boxes with learned radii: f(x) = Σ_t C_t Π_j 1[\|x_j\| ≤ v_tj] per head.

    g(ξ) = Σ_t C_t Π_j sin(2πv_tjξ_j)/(πξ_j), with 2v_tj at ξ_j = 0: the B-spline of order 1, whose
    two forms are one. C is outside of the product; the paper [1] has it inside, which for f is
    C^ℓ. g is not integrable: **a sampled box has infinite variance under every density of
    frequencies**, its mask is a noisy, band-limited version of a box. `mask` is the exact one;
    being flat, it has no gradient to the radii, while g has.

    Args:
        num_heads, num_terms, dim, radius_min, radius_max, generator: see `BSplineSpectrum`.

    References:
        [1] Choromanski et al., AISTATS 2024, "local RPEs".

    Example:
        >>> spectrum = BoxSpectrum(num_heads=1, num_terms=1, dim=2, radius_max=3.0)
        >>> mask = spectrum.mask(torch.tensor([[0.0, 2.9], [0.0, 3.1]])) / spectrum.amplitude
        >>> mask.detach().abs().flatten()
        tensor([1., 0.])
    """

    def __init__(
        self,
        num_heads: int,
        num_terms: int,
        dim: int = 3,
        radius_min: float = 3.0,
        radius_max: float = 6.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(
            num_heads, num_terms, dim, 1, "amplitude", radius_min, radius_max, generator
        )


class TentSpectrum(BSplineSpectrum):
    r"""Tents, continuous local masks: the B-spline of order 2.

    - ``form="amplitude"``: f(x) = Σ_t a_t Π_j (1 − \|x_j\|/v_tj)_+ per head, of peak Σ_t a_t;
      g(ξ) = Σ_t a_t Π_j sin²(πv_tjξ_j)/(v_tj π²ξ_j²).
    - ``form="weight"``: f(x) = Σ_t w_t Π_j (v_tj − \|x_j\|)_+,
      g(ξ) = Σ_t w_t Π_j sin²(πv_tjξ_j)/(πξ_j)².

    g ≥ 0 for positive amplitudes.

    Args:
        num_heads, num_terms, dim, form, radius_min, radius_max, generator: see `BSplineSpectrum`.
    """

    def __init__(
        self,
        num_heads: int,
        num_terms: int,
        dim: int = 3,
        form: str = "amplitude",
        radius_min: float = 3.0,
        radius_max: float = 6.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(num_heads, num_terms, dim, 2, form, radius_min, radius_max, generator)
