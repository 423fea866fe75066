"""The loss by hand-computed values: parts, recycles, decay, masks; and what is refused."""

from dataclasses import replace

import pytest
import torch

from flt_mol import Structures
from flt_mol.evaluation.metrics import error_sums
from flt_mol.models.energy import Normalizer
from flt_mol.training.config import LossConfig
from flt_mol.training.losses import displacement_weight, training_loss

ENERGY = 2.0 / 2  # errors of 1 and 3 eV, over the standard deviation 2
INITIAL = 5.0 / 5
DISPLACEMENT = (1.0 + 0.0 + 2.0) / 3


def normalizers():
    energy, initial = Normalizer(), Normalizer()
    energy.std.fill_(2.0)
    initial.std.fill_(5.0)
    return {"energy": energy, "energy_initial": initial}


def batch():
    """Two systems; targets 1 and 3 eV, initial 10 and 20 eV; the third atom is fixed.

    The last atom moves across the boundary of its cell, by -1 Å along x.
    """
    first = Structures.single(
        [1, 1, 1],
        [[0.0, 0, 0], [2, 0, 0], [4, 0, 0]],
        fixed=[False, False, True],
        sid="a",
        energy=1.0,
        energy_initial=10.0,
        positions_relaxed=[[0.0, 0, 0], [2, 3, 4], [4, 9, 0]],
    )
    second = Structures.single(
        [8],
        [[0.5, 0, 0]],
        cell=4 * torch.eye(3),
        pbc=True,
        sid="b",
        energy=3.0,
        energy_initial=20.0,
        positions_relaxed=[[3.5, 0, 0]],
    )
    return Structures.cat([first, second])


def outputs(recycles=1):
    """Errors of energies 1 and 3 eV on the last recycle, 10 eV more on each before; so others.

    The last recycle leaves free atoms by 1, 0 and 2 Å wrong, each before by 1 Å more along z.
    """
    earlier = torch.arange(recycles - 1, -1, -1.0)
    signs = torch.tensor([1.0, -1.0])
    steps = torch.tensor([[0.0, 0, 1], [0, 3, 4], [7, 7, 7], [1, 0, 0]])
    found = {
        "energy": torch.tensor([2.0, 0.0]) + 10 * earlier[:, None] * signs,
        "energy_initial": torch.tensor([15.0, 15.0]) + 10 * earlier[:, None] * signs,
        "displacement": steps + earlier[:, None, None] * torch.tensor([0.0, 0.0, 1.0]),
    }
    last = {name: value[-1] for name, value in found.items()}
    return last if recycles == 1 else last | {f"{k}_recycles": v for k, v in found.items()}


def total(found=None, progress=0.0, moved=None, structures=None, **settings):
    structures = batch() if structures is None else structures
    config, found = LossConfig(**settings), outputs() if found is None else found
    return training_loss(found, structures, progress, config, normalizers(), moved)


def test_weights_are_one_where_the_model_has_the_output():
    loss = total()
    assert float(loss.total) == pytest.approx(ENERGY + INITIAL + DISPLACEMENT)
    assert {name: (float(v), n) for name, (v, n) in loss.errors.items()} == {
        "mae": (2.0, 2),
        "energy_initial_mae": (5.0, 2),
        "displacement": (1.0, 3),
        "loss": (pytest.approx(3.0), 2),
    }
    alone = {"energy": outputs()["energy"]}
    assert float(total(alone).total) == pytest.approx(ENERGY)


def test_parts_with_their_weights():
    loss = total(energy_initial_weight=0.25, displacement_weight=3.0)
    assert float(loss.total) == pytest.approx(ENERGY + 0.25 * INITIAL + 3 * DISPLACEMENT)
    loss = total(energy_initial_weight=0.0, displacement_weight=0.0)
    assert float(loss.total) == pytest.approx(ENERGY)
    assert "displacement" not in loss.errors


