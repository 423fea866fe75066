"""Modules: RPE families, frequencies, feature maps, attention, filters, blocks."""

from flt_mol.nn.attention import (
    FLTAttention,
)
from flt_mol.nn.feature_map import (
    FEATURE_MAPS,
    ELUFeatures,
    FeatureMap,
    HyperbolicFeatures,
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
from flt_mol.nn.inspection import (
    Fidelity,
)
from flt_mol.nn.local import (
    ImageKeys,
    PairCorrection,
    PairFilter,
    PairWeights,
)
from flt_mol.nn.multihead import (
    FLTMultiheadAttention,
)
from flt_mol.nn.rpe import (
    FourierRPE,
)
from flt_mol.nn.spectral import (
    SpectralFilter,
    SpectralGeometry,
)
from flt_mol.nn.spectrum import (
    SPECTRA,
    BoxSpectrum,
    BSplineSpectrum,
    CauchySpectrum,
    DirectionalSpectrum,
    GaussianMixtureSpectrum,
    GaussianSpectrum,
    LaplaceSpectrum,
    MaternSpectrum,
    ProductSpectrum,
    ShellSpectrum,
    Spectrum,
    SumSpectrum,
    TentSpectrum,
)
from flt_mol.nn.streaming import (
    AttentionState,
)
from flt_mol.nn.transformer import (
    FLTBlock,
    FLTEncoder,
)

__all__ = [
    "FEATURE_MAPS",
    "FREQUENCIES",
    "SPECTRA",
    "AttentionState",
    "BSplineSpectrum",
    "BoxSpectrum",
    "CauchySpectrum",
    "ComponentFrequencies",
    "DirectionalSpectrum",
    "ELUFeatures",
    "FLTAttention",
    "FLTBlock",
    "FLTEncoder",
    "FLTMultiheadAttention",
    "FeatureMap",
    "Fidelity",
    "FourierRPE",
    "Frequencies",
    "GaussianFrequencies",
    "GaussianMixtureSpectrum",
    "GaussianSpectrum",
    "HyperbolicFeatures",
    "ImageKeys",
    "LaplaceSpectrum",
    "LatticeFrequencies",
    "LebedevFrequencies",
    "MaternSpectrum",
    "PairCorrection",
    "PairFilter",
    "PairWeights",
    "ProductSpectrum",
    "ReLUFeatures",
    "ShellSpectrum",
    "SoftmaxFeatures",
    "SoftplusFeatures",
    "SpectralFilter",
    "SpectralGeometry",
    "Spectrum",
    "SumSpectrum",
    "TentSpectrum",
]
