import json
from dataclasses import replace

import pytest
import torch
from conftest import small_model

from flt_mol import Structures, resources, testing
from flt_mol.models import EnergyConfig, EnergyModel
from flt_mol.models.energy import RPEConfig


def build(**changes):
    model = small_model(**changes)
    model.normalizer.fit(torch.tensor([-3.0, 1.0, 2.0]))
    return model


VARIANTS = {
    "linear": {},
    "exact": {"attention": "exact"},
    "performer": {"rpe": None},
    "weight form": {"rpe": RPEConfig(num_terms=4, num_frequencies=6, form="weight")},
    "symmetric": {"rpe": RPEConfig(num_terms=4, num_frequencies=6, split="symmetric")},
    "recycles": {"recycles": 3},
}
every_variant = pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())


@pytest.fixture
def structures():
    return testing.random_structures(torch.Generator().manual_seed(1), natoms=(5, 1, 9, 14))


@every_variant
def test_properties(changes, structures):
    model = build(**changes).eval()
    testing.check_permutation(model, structures)
    testing.check_translation(model, structures)
    testing.check_batch_equals_alone(model, structures)
    testing.check_deterministic(model, structures)
    testing.check_empty_and_single_atom(model, structures)
    testing.check_save_load(model, lambda: build(**changes, seed=7), structures)


@every_variant
def test_every_parameter_learns(changes, structures):
    # Everything but keys' biases, which softmax divides out in exact attention.
    model = build(**changes)
    energy = model(structures)["energy"]
    energy.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        if not name.endswith("attention.key.bias"):
            assert parameter.grad.abs().max() > 0, name


def test_rpe_changes_energies_and_a_performer_does_not_see_positions(structures):
    moved = Structures(**{**vars(structures), "positions": structures.positions * 1.3})
    with torch.no_grad():
        blind = build(rpe=None)
        assert torch.equal(blind(structures)["energy"], blind(moved)["energy"])
        seeing = build()
        change = (seeing(structures)["energy"] - seeing(moved)["energy"]).abs()
    several = structures.natoms > 1
    assert (change[several] > 1e-4).all()
    assert change[~several].max() < 1e-5


def test_linear_and_exact_share_their_state_dict(structures):
    exact = build(attention="exact")
    linear = build()
    linear.load_state_dict(exact.state_dict())
    assert list(linear.state_dict()) == list(exact.state_dict())


def test_forces_by_autograd_are_minus_the_slope_and_differentiable(structures):
    model = build().double()
    positions = structures.positions.double().requires_grad_()
    moving = replace(structures, positions=positions)
    energy = model(moving)["energy"].sum()
    (slope,) = torch.autograd.grad(energy, positions, create_graph=True)
    step = torch.zeros_like(positions)
    step[3, 1] = 1e-5
    with torch.no_grad():
        up, down = (
            model(replace(structures, positions=positions + s))["energy"].sum()
            for s in (step, -step)
        )
    assert slope[3, 1].item() == pytest.approx(float(up - down) / 2e-5, rel=1e-5, abs=1e-9)
    slope.square().sum().backward()
    assert model.embedding.element.weight.grad.abs().max() > 0


def test_energy_of_a_hand_made_readout(structures):
    """With all weights of the head's last layer 0, E = mean + std · Σ_i w[tag_i] · bias."""
    model = build()
    with torch.no_grad():
        last = model.head.atom_energy[-1]
        last.weight.zero_()
        last.bias.fill_(0.5)
        energy = model(structures)["energy"]
    weights = torch.tensor([0.1, 0.3, 1.0])[structures.tags]
    sums = [float(weights[structures.system == b].sum()) for b in range(len(structures))]
    std = (14 / 3) ** 0.5  # of -3, 1, 2
    expected = torch.tensor([std * 0.5 * s for s in sums])
    assert torch.allclose(energy, expected, atol=1e-5)


def test_same_energies_under_a_float64_default_dtype(structures):
    before = build()(structures)["energy"]
    torch.set_default_dtype(torch.float64)
    try:
        model = build()
        energy = model(structures)["energy"]
    finally:
        torch.set_default_dtype(torch.float32)
    assert energy.dtype == torch.float32
    assert torch.equal(model.head.tag_weight, build().head.tag_weight)
    assert energy.isfinite().all()
    assert before.shape == energy.shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_translation_with_weights_of_other_dtypes(dtype, structures):
    model = build().to(dtype).eval()
    testing.check_translation(model, structures)


def test_seed_decides_the_random_features():
    key = "encoder.blocks.0.attention.feature_map.content_projection"
    assert torch.equal(build().state_dict()[key], build().state_dict()[key])
    assert not torch.equal(build().state_dict()[key], build(seed=1).state_dict()[key])


def test_config_travels_in_the_state_dict():
    model = build(recycles=2, rpe=None)
    again = EnergyModel.config_of(model.state_dict())
    assert again == model.config
    with pytest.raises(ValueError, match="config_json"):
        EnergyModel.config_of({"x": torch.zeros(1)})
    assert json.loads(bytes(model.state_dict()["config_json"].tolist()))["recycles"] == 2


def test_unknown_settings_are_named():
    with pytest.raises(ValueError, match="unknown model setting widht; known: .*embed_dim"):
        EnergyConfig.from_dict({"widht": 3})
    with pytest.raises(ValueError, match="unknown model setting terms; known: .*num_terms"):
        EnergyConfig.from_dict({"rpe": {"terms": 3}})


def test_elements_seen():
    model = build()
    model.mark_seen([1, 29])
    assert model.elements_seen.nonzero().flatten().tolist() == [1, 29]


@pytest.mark.parametrize("name", ["emt_small", "emt_performer_small"])
def test_shipped_model_files_hold_every_setting(name):
    import yaml

    values = yaml.safe_load((resources.folder("models") / name / "model.yaml").read_text())
    assert set(values) == set(EnergyConfig.__dataclass_fields__)
    if values["rpe"] is not None:
        assert set(values["rpe"]) == set(RPEConfig.__dataclass_fields__)


def test_bf16_autocast_stays_close(structures):
    model = build().eval()
    with torch.no_grad():
        full = model(structures)["energy"]
        with torch.autocast("cpu", torch.bfloat16):
            half = model(structures)["energy"]
    assert half.dtype == torch.float32
    assert (full - half).abs().max() < 0.05 * full.abs().max()
