"""RPE families: the spectrum g that is learned, and the mask f it stands for.

f(x) = ∫ g(ξ) e^{2πi x·ξ} dξ; lengths in Å, frequencies ξ in cycles/Å. Of every family:
``family(frequencies)`` is g (H, R), ``family.mask(displacements)`` is f (…, H); both are at least
float32 and differentiable by all parameters. `SPECTRA` has the families by name.
"""

from flt_mol.nn.spectrum._terms import FORMS
from flt_mol.nn.spectrum.base import ProductSpectrum, Spectrum, SumSpectrum
from flt_mol.nn.spectrum.cauchy import CauchySpectrum
from flt_mol.nn.spectrum.gaussian import GaussianSpectrum
from flt_mol.nn.spectrum.kernels import KernelSpectrum, LaplaceSpectrum, MaternSpectrum
from flt_mol.nn.spectrum.local import BoxSpectrum, BSplineSpectrum, TentSpectrum
from flt_mol.nn.spectrum.mixture import DirectionalSpectrum, GaussianMixtureSpectrum
from flt_mol.nn.spectrum.shells import ShellSpectrum

SPECTRA: dict[str, type[Spectrum]] = {
    "gaussian": GaussianSpectrum,
    "gaussian_mixture": GaussianMixtureSpectrum,
    "directional": DirectionalSpectrum,
    "matern": MaternSpectrum,
    "laplace": LaplaceSpectrum,
    "cauchy": CauchySpectrum,
    "box": BoxSpectrum,
    "tent": TentSpectrum,
    "bspline": BSplineSpectrum,
    "shells": ShellSpectrum,
}

__all__ = [
    "FORMS",
    "SPECTRA",
    "BSplineSpectrum",
    "BoxSpectrum",
    "CauchySpectrum",
    "DirectionalSpectrum",
    "GaussianMixtureSpectrum",
    "GaussianSpectrum",
    "KernelSpectrum",
    "LaplaceSpectrum",
    "MaternSpectrum",
    "ProductSpectrum",
    "ShellSpectrum",
    "Spectrum",
    "SumSpectrum",
    "TentSpectrum",
]
