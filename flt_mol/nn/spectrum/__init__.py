"""RPE families: the spectrum g that is learned, and the mask f it stands for.

f(x) = ∫ g(ξ) e^{2πi x·ξ} dξ; lengths in Å, frequencies ξ in cycles/Å. `SPECTRA` has the families
by name; they take plain data.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from flt_mol.nn.layers import seeded_generator
from flt_mol.nn.spectrum.base import ProductSpectrum, Spectrum, SumSpectrum
from flt_mol.nn.spectrum.kernels import BSplineSpectrum, CauchySpectrum, MaternSpectrum
from flt_mol.nn.spectrum.terms import DirectionalSpectrum, GaussianMixtureSpectrum, GaussianSpectrum


def combined(
    combination: Callable[..., Spectrum],
    /,
    num_heads: int,
    spectra: Sequence[Mapping[str, Any]],
    generator: torch.Generator | None = None,
) -> Spectrum:
    """A sum or product of ``{"name": …, **arguments}`` with names of `SPECTRA`."""
    parts, generator = [], seeded_generator(generator)
    for spec in spectra:
        arguments = dict(spec)
        if (name := arguments.pop("name", None)) not in SPECTRA:
            raise ValueError(f"spectrum {name!r} is unknown, expected one of {', '.join(SPECTRA)}")
        parts.append(SPECTRA[name](num_heads=num_heads, generator=generator, **arguments))
    return combination(*parts)


SPECTRA: dict[str, Callable[..., Spectrum]] = {
    "gaussian": GaussianSpectrum,
    "gaussian_mixture": GaussianMixtureSpectrum,
    "directional": DirectionalSpectrum,
    "matern": MaternSpectrum,
    "laplace": partial(MaternSpectrum, nu=0.5),
    "cauchy": CauchySpectrum,
    "box": partial(BSplineSpectrum, order=1),
    "tent": partial(BSplineSpectrum, order=2),
    "bspline": BSplineSpectrum,
    "sum": partial(combined, SumSpectrum),
    "product": partial(combined, ProductSpectrum),
}
"""Families of spectra by name: called with `num_heads` and their arguments."""

__all__ = [
    "SPECTRA", "BSplineSpectrum", "CauchySpectrum", "DirectionalSpectrum",
    "GaussianMixtureSpectrum", "GaussianSpectrum", "MaternSpectrum", "ProductSpectrum",
    "Spectrum", "SumSpectrum",
]  # fmt: skip
