"""Deterministic sets: a lattice, and spherical shells with Lebedev rules."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from flt_mol.functional.groups import at_least_float32
from flt_mol.functional.reciprocal import half_lattice
from flt_mol.nn.frequencies.base import Frequencies
from flt_mol.nn.layers import placed
from flt_mol.nn.spectrum import Spectrum

_MAX_CANDIDATES = 20_000_000

# Of the rules in SciPy, those with positive weights. Each is exact up to its degree.
_DEGREES: tuple[int, ...] = (3, 5, 7, 9, 11, 15, 17, 19, 21, 23, 29, 31, *range(35, 132, 6))


class QuadratureFrequencies(Frequencies):
    """Fixed frequencies with quadrature weights: ∫ h(ξ) dξ ≈ Σ_t ω_t h(ξ_t) for even h.

    The mask is then Σ_t ω_t g(ξ_t) cos 2πξ_t·x, without noise.

    Args:
        points: ξ (R, ℓ), cycles/Å; of ξ and −ξ, which have the same wave, one is enough.
        weights: ω (R,) > 0, Å^{-ℓ}.

    Raises:
        ValueError: shapes that do not belong together, or weights that are not positive.
    """

    points: Tensor
    log_weight: Tensor

    def __init__(self, points: Tensor, weights: Tensor) -> None:
        if points.dim() != 2 or weights.shape != points.shape[:1] or not bool((weights > 0).all()):
            shapes = f"{tuple(points.shape)} and {tuple(weights.shape)}"
            raise ValueError(f"expected points (R, ℓ) and weights (R,) > 0, got {shapes}")
        super().__init__(*points.shape)
        self.register_buffer("points", placed(points))
        self.register_buffer("log_weight", placed(weights.log()))

    def forward(self, spectrum: Spectrum) -> tuple[Tensor, Tensor]:
        """ξ (R, ℓ), cycles/Å, and ρ = R ω g(ξ) (H, R)."""
        points = at_least_float32(self.points)
        weights = at_least_float32(self.log_weight).exp()
        return points, spectrum(points) * (self.num_frequencies * weights)


class LatticeFrequencies(QuadratureFrequencies):
    r"""Half of all |ξ| ≤ ξ_max of a lattice whose dual has points at least L apart.

    Summing over a lattice repeats f with the periods of the dual lattice (Poisson):
    N̂(x) = V Σ_ξ g(ξ) cos 2πξ·x = Σ_T f(x + T), V the volume of a cell in frequency space. For
    |x| ≤ L/2 the repetitions, and the spectrum beyond ξ_max, are all the error there is. Of all
    lattices with shortest dual vector L the body-centred cubic one, A*_ℓ for any ℓ, needs the
    fewest frequencies [1].

    ξ_max = cutoff/(2πσ_min), L = radius + margin·σ_max. For ℓ = 3, the defaults, radius 18 Å and
    σ = 2 Å: R = 959.

    Args:
        radius: of the displacements for which the mask is to be right, Å.
        sigma: width of the Gaussians in real space, Å; one, or (narrowest, widest).
        dim: ℓ.
        cutoff: 2πσ_min ξ_max.
        margin: (L − radius)/σ_max.

    Raises:
        ValueError: values that are not positive and finite, or far too many frequencies.

    References:
        [1] Petersen & Middleton, Information and Control 1962.
    """

    def __init__(
        self,
        radius: float,
        sigma: float | Sequence[float],
        dim: int = 3,
        *,
        cutoff: float = 4.2,
        margin: float = 4.0,
    ) -> None:
        narrowest, widest = _widths(radius, sigma, cutoff, margin)
        period, largest = radius + margin * widest, cutoff / (2 * math.pi * narrowest)
        points, volume = _half_lattice(period, largest, dim)
        weights = torch.full(points.shape[:1], 2 * volume, dtype=torch.float64, device="cpu")
        weights[0] = volume
        super().__init__(points, weights)


class LebedevFrequencies(QuadratureFrequencies):
    r"""Evenly spaced shells |ξ| = q_1, 2q_1, … and on each of them a Lebedev rule: half of it.

    For ℓ = 3, N̂(x) = Σ_s 4πs²q_1³ Σ_u ω_u g(s q_1 u) cos(2πs q_1 u·x), u over the rule's
    directions. The trapezoidal rule in |ξ| repeats r f(r) with the period 1/q_1 = radius +
    margin·σ_max, in all directions alike; directions differ by the error of the Lebedev rule [1]
    alone. A rule of odd degree d first fails at (2d + 3) j_{d+1}(2π|ξ|r), j the spherical Bessel
    function: on each shell d is the smallest for which this is below `tolerance` times f(0). For
    the defaults, radius 18 Å and σ = 2 Å: R = 1256.

    Args:
        radius, sigma: see `LatticeFrequencies`.
        tolerance: of the directions, on each shell, in units of f(0).
        cutoff: 2πσ_min times the largest |ξ|.
        margin: (1/q_1 − radius)/σ_max.

    Raises:
        ValueError: values that are not positive and finite, or a tolerance that no rule reaches.

    References:
        [1] Lebedev & Laikov, Doklady Mathematics 1999.
    """

    def __init__(
        self,
        radius: float,
        sigma: float | Sequence[float],
        *,
        tolerance: float = 1e-3,
        cutoff: float = 4.2,
        margin: float = 4.0,
    ) -> None:
        narrowest, widest = _widths(radius, sigma, cutoff, margin, tolerance)
        step = 1 / (radius + margin * widest)
        points, weights = [], []
        for shell in range(1, math.floor(cutoff / (2 * math.pi * narrowest) / step + 1e-9) + 1):
            q = shell * step
            volume = 4 * math.pi * q**2 * step
            # The largest spectrum here of Gaussians with f(0) = 1 has one maximum in σ.
            best = min(max(math.sqrt(3) / (2 * math.pi * q), narrowest), widest)
            g = (math.sqrt(2 * math.pi) * best) ** 3 * math.exp(-2 * (math.pi * best * q) ** 2)
            directions, shares = _half_rule(_degree(q * radius, tolerance / (volume * g)))
            points.append(q * directions)
            weights.append(volume * shares)
        if not points:
            raise ValueError(f"no shell fits below cutoff/(2πσ) for {cutoff=}, {sigma=}, {radius=}")
        super().__init__(torch.cat(points), torch.cat(weights))


def _widths(radius: float, sigma: float | Sequence[float], *others: float) -> tuple[float, float]:
    """The narrowest and the widest Gaussian, Å; all values are checked."""
    low, high = sigma if isinstance(sigma, Sequence) else (sigma, sigma)
    if not (0 < low <= high < math.inf and all(0 < x < math.inf for x in (radius, *others))):
        raise ValueError(
            "need finite sigma, narrowest first, radius, cutoff, margin and tolerance > 0, got "
            f"sigma={sigma}, radius={radius} and {others}"
        )
    return low, high


def _half_lattice(period: float, largest: float, dim: int) -> tuple[Tensor, float]:
    """ξ (R, ℓ) of A*_ℓ up to |ξ| = `largest`, the origin first, without any −ξ; cell's volume.

    `period` is the length of the shortest vectors of the dual lattice A_ℓ, Å.
    """
    # Vectors of A_ℓ of length L; neighbours in the chain meet at 120°.
    gram = np.eye(dim) - 0.5 * (np.eye(dim, k=1) + np.eye(dim, k=-1))
    dual = np.asarray(period * np.linalg.cholesky(gram), np.float64)
    if (2 * largest * period + 1) ** dim > _MAX_CANDIDATES:
        raise ValueError(
            f"a lattice of period {period:g} Å up to {largest:g} cycles/Å in {dim} dimensions has "
            "too many points: take a smaller radius, or wider Gaussians (sigma)"
        )
    points = half_lattice(dual, largest) @ np.linalg.inv(dual).T
    return torch.from_numpy(points), float(1 / np.linalg.det(dual))


def _half_rule(degree: int) -> tuple[Tensor, Tensor]:
    """Directions u (K, 3) of a Lebedev rule, one of u and −u, and weights (K,) that sum to 1."""
    from scipy.integrate import lebedev_rule  # SciPy takes a while to import

    points, weights = lebedev_rule(degree)
    # Coordinates that should be 0 are off by rounding.
    x, y, z = points = np.where(np.abs(points) < 1e-9, 0.0, points)
    upper = (z > 0) | ((z == 0) & ((y > 0) | ((y == 0) & (x > 0))))
    shares = weights[upper] / weights[upper].sum()
    return torch.from_numpy(points.T[upper]), torch.from_numpy(shares)


def _degree(turns: float, tolerance: float) -> int:
    """The lowest degree whose error on waves of up to `turns` periods is below `tolerance`."""
    from scipy.special import spherical_jn

    phases = np.linspace(0.0, 2 * math.pi * turns, 257)
    for degree in _DEGREES:
        if (2 * degree + 3) * float(np.abs(spherical_jn(degree + 1, phases)).max()) <= tolerance:
            return degree
    raise ValueError(
        f"no Lebedev rule resolves {turns:.3g} periods of a plane wave to {tolerance:.1g}: take a "
        "smaller radius, wider Gaussians (sigma), or LatticeFrequencies"
    )
