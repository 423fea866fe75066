import numpy as np
import pytest
from ase.build import molecule
from ase.calculators.calculator import PropertyNotImplementedError
from ase.calculators.fd import calculate_numerical_forces, calculate_numerical_stress
from ase.constraints import FixAtoms
from conftest import small_model, small_pairs
from slabs import PLATINUM, ByHand, platinum

from flt_mol import FLTCalculator
from flt_mol.data import from_ase


def change(name):
    def do(atoms):
        if name == "positions":
            atoms.positions[0, 2] += 0.01
        elif name == "numbers":
            atoms.numbers[0] = 79
        elif name == "cell":
            atoms.cell[2, 2] += 1
        elif name == "pbc":
            atoms.pbc = [True, True, False]
        elif name == "tags":
            atoms.set_tags([0] * 12 + [2] * 2)
        else:
            atoms.set_constraint(FixAtoms([0]))

    return do


@pytest.mark.parametrize("name", ["positions", "numbers", "cell", "pbc", "tags", "fixed"])
def test_an_energy_is_kept_until_something_changes(name):
    model = ByHand()
    atoms = platinum()
    atoms.calc = FLTCalculator(model)
    assert [atoms.get_potential_energy() for _ in range(3)] == [PLATINUM] * 3
    assert model.calls == 1
    change(name)(atoms)
    atoms.get_potential_energy()
    assert model.calls == 2


def test_charges_and_moments_do_not_count():
    model = ByHand()
    atoms = platinum()
    atoms.calc = FLTCalculator(model)
    atoms.get_potential_energy()
    atoms.set_initial_magnetic_moments([1.0] * len(atoms))
    atoms.get_potential_energy()
    assert model.calls == 1


def test_an_ensemble_gives_mean_and_standard_deviation():
    atoms = platinum()
    atoms.calc = FLTCalculator([ByHand(1.0), ByHand(3.0)])
    assert atoms.calc.std is None
    assert atoms.get_potential_energy() == 2 * PLATINUM
    assert atoms.calc.std == pytest.approx(np.sqrt(2) * PLATINUM)


def test_several_structures_may_share_a_calculator():
    first, second = platinum(), platinum()
    second.numbers[0] = 28
    first.calc = second.calc = FLTCalculator(ByHand())
    assert first.get_potential_energy() == PLATINUM
    assert second.get_potential_energy() == PLATINUM - 50
    assert first.get_potential_energy() == PLATINUM


@pytest.mark.parametrize("name", ["forces", "stress", "free_energy", "magmoms"])
def test_properties_that_mean_nothing_are_refused(name):
    atoms = platinum()
    atoms.calc = FLTCalculator(ByHand())
    with pytest.raises(PropertyNotImplementedError, match="force|stress|free_energy|magmoms"):
        atoms.calc.get_property(name, atoms)


def forced(seed=0, outputs=("energy", "forces")):
    model = small_model(seed=seed, outputs=list(outputs), pairs=small_pairs(vectors=2)).eval()
    model.normalizer.std.fill_(20.0)
    model.mark_seen([1, 6, 8, 78])
    return model


def test_forces_of_models_that_were_trained_on_them():
    """Of an ensemble the mean; energy, forces and stress belong together."""
    models = [forced(seed) for seed in (0, 1)]
    atoms = platinum()
    atoms.calc = FLTCalculator(models)
    energy, forces, stress = atoms.get_potential_energy(), atoms.get_forces(), atoms.get_stress()
    found = [model(from_ase(atoms), stress=True) for model in models]
    mean = {name: sum(out[name] for out in found).detach().numpy() / 2 for name in found[0]}
    assert energy == pytest.approx(mean["energy"][0], abs=1e-5)
    np.testing.assert_allclose(forces, mean["forces"], atol=1e-6)
    assert np.abs(forces).max() > 1e-4
    np.testing.assert_allclose(
        stress[[0, 3, 5]], mean["stress"][0][[0, 1, 0], [0, 2, 1]], atol=1e-8
    )
    std = np.std([out["energy"].item() for out in found], ddof=1)
    assert atoms.calc.std == pytest.approx(std, abs=1e-5)
    atoms.set_constraint(FixAtoms([0, 1]))
    assert not atoms.get_forces()[:2].any()
    with pytest.raises(PropertyNotImplementedError, match="magmoms"):
        atoms.calc.get_property("magmoms", atoms)


def test_forces_of_a_model_are_slopes_of_its_energy_in_ase():
    atoms = platinum()
    atoms.calc = FLTCalculator(forced().double())
    forces = atoms.get_forces()
    numerical = calculate_numerical_forces(atoms, eps=1e-2, iatoms=[0, len(atoms) - 1])
    assert np.abs(numerical).max() > 1e-2
    np.testing.assert_allclose(forces[[0, -1]], numerical, atol=3e-4)
    stress = calculate_numerical_stress(atoms, eps=1e-3)
    np.testing.assert_allclose(atoms.get_stress(), stress, atol=1e-5)


def test_one_member_without_forces_is_enough_to_refuse_them():
    atoms = platinum()
    atoms.calc = FLTCalculator([forced(), forced(outputs=["energy"])])
    assert np.isfinite(atoms.get_potential_energy())
    with pytest.raises(PropertyNotImplementedError, match="not trained on forces"):
        atoms.get_forces()


@pytest.mark.filterwarnings("ignore:no cell", "ignore:all tags")
def test_a_molecule_without_cell_has_no_stress():
    atoms = molecule("H2O")
    atoms.set_tags(2)
    atoms.calc = FLTCalculator(forced())
    assert np.isfinite(atoms.get_forces()).all()
    with pytest.raises(PropertyNotImplementedError, match="volume"):
        atoms.get_stress()


def test_steps_of_a_relaxation_take_one_call_each():
    model, calls = forced(), []
    model.register_forward_hook(lambda *_: calls.append(1))
    atoms = platinum()
    atoms.calc = FLTCalculator(model)
    atoms.get_forces()
    first = len(calls)
    for step in range(3):
        atoms.positions[0, 2] += 0.01 * step + 0.01
        atoms.get_forces()
        atoms.get_potential_energy()
    assert len(calls) == first + 3
