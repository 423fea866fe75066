"""Modules: RPE families, frequencies, feature maps, attention, filters, blocks."""

from flt_mol.nn.attention import Attention, AttentionInputs, AttentionRows, Fidelity, FLTAttention
from flt_mol.nn.block import BlockGeometry, FLTBlock, FLTEncoder
from flt_mol.nn.feature_maps import (
    FEATURE_MAPS,
    ELUFeatures,
    FeatureMap,
    HyperbolicFeatures,
    LearnedReLUFeatures,
    ReLUFeatures,
    SoftmaxFeatures,
    SoftplusFeatures,
)
from flt_mol.nn.frequencies import (
    FREQUENCIES,
    ComponentFrequencies,
    Frequencies,
    GaussianFrequencies,
    LatticeFrequencies,
    LebedevFrequencies,
)
from flt_mol.nn.heads import ChargeHead, DisplacementHead, EnergyHead
from flt_mol.nn.images import GaussianBias, ImageKeys, PairWeights
from flt_mol.nn.local_filter import LocalBasis, LocalFilter, LocalGeometry, PairCorrection
from flt_mol.nn.multihead import FLTMultiheadAttention
from flt_mol.nn.rpe import FourierRPE
from flt_mol.nn.spectral_filter import SpectralFilter, SpectralGeometry
from flt_mol.nn.spectrum import (
    SPECTRA,
    BSplineSpectrum,
    CauchySpectrum,
    DirectionalSpectrum,
    GaussianMixtureSpectrum,
    GaussianSpectrum,
    MaternSpectrum,
    ProductSpectrum,
    Spectrum,
    SumSpectrum,
)

__all__ = [
    "FEATURE_MAPS", "FREQUENCIES", "SPECTRA", "Attention", "AttentionInputs", "AttentionRows",
    "BSplineSpectrum", "BlockGeometry", "CauchySpectrum", "ChargeHead", "ComponentFrequencies",
    "DirectionalSpectrum", "DisplacementHead", "ELUFeatures", "EnergyHead", "FLTAttention",
    "FLTBlock", "FLTEncoder", "FLTMultiheadAttention", "FeatureMap", "Fidelity", "FourierRPE",
    "Frequencies", "GaussianBias", "GaussianFrequencies", "GaussianMixtureSpectrum",
    "GaussianSpectrum", "HyperbolicFeatures", "ImageKeys", "LatticeFrequencies",
    "LearnedReLUFeatures", "LebedevFrequencies", "LocalBasis", "LocalFilter", "LocalGeometry",
    "MaternSpectrum", "PairCorrection", "PairWeights", "ProductSpectrum", "ReLUFeatures",
    "SoftmaxFeatures", "SoftplusFeatures", "SpectralFilter", "SpectralGeometry", "Spectrum",
    "SumSpectrum",
]  # fmt: skip
