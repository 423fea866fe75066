import numpy as np
import pytest
import torch
from conftest import small_model, small_pairs

from flt_mol import Structures, testing
from flt_mol.evaluation.further import FurtherErrors
from flt_mol.evaluation.splits import evaluate_model, evaluate_splits


def pair(sid, moved, fixed=(1, 0), **targets):
    """Two atoms in a cell of 4 Å, of which the second moves along z."""
    relaxed = [[0, 0, 0], [0, 0, 1 + moved]]
    return Structures.single(
        [29, 1], [[0, 0, 0], [0, 0, 1]], cell=4 * torch.eye(3), pbc=True, fixed=fixed, sid=sid,
        positions_relaxed=relaxed, **targets,
    )  # fmt: skip


def test_sums_over_free_atoms_and_systems():
    errors = FurtherErrors()
    batch = Structures.cat([pair(1, 0.5, energy_initial=1.0), pair(2, 3.9, energy_initial=2.0)])
    shift = torch.tensor([[9.0, 0, 0], [0, 0, 0.2], [0, 0, 0], [0, 0, 0.0]])
    errors.update({"displacement": shift, "energy_initial": torch.tensor([1.01, 3.0])}, batch)
    assert errors.compute() == {
        "energy_initial_mae": pytest.approx(0.505, abs=1e-6),
        "energy_initial_ewt": 0.5,
        "energy_initial_count": 2,
        "displacement": pytest.approx((0.3 + 0.1) / 2, abs=1e-6),  # 3.9 is −0.1 by its image
        "displacement_unmoved": pytest.approx((0.5 + 0.1) / 2, abs=1e-6),
        "displacement_atoms": 2,
    }


def test_what_has_no_target_is_passed_over():
    errors = FurtherErrors()
    one = Structures.single([1], [[0, 0, 0]])
    errors.update({"displacement": torch.zeros(1, 3), "energy_initial": torch.zeros(1)}, one)
    errors.update(torch.zeros(1), one)
    assert errors.compute() == {}


def test_wrong_displacements_name_the_system():
    errors, batch = FurtherErrors(), Structures.cat([pair("a", 0.1), pair("b", 0.1)])
    with pytest.raises(ValueError, match=r"shape \(4,\) for 4 atoms"):
        errors.update({"displacement": torch.zeros(4)}, batch)
    shift = torch.zeros(4, 3)
    shift[3, 0] = torch.nan
    with pytest.raises(ValueError, match="sid b is not finite"):
        errors.update({"displacement": shift}, batch)


@pytest.fixture
def moving():
    return small_model(pairs=small_pairs(), outputs=["energy", "energy_initial", "displacement"])


def systems(fixed):
    """Random systems with all targets."""
    structures = testing.random_structures(torch.Generator().manual_seed(0), natoms=(5, 6, 4))
    return [
        Structures.single(
            s.atomic_numbers, s.positions, cell=s.cell, pbc=s.pbc[0].tolist(), sid=i,
            energy=0.1 * i, energy_initial=0.0, fixed=[fixed] + [0] * (s.num_atoms - 1),
            positions_relaxed=s.positions + 0.1,
        )
        for i, s in enumerate(structures)
    ]  # fmt: skip


def test_outputs_of_a_model_are_evaluated_in_any_batches(moving):
    moving.mark_seen(range(1, 119))
    one, all_at_once = (evaluate_model(moving, systems(fixed=1), size) for size in (1, 8))
    assert not one.unfixed
    assert one.further["displacement_unmoved"] == pytest.approx(0.1 * 3**0.5, rel=1e-5)
    assert one.further["energy_initial_count"] == 3
    assert one.further == pytest.approx(all_at_once.further, rel=1e-4)
    np.testing.assert_allclose(one.prediction, all_at_once.prediction, atol=1e-5)


def test_no_fixed_atom_under_a_model_that_moves_them_is_told_once(moving):
    moving.mark_seen(range(1, 119))
    with pytest.warns(UserWarning, match=r"no atom is fixed in b, c, and this model moves") as w:
        evaluate_splits(moving, {"a": systems(1), "b": systems(0), "c": systems(0)})
    assert len(w) == 1
    with pytest.warns(UserWarning, match="no atom is fixed in this split"):
        assert evaluate_model(moving, systems(0)).unfixed
    still = small_model()
    still.mark_seen(range(1, 119))
    assert not evaluate_model(still, systems(0)).unfixed
