"""Which relaxed EMT systems are kept, and the one reason why another is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from ase import Atoms
from ase.data import covalent_radii
from numpy.typing import NDArray

from flt_mol.data.emt.surfaces import Slab, adsorbate_bonds

Array = NDArray[Any]

MAX_ENERGY = 10.0
"""Largest |y_init| and |y_relaxed|, eV, as in OC20."""
BOND_SLACK = 0.8
"""A bond of the adsorbate holds up to the sum of covalent radii plus this, Å."""
DESORBED = 1.5
"""An adsorbate is on the surface while one of its atoms is within this times a covalent sum."""
SUBSURFACE = 0.5
"""No adsorbate atom may be lower than this below the mean height of the top layer, Å."""
RECONSTRUCTED = 1.0
"""Largest move of a slab atom: ideal to relaxed clean, or relaxed clean to with adsorbate, Å."""

REASONS = (
    "energy_init_out_of_range",
    "dissociated",
    "not_converged",
    "energy_out_of_range",
    "desorbed",
    "subsurface",
    "reconstructed",
)
"""In the order in which they are asked; the first that applies is counted."""

RULES = {
    "energy_init_out_of_range": f"y_init beyond ±{MAX_ENERGY:g} eV or not finite",
    "dissociated": "a bond of the adsorbate became longer than the sum of covalent radii + "
    f"{BOND_SLACK:g} Å at any step",
    "not_converged": "force limit not reached within the step limit, or values not finite",
    "energy_out_of_range": f"y_relaxed beyond ±{MAX_ENERGY:g} eV or not finite",
    "desorbed": f"no adsorbate atom within {DESORBED:g} × the sum of covalent radii of a slab atom",
    "subsurface": f"an adsorbate atom more than {SUBSURFACE:g} Å below the mean height of the "
    "top layer",
    "reconstructed": f"a slab atom moved more than {RECONSTRUCTED:g} Å from the clean slab's",
}


def dissociation_check(name: str, system: Atoms) -> Callable[[Array], str | None]:
    """A `stop` for `relax`: "dissociated" once a bond of adsorbate `name` is broken.

    The adsorbate's atoms are the last of `system` and are not wrapped while relaxing.
    """
    bonds = np.array(adsorbate_bonds(name), dtype=np.int64).reshape(-1, 2)
    bonds = bonds + int((system.get_tags() != 2).sum())
    longest = covalent_radii[system.numbers[bonds]].sum(1) + BOND_SLACK

    def check(positions: Array) -> str | None:
        length = np.linalg.norm(positions[bonds[:, 0]] - positions[bonds[:, 1]], axis=1)
        return "dissociated" if bool((length > longest).any()) else None

    return check


def out_of_range(energy: float) -> bool:
    """Whether an adsorption energy, eV, is too large or not finite."""
    return not abs(energy) <= MAX_ENERGY


def is_desorbed(system: Atoms) -> bool:
    """Whether no adsorbate atom is near a slab atom, by the nearest periodic image."""
    tags = system.get_tags()
    adsorbate, metal = np.flatnonzero(tags == 2), np.flatnonzero(tags != 2)
    distances = system.get_all_distances(mic=True)[np.ix_(adsorbate, metal)]
    radii = covalent_radii[system.numbers]
    return not bool((distances <= DESORBED * (radii[adsorbate][:, None] + radii[metal])).any())


def is_subsurface(system: Atoms, layers: int) -> bool:
    """Whether an adsorbate atom went below the top layer of the slab."""
    heights, tags = system.positions[:, 2], system.get_tags()
    metal = np.sort(heights[tags != 2])
    top = float(metal[-(len(metal) // layers) :].mean())
    return bool((heights[tags == 2] < top - SUBSURFACE).any())


def is_reconstructed(system: Atoms, clean: Atoms) -> bool:
    """Whether a slab atom of `system` is far from its place in the relaxed clean slab."""
    moved = np.linalg.norm(system.positions[: len(clean)] - clean.positions, axis=1)
    return bool((moved > RECONSTRUCTED).any())


def verdict(system: Atoms, slab: Slab, y_relaxed: float, outcome: str) -> str | None:
    """Reason to drop a relaxed system, one of `REASONS`, or None to keep it.

    Args:
        system: slab and adsorbate after relaxation.
        slab: the clean slab.
        y_relaxed: adsorption energy of `system`, eV.
        outcome: what `relax` returned.
    """
    if outcome != "converged":
        return outcome
    if out_of_range(y_relaxed):
        return "energy_out_of_range"
    if is_desorbed(system):
        return "desorbed"
    if is_subsurface(system, slab.layers):
        return "subsurface"
    return "reconstructed" if is_reconstructed(system, slab.atoms) else None