@pytest.mark.parametrize(
    ("weights", "expected"),
    [(None, (0.5 * 11 / 2 + 2 / 2) / 1.5), ([1.0, 3.0], (11 / 2 + 3 * 2 / 2) / 4)],
)
def test_every_recycle_with_its_weight(weights, expected):
    # The earlier recycle is off by 11 and 13 eV in the first coordinate of its sign: mean 12.
    found = {k: v for k, v in outputs(2).items() if k.startswith("energy") and "init" not in k}
    expected = expected + (1 / 2) * ((weights or [0.5, 1.0])[0] / sum(weights or [0.5, 1.0]))
    assert float(total(found, recycle_weights=weights).total) == pytest.approx(expected)
    assert float(total(found).errors["mae"][0]) == 2.0, "of the last"


@pytest.mark.parametrize(
    ("decay", "weights"),
    [("none", [8, 8, 8]), ("linear", [8, 5, 2]), ("cosine", [8, 5, 2])],
)
def test_the_weight_of_displacements_decays(decay, weights):
    final = 0.0 if decay == "none" else 2.0
    config = LossConfig(
        displacement_weight=8.0, displacement_decay=decay, displacement_final_weight=final
    )
    assert [displacement_weight(p, config) for p in (0, 0.5, 1)] == pytest.approx(weights)
    settings = config.model_dump()
    loss = total(progress=1.0, **settings)
    assert float(loss.total) == pytest.approx(ENERGY + INITIAL + weights[-1] * DISPLACEMENT)


def test_the_weight_may_rise_from_zero():
    settings = {
        "displacement_weight": 0.0,
        "displacement_decay": "linear",
        "displacement_final_weight": 1.0,
    }
    assert float(total(progress=0.5, **settings).total) == pytest.approx(2 + 0.5 * DISPLACEMENT)


def test_initial_energies_of_moved_systems_do_not_count():
    found = {**outputs(), "energy_initial": torch.tensor([10.0, 27.0], requires_grad=True)}
    loss = total(found, moved=torch.tensor([True, False]))
    assert float(loss.total.detach()) == pytest.approx(ENERGY + 7 / 5 + DISPLACEMENT)
    assert float(loss.errors["energy_initial_mae"][1]) == 1
    none = total(found, moved=torch.tensor([True, True]))
    assert float(none.total.detach()) == pytest.approx(ENERGY + DISPLACEMENT)
    none.total.backward()
    assert found["energy_initial"].grad.tolist() == [0, 0], "part of the graph"


def test_fixed_atoms_do_not_count():
    found = outputs()
    other = {**found, "displacement": found["displacement"].clone()}
    other["displacement"][2] = 100.0
    assert total(found).total == total(other).total
    assert error_sums(found, batch()) == error_sums(other, batch())
    everywhere = replace(batch(), fixed=torch.ones(4, dtype=torch.bool))
    other["displacement"].requires_grad_()
    loss = total(other, structures=everywhere)
    assert float(loss.total.detach()) == pytest.approx(ENERGY + INITIAL)
    loss.total.backward()
    assert other["displacement"].grad.abs().max() == 0


def test_an_exact_displacement_has_a_gradient():
    found = outputs()
    found["displacement"].requires_grad_()
    total(found).total.backward()
    grad = found["displacement"].grad
    assert grad.isfinite().all()
    assert grad[1].tolist() == [0, 0, 0]
    assert grad[0].tolist() == pytest.approx([0, 0, 1 / 3])


@pytest.mark.parametrize("field", ["energy", "energy_initial", "positions_relaxed"])
def test_missing_targets_are_named(field):
    lacking = replace(batch(), **{field: None})
    for call in (total, lambda found, structures: error_sums(found, structures)):
        with pytest.raises(ValueError, match=rf"a, b.*{field}"):
            call(outputs(), structures=lacking)


def test_outputs_that_would_broadcast_are_refused():
    with pytest.raises(ValueError, match=r"energy .*\(2, 1\)"):
        total({"energy": torch.zeros(2, 1)})


