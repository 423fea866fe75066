"""Where frequencies ξ come from, and the density they were drawn with.

`FREQUENCIES` has the families by name; they take plain data.
"""

from flt_mol.nn.frequencies.base import Frequencies
from flt_mol.nn.frequencies.deterministic import (
    LatticeFrequencies,
    LebedevFrequencies,
    QuadratureFrequencies,
)
from flt_mol.nn.frequencies.gaussian import (
    ComponentFrequencies,
    GaussianFrequencies,
    normal_vectors,
)

FREQUENCIES: dict[str, type[Frequencies]] = {
    "gaussian": GaussianFrequencies,
    "component": ComponentFrequencies,
    "lattice": LatticeFrequencies,
    "lebedev": LebedevFrequencies,
}
"""Families of frequencies by name."""

__all__ = [
    "FREQUENCIES", "ComponentFrequencies", "Frequencies", "GaussianFrequencies",
    "LatticeFrequencies", "LebedevFrequencies", "QuadratureFrequencies", "normal_vectors",
]  # fmt: skip
