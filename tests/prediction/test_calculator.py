import copy
import pickle
import warnings

import ase.io
import numpy as np
import pytest
import torch
from ase.build import molecule
from ase.calculators.calculator import PropertyNotImplementedError
from ase.constraints import FixAtoms
from ase.db import connect
from ase.mep import NEB
from ase.optimize import BFGS
from slabs import PLATINUM, ByHand, platinum

from flt_mol import FLTCalculator, predict


class Spring(torch.nn.Module):
    """½ k Σ |r|², whose forces −k r are trained on, or so it says."""

    trained_on_forces = True

    def __init__(self, k=3.0):
        super().__init__()
        self.k = torch.nn.Parameter(torch.tensor(k))

    def forward(self, structures):
        energy = 0.5 * self.k * structures.positions.square().sum(1)
        total = torch.zeros(len(structures)).index_add(0, structures.system, energy)
        return {"energy": total}


def test_the_energy_is_that_of_predict():
    atoms = platinum()
    atoms.calc = FLTCalculator("emt_small")
    energy = atoms.get_potential_energy()
    assert energy == predict(atoms, "emt_small")[0]
    assert isinstance(energy, float)
    assert atoms.calc.parameters == {"checkpoint": "emt_small"}
    assert atoms.calc.spread is None


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.positions.__iadd__([[0, 0, 0.1]] * 14),
        lambda a: a.set_tags([0] * 14),
        lambda a: a.set_constraint(FixAtoms([0])),
        lambda a: a.set_cell(a.cell * 1.1),
        lambda a: a.__delitem__(13),
        lambda a: a.set_atomic_numbers([29] * 14),
        lambda a: a.set_pbc([True, True, False]),
    ],
)
def test_energies_are_kept_until_something_changes(change):
    atoms, model = platinum(), ByHand()
    atoms.calc = FLTCalculator(model)
    assert [atoms.get_potential_energy() for _ in range(3)] == [PLATINUM] * 3
    atoms.set_initial_magnetic_moments([1.0] * 14)
    assert atoms.get_potential_energy() == PLATINUM
    assert model.calls == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        change(atoms)
        atoms.get_potential_energy()
    assert model.calls == 2


def test_atoms_are_left_as_they_are():
    atoms = platinum()
    atoms.info["y_relaxed"] = float("nan")
    before = atoms.copy()
    atoms.calc = FLTCalculator(ByHand())
    atoms.get_potential_energy()
    assert atoms == before
    assert list(atoms.info) == ["y_relaxed"]


@pytest.mark.parametrize(
    ("ask", "reason"),
    [
        (lambda a: a.get_forces(), "not trained on forces: its energy is that of the relaxed"),
        (lambda a: a.get_stress(), "gives no stress"),
        (lambda a: a.get_potential_energy(force_consistent=True), "gives no free_energy"),
        (lambda a: a.get_charges(), "gives the energy, no charges"),
        (lambda a: BFGS(a, logfile=None).run(steps=1), "gradient of it is no force"),
    ],
)
def test_what_there_is_none_of_is_refused_with_the_reason(ask, reason):
    atoms = platinum()
    atoms.calc = FLTCalculator(ByHand())
    with pytest.raises(PropertyNotImplementedError, match=reason):
        ask(atoms)
    assert atoms.get_potential_energy() == PLATINUM


def test_forces_of_models_trained_on_them():
    atoms = platinum()
    atoms.calc = FLTCalculator(Spring())
    np.testing.assert_allclose(atoms.get_forces(), -3.0 * atoms.positions, rtol=1e-6)
    atoms.calc = FLTCalculator([Spring(1.0), Spring(3.0)])
    np.testing.assert_allclose(atoms.get_forces(), -2.0 * atoms.positions, rtol=1e-6)
    assert "energy" in atoms.calc.results
    atoms.calc = FLTCalculator([Spring(), ByHand()])
    with pytest.raises(PropertyNotImplementedError, match="not trained on forces"):
        atoms.get_forces()
    atoms.calc = FLTCalculator(Spring(torch.inf))
    with pytest.raises(ValueError, match="not finite|inf eV"):
        atoms.get_forces()


