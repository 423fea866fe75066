"""Linear-attention Transformers with Fourier-learned relative positions, for 3D atoms.

Shape letters used in every docstring:
B systems, N atoms in the whole batch, P neighbour pairs, H heads, D channels per head, C = H·D,
R frequencies, M random features, L padded length, T basis functions, ℓ dimension of positions.
Lengths are in Å, energies in eV, frequencies in cycles/Å.
"""

from typing import TYPE_CHECKING, Any

# From here on `flt_mol.predict` is the function; the module has its name, as in ase.build.
from flt_mol.predict import predict
from flt_mol.structures import Structures

if TYPE_CHECKING:
    from flt_mol.prediction.calculator import FLTCalculator

__version__ = "0.1.0"
__all__ = ["FLTCalculator", "Structures", "__version__", "predict"]


def __getattr__(name: str) -> Any:
    # ASE comes with it: only who asks for it waits.
    if name == "FLTCalculator":
        from flt_mol.prediction.calculator import FLTCalculator

        return FLTCalculator
    raise AttributeError(f"module 'flt_mol' has no attribute '{name}'")
