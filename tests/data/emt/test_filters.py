"""Each filter on an example built for it."""

import numpy as np
import pytest
from ase import Atoms
from ase.data import covalent_radii

from flt_mol.data.emt import filters, surfaces
from flt_mol.data.emt.relax import relax

TOP = 9.0


def clean_slab():
    """Two square layers of copper, 3 Å apart, the upper one at a height of 9 Å."""
    grid = [(i * 2.6, j * 2.6) for i in range(3) for j in range(3)]
    positions = [(x, y, z) for z in (TOP - 3.0, TOP) for x, y in grid]
    atoms = Atoms("Cu18", positions=positions, cell=[7.8, 7.8, 24.0], pbc=True)
    atoms.set_tags([0] * 9 + [1] * 9)
    return surfaces.Slab(atoms, 0.0, "100", 2, "converged", 0.0)


def with_adsorbate(name, position, stretch=1.0):
    slab = clean_slab()
    adsorbate = surfaces.gas_geometry(name)
    adsorbate.positions -= adsorbate.positions[0]
    adsorbate.positions *= stretch
    adsorbate.positions += position
    adsorbate.set_tags(2)
    return slab, slab.atoms + adsorbate


def judge(slab, system, y=-1.0, outcome="converged"):
    return filters.verdict(system, slab, y, outcome)


def test_a_good_system_is_kept():
    assert judge(*with_adsorbate("O", (2.6, 2.6, TOP + 1.9))) is None


@pytest.mark.parametrize(
    ("energy", "dropped"),
    [
        (10.0, False),
        (-10.0, False),
        (10.001, True),
        (-10.001, True),
        (np.nan, True),
        (np.inf, True),
    ],
)
def test_energy_out_of_range(energy, dropped):
    reason = judge(*with_adsorbate("O", (2.6, 2.6, TOP + 1.9)), y=energy)
    assert reason == ("energy_out_of_range" if dropped else None)
    assert filters.out_of_range(energy) is dropped


def test_outcome_of_the_relaxation_is_the_reason():
    system = with_adsorbate("O", (2.6, 2.6, TOP + 1.9))
    assert judge(*system, outcome="not_converged") == "not_converged"
    assert judge(*system, outcome="dissociated") == "dissociated"


def test_desorbed():
    limit = 1.5 * (covalent_radii[29] + covalent_radii[8])
    assert judge(*with_adsorbate("O", (2.6, 2.6, TOP + limit - 0.01))) is None
    assert judge(*with_adsorbate("O", (2.6, 2.6, TOP + limit + 0.01))) == "desorbed"


def test_desorption_looks_across_the_border():
    # one cell away from the atom below it
    assert judge(*with_adsorbate("O", (2.6 - 7.8, 2.6 + 7.8, TOP + 1.9))) is None


def test_one_atom_near_is_enough():
    # carbon dioxide standing upright: the far oxygen is 4 Å up
    slab, system = with_adsorbate("CO2", (2.6, 2.6, TOP + 3.1))
    assert system.positions[-2:, 2].max() - TOP > 3.0
    assert judge(slab, system) is None


def test_subsurface():
    hole = (1.3, 1.3)
    assert judge(*with_adsorbate("C", (*hole, TOP - 0.49))) is None
    assert judge(*with_adsorbate("C", (*hole, TOP - 0.51))) == "subsurface"


def test_reconstructed():
    slab, system = with_adsorbate("O", (2.6, 2.6, TOP + 1.9))
    system.positions[12] += (0.99, 0.0, 0.0)
    assert judge(slab, system) is None
    system.positions[12] += (0.02, 0.0, 0.0)
    assert judge(slab, system) == "reconstructed"


@pytest.mark.parametrize("name", ["OH", "CO", "CH3"])
def test_dissociation_is_a_bond_beyond_the_slack(name):
    _, system = with_adsorbate(name, (2.6, 2.6, TOP + 1.9))
    check = filters.dissociation_check(name, system)
    assert check(system.positions) is None
    first, last = len(system) - len(surfaces.gas_geometry(name)), len(system) - 1
    longest = covalent_radii[system.numbers[[first, last]]].sum() + 0.8
    bond = system.positions[last] - system.positions[first]
    for length, reason in ((longest - 0.01, None), (longest + 0.01, "dissociated")):
        stretched = system.positions.copy()
        stretched[last] = stretched[first] + bond / np.linalg.norm(bond) * length
        assert check(stretched) == reason


def test_single_atoms_cannot_dissociate():
    _, system = with_adsorbate("N", (2.6, 2.6, TOP + 1.9))
    assert filters.dissociation_check("N", system)(system.positions * 100) is None


def test_dissociation_ends_the_relaxation():
    # hydrogen atoms of H2O that EMT's copper pulls apart
    slab, system = with_adsorbate("H2O", (2.6, 2.6, TOP + 1.2), stretch=1.6)
    check = filters.dissociation_check("H2O", system)
    assert relax(system, fmax=0.05, steps=200, stop=check) == "dissociated"
    assert judge(slab, system, outcome="dissociated") == "dissociated"


def test_every_reason_has_a_rule():
    assert set(filters.RULES) == set(filters.REASONS)
