"""Linear-attention Transformers with Fourier-learned relative positions, for 3D atoms.

Shape letters used in every docstring:
B systems, N atoms in the whole batch, P neighbour pairs, H heads, D channels per head, C = H·D,
R frequencies, M random features, L padded length, T basis functions, ℓ dimension of positions.
Lengths are in Å, energies in eV, frequencies in cycles/Å.
"""

from flt_mol.structures import Structures

__version__ = "0.1.0"
__all__ = ["Structures", "__version__"]
