"""Every check passes a sound layer or model, and fails one that breaks just that promise."""

import pytest
import torch
from testing.sound_layers import Attention, Broken, Padded, Periodic, draw, packed, seeded
from torch import nn

from helpers import checks
from helpers import invariances as testing
from helpers.invariances import Rows, random_rows, random_structures

CRYSTAL = {"periodic": True}


def systems(**settings):
    return random_structures(seeded(1), (5, 1, 9), **settings)


class Springs(nn.Module):
    """Energy: a number per element, plus a smooth sum over periodic distances."""

    def __init__(self, seed=0):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(100, generator=seeded(seed)))
        self.images = Periodic()

    def forward(self, structures):
        rows = Rows.of(structures)
        x = self.weight[structures.atomic_numbers, None].expand(-1, 4)
        rows = Rows(**{**vars(rows), "x": x.to(rows.positions)})
        atoms = x[:, 0] + self.images(rows).sum(1) if len(x) else x.sum(1)
        return {"energy": atoms.new_zeros(len(rows)).index_add(0, rows.system, atoms) + 3}


class Wrong(nn.Module):
    """A model with a fault of its energies."""

    def __init__(self, fault):
        super().__init__()
        self.model, self.fault = Springs(), fault

    def forward(self, structures):
        return self.model(structures)["energy"] + self.fault(structures)


# name of the check: fault (rows, outputs) → outputs, and how rows are drawn.
FAULTS = {
    "permutation": (lambda rows, y: y + torch.arange(len(y))[:, None], {}),
    "translation": (lambda rows, y: y + 1e-3 * rows.positions[:, :1], {}),
    "rotation": (lambda rows, y: y + (rows.positions[:, :1] / 10).sin(), {}),
    "batch_equals_alone": (lambda rows, y: y - y.mean(0), {}),
    "alone": (lambda rows, y: y + (len(y) > 20), {}),
    "empty_and_single_atom": (lambda rows, y: y + len(rows), {}),
    "dtype": (lambda rows, y: y.float(), {}),
    "autocast": (lambda rows, y: 2 * y if torch.is_autocast_enabled("cpu") else y, {}),
    "coincident": (lambda rows, y: y / rows.positions.diff(dim=0).norm(dim=1).min(), {}),
    "gradients": (lambda rows, y: y.detach() + 0 * y, {}),
    "causality": (lambda rows, y: y, {"dim": 1}),
}
LATTICE_FAULTS = {
    "periodic_images": lambda rows, y: y + rows.positions[:, :1].sin(),
    "cell_basis": lambda rows, y: y + rows.cell[rows.system, 0, :1],
    "supercell": lambda rows, y: y + rows.sizes[rows.system, None],
}
ARGUMENTS = {"alone": {"larger": 3}, "coincident": {"second": True}}


def run(name, layer, rows):
    check = getattr(testing, f"check_{name}", None) or getattr(checks, f"check_{name}")
    return check(layer, rows, **ARGUMENTS.get(name, {}))


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_a_layer(name):
    fault, settings = FAULTS[name]
    rows = draw(**settings)
    run(name, Attention(causal=name == "causality"), rows)
    with pytest.raises(AssertionError):
        run(name, Broken(fault), rows)


@pytest.mark.parametrize("periodic", [True, (True, False, True)])
@pytest.mark.parametrize("name", LATTICE_FAULTS)
def test_a_fault_of_a_periodic_layer(name, periodic):
    rows = draw((5, 0, 3), periodic=periodic)
    assert run(name, Periodic(), rows) <= 1e-5
    with pytest.raises(AssertionError, match="outputs changed"):
        run(name, Broken(LATTICE_FAULTS[name], Periodic()), rows)


