"""The loss by hand-computed values: parts, passes, decay, masks; and what is refused."""

import math
from dataclasses import replace

import pytest
import torch

from flt_mol import Structures
from flt_mol.models.energy import Normalizer
from flt_mol.training.losses import (
    LossConfig,
    displacement_weight,
    distances,
    pass_weights,
    training_loss,
)


def normalizers():
    energy, initial = Normalizer(), Normalizer()
    energy.std.fill_(2.0)
    initial.std.fill_(5.0)
    return {"energy": energy, "energy_initial": initial}


def batch():
    """Two systems; targets 1 and 3 eV, initial 10 and 20 eV; atoms 1 and 3 move, atom 2 is fixed.

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


def outputs(passes=1):
    """Errors of energies 1 and 3 eV in the last pass, 10 eV more in each before; likewise others.

    The last pass leaves free atoms by 1, 0 and 2 Å wrong, each before by 1 Å more along z.
    """
    earlier = torch.arange(passes - 1, -1, -1.0)
    energy = torch.tensor([2.0, 0.0]) + 10 * earlier[:, None] * torch.tensor([1.0, -1.0])
    initial = torch.tensor([15.0, 15.0]) + 10 * earlier[:, None] * torch.tensor([1.0, -1.0])
    steps = torch.tensor([[0.0, 0, 1], [0, 3, 4], [7, 7, 7], [1, 0, 0]])
    every = steps + earlier[:, None, None] * torch.tensor([0.0, 0.0, 1.0])
    found = {"energy": energy, "energy_initial": initial, "displacement": every}
    last = {name: value[-1] for name, value in found.items()}
    if passes == 1:
        return last
    return last | {f"{name}_passes": value for name, value in found.items()}


def only(names, found):
    return {k: v for k, v in found.items() if k.removesuffix("_passes") in names}


ENERGY = 2.0 / 2  # errors 1 and 3, over the spread 2
INITIAL = 5.0 / 5
DISPLACEMENT = (1.0 + 0.0 + 2.0) / 3


def test_the_energy_alone_is_what_it_always_was():
    structures, found = batch(), only(["energy"], outputs())
    loss = training_loss(found, structures, 0.3, LossConfig(), normalizers())
    assert loss.total.item() == ENERGY
    assert {k: (v.value.item(), v.over) for k, v in loss.parts.items()} == {"mae": (2.0, 2)}


def test_all_parts_with_their_weights():
    config = LossConfig(energy_initial_weight=0.25, displacement_weight=3.0)
    loss = training_loss(outputs(), batch(), 0.9, config, normalizers())
    assert loss.total.item() == pytest.approx(ENERGY + 0.25 * INITIAL + 3 * DISPLACEMENT)
    parts = {name: (part.value.item(), part.over) for name, part in loss.parts.items()}
    assert parts == {"mae": (2.0, 2), "energy_initial_mae": (5.0, 2), "displacement": (1.0, 3)}
    assert not any(part.value.requires_grad for part in loss.parts.values())


def test_weights_are_one_where_the_model_has_the_output():
    loss = training_loss(outputs(), batch(), 0.0, LossConfig(), normalizers())
    assert loss.total.item() == pytest.approx(ENERGY + INITIAL + DISPLACEMENT)


def test_every_pass_with_its_weight():
    # Passes 1, 2, 3: errors of energies by 20, 10, 0 eV larger; of displacements below.
    config = LossConfig(pass_weights=[1.0, 2.0, 5.0], energy_initial_weight=0.0)
    found = only(["energy"], outputs(3))
    loss = training_loss(found, batch(), 0.0, config, normalizers())
    # Pass k: E = (2 + 10 m, -10 m), m = 2, 1, 0; errors (1 + 10 m) and (3 + 10 m).
    by_hand = (1 * 22 + 2 * 12 + 5 * 2) / 8 / 2
    assert loss.total.item() == pytest.approx(by_hand)
    assert loss.parts["mae"].value.item() == 2.0, "of the last pass"


def test_earlier_passes_count_half_by_default():
    found = only(["energy", "displacement"], outputs(2))
    loss = training_loss(found, batch(), 0.0, LossConfig(), normalizers())
    # One pass before, by 1 Å along z: (2, 1, √(2² + 1²)).
    before = (2 + 1 + math.sqrt(5)) / 3
    energies = (0.5 * 12 + 1 * 2) / 1.5 / 2
    assert loss.total.item() == pytest.approx(energies + (0.5 * before + 1.0) / 1.5)
    assert loss.parts["displacement"].value.item() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("decay", "weights"),
    [
        ("none", [4.0, 4.0, 4.0, 4.0]),
        ("linear", [4.0, 3.25, 2.5, 1.0]),
        ("cosine", [4.0, 1 + 3 * (2 + math.sqrt(2)) / 4, 2.5, 1.0]),
    ],
)
def test_the_weight_of_displacements_decays(decay, weights):
    config = LossConfig(
        displacement_weight=4.0, displacement_decay=decay, displacement_final_weight=1.0
    )
    for progress, weight in zip([0.0, 0.25, 0.5, 1.0], weights, strict=True):
        assert displacement_weight(progress, config) == pytest.approx(weight)
        found = only(["energy", "displacement"], outputs())
        total = training_loss(found, batch(), progress, config, normalizers()).total
        assert total.item() == pytest.approx(ENERGY + weight * DISPLACEMENT)


def test_an_unknown_decay():
    with pytest.raises(ValueError, match="'step'; known: none, linear, cosine"):
        displacement_weight(0.0, LossConfig(displacement_decay="step"))


def test_a_weight_may_rise_from_zero():
    config = LossConfig(
        displacement_weight=0.0, displacement_decay="linear", displacement_final_weight=2.0
    )
    found = only(["energy", "displacement"], outputs())
    total = training_loss(found, batch(), 0.5, config, normalizers()).total
    assert total.item() == pytest.approx(ENERGY + DISPLACEMENT)


@pytest.mark.parametrize("passes", [1, 2])
def test_initial_energies_of_moved_systems_are_left_out(passes):
    structures, found = batch(), only(["energy", "energy_initial"], outputs(passes))
    found = {k: v.clone().requires_grad_() for k, v in found.items()}
    moved = torch.tensor([False, True])
    config = LossConfig(pass_weights=[0.0] * (passes - 1) + [1.0])
    loss = training_loss(found, structures, 0.0, config, normalizers(), moved)
    assert loss.parts["energy_initial_mae"].over == 1
    assert loss.total.item() == pytest.approx(ENERGY + 5 / 5)
    loss.total.backward()
    gradient = found["energy_initial" if passes == 1 else "energy_initial_passes"].grad
    assert gradient.flatten()[-2:].tolist() == pytest.approx([1 / 5, 0.0])


def test_no_initial_energy_left_keeps_the_gradients_graph():
    found = {k: v.requires_grad_() for k, v in outputs().items()}
    moved = torch.tensor([True, True])
    loss = training_loss(found, batch(), 0.0, LossConfig(), normalizers(), moved)
    assert loss.parts["energy_initial_mae"].over == 0
    assert loss.total.item() == pytest.approx(ENERGY + DISPLACEMENT)
    loss.total.backward()
    assert found["energy_initial"].grad.tolist() == [0.0, 0.0]


def test_fixed_atoms_say_nothing():
    structures, found = batch(), outputs()
    found["displacement"].requires_grad_()
    loss = training_loss(found, structures, 0.0, LossConfig(), normalizers())
    loss.total.backward()
    gradient = found["displacement"].grad
    assert gradient[2].tolist() == [0, 0, 0]
    assert gradient[0].tolist() == pytest.approx([0, 0, 1 / 3])
    assert gradient[1].tolist() == [0, 0, 0], "exactly right: no direction, and no NaN"

    found["displacement"] = torch.full((4, 3), math.nan)
    found["displacement"][[0, 1, 3]] = outputs()["displacement"][[0, 1, 3]]
    total = training_loss(found, structures, 0.0, LossConfig(), normalizers()).total
    assert total.item() == pytest.approx(loss.total.item())


def test_all_atoms_fixed():
    structures = replace(batch(), fixed=torch.ones(4, dtype=torch.bool))
    loss = training_loss(outputs(), structures, 0.0, LossConfig(), normalizers())
    assert loss.total.item() == pytest.approx(ENERGY + INITIAL)
    assert loss.parts["displacement"].over == 0


def test_distances_do_not_depend_on_the_frame_and_are_kept_precise():
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 50, 3, generator=generator)
    turn = torch.linalg.qr(torch.randn(3, 3, generator=generator)).Q
    assert torch.allclose(distances(a @ turn, b @ turn), distances(a, b), atol=1e-5)
    assert distances(a.bfloat16(), b.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("energy", "no relaxed energy for some of sids a, b; give it as y_relaxed"),
        ("energy_initial", "no energy before relaxation .* take energy_initial out of model.outp"),
        ("positions_relaxed", "no relaxed positions .* take displacement out of model.outputs"),
    ],
)
def test_missing_targets_are_named_with_their_mend(field, message):
    structures = replace(batch(), **{field: None})
    with pytest.raises(ValueError, match=message):
        training_loss(outputs(), structures, 0.0, LossConfig(), normalizers())


def test_targets_that_nothing_asks_for_may_be_missing():
    structures = replace(batch(), energy_initial=None, positions_relaxed=None)
    training_loss(only(["energy"], outputs()), structures, 0.0, LossConfig(), normalizers())


def test_a_weight_without_its_head():
    found = only(["energy"], outputs())
    config = LossConfig(displacement_weight=0.5)
    with pytest.raises(ValueError, match=r"displacement_weight is 0.5, and the model has no outp"):
        training_loss(found, batch(), 0.0, config, normalizers())


def test_another_number_of_passes():
    with pytest.raises(ValueError, match=r"has 2 weights, and the model makes 3 passes"):
        pass_weights(3, LossConfig(pass_weights=[1.0, 1.0]))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("energy", lambda x: x[:, None], r"'energy' has shape \(2, 1\), expected \(2,\)"),
        ("energy", lambda x: x[:1], r"'energy' has shape \(1,\), expected \(2,\)"),
        ("energy", lambda x: x[0], r"'energy' has shape \(\), expected \(2,\)"),
        ("energy_initial", lambda x: x[:, None], r"'energy_initial' has shape \(2, 1\)"),
        ("displacement", lambda x: x[:1], r"'displacement' has shape \(1, 3\), expected \(4, 3\)"),
        ("displacement", lambda x: x[:, :1], r"'displacement' has shape \(4, 1\)"),
    ],
)
def test_outputs_that_would_broadcast_are_refused(name, change, message):
    given = outputs()
    given[name] = change(given[name])
    with pytest.raises(ValueError, match=message):
        training_loss(given, batch(), 0.0, LossConfig(), normalizers())
