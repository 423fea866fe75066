"""Models: structures to adsorption energies."""

from flt_mol.models.config import (
    EnergyConfig,
    ImageConfig,
    PairConfig,
    RPEConfig,
    SpectralConfig,
)
from flt_mol.models.energy import EnergyModel

__all__ = [
    "EnergyConfig",
    "EnergyModel",
    "ImageConfig",
    "PairConfig",
    "RPEConfig",
    "SpectralConfig",
]
