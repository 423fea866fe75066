"""Several recycles: what is read out of each, and what each hands to the next."""

from dataclasses import replace

import pytest
import torch
from conftest import ALL_OUTPUTS, KINDS, all_outputs, small_model, small_pairs
from torch import nn

from helpers import checks
from helpers import invariances as testing

FEEDBACK = ["features", "positions"]
SHORT = ["rpe", "both filters", "correction, pair types", "exact", "centred images, pair types"]
# Of positions, where a kind of model can; and of features, for one of them.
ONCE = [
    *((name, all_outputs(KINDS[name], 2, "positions")["feedback"]) for name in SHORT),
    ("both filters", "features"),
]
every_kind, moving_kinds = (
    pytest.mark.parametrize(
        ("changes", "feedback"),
        [pytest.param(KINDS[name], f, id=f"{name}-{f}") for name, f in ONCE if test(KINDS[name])],
    )
    for test in (lambda changes: True, lambda changes: changes.get("pairs") is not None)
)


@pytest.fixture
def structures():
    generator = torch.Generator().manual_seed(1)
    return testing.random_structures(generator, (5, 1, 0, 14), (True, True, False))


def build(changes, recycles=3, feedback="features", step=1.0):
    """A model of this kind whose steps are `step` times what they are at the start."""
    model = small_model(**all_outputs(changes, recycles, feedback)).eval()
    model.normalizer.fit(torch.tensor([-3.0, 1.0, 2.0]))
    model.normalizer_initial.fit(torch.tensor([5.0, 9.0]))
    if model.displacement_head is not None:
        with torch.no_grad():
            for p in model.displacement_head.strength[2].parameters():
                p.mul_(step)
    return model


@every_kind
def test_the_last_recycle_is_the_answer_and_the_first_that_of_one(changes, feedback, structures):
    model = build(changes, 3, feedback, step=30)
    alone = build(changes, 1)  # with one recycle there is nothing to feed back
    alone.load_state_dict(model.state_dict())
    with torch.no_grad():
        out, once = model(structures), alone(structures)
    for name in model.config.outputs:
        assert torch.equal(out[f"{name}_recycles"][-1], out[name])
        assert torch.equal(out[f"{name}_recycles"][0], once[name])
        assert f"{name}_recycles" not in once
        first, second, third = out[f"{name}_recycles"]
        assert not torch.equal(first, second)
        assert not torch.equal(second, third)


def test_a_recycle_of_features_is_the_stack_on_its_own_output(structures):
    """What the encoder alone does with recycles."""
    model = build(KINDS["both filters"], 3)
    start = model.embedding(structures.atomic_numbers, structures.tags)
    x, geometry = model.geometry(structures, model.encoder, start)
    rows = model.encoder(
        x, ptr=structures.ptr, plane_waves=geometry.plane_waves, local=geometry.local
    )
    out = model(structures, embeddings=True)
    torch.testing.assert_close(out["atom_embeddings"], rows)
    for k in range(3):
        x = model.encoder.once(x, structures.ptr, geometry)
        energies = model.head(x, structures.tags, structures.ptr)[:, 0]
        expected = model.normalizer.denormalize(energies)
        torch.testing.assert_close(out["energy_recycles"][k], expected)
        step = model.displacement_head(x, geometry.local, structures.fixed)
        torch.testing.assert_close(out["displacement_recycles"][k], step)


# Positions that move


@moving_kinds
def test_fixed_atoms_never_move_and_displacements_turn_with_the_system(
    changes, feedback, structures
):
    model = build(changes, 3, feedback, step=10)
    with torch.no_grad():
        moved = model(structures)["displacement_recycles"]
    assert structures.fixed.sum() >= 4
    assert not moved[:, structures.fixed].any()
    free = ~structures.fixed & (structures.system == 3)
    assert (moved[:, free].norm(dim=-1) > 0).all()
    assert moved[:, free].abs().mean() > 1e-3
    assert moved.abs().max() < 3
    q = torch.linalg.qr(torch.randn(4, 3, 3, generator=torch.Generator().manual_seed(5)).double()).Q
    with torch.no_grad():
        turned = model(testing.Rows.of(structures).turned(q).structures)["displacement_recycles"]
    error = (turned - (moved.double().unsqueeze(-2) @ q[structures.system]).squeeze(-2)).abs().max()
    assert (error < 1e-4 * moved.abs().max()) == model.rotation_invariant


