"""Models: structures to adsorption energies."""

from flt_mol.models.config import (
    EnergyConfig,
    ImageConfig,
    PairConfig,
    RPEConfig,
    SpectralConfig,
)
from flt_mol.models.energy import EnergyModel
from flt_mol.models.named import named_config

__all__ = [
    "EnergyConfig",
    "EnergyModel",
    "ImageConfig",
    "PairConfig",
    "RPEConfig",
    "SpectralConfig",
    "named_config",
]
