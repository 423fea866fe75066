"""Models: compositions of modules into nets for one purpose."""

from flt_mol.models.energy import EnergyConfig, EnergyModel, RPEConfig

__all__ = ["EnergyConfig", "EnergyModel", "RPEConfig"]
