"""What every set of frequencies offers: ξ, and what each of them stands for."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from flt_mol.functional.numerics import at_least_float32, placed
from flt_mol.nn.redraw import Redrawn
from flt_mol.nn.spectrum import Spectrum


class Frequencies(Redrawn):
    r"""ξ_1 … ξ_R and their density p, so that (1/R) Σ_t g(ξ_t)/p(ξ_t) cos 2πξ_t·x estimates f(x).

    A family of your own defines `forward`. If the weights of its frequencies are not a spectrum
    over a density, it defines `ratio` instead. Random ones keep their draws as `Redrawn` says.

    Args:
        num_frequencies: R.
        dim: ℓ.

    Raises:
        ValueError: R or ℓ below 1.
    """

    def __init__(self, num_frequencies: int, dim: int) -> None:
        super().__init__()
        if num_frequencies < 1 or dim < 1:
            raise ValueError(
                f"num_frequencies and dim must be ≥ 1, got {num_frequencies} and {dim}"
            )
        self.num_frequencies = num_frequencies
        self.dim = dim

    def forward(self) -> tuple[Tensor, Tensor]:
        """ξ (R, ℓ), cycles/Å, and log p(ξ) (R,); or (H, R, ℓ) and (H, R), a set per head.

        A deterministic set with quadrature weights ω_t, ∫ h(ξ) dξ ≈ Σ_t ω_t h(ξ_t), has
        log p = −log(R ω_t).
        """
        raise NotImplementedError(f"{type(self).__name__} has no density: define forward, or ratio")

    def ratio(self, spectrum: Spectrum) -> tuple[Tensor, Tensor]:
        """ξ (R, ℓ) or (H, R, ℓ), cycles/Å, and ρ = g(ξ)/p(ξ) (H, R), complex where g is."""
        frequencies, log_density = self()
        g = spectrum(frequencies)
        expected = (spectrum.num_heads, self.num_frequencies)
        if tuple(g.shape) != expected:
            raise ValueError(
                f"g of {type(spectrum).__name__} has shape {tuple(g.shape)} for frequencies "
                f"{tuple(frequencies.shape)}, expected (heads, frequencies) = {expected}"
            )
        return frequencies, g * (-log_density).exp()

    def extra_repr(self) -> str:
        """What `repr` shows."""
        return f"num_frequencies={self.num_frequencies}, dim={self.dim}"


class QuadratureFrequencies(Frequencies):
    """Fixed frequencies with quadrature weights: ∫ h(ξ) dξ ≈ Σ_t ω_t h(ξ_t) for even h.

    The mask is then Σ_t ω_t g(ξ_t) cos 2πξ_t·x: no noise, but an error that depends on g and x.

    Args:
        points: ξ (R, ℓ), cycles/Å; of ξ and −ξ, which have the same wave, one is enough.
        weights: ω (R,) > 0, Å^{-ℓ}.

    Raises:
        ValueError: shapes that do not belong together, or numbers that are not finite, or
            weights that are not positive.

    Example:
        The trapezoidal rule of ∫ e^{−πξ²} cos 2πξx dξ = e^{−πx²}:

        >>> import math, torch
        >>> points = torch.arange(9.0)[:, None] / 4
        >>> frequencies = QuadratureFrequencies(points, torch.tensor([0.25] + 8 * [0.5]))
        >>> xi, log_density = frequencies()
        >>> ratio = (-math.pi * xi[:, 0] ** 2 - log_density).exp()
        >>> round(ratio.mean().item(), 4)
        1.0
    """

    points: Tensor
    log_weight: Tensor

    def __init__(self, points: Tensor, weights: Tensor) -> None:
        if points.dim() != 2 or weights.shape != points.shape[:1]:
            raise ValueError(
                f"points must be (R, ℓ) and weights (R,), got {tuple(points.shape)} and "
                f"{tuple(weights.shape)}"
            )
        if not bool(torch.isfinite(points).all() and torch.isfinite(weights).all()):
            raise ValueError("points and weights must be finite: leave out those that are not")
        if not bool((weights > 0).all()):
            raise ValueError(
                f"weights must be positive, the smallest is {float(weights.min()):g}: leave out "
                "points without weight, and choose a rule without negative ones"
            )
        super().__init__(*points.shape)
        self.register_buffer("points", placed(points))
        self.register_buffer("log_weight", placed(weights.log()))

    def forward(self) -> tuple[Tensor, Tensor]:
        """ξ (R, ℓ), cycles/Å, and log p = −log(R ω) (R,)."""
        log_weight = at_least_float32(self.log_weight)
        return at_least_float32(self.points), -log_weight - math.log(self.num_frequencies)


def number_range(value: Any, name: str) -> tuple[float, float]:
    """The lowest and the highest of one number or two, of whatever kind of number.

    Raises:
        ValueError: anything else.

    Example:
        >>> import torch
        >>> number_range(2, "sigma"), number_range(torch.tensor([1.0, 2.0]), "sigma")
        ((2.0, 2.0), (1.0, 2.0))
    """
    try:
        if isinstance(value, Iterable) and getattr(value, "ndim", 1) != 0:
            lowest, highest = map(float, value)
            return lowest, highest
        return float(value), float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{name} is {value!r}, expected one number or (lowest, highest)"
        ) from error


def widths(
    radius: float, sigma: float | tuple[float, float], cutoff: float, margin: float
) -> tuple[float, float]:
    """The narrowest and the widest Gaussian of a deterministic set, Å.

    Raises:
        ValueError: anything that is not positive and finite, or the widest first.
    """
    narrowest, widest = number_range(sigma, "sigma")
    if not (
        0 < narrowest <= widest < math.inf
        and all(0 < value < math.inf for value in (radius, cutoff, margin))
    ):
        raise ValueError(
            f"need finite sigma > 0, narrowest first, and finite radius, cutoff and margin > 0, "
            f"got sigma={sigma}, radius={radius}, cutoff={cutoff}, margin={margin}"
        )
    return narrowest, widest