def test_what_models_with_forces_give_none_of():
    atoms = platinum()
    atoms.calc = FLTCalculator(Spring())
    with pytest.raises(PropertyNotImplementedError, match="gives the energy and forces, no stress"):
        atoms.get_stress()


def test_the_model_cannot_be_changed_afterwards():
    calculator = FLTCalculator("emt_small")
    with pytest.raises(ValueError, match="checkpoint cannot be changed.* make another"):
        calculator.set(checkpoint="flt-small")
    assert calculator.parameters == {"checkpoint": "emt_small"}
    assert calculator.set() == {}


def test_results_that_are_changed_by_others():
    atoms = platinum()
    atoms.calc = FLTCalculator(Spring())
    forces = atoms.get_forces()
    forces[:] = 0.0
    assert np.abs(atoms.get_forces()).max() > 1.0


def test_images_that_share_a_calculator():
    images = [platinum() for _ in range(3)]
    for step, image in enumerate(images):
        image.positions[-1, 0] += 0.4 * step
    expected = predict(images, "emt_small")
    assert len(set(expected)) == 3
    shared = FLTCalculator("emt_small")
    for image in images:
        image.calc = shared
    for _ in range(2):
        found = [image.get_potential_energy() for image in images]
        np.testing.assert_allclose(found, expected, atol=1e-6)
    band = NEB(images, allow_shared_calculator=True, method="improvedtangent")
    with pytest.raises(PropertyNotImplementedError, match="not trained on forces"):
        band.get_forces()


def test_optimisers_work_where_there_are_forces():
    atoms = molecule("H2O")
    atoms.set_tags(2)
    atoms.calc = FLTCalculator(Spring())
    with pytest.warns(UserWarning, match="1 of 1 structures") as caught:
        assert BFGS(atoms, logfile=None).run(fmax=0.01, steps=50)
    assert [str(w.message)[:12] for w in caught] == ["no cell in 1", "atoms less t"]  # at the end
    assert np.abs(atoms.positions).max() < 0.01


def test_warnings_come_once_per_kind():
    atoms = platinum(tags=False)
    atoms.calc = FLTCalculator(ByHand(seen=[78]))

    def three_times():
        for _ in range(3):
            atoms.positions += 0.01
            atoms.get_potential_energy()

    with pytest.warns(UserWarning, match="structures") as caught:
        three_times()
    kinds = [str(w.message)[:15] for w in caught]
    assert kinds == ["all tags are 0 ", "elements never "]
    atoms.set_atomic_numbers([29] * 14)
    with pytest.warns(UserWarning, match="never trained on: Cu") as caught:
        atoms.get_potential_energy()
    assert len(caught) == 1


def test_ensembles():
    atoms = platinum()
    atoms.calc = FLTCalculator([ByHand(1.0), ByHand(3.0)])
    assert atoms.calc.spread is None
    assert atoms.get_potential_energy() == 2 * PLATINUM
    assert atoms.calc.spread == pytest.approx(2**0.5 * PLATINUM)
    atoms.calc.reset()
    assert atoms.calc.spread is None
    names = ["emt_small", "emt_performer_small"]
    assert FLTCalculator(names).parameters == {"checkpoint": names}
    assert FLTCalculator(["emt_small", ByHand()]).parameters == {"checkpoint": ["emt_small"]}


def test_it_can_be_copied_pickled_and_written(tmp_path):
    atoms = platinum()
    for calculator in (FLTCalculator("emt_small"), FLTCalculator(["emt_small", ByHand()])):
        atoms.calc = calculator
        energy = atoms.get_potential_energy()
        for again in (copy.deepcopy(calculator), pickle.loads(pickle.dumps(calculator))):
            other = platinum()
            other.calc = again
            assert other.get_potential_energy() == energy
        for name in ("a.traj", "a.extxyz"):
            ase.io.write(tmp_path / name, atoms)
            back = ase.io.read(tmp_path / name).get_potential_energy()
            assert back == pytest.approx(energy, abs=1e-6)
    with connect(tmp_path / "a.json") as rows:
        rows.write(atoms)
        assert next(rows.select()).energy == energy


def test_atoms_are_needed():
    with pytest.raises(ValueError, match="no atoms to calculate"):
        FLTCalculator(ByHand()).calculate()
