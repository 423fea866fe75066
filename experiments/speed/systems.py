"""Slabs and crystals to time models on: constructed, so that everybody has the same ones."""

from __future__ import annotations

import numpy as np
import torch
from ase.build import add_adsorbate, fcc111, molecule

from flt_mol.data import from_ase
from flt_mol.structures import Structures

_METALS = ("Cu", "Pt", "Pd", "Ag", "Au", "Ni", "Rh", "Ir")
_SIZES = ((4, 4, 5), (4, 5, 4), (3, 5, 5), (5, 4, 4))
_ADSORBATES = ("O", "OH", "CO", "N")


def slabs(count: int = 32, layers: int | None = None) -> Structures:
    """fcc(111) slabs of 75 to 82 atoms with an adsorbate, rattled; tags as OC20 has them."""
    systems = []
    for index in range(count):
        across, along, deep = _SIZES[index % len(_SIZES)]
        metal = _METALS[index % len(_METALS)]
        atoms = fcc111(metal, (across, along, layers or deep), vacuum=8.0, periodic=True)
        name = _ADSORBATES[index // 2 % len(_ADSORBATES)]
        add_adsorbate(atoms, name if len(name) == 1 else molecule(name), 1.9, "ontop")
        # ASE numbers layers from the top, beginning with 1; adsorbates are 0.
        atoms.set_tags(np.array([2, 1, 0])[np.minimum(atoms.get_tags(), 2)])
        atoms.rattle(0.1, seed=index)
        systems.append(from_ase(atoms))
    return Structures.cat(systems)


def crystal(num_atoms: int, lattice_constant: float = 3.61, rattle: float = 0.1) -> Structures:
    """One periodic system of about `num_atoms` atoms: rattled copper in cubic cells of four."""
    a = max(1, int((num_atoms / 4) ** (1 / 3)))
    options = [(i, j, k) for i in (a, a + 1) for j in (i, i + 1) for k in (j, j + 1) if k <= i + 1]
    repeats = min(options, key=lambda r: abs(4 * r[0] * r[1] * r[2] - num_atoms))
    base = torch.tensor([[0, 0, 0], [0, 1, 1], [1, 0, 1], [1, 1, 0]], dtype=torch.float64) / 2
    places = torch.cartesian_prod(*(torch.arange(r, dtype=torch.float64) for r in repeats))
    positions = lattice_constant * (places[:, None] + base).reshape(-1, 3)
    noise = torch.randn(positions.shape, generator=torch.Generator().manual_seed(0)).double()
    n = len(positions)
    return Structures(
        atomic_numbers=torch.full((n,), 29),
        positions=(positions + rattle * noise).float(),
        cell=(lattice_constant * torch.tensor(repeats, dtype=torch.float64)).diag()[None].float(),
        pbc=torch.ones(1, 3, dtype=torch.bool),
        tags=torch.zeros(n, dtype=torch.int64),
        fixed=torch.zeros(n, dtype=torch.bool),
        ptr=torch.tensor([0, n]),
        sid=(0,),
    )
