"""How well a set of frequencies gives a mask, and how much turning a molecule changes it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flt_mol.nn.frequencies import (
    ComponentFrequencies,
    Frequencies,
    GaussianFrequencies,
    LatticeFrequencies,
    LebedevFrequencies,
)
from flt_mol.nn.rpe import FourierRPE, rotation_error
from flt_mol.nn.spectrum import GaussianSpectrum

__all__ = ["MaskError", "deterministic_sets", "largest_error", "random_sets"]


class MaskError(NamedTuple):
    """A set of frequencies for f(x) = exp(−‖x‖²/2σ²), over all displacements up to a radius.

    Attributes:
        kind: of frequencies.
        num_frequencies: R.
        error: the largest |N̂ − f|, in units of f(0); the median over draws.
        rotation: the widest range of N̂ over directions at one distance, see `rotation_error`; the
            median over draws.
    """

    kind: str
    num_frequencies: int
    error: float
    rotation: float


def largest_error(rpe: FourierRPE, radius: float, radii: int = 49, directions: int = 256) -> Tensor:
    """The largest |N̂(x) − f(x)| per head over distances up to `radius`, Å, in many directions."""
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(directions, rpe.dim, generator=generator, dtype=torch.float32)
    u = u / u.norm(dim=-1, keepdim=True)
    worst = []
    with torch.no_grad():
        for r in torch.linspace(0.0, radius, radii, dtype=torch.float32):
            worst.append((rpe.sampled_mask(r * u) - rpe.mask(r * u)).abs().amax(0))
    return torch.stack(worst).amax(0)


def random_sets(
    sigma: float, counts: Iterable[int], radius: float = 18.0, draws: int = 8
) -> Iterator[MaskError]:
    """Every random kind at every R of `counts`.

    Args:
        sigma: σ of the mask, Å.
        counts: R.
        radius: of the displacements, Å.
        draws: how many sets of each kind.
    """
    matched = 1 / (2 * math.pi * sigma)
    for count in counts:
        kinds: dict[str, dict[str, object]] = {
            "Gaussian, σ per frequency, 0.04–0.16 Å⁻¹": {},
            "Gaussian, matched": {"sigma": matched},
            "Gaussian, matched, orthogonal": {"sigma": matched, "sampling": "orthogonal"},
            "Gaussian, matched, Sobol": {"sigma": matched, "sampling": "sobol"},
        }
        for kind, settings in kinds.items():
            sets = [
                GaussianFrequencies(
                    count,
                    generator=torch.Generator().manual_seed(seed),
                    **settings,  # type: ignore[arg-type]
                )
                for seed in range(draws)
            ]
            yield _measured(kind, sets, sigma, radius)
        for sampling in ("normal", "sobol"):
            generator = torch.Generator().manual_seed(0)
            # A set for each head: as many draws in one.
            component = ComponentFrequencies(
                count, draws, 1, sampling=sampling, generator=generator
            )
            yield _measured(f"component-matched, {sampling}", [component], sigma, radius, draws)


def deterministic_sets(
    sigma: float, radius: float = 18.0, cutoffs: Iterable[tuple[float, float]] = ((4.2, 4.0),)
) -> Iterator[MaskError]:
    """Lattice and shells, by default with the settings that bring errors to 1e-3.

    Args:
        sigma: σ of the mask, Å.
        radius: of the displacements, Å.
        cutoffs: pairs of `cutoff` and `margin`, see `LatticeFrequencies`.
    """
    for cutoff, margin in cutoffs:
        settings = f"cutoff {cutoff:g}, margin {margin:g}"
        lattice = LatticeFrequencies(radius, sigma, cutoff=cutoff, margin=margin)
        yield _measured(f"lattice, {settings}", [lattice], sigma, radius)
        shells = LebedevFrequencies(radius, sigma, cutoff=cutoff, margin=margin)
        yield _measured(f"shells, {settings}", [shells], sigma, radius)


def _measured(
    kind: str, sets: Sequence[Frequencies], sigma: float, radius: float, heads: int = 1
) -> MaskError:
    spectrum = GaussianSpectrum(heads, num_terms=1, sigma_min=sigma, sigma_max=sigma)
    with torch.no_grad():
        spectrum.amplitude.fill_(1.0)
    layers = [FourierRPE(spectrum, frequencies) for frequencies in sets]
    error = torch.cat([largest_error(rpe, radius) for rpe in layers]).median()
    rotation = torch.cat([rotation_error(rpe, radius) for rpe in layers]).median()
    return MaskError(kind, sets[0].num_frequencies, error.item(), rotation.item())