class Along(nn.Module):
    """A head made by hand: all free atoms go one way, and it notes where they were."""

    def __init__(self, way):
        super().__init__()
        self.way = torch.tensor(way)
        self.seen = []

    def forward(self, x, local, fixed):
        self.seen.append(local)
        return self.way.expand(len(x), 3).masked_fill(fixed[:, None], 0.0)


def test_the_next_pass_sees_free_atoms_where_they_were_moved_to(structures):
    model = build(KINDS["both filters"], 3, "positions")
    model.displacement_head = head = Along([0.2, -0.1, 0.3])
    with torch.no_grad():
        out = model(structures.with_pairs(model.cutoff))
    free = (~structures.fixed).float()[:, None]
    for k in range(3):
        torch.testing.assert_close(out["displacement_recycles"][k], (k + 1) * free * head.way)
        now = structures.positions + k * free * head.way
        searched = replace(structures, positions=now).with_pairs(model.cutoff).pairs
        local = head.seen[k]
        assert local.pairs.index_j.tolist() == searched.index_j.tolist()
        assert local.pairs.shift.tolist() == searched.shift.tolist()
        vectors = searched.vectors(now, structures.cell, structures.ptr)
        torch.testing.assert_close(local.vectors, vectors, rtol=0, atol=1e-5)


def test_a_recycle_by_hand(structures):
    """Features are kept, and what the new surroundings add is added to them."""
    model = build(KINDS["both filters"], 2, "positions")
    model.displacement_head = head = Along([0.2, -0.1, 0.3])
    numbers, ptr = structures.atomic_numbers, structures.ptr
    with torch.no_grad():
        out = model(structures)
        start = model.embedding(numbers, structures.tags)
        before, geometry = model.geometry(structures, model.encoder, start)
        x = model.encoder.once(before, ptr, geometry)
        moved = structures.positions + head.way * ~structures.fixed[:, None]
        there = replace(structures, positions=moved)
        after, geometry = model.geometry(there, model.encoder, start)
        assert (after - before).abs().max() > 1e-3
        x = model.encoder.once(x + (after - before), ptr, geometry)
        expected = model.normalizer.denormalize(model.head(x, structures.tags, ptr)[:, 0])
    torch.testing.assert_close(out["energy"], expected)


@pytest.mark.parametrize("name", ["both filters", "correction, pair types", "rpe, both filters"])
def test_all_atoms_moved_alike_or_not_at_all_are_the_same_system(name, structures):
    """Feedback of positions then adds nothing to that of features."""
    free = replace(structures, fixed=torch.zeros_like(structures.fixed))
    still = replace(structures, fixed=torch.ones_like(structures.fixed))
    for given in (free, still):
        outs = []
        for feedback in FEEDBACK:
            model = build(KINDS[name], 3, feedback)
            model.displacement_head = Along([0.25, -0.5, 0.125])
            with torch.no_grad():
                outs.append(model(given)["energy_recycles"])
        torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-4)
    model = build(KINDS[name], 3, "positions", step=30)
    with torch.no_grad():
        assert not model(still)["displacement_recycles"].any()


def test_the_image_keys_and_waves_follow_the_atoms(structures):
    """A system that lands where another begins continues as that one from the same features."""
    for name in ("centred images, pair types", "exact", "correction, pair types"):
        model = build(KINDS[name], 2, "positions")
        model.displacement_head = head = Along([0.2, -0.1, 0.3])
        with torch.no_grad():
            plain = build(KINDS[name], 2, "features")
            plain.displacement_head = head
            difference = model(structures)["energy"] - plain(structures)["energy"]
        some_fixed = structures.natoms > 1
        assert (difference[some_fixed].abs() > 1e-4).all(), name