def test_shares_of_two_processes_give_the_gradient_of_the_whole():
    """DDP averages over processes; each mean is scaled by its share of systems or atoms."""
    whole = outputs()
    for value in whole.values():
        value.requires_grad_()
    total(whole).total.backward()
    counts = {"systems": (1, 1), "atoms": (2, 1)}
    sums = {name: torch.zeros_like(value) for name, value in whole.items()}
    for rank, rows in ((0, slice(0, 3)), (1, slice(3, 4))):
        one = {
            "energy": whole["energy"].detach()[rank : rank + 1].requires_grad_(),
            "energy_initial": whole["energy_initial"].detach()[rank : rank + 1].requires_grad_(),
            "displacement": whole["displacement"].detach()[rows].requires_grad_(),
        }

        def share(name, count, rank=rank):
            every = counts["atoms" if name == "displacement" else "systems"]
            assert count == every[rank]
            return 2 * count / sum(every)

        loss = training_loss(one, batch()[rank], 0.0, LossConfig(), normalizers(), share=share)
        loss.total.backward()
        for name, value in one.items():
            place = rows if name == "displacement" else slice(rank, rank + 1)
            sums[name][place] += value.grad / 2
    for name, value in whole.items():
        torch.testing.assert_close(sums[name], value.grad)


@pytest.mark.parametrize("recycles", [1, 2])
def test_sums_of_errors_do_not_depend_on_batches(recycles):
    found = outputs(recycles)
    whole = error_sums(found, batch())
    assert whole["mae"] == (torch.tensor(4.0), 2)
    assert whole["energy_initial_mae"] == (torch.tensor(10.0), 2)
    assert whole["displacement"] == (torch.tensor(3.0), 3)
    assert whole["displacement_unmoved"] == (torch.tensor(0.0 + 5.0 + 1.0), 3)
    assert whole["ewt"] == (torch.tensor(0), 2)
    assert ("mae_recycle1" in whole) == (recycles == 2)
    if recycles == 2:
        assert whole["mae_recycle1"] == (torch.tensor(24.0), 2)
        assert whole["mae_recycle2"] == whole["mae"]
        assert whole["displacement_recycle1"][0] == pytest.approx(2 + 1 + 5**0.5)


def test_energies_within_threshold():
    one = batch()
    found = {"energy": one.energy.float() + torch.tensor([0.019, 0.021])}
    assert error_sums(found, one)["ewt"] == (torch.tensor(1), 2)
    at_rest = replace(one, energy=torch.zeros(2, dtype=torch.float64))
    found = {"energy": torch.tensor([0.02, 0.0199])}  # strictly below counts
    assert error_sums(found, at_rest)["ewt"] == (torch.tensor(1), 2)


def with_forces(structures, *, unknown=()):
    forces = torch.arange(12.0).view(4, 3)
    forces[list(unknown)] = torch.nan
    return replace(structures, forces=forces)


def test_forces_of_free_atoms_with_known_forces():
    """Atoms are wrong by 5, 0, 7 (fixed) and 2 eV/Å; the standard deviation of energies is 2."""
    right = torch.arange(12.0).view(4, 3)
    wrong = right + torch.tensor([[3.0, 0, 4], [0, 0, 0], [7, 0, 0], [0, -2, 0]])
    wrong.requires_grad_()
    found = {"energy": torch.tensor([1.0, 3.0]), "forces": wrong}
    for unknown, mean, count in (((), 7 / 3, 3), ((0,), 1.0, 2), ((0, 1, 3), 0.0, 0)):
        structures = with_forces(batch(), unknown=unknown)
        loss = total(found, structures=structures, forces_weight=3.0)
        assert loss.total.item() == pytest.approx(3 * mean / 2)
        assert [float(x) for x in loss.errors["forces"]] == [pytest.approx(mean), count]
        (gradient,) = torch.autograd.grad(loss.total, wrong)
        assert gradient.isfinite().all()
        assert gradient.norm(dim=1).gt(0).tolist() == [0 not in unknown, False, False, bool(mean)]
    default = total(found, structures=with_forces(batch()))
    assert default.total.item() == pytest.approx(30 * 7 / 3 / 2)
    with pytest.raises(ValueError, match=r"a, b.*forces"):
        total(found)


def test_forces_beside_recycles_are_of_the_last():
    found = {**outputs(2), "forces": torch.arange(12.0).view(4, 3) + torch.tensor([0.0, 0, 1])}
    del found["displacement"], found["displacement_recycles"]
    settings = {"energy_initial_weight": 0.0, "recycle_weights": [0.0, 1.0], "forces_weight": 2.0}
    loss = total(found, structures=with_forces(batch()), **settings)
    assert float(loss.total) == pytest.approx(ENERGY + 2.0 / 2)
