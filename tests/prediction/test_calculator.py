import numpy as np
import pytest
import torch
from ase.calculators.calculator import PropertyNotImplementedError
from ase.constraints import FixAtoms
from slabs import PLATINUM, ByHand, platinum

from flt_mol import FLTCalculator


class Springs(torch.nn.Module):
    """½ Σ |r|², eV: forces −r."""

    trained_on_forces = True

    def __init__(self, scale=1.0):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(scale))

    def forward(self, structures):
        squares = structures.positions.square().sum(1)
        zero = torch.zeros(len(structures), dtype=squares.dtype)
        return {"energy": self.scale * zero.index_add(0, structures.system, squares) / 2}


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
    assert atoms.calc.spread is None
    assert atoms.get_potential_energy() == 2 * PLATINUM
    assert atoms.calc.spread == pytest.approx(np.sqrt(2) * PLATINUM)


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


def test_forces_of_a_model_that_was_trained_on_them():
    atoms = platinum()
    atoms.calc = FLTCalculator([Springs(1.0), Springs(3.0)])
    np.testing.assert_allclose(atoms.get_forces(), -2 * atoms.positions, rtol=1e-5)
    with pytest.raises(PropertyNotImplementedError):
        atoms.get_stress()
