"""Spherical shells of frequencies, each a Lebedev rule: rotations change the mask least."""

from __future__ import annotations

import importlib
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flt_mol.nn.frequencies.base import QuadratureFrequencies, widths

# Of the rules in SciPy, those with positive weights. Each is exact up to its degree.
_DEGREES: tuple[int, ...] = (3, 5, 7, 9, 11, 15, 17, 19, 21, 23, 29, 31, *range(35, 132, 6))


class LebedevFrequencies(QuadratureFrequencies):
    r"""Evenly spaced shells |ξ| = q_1, 2q_1, … and on each of them a Lebedev rule: half of it.

    For ℓ = 3, N̂(x) = Σ_s 4πs²q_1³ Σ_u ω_u g(s q_1 u) cos(2πs q_1 u·x), u over the rule's
    directions. The trapezoidal rule in |ξ| repeats r f(r) with the period 1/q_1 = radius +
    margin·σ_max, and its error is the same in all directions, as is that of leaving out
    |ξ| > cutoff/(2πσ_min). (Gauss rules in |ξ| need 1.5 to 2 times as many points here: f ends
    where r is large, which they cannot know.) Directions differ by the error of the Lebedev rule
    [1] alone. A rule of odd degree d first fails at (2d + 3) j_{d+1}(2π|ξ|r) P_{d+1}(û·x̂), with j
    the spherical Bessel function; on each shell d is the smallest for which this is below
    `tolerance` times f(0), for radius r and any Gaussian between the narrowest and the widest.

    Measured for the defaults, radius 18 Å and one Gaussian with f(0) = 1 (`rotation_error`, and the
    largest |N̂ − f|):

    | σ, Å | R | rotation error | error |
    |---|---|---|---|
    | 1 | 6656 | 2.0e-4 | 6.3e-4 |
    | 2 | 1256 | 2.9e-4 | 6.5e-4 |
    | 4 | 275 | 2.1e-4 | 6.5e-4 |
    | 2 and 4 | 1781 | 1.0e-4 | 2.0e-4 |

    Where f itself may be rough, a few shells still do not depend on orientation: for σ = 4 Å,
    ``cutoff=2.5, margin=0.5`` has R = 43, rotation error 6.5e-7 and error 0.28, and ``cutoff=3.0,
    margin=1.0`` R = 80, 3.0e-4 and 0.14. In `LatticeFrequencies` the two errors are of one size.

    Args:
        radius: of the displacements for which the mask is to be right, Å.
        sigma: width of the Gaussians in real space, Å; one, or (narrowest, widest).
        tolerance: of the directions, on each shell, in units of f(0).
        cutoff: 2πσ_min times the largest |ξ|.
        margin: (1/q_1 − radius)/σ_max.

    Raises:
        ValueError: values that are not positive and finite, or a tolerance that no rule reaches.
        ImportError: no SciPy ≥ 1.15, which has the rules.

    References:
        [1] Lebedev & Laikov, "A quadrature formula for the sphere of the 131st algebraic order of
        accuracy", 1999.

    Example:
        >>> LebedevFrequencies(radius=18.0, sigma=4.0).num_frequencies
        275
    """

    def __init__(
        self,
        radius: float,
        sigma: float | tuple[float, float],
        *,
        tolerance: float = 1e-3,
        cutoff: float = 4.2,
        margin: float = 4.0,
    ) -> None:
        radius, cutoff, margin = float(radius), float(cutoff), float(margin)
        narrowest, widest = widths(radius, sigma, cutoff, margin)
        if not 0 < tolerance < math.inf:
            raise ValueError(f"tolerance is {tolerance}, expected a finite number > 0")
        step = 1 / (radius + margin * widest)
        points, weights = [], []
        for shell in range(1, math.floor(cutoff / (2 * math.pi * narrowest) / step + 1e-9) + 1):
            q = shell * step
            volume = 4 * math.pi * q**2 * step
            largest = volume * _largest_spectrum(q, narrowest, widest)
            directions, shares = half_rule(_degree(q * radius, tolerance / largest))
            points.append(q * directions)
            weights.append(volume * shares)
        if not points:
            raise ValueError(
                f"no shell fits below cutoff/(2πσ) for cutoff={cutoff}, sigma={sigma}, radius="
                f"{radius}: raise cutoff or margin"
            )
        super().__init__(torch.cat(points), torch.cat(weights))


def half_rule(degree: int) -> tuple[Tensor, Tensor]:
    """Directions u (K, 3) of a Lebedev rule, one of u and −u, and weights (K,) that sum to 1.

    Args:
        degree: up to which polynomials are integrated exactly; one that exists.

    Returns:
        float64 on CPU.

    Raises:
        ImportError: no SciPy ≥ 1.15.

    Example:
        >>> directions, weights = half_rule(3)
        >>> directions.shape, weights.sum().item()
        (torch.Size([3, 3]), 1.0)
    """
    points, weights = _scipy("integrate", "lebedev_rule")(degree)
    # Coordinates that should be 0 are off by rounding.
    x, y, z = np.where(np.abs(points) < 1e-9, 0.0, points)
    upper = (z > 0) | ((z == 0) & ((y > 0) | ((y == 0) & (x > 0))))
    directions = torch.from_numpy(np.stack([x, y, z], axis=-1)[upper])
    shares = torch.from_numpy(np.asarray(weights[upper], dtype=np.float64))
    return directions, shares / shares.sum()


def _largest_spectrum(q: float, narrowest: float, widest: float) -> float:
    """The largest g(q) of Gaussians with f(0) = 1: (√(2π)σ)³ exp(−2π²σ²q²) has one maximum in σ."""
    best = min(max(math.sqrt(3) / (2 * math.pi * q), narrowest), widest)
    return (math.sqrt(2 * math.pi) * best) ** 3 * math.exp(-2 * (math.pi * best * q) ** 2)


def _degree(turns: float, tolerance: float) -> int:
    """The lowest degree whose error on waves of up to `turns` periods is below `tolerance`."""
    bessel = _scipy("special", "spherical_jn")
    phases = np.linspace(0.0, 2 * math.pi * turns, 257)
    for degree in _DEGREES:
        if (2 * degree + 3) * float(np.abs(bessel(degree + 1, phases)).max()) <= tolerance:
            return degree
    raise ValueError(
        f"no Lebedev rule resolves waves of {turns:.3g} periods within {tolerance:.1g}: take a "
        "smaller radius, wider Gaussians (sigma), or LatticeFrequencies"
    )


def _scipy(module: str, name: str) -> Any:
    """A function of SciPy, which is imported here alone."""
    try:
        return getattr(importlib.import_module(f"scipy.{module}"), name)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            "LebedevFrequencies needs SciPy ≥ 1.15: install it, or use LatticeFrequencies"
        ) from error
