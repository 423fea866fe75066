"""Functions of a distance: smooth cutoff, Gaussians with centres, per pair of elements."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from flt_mol.functional.groups import at_least_float32
from flt_mol.nn.embedding import MAX_ATOMIC_NUMBER
from flt_mol.nn.layers import draw_normal, placed, seeded_generator

SMALLEST_EXPONENT = -60.0  # e⁻⁶⁰ = 9e-27, beside values of up to 1; denormal numbers are slow
CHUNK = 2**20  # pairs, so that intermediate results of large systems stay small


def check_sizes(**sizes: int | None) -> None:
    """Refuse a size below 1, by its name; None passes."""
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"{name} is {size}, expected a number ≥ 1")


def check_basis(cutoff: float, num_basis: int = 2) -> None:
    """Refuse a cutoff that is not a positive length, or fewer than two functions."""
    if not 0 < cutoff < math.inf or num_basis < 2:
        raise ValueError(f"need 0 < cutoff < ∞ and num_basis ≥ 2, got {cutoff=}, {num_basis=}")


def smooth_cutoff(distances: Tensor, cutoff: float) -> Tensor:
    """w(u) = 1 − 10u³ + 15u⁴ − 6u⁵ with u = r / cutoff, and 0 beyond: C², 1 at r = 0.

    Value, slope and curvature are 0 at the cutoff, slope and curvature at 0. Written as
    (1 − u)³(1 + 3u + 6u²), which does not cancel near the cutoff.

    References:
        Gasteiger et al., "Directional message passing", ICLR 2020, equation 8 with p = 3.
    """
    u = (distances / cutoff).clamp(max=1.0)
    return (1 - u) ** 3 * (1 + 3 * u + 6 * u.square())


def log_smooth_cutoff(distances: Tensor, cutoff: float) -> Tensor:
    """Logarithm of `smooth_cutoff`: −∞ at and beyond the cutoff, with gradient 0 there."""
    window = smooth_cutoff(distances, cutoff)
    zero = window == 0
    return window.masked_fill(zero, 1.0).log().masked_fill(zero, -torch.inf)


class PairTypes(nn.Module):
    """r' = a r + b with a and b learned for each ordered pair of elements, as 3D-Graphormer's [1].

    a_ij = 1 + s_{z_i}·t_{z_j} and b_ij = p_{z_i}·q_{z_j}, with four numbers per element and role.
    **Not symmetrical**: what z_i receives from z_j need not be what z_j receives from z_i.

    Args:
        generator: on CPU; None takes a seed from torch.

    References:
        [1] Shi et al., "Benchmarking Graphormer …", 2022.
    """

    def __init__(self, generator: torch.Generator | None = None) -> None:
        super().__init__()
        elements, rank = MAX_ATOMIC_NUMBER + 1, 4
        start = draw_normal(4, elements, rank, generator=seeded_generator(generator))
        start[::2] *= 0.02
        self.scale_receiver, self.scale_sender, self.shift_receiver, self.shift_sender = (
            nn.Parameter(placed(table * rank**-0.5)) for table in start
        )

    def forward(self, distances: Tensor, receiver: Tensor | None, sender: Tensor | None) -> Tensor:
        """Distances r (P,) and the atomic numbers (P,) of both atoms, 1 to 118, to r' (P,)."""
        if receiver is None or sender is None:
            raise ValueError("pair_types=True needs atomic_numbers: pass them to forward")
        scale = 1 + (self.scale_receiver[receiver] * self.scale_sender[sender]).sum(-1)
        shift = (self.shift_receiver[receiver] * self.shift_sender[sender]).sum(-1)
        return scale.to(distances.dtype) * distances + shift.to(distances.dtype)


class RadialBasis(nn.Module):
    """B_t(r) = exp(−(r' − μ_t)² / 2σ²) · w(r): Gaussians with centres, under a smooth cutoff.

    T centres are spaced evenly over [0, cutoff], one spacing wide (σ). r' = r, or `PairTypes` of r;
    the cutoff w acts on r itself.

    Args:
        cutoff: Å.
        num_basis: T.
        pair_types: whether r is transformed per pair of elements (`PairTypes`).
        generator: on CPU; None takes a seed from torch.

    Raises:
        ValueError: a cutoff that is not a positive length, or fewer than two functions.
    """

    def __init__(
        self,
        cutoff: float = 6.0,
        num_basis: int = 32,
        pair_types: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        check_basis(cutoff, num_basis)
        self.cutoff = float(cutoff)
        self.num_basis = num_basis
        self.pair_types = PairTypes(generator=generator) if pair_types else None

    def forward(
        self, distances: Tensor, receiver: Tensor | None = None, sender: Tensor | None = None
    ) -> Tensor:
        """Distances (P,), Å, and the atomic numbers (P,) of both atoms if types are on → (P, T).

        Raises:
            ValueError: types are on and atomic numbers are missing.
        """
        r = transformed = at_least_float32(distances)
        if self.pair_types is not None:
            transformed = self.pair_types(r, receiver, sender)
        scaled = transformed * ((self.num_basis - 1) / self.cutoff)
        window = smooth_cutoff(r, self.cutoff)
        if r.shape[0] <= CHUNK:
            return self._gaussians(scaled, window)
        out = r.new_empty(r.shape[0], self.num_basis)
        for k in range(0, r.shape[0], CHUNK):
            some = slice(k, k + CHUNK)
            out[some] = self._gaussians(scaled[some], window[some])
        return out

    def _gaussians(self, scaled: Tensor, window: Tensor) -> Tensor:
        steps = torch.arange(self.num_basis, dtype=scaled.dtype, device=scaled.device)
        exponent = -0.5 * (scaled[:, None] - steps).square()
        return exponent.clamp(min=SMALLEST_EXPONENT).exp() * window[:, None]
