"""Linear-attention Transformers with Fourier-learned relative positions, for 3D atoms.

Shape letters used in every docstring:
B systems, N atoms in the whole batch, P neighbour pairs, H heads, D channels per head, C = H·D,
R frequencies, M random features, L padded length, T basis functions, ℓ dimension of positions.
Lengths are in Å, energies in eV, frequencies in cycles/Å.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flt_mol.files import VERSION

if TYPE_CHECKING:
    from flt_mol.data import open_dataset
    from flt_mol.models.checkpoint import load_model
    from flt_mol.prediction.calculator import FLTCalculator
    from flt_mol.prediction.energies import predict
    from flt_mol.structures import Structures

__version__ = VERSION
__all__ = ["FLTCalculator", "Structures", "__version__", "load_model", "open_dataset", "predict"]
_MODULES = {
    "FLTCalculator": "prediction.calculator",
    "Structures": "structures",
    "load_model": "models.checkpoint",
    "open_dataset": "data",
    "predict": "prediction.energies",
}


def __getattr__(name: str) -> Any:
    # Loaded when first used: torch and ASE take seconds.
    if name not in _MODULES:
        raise AttributeError(f"module 'flt_mol' has no attribute '{name}'")
    return getattr(import_module(f"flt_mol.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
