"""Building and relaxing single EMT systems."""

import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk, molecule
from ase.calculators.emt import EMT
from ase.constraints import FixAtoms
from ase.data import covalent_radii
from ase.optimize import BFGS

from flt_mol.data.emt import surfaces
from flt_mol.data.emt.relax import relax


def generator(seed=0):
    return np.random.default_rng(seed)


@pytest.fixture(scope="module")
def slab():
    symbols = surfaces.draw_symbols(("Cu", "Pd"), 8, generator())
    return surfaces.relax_slab(
        surfaces.build_slab("111", (2, 2, 2), symbols, 0.02), "111", 2, fmax=0.01, steps=200
    )


@pytest.mark.parametrize("metal", surfaces.METALS)
def test_lattice_constant_has_no_pressure(metal):
    crystal = bulk(metal, "fcc", a=surfaces.lattice_constant(metal))
    crystal.calc = EMT()
    assert np.abs(crystal.get_stress()[:3]).max() < 1e-4  # eV/Å³; 1 % of strain gives some 1e-2


@pytest.mark.parametrize(("facet", "layers"), [("111", 2), ("100", 3), ("110", 4), ("111", 4)])
def test_slab_layers_tags_and_vacuum(facet, layers):
    slab = surfaces.build_slab(facet, (2, 3, layers), ["Ni"] * (6 * layers), 0.0)
    tags, heights = slab.get_tags(), slab.positions[:, 2]
    assert len(slab) == 6 * layers
    assert len(np.unique(np.round(heights, 2))) == layers
    assert (tags == 0).sum() == 6 * (layers // 2)
    assert heights[tags == 0].max() < heights[tags == 1].min()
    assert slab.constraints[0].index.tolist() == np.flatnonzero(tags == 0).tolist()
    assert heights.min() == pytest.approx(7.0, abs=1e-3)
    assert slab.cell[2, 2] - heights.max() == pytest.approx(7.0, abs=1e-3)
    assert slab.pbc.all()


def test_lattice_is_the_strained_mean_of_the_composition():
    slab = surfaces.build_slab("100", (2, 2, 2), ["Al", "Au", "Au", "Au"] * 2, 0.03)
    a = 1.03 * (0.25 * surfaces.lattice_constant("Al") + 0.75 * surfaces.lattice_constant("Au"))
    # the 100 surface cell of n × n atoms is n a / √2 wide
    assert slab.cell[0, 0] == pytest.approx(2 * a / np.sqrt(2), abs=1e-5)


def test_every_drawn_element_occurs():
    for seed in range(20):
        assert set(surfaces.draw_symbols(("Cu", "Pd", "Pt"), 8, generator(seed))) == {
            "Cu",
            "Pd",
            "Pt",
        }


def test_positions_are_exact_in_float32(slab):
    system = surfaces.place_adsorbate(slab, "CH3", generator(1))
    for array in (slab.atoms.positions, system.positions, system.cell.array):
        assert np.array_equal(array, array.astype(np.float32).astype(np.float64))


def test_relaxed_slab(slab):
    atoms = slab.atoms.copy()
    ideal = surfaces.build_slab("111", (2, 2, 2), atoms.get_chemical_symbols(), 0.02)
    fixed = atoms.get_tags() == 0
    atoms.calc = EMT()
    assert slab.outcome == "converged"
    assert np.array_equal(atoms.positions[fixed], ideal.positions[fixed])
    assert np.linalg.norm(atoms.get_forces(apply_constraint=False)[~fixed], axis=1).max() < 0.02
    assert slab.energy == pytest.approx(atoms.get_potential_energy(), abs=1e-12)
    assert 0 < slab.displacement < 0.5
    assert slab.energy < surfaces.energy(ideal)


def test_relax_agrees_with_ase():
    mine = surfaces.build_slab("100", (2, 2, 3), ["Pt", "Ni"] * 6, 0.0)
    mine.positions[-1] += (0.1, -0.05, 0.2)
    reference = mine.copy()
    reference.calc = EMT()
    BFGS(reference, logfile=None).run(fmax=1e-3, steps=300)
    assert relax(mine, fmax=1e-3, steps=300) == "converged"
    assert mine.calc is None
    assert surfaces.energy(mine) == pytest.approx(reference.get_potential_energy(), abs=1e-5)


def test_relax_never_climbs(slab):
    system = surfaces.place_adsorbate(slab, "CO", generator(3))
    path = [surfaces.energy(system)]

    def watch(positions):
        now = system.copy()
        now.positions = positions
        path.append(surfaces.energy(now))

    relax(system, fmax=0.05, steps=100, stop=watch)
    assert len(path) > 5
    assert np.diff(path).max() < 1e-3


def test_relax_says_why_it_ended(slab):
    start = surfaces.place_adsorbate(slab, "CO", generator(3))
    assert relax(start.copy(), fmax=0.05, steps=2) == "not_converged"
    assert relax(start.copy(), fmax=0.05, steps=50, stop=lambda _: "enough") == "enough"
    broken = Atoms("CO", positions=[(0, 0, 0), (0, 0, 0)])  # forces are not finite
    assert relax(broken, fmax=0.05, steps=5) == "not_converged"
    held = Atoms("CO", positions=[(0, 0, 0), (0, 0, 1.5)], constraint=FixAtoms([0, 1]))
    assert relax(held, fmax=0.05, steps=5) == "converged"


def test_gas_references_are_those_of_oc20():
    def relaxed(name):
        atoms = molecule(name)
        atoms.calc = EMT()
        BFGS(atoms, logfile=None).run(fmax=1e-3, steps=300)
        return atoms.get_potential_energy()

    reference = surfaces.gas_references()
    assert 2 * reference["H"] == pytest.approx(relaxed("H2"), abs=1e-5)
    assert 2 * reference["N"] == pytest.approx(relaxed("N2"), abs=1e-5)
    assert 2 * reference["H"] + reference["O"] == pytest.approx(relaxed("H2O"), abs=1e-5)
    assert reference["C"] + reference["O"] == pytest.approx(relaxed("CO"), abs=1e-5)


def test_contact_height_of_one_atom_on_top_of_another():
    below = Atoms("Cu", positions=[(0, 0, 1.0)], cell=[8, 8, 20], pbc=True)
    radii = covalent_radii[29] + covalent_radii[8]
    straight = Atoms("O", positions=[(0, 0, 0)])
    assert surfaces.contact_height(below, straight, 1.2) == pytest.approx(1.0 + 1.2 * radii)
    aside = Atoms("O", positions=[(9.0, -16.0, 0.5)])  # 1 Å from an image, across the border
    height = 1.0 + np.sqrt((1.2 * radii) ** 2 - 1.0) - 0.5
    assert surfaces.contact_height(below, aside, 1.2) == pytest.approx(height)


def test_adsorbate_touches_within_the_range(slab):
    for seed in range(10):
        system = surfaces.place_adsorbate(slab, "NH3", generator(seed))
        tags, radii = system.get_tags(), covalent_radii[system.numbers]
        ratio = system.get_all_distances(mic=True) / (radii[:, None] + radii)
        nearest = ratio[np.ix_(tags == 2, tags != 2)].min()
        assert 1.1 - 1e-3 <= nearest <= 1.5 + 1e-3
        assert system.get_chemical_symbols()[-4:] == ["N", "H", "H", "H"]
        assert system.constraints[0].index.tolist() == np.flatnonzero(tags == 0).tolist()
        assert np.array_equal(system.positions[:-4], slab.atoms.positions)


def test_rotations_are_rotations_and_uniform():
    rng = generator()
    rotations = np.array([surfaces.random_rotation(rng) for _ in range(2000)])
    np.testing.assert_allclose(
        rotations @ rotations.transpose(0, 2, 1), np.tile(np.eye(3), (2000, 1, 1)), atol=1e-12
    )
    np.testing.assert_allclose(np.linalg.det(rotations), 1.0)
    # each entry has mean 0 and variance 1/3; 5 standard errors
    assert np.abs(rotations.mean(0)).max() < 5 / np.sqrt(3 * 2000)


def test_adsorption_energy_of_atoms_far_away_is_that_of_the_gas(slab):
    system = slab.atoms.copy()
    system.cell[2, 2] += 30.0
    gas = molecule("H2")
    gas.positions += (0, 0, 30.0)
    relax(gas, fmax=1e-3, steps=100)
    gas.set_tags(2)
    system.set_constraint()
    assert surfaces.adsorption_energy(system + gas, slab) == pytest.approx(0.0, abs=1e-5)


def test_bonds_are_those_of_chemistry():
    bonds = {
        name: len(surfaces.adsorbate_bonds(name)) for name in ("O", "N2", "CO2", "CH3", "CH2O")
    }
    assert bonds == {"O": 0, "N2": 1, "CO2": 2, "CH3": 3, "CH2O": 3}
