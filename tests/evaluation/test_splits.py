import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from slabs import ByHand

from flt_mol.evaluation import evaluate_model, evaluate_splits
from flt_mol.structures import Structures


def system(sid, energy=0.0, numbers=(29, 29, 8), **changes):
    count = len(numbers)
    settings = {
        "tags": [0] * (count - 1) + [2],
        "fixed": [True] + [False] * (count - 1),
        "cell": 9 * torch.eye(3),
        "pbc": True,
        **changes,
    }
    positions = torch.arange(3.0 * count).reshape(count, 3)
    return Structures.single(numbers, positions, sid=sid, energy=energy, **settings)


def energies(structures):
    """The sum of the atomic numbers over 100, eV."""
    values = structures.atomic_numbers.double() / 100
    total = torch.zeros(len(structures), dtype=torch.float64)
    return total.index_add(0, structures.system, values)


class Source(list):
    """A data set: a path, and batches by rows."""

    path = "some.lmdb"

    def __getitems__(self, rows):
        return Structures.cat([self[row] for row in rows])


SYSTEMS = [system(f"s{i}", 0.5 + i, [29, 29 + i, 8]) for i in range(5)]


def loader(systems):
    return torch.utils.data.DataLoader(systems, batch_size=2, collate_fn=Structures.cat)


@pytest.mark.parametrize("make", [list, Source, loader, iter, lambda x: [Structures.cat(x)]])
@pytest.mark.parametrize("batch_size", [1, 2, 64])
def test_each_prediction_stays_with_its_sid_and_target(make, batch_size):
    result = evaluate_model(energies, make(SYSTEMS), batch_size)
    assert result.sid == tuple(f"s{i}" for i in range(5))
    assert result.target.tolist() == [0.5 + i for i in range(5)]
    np.testing.assert_allclose(result.prediction, [0.66 + i / 100 for i in range(5)])
    assert result.metrics["mae"] == pytest.approx(np.mean(np.abs(result.error)))
    assert result.columns["natoms"] == (3,) * 5


def test_splits_are_reported_as_they_go():
    steps = []
    results = evaluate_splits(
        energies, {"a": SYSTEMS, "b": SYSTEMS[:1]}, 2, progress=lambda *step: steps.append(step)
    )
    assert list(results) == ["a", "b"]
    assert steps == [("a", 2, 5), ("a", 4, 5), ("a", 5, 5), ("b", 1, 1)]


def test_columns_hold_adsorbates_elements_and_facets():
    systems = [
        system(1, numbers=[28, 6, 8], tags=[0, 2, 2], info={"facet": "111"}),
        system(2, info={"facet": None}),
    ]
    columns = evaluate_model(energies, systems).columns
    assert columns["adsorbate"] == ("CO", "O")
    assert columns["elements"] == ("C Ni O", "Cu O")
    assert columns["facet"] == ("111", None)


def test_the_model_is_evaluated_in_eval_mode_and_keeps_its_flags():
    model = ByHand(1e-3)
    evaluate_model(model, SYSTEMS)  # which asserts it
    assert model.training


def test_splits_without_targets_or_systems_are_refused():
    source = Source([system("x", None)])
    with pytest.raises(ValueError, match=r"this split has no targets: some\.lmdb.* x"):
        evaluate_model(energies, source)
    with pytest.raises(ValueError, match="no systems"):
        evaluate_model(energies, [])
    with pytest.raises(ValueError, match="batch_size"):
        evaluate_model(energies, SYSTEMS, 0)


def test_wrong_predictions_are_named():
    with pytest.raises(ValueError, match="5 systems"):
        evaluate_model(lambda structures: torch.zeros(3), SYSTEMS)
    with pytest.raises(ValueError, match="sid s2"):
        evaluate_model(lambda s: torch.tensor([0, 0, torch.nan, 0, 0]), SYSTEMS)


def moved(structures):
    """Every atom 0.25 Å along x, and initial energies of 1 eV."""
    shift = torch.zeros_like(structures.positions)
    shift[:, 0] = 0.25
    ones = torch.ones(len(structures))
    return {"energy": energies(structures), "displacement": shift, "energy_initial": ones}


