"""Where frequencies ξ come from, and the density they were drawn with."""

from flt_mol.nn.frequencies.base import Frequencies, QuadratureFrequencies
from flt_mol.nn.frequencies.component import (
    ComponentFrequencies,
    GaussianComponents,
    gaussian_components,
)
from flt_mol.nn.frequencies.draws import SAMPLINGS, normal_vectors
from flt_mol.nn.frequencies.gaussian import GaussianFrequencies
from flt_mol.nn.frequencies.lattice import LatticeFrequencies
from flt_mol.nn.frequencies.shells import LebedevFrequencies

FREQUENCIES: dict[str, type[Frequencies]] = {
    "gaussian": GaussianFrequencies,
    "component": ComponentFrequencies,
    "lattice": LatticeFrequencies,
    "lebedev": LebedevFrequencies,
}
"""Families by the name they have in configurations."""

__all__ = [
    "FREQUENCIES",
    "SAMPLINGS",
    "ComponentFrequencies",
    "Frequencies",
    "GaussianComponents",
    "GaussianFrequencies",
    "LatticeFrequencies",
    "LebedevFrequencies",
    "QuadratureFrequencies",
    "gaussian_components",
    "normal_vectors",
]
