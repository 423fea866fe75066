"""Local masks: zero outside learned radii. Box, tent, and B-splines of any order."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from flt_mol.nn.spectrum.terms import TermSpectrum


class _LocalSpectrum(TermSpectrum):
    _name = "radius"
    _per_dimension = True
    order: int

    def __init__(
        self,
        num_heads: int,
        num_terms: int = 16,
        dim: int = 3,
        radius_min: float = 3.0,
        radius_max: float = 6.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(num_heads, num_terms, dim, radius_min, radius_max, generator)
        self._peak = _cardinal_bspline(torch.zeros((), dtype=torch.float64), self.order).item()

    def _unit_spectrum(self, xi: Tensor, length: Tensor) -> Tensor:
        width = 2 * length / self.order
        return _product(width * torch.sinc(width * xi) ** self.order / self._peak)

    def _unit_mask(self, x: Tensor, length: Tensor) -> Tensor:
        return _product(_cardinal_bspline(0.5 * self.order * x / length, self.order) / self._peak)

    def extra_repr(self) -> str:
        """What `repr` shows."""
        return f"{super().extra_repr()}, order={self.order}"


class BSplineSpectrum(_LocalSpectrum):
    r"""Local B-splines of order k: masks that vanish where any \|x_j\| ≥ v_j.

    The k-fold convolution with itself of a box of half-width v/k is a piecewise polynomial of
    degree k − 1 with k − 2 continuous derivatives and support \|x\| ≤ v, the cardinal B-spline
    β_k(kx/2v). Per head, with T terms and a radius per term and dimension:
    f(x) = Σ_t a_t Π_j β_k(kx_j/2v_tj)/β_k(0), of peak f(0) = Σ_t a_t;
    g(ξ) = Σ_t a_t Π_j (2v_tj/k) [sin(2πv_tjξ_j/k)/(2πv_tjξ_j/k)]^k / β_k(0).

    It is the paper's "continuous local RPE" [1] put right: there the power is on the sine alone,
    which for even k is the spectrum of an odd, imaginary mask, for odd k ≥ 3 of one with jumps.
    k = 1 is `BoxSpectrum`, k = 2 `TentSpectrum`; large k tends to a Gaussian of width v/√(3k).
    \|g\| decays as \|ξ_j\|^{−k}: from k = 2 on, the variance of a sampled mask can be finite.
    Support is a box, so these masks know the axes.

    Args:
        num_heads, num_terms, dim, generator: see `TermSpectrum`.
        order: k ≥ 1.
        radius_min, radius_max: smallest and largest v_t at the start, Å, evenly spaced in log v.

    Attributes:
        log_radius: log v (H, T, ℓ), v in Å.
        amplitude: a (H, T).

    Raises:
        ValueError: order below 1, or radii that are not 0 < radius_min ≤ radius_max.

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
        num_terms: int = 16,
        dim: int = 3,
        order: int = 4,
        radius_min: float = 3.0,
        radius_max: float = 6.0,
        generator: torch.Generator | None = None,
    ) -> None:
        if order < 1:
            raise ValueError(f"order is {order}, expected k ≥ 1 (1 box, 2 tent, 3 smooth)")
        self.order = order
        super().__init__(num_heads, num_terms, dim, radius_min, radius_max, generator)


class BoxSpectrum(_LocalSpectrum):
    r"""Boxes with learned radii: f(x) = Σ_t a_t Π_j 1[\|x_j\| ≤ v_tj] per head.

    g(ξ) = Σ_t a_t Π_j sin(2πv_tjξ_j)/(πξ_j), with 2v_tj at ξ_j = 0. g is not integrable: **a
    sampled box has infinite variance under every density of frequencies**, its mask is a noisy,
    band-limited version of a box. `mask` is the exact one; being flat, it has no gradient to the
    radii, while g has. Arguments are those of `BSplineSpectrum` without the order, which is 1.
    """

    order = 1


class TentSpectrum(_LocalSpectrum):
    r"""Tents, continuous local masks: f(x) = Σ_t a_t Π_j (1 − \|x_j\|/v_tj)_+ per head.

    g(ξ) = Σ_t a_t Π_j sin²(πv_tjξ_j)/(v_tj π²ξ_j²). Arguments are those of `BSplineSpectrum`
    without the order, which is 2.
    """

    order = 2


def _cardinal_bspline(x: Tensor, order: int) -> Tensor:
    r"""β_k(x): the k-fold convolution of the box of width 1 around 0 with itself, of integral 1.

    By the recurrence of Cox and de Boor, whose summands are positive: no digits are lost.
    """
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
