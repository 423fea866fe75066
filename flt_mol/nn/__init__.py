"""Modules: RPE families, frequencies, attention."""

from flt_mol.nn.attention import FLTAttention
from flt_mol.nn.frequencies import GaussianFrequencies
from flt_mol.nn.rpe import FourierRPE
from flt_mol.nn.spectrum import GaussianSpectrum, Spectrum

__all__ = [
    "FLTAttention",
    "FourierRPE",
    "GaussianFrequencies",
    "GaussianSpectrum",
    "Spectrum",
]