def test_each_recycle_teaches_its_own_step(structures):
    """Losses of a later recycle do not reach the steps before it, which are held constant."""
    model = build(KINDS["both filters"], 2, "positions")
    out = model(structures)
    free = ~structures.fixed & (structures.system == 3)
    total = out["displacement_recycles"][1, free].sum()
    head = list(model.displacement_head.parameters())
    both = torch.autograd.grad(total, head, retain_graph=True)
    # The same sum without the first step: it is the second step's alone.
    step = (out["displacement_recycles"][1] - out["displacement_recycles"][0].detach())[free].sum()
    alone = torch.autograd.grad(step, head, retain_graph=True)
    for x, y in zip(both, alone, strict=True):
        torch.testing.assert_close(x, y)
    # Energies of the second recycle depend on the head only by where atoms are: not by gradients.
    found = torch.autograd.grad(out["energy"].sum(), head, allow_unused=True, retain_graph=True)
    assert all(x is None for x in found)
    # Features, however, are one graph from the first recycle to the last.
    weight = model.encoder.blocks[0].local.weight
    assert torch.autograd.grad(out["energy_recycles"][0].sum(), weight, retain_graph=True)[0].any()


@pytest.mark.parametrize("feedback", FEEDBACK)
def test_systems_do_not_know_of_each_other_in_any_recycle(feedback, structures):
    model = build(KINDS["both filters"], 3, feedback, step=10)
    with torch.no_grad():
        together = model(structures)
        alone = [model(system) for system in structures]
    for name, x in together.items():
        joined = torch.cat([y[name] for y in alone], dim=x.dim() - 2 if "displ" in name else -1)
        torch.testing.assert_close(joined, x, rtol=1e-5, atol=1e-4)


class Columns(nn.Module):
    """A head that says the same of every system."""

    def forward(self, x, tags, ptr):
        return torch.tensor([[1.0, 2.0]]).expand(len(ptr) - 1, 2)


def test_energies_are_denormalised_by_their_own_mean_and_standard_deviation(structures):
    outputs = ["energy_initial", "displacement", "energy"]
    model = small_model(**{**KINDS["both filters"], "outputs": outputs})
    model.normalizer.fit(torch.tensor([0.0, 4.0]))
    model.normalizer_initial.fit(torch.tensor([10.0, 12.0]))
    model.head = Columns()
    out = model(structures)
    assert list(out) == outputs
    assert out["energy"].tolist() == [6.0] * 4
    assert out["energy_initial"].tolist() == [12.0] * 4


def test_steps_add_up_where_atoms_move(structures):
    for feedback, expected in (("positions", [1.0, 2.0, 3.0]), ("features", [1.0, 1.0, 1.0])):
        model = build(KINDS["both filters"], 3, feedback)
        model.displacement_head = Along([1.0, 0.0, 0.0])
        free = model(structures)["displacement_recycles"][:, ~structures.fixed, 0]
        torch.testing.assert_close(free, torch.tensor(expected)[:, None].expand_as(free))


def test_small_systems_have_no_trouble_with_recycles():
    """No atoms, or one without neighbours: it stays, and nothing is NaN."""
    changes = {"rpe": None, "pairs": small_pairs(vectors=2), "outputs": ALL_OUTPUTS}
    model = small_model(**changes, recycles=2, feedback="positions").eval()
    structures = testing.random_structures(torch.Generator().manual_seed(2), (0, 1), False)
    structures = replace(structures, fixed=torch.zeros(1, dtype=torch.bool))
    with torch.no_grad():
        out = model(structures)
    assert all(x.isfinite().all() for x in out.values())
    assert not out["displacement"].any()
    checks.check_empty_and_single_atom(model, structures)
