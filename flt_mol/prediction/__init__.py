"""Energies of new structures: in memory, in files, and as an ASE calculator."""

from flt_mol.prediction.energies import EnsembleEnergies, predict, predict_structures
from flt_mol.prediction.members import load_members, surface_rule
from flt_mol.prediction.table import Prediction, predict_files, write_predictions

__all__ = [
    "EnsembleEnergies", "Prediction", "load_members", "predict", "predict_files",
    "predict_structures", "surface_rule", "write_predictions",
]  # fmt: skip
