"""A lattice of frequencies, body-centred cubic in three dimensions: a mask without noise."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flt_mol.nn.frequencies.base import QuadratureFrequencies, widths

_MAX_CANDIDATES = 20_000_000


class LatticeFrequencies(QuadratureFrequencies):
    r"""All |ξ| ≤ ξ_max of a lattice whose dual has its points at least L apart: the half of them.

    Summing over all points of a lattice repeats f with the periods of the dual lattice (Poisson):
    N̂(x) = V Σ_ξ g(ξ) cos 2πξ·x = Σ_T f(x + T), V the volume of a cell in frequency space. So for
    |x| ≤ L/2 the repetitions, and with |ξ| ≤ ξ_max the rest of the spectrum, are all the error
    there is, for *any* smooth g; directions differ by that error only. Of all lattices with
    shortest dual vector L the fewest frequencies are needed in the body-centred cubic one (its dual
    is the densest packing), the hexagonal one for ℓ = 2, an even grid for ℓ = 1 (A*_ℓ for any ℓ).

    ξ_max = cutoff/(2πσ_min) leaves out e^{−cutoff²/2} of the peak of the narrowest Gaussian's
    spectrum, and L = radius + margin·σ_max brings the nearest repetition of the widest one to
    `margin` standard deviations. Measured for ℓ = 3, the defaults, radius 18 Å and one Gaussian
    with f(0) = 1 (`rotation_error`, and the largest |N̂ − f|):

    | σ, Å | R | rotation error | error |
    |---|---|---|---|
    | 1 | 4705 | 2.5e-4 | 5.2e-4 |
    | 2 | 959 | 3.7e-4 | 5.6e-4 |
    | 4 | 269 | 3.9e-4 | 5.1e-4 |
    | 2 and 4 | 2143 | 1.7e-4 | 2.8e-4 |

    R grows as (radius/σ)³: no set resolves bond lengths over a slab cheaply. With a smaller margin
    both errors grow together (1.1e-2 at 3, 0.13 at 2): a part of the set is no estimate of f.

    Args:
        radius: of the displacements for which the mask is to be right, Å.
        sigma: width of the Gaussians in real space, Å; one, or (narrowest, widest).
        dim: ℓ.
        cutoff: 2πσ_min ξ_max.
        margin: (L − radius)/σ_max.

    Raises:
        ValueError: values that are not positive and finite, or a set of tens of millions.

    References:
        Petersen & Middleton, "Sampling and reconstruction of wave-number-limited functions in
        N-dimensional Euclidean spaces", 1962.

    Example:
        >>> LatticeFrequencies(radius=18.0, sigma=4.0).num_frequencies
        269
    """

    def __init__(
        self,
        radius: float,
        sigma: float | tuple[float, float],
        dim: int = 3,
        *,
        cutoff: float = 4.2,
        margin: float = 4.0,
    ) -> None:
        radius, cutoff, margin = float(radius), float(cutoff), float(margin)
        narrowest, widest = widths(radius, sigma, cutoff, margin)
        period, largest = radius + margin * widest, cutoff / (2 * math.pi * narrowest)
        points, volume = half_lattice(period, largest, dim)
        weights = torch.full(points.shape[:1], 2 * volume, dtype=torch.float64, device="cpu")
        weights[0] = volume
        super().__init__(points, weights)


def half_lattice(period: float, largest: float, dim: int) -> tuple[Tensor, float]:
    """ξ (R, ℓ) of the lattice A*_ℓ up to |ξ| = `largest`, the origin first, without any −ξ.

    Args:
        period: L, length of the shortest vectors of the dual lattice A_ℓ, Å.
        largest: cycles/Å.
        dim: ℓ.

    Returns:
        ξ, float64 on CPU, and the volume of the lattice's cell, Å^{-ℓ}.

    Example:
        >>> points, volume = half_lattice(period=2.0, largest=1.0, dim=1)
        >>> points.flatten().tolist(), volume
        ([0.0, 0.5, 1.0], 0.5)
    """
    if dim < 1:
        raise ValueError(f"dim must be ≥ 1, got {dim}")
    with torch.device("cpu"):
        # Vectors of A_ℓ of length L; neighbours in the chain meet at 120°.
        gram = torch.eye(dim, dtype=torch.float64)
        gram.diagonal(1).fill_(-0.5)
        gram.diagonal(-1).fill_(-0.5)
        dual = period * torch.linalg.cholesky(gram)
        basis = torch.linalg.inv(dual).T
        # ξ·(dual vector) is an integer, and at most |ξ| L.
        bound = math.floor(largest * period + 1e-9)
        if (2 * bound + 1) ** dim > _MAX_CANDIDATES:
            raise ValueError(
                f"a lattice of period {period:g} Å up to {largest:g} cycles/Å in {dim} dimensions "
                "has too many points: take a smaller radius, or wider Gaussians (sigma)"
            )
        axis = torch.arange(-bound, bound + 1, dtype=torch.float64)
        index = torch.cartesian_prod(*[axis] * dim).view(-1, dim)
        # In this order the origin is in the middle, and ξ is after it where −ξ is before.
        index = index[index.shape[0] // 2 :]
        points = index @ basis
        inside = points.norm(dim=-1) <= largest + 1e-9 / period
    return points[inside], float(basis.det().abs())