MODEL_FAULTS = {
    "permutation": lambda s: s.positions.new_tensor([float(s.positions[p, 0]) for p in s.ptr[:-1]]),
    "translation": lambda s: s.positions[0, 0],
    "rotation": lambda s: s.cell[:, 0, 0],
    "batch_equals_alone": lambda s: len(s),
    "empty_and_single_atom": lambda s: 0.0 / (s.natoms - 1),
    "periodic_images": lambda s: s.positions[0, 0],
    "cell_basis": lambda s: s.cell[:, 0, 0],
    "supercell": lambda s: s.natoms**2,
}


@pytest.mark.parametrize("name", MODEL_FAULTS)
def test_a_fault_of_a_model(name):
    structures = systems()
    run(name, Springs(), structures)
    if name == "permutation":
        structures = random_structures(seeded(1), (5, 2, 9))
    with pytest.raises(AssertionError, match="energies"):
        run(name, Wrong(MODEL_FAULTS[name]), structures)


def test_energies_per_cell():
    structures = systems(periodic=(True, False, True))
    testing.check_supercell(Springs(), structures)
    with pytest.raises(AssertionError):
        testing.check_supercell(Springs(), structures, extensive=False)


def test_states_of_models():
    structures = systems()
    checks.check_save_load(Springs(), lambda: Springs(1), structures)
    with pytest.raises(AssertionError, match="state_dict"):
        checks.check_save_load(Springs(), lambda: Wrong(lambda s: 0), structures)


@pytest.mark.parametrize("persistent", [True, False])
def test_what_is_drawn_but_not_saved(persistent):
    def build(seed):
        layer = Attention(seed)
        layer.register_buffer("draw", layer.draw + 1, persistent=persistent)
        return layer

    rows = draw()
    if persistent:
        checks.check_save_load(build(0), lambda: build(1), rows)
    else:
        with pytest.raises(AssertionError, match="saved state"):
            checks.check_save_load(build(0), lambda: build(1), rows)


def test_padding():
    rows = random_rows(seeded(1), (5, 0, 7, 1), 4)
    checks.check_padding(checks.PaddedLayer(Padded()), rows)
    packed_form = packed(lambda rows: checks.PaddedLayer(Padded())(rows))
    testing.check_permutation(packed_form, rows)
    for fault in (
        lambda m, x, r, mask: Padded()(x, r, mask=torch.ones_like(mask)),
        lambda m, x, r, mask: Padded()(x, r, mask=mask) + 0 * x.sum(),
        lambda m, x, r, mask: Padded()(x, r, mask=mask) + 1,
    ):
        with pytest.raises(AssertionError):
            checks.check_padding(checks.PaddedLayer(Padded(), fault), rows)


def test_modes_are_restored_and_generators_left_alone():
    layer, rows = Attention(), draw()
    layer.train()
    layer.dropout.eval()
    state = torch.get_rng_state()
    testing.check_permutation(layer, rows)
    assert layer.training
    assert not layer.dropout.training
    assert torch.equal(state, torch.get_rng_state())


def test_random_structures_have_distance_and_every_field():
    structures = random_structures(seeded(), (7, 0, 12), (True, False, True))
    assert structures.natoms.tolist() == [7, 0, 12]
    assert structures.pbc.tolist() == [[True, False, True]] * 3
    assert bool((structures.fixed == (structures.tags == 0)).all())
    for system in structures:
        assert system.num_atoms < 2 or float(torch.pdist(system.positions).min()) > 1


def test_rows_and_structures_are_the_same_systems():
    rows = random_rows(seeded(), (3, 0, 4), **CRYSTAL)
    again = Rows.of(rows.structures)
    for name in ("positions", "cell", "pbc", "atomic_numbers", "tags", "fixed", "ptr"):
        assert torch.equal(getattr(again, name), getattr(rows, name)), name
    with pytest.raises(ValueError, match="atoms"):
        _ = random_rows(seeded(), dim=1).structures
    with pytest.raises(ValueError, match="periodic"):
        testing.check_supercell(Periodic(), random_rows(seeded()))
