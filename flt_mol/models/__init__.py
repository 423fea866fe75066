"""Models: structures to adsorption energies."""

from flt_mol.models.config import (
    EnergyConfig,
    ImageConfig,
    PairConfig,
    RPEConfig,
    SpectralConfig,
    named_config,
)
from flt_mol.models.energy import EnergyModel, Normalizer

__all__ = [
    "EnergyConfig", "EnergyModel", "ImageConfig", "Normalizer", "PairConfig", "RPEConfig",
    "SpectralConfig", "named_config",
]  # fmt: skip