def relaxed(sid, fixed):
    """The free atoms relax by 1 Å along x, across the boundary of the cell."""
    one = system(sid, fixed=fixed, energy_initial=1.01)
    positions = one.positions.clone()
    positions[~one.fixed, 0] += 1 - 9
    return Structures.single(
        one.atomic_numbers,
        one.positions,
        sid=sid,
        energy=0.66,
        energy_initial=1.01,
        cell=one.cell[0],
        pbc=True,
        tags=one.tags,
        fixed=one.fixed,
        positions_relaxed=positions,
    )


def test_other_outputs_are_compared_over_free_atoms():
    systems = [relaxed(1, [True, True, False]), relaxed(2, [True, False, False])]
    further = evaluate_model(moved, systems, 1).further
    assert further == {
        "energy_initial_mae": pytest.approx(0.01, abs=1e-6),
        "energy_initial_ewt": 1.0,
        "energy_initial_count": 2,
        "displacement": pytest.approx(0.75, abs=1e-6),
        "displacement_unmoved": pytest.approx(1.0, abs=1e-6),
        "displacement_atoms": 3,
    }
    assert evaluate_model(energies, systems).further == {}


def test_displacements_that_are_not_finite_name_the_system():
    def broken(structures):
        return {**moved(structures), "displacement": torch.full((6, 3), torch.nan)}

    with pytest.raises(ValueError, match="sid 7"):
        evaluate_model(broken, [relaxed(7, [False] * 3), relaxed(8, [False] * 3)])


class Moving(ByHand):
    config = SimpleNamespace(feedback="positions")


class WithReference(ByHand):
    def __init__(self, each):
        super().__init__(1e-3)
        self.each = each

    def reference_energies(self, structures):
        return torch.full((len(structures),), self.each, dtype=torch.float64)


@pytest.mark.parametrize(
    ("model", "systems", "words"),
    [
        (ByHand(1e-3, seen=[8, 29]), [system(1, numbers=[29, 78, 8])], "Pt"),
        (Moving(1e-3), [system(1, fixed=[False] * 3)], "no atom is fixed in 2 of 2"),
        (energies, [*SYSTEMS, system("far", -5332.0)], r"1 of 7 structures \(far: -5332 eV\)"),
        (energies, [system(i, 20.0 * i) for i in (1, 2)], r"3 of 3 structures \(2: 40 eV, 1: 20"),
        (energies, [system(1, tags=[2] * 3)], r"all tags are 2 in 2 of 2"),
        (WithReference(20.0), [system(i, 2.0 + 20 * i) for i in (1, 3)], r"1 of 3 .*3: 42 eV"),
    ],
)
def test_what_deserves_it_is_warned_of_once(model, systems, words):
    with pytest.warns(UserWarning, match=words) as caught:
        evaluate_splits(model, {"a": systems, "b": systems[:1]})
    assert len(caught) == 1


def test_nothing_else_is_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        evaluate_model(moved, SYSTEMS)


def test_forces_of_a_split():
    """Means over all batches; sids of what is not finite; nothing where forces are not known."""
    zeros = torch.zeros(3, 3)
    known = [system(f"s{i}", forces=zeros) for i in range(3)]
    known.append(system("s3", forces=zeros * torch.nan))

    def model(structures, bad=0.0):
        forces = torch.ones(structures.num_atoms, 3) * (1 + bad)
        forces[:3] *= 0.01
        return {"energy": structures.energy + 0.01, "forces": forces}

    for batch_size in (2, 4):
        found = evaluate_model(model, loader(known), batch_size).further
        batches = 2 if batch_size == 2 else 1
        assert found["forces_mae"] == pytest.approx((0.01 * batches + 3 - batches) / 3)
        assert found["efwt"] == pytest.approx(batches / 3)
        assert found["forces_atoms"] == 6
    assert evaluate_model(model, [system("a")]).further == {}
    with pytest.raises(ValueError, match="s0"):
        evaluate_model(lambda x: model(x, torch.nan), known)
