"""Settings of models: bounds, rules between them, families of the RPE, names."""

import copy
import pickle

import pytest
import torch
from conftest import small_model
from pydantic import ValidationError

from flt_mol.models import (
    EnergyConfig,
    EnergyModel,
    ImageConfig,
    PairConfig,
    RPEConfig,
    named_config,
)
from flt_mol.models.config import explain
from flt_mol.nn import FREQUENCIES, SPECTRA
from helpers import invariances as testing

PAIRS = PairConfig()
MOVES = ["energy", "displacement"]


def message(settings) -> str:
    with pytest.raises(ValidationError) as caught:
        EnergyConfig(**settings)
    return explain(caught.value, EnergyConfig, "model.")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, 0) for key in ("embed_dim", "num_heads", "num_layers", "recycles", "ffn_dim")),
        *((key, True) for key in ("num_features", "redraw_every", "far_blocks", "dropout")),
        *((key, "3") for key in ("embed_dim", "far_scale", "seed")),
        *((key, None) for key in ("embed_dim", "attention", "outputs", "readout", "head_norm")),
        *(("dropout", value) for value in (-0.1, 1.0, float("nan"))),
        *(("far_scale", value) for value in (0.0, float("inf"))),
        ("attention", "quadratic"),
        ("feature_map", "softplus2"),
        ("seed", 2**63),
        ("head_norm", 1),
        ("pairs", 5.0),
        ("outputs", "energy"),
    ],
)
def test_a_value_out_of_bounds_is_named_with_its_key(key, value):
    text = message({key: value})
    assert text.startswith(f"model.{key} is ")
    assert "expected" in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("pairs", "cutoff", -1.0),
        ("pairs", "cutoff", 101.0),
        ("pairs", "num_basis", 1),
        ("pairs", "vector_dropout", 1.0),
        ("pairs", "filter", "yes"),
        ("spectral", "k_max", 4.5),
        ("spectral", "padding", 0.0),
        ("spectral", "num_basis", 0),
        ("images", "mask", "round"),
    ],
)
def test_values_of_parts(part, key, value):
    assert message({"rpe": None, part: {key: value}}).startswith(f"model.{part}.{key} is {value!r}")


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"embed_dim": 10}, ["model.embed_dim is 10", "multiple of model.num_heads, 4"]),
        ({"outputs": ["displacement"], "pairs": PAIRS}, ["model.outputs"]),
        ({"outputs": ["energy", "energy"]}, ["model.outputs"]),
        ({"outputs": ["energy", "displacement"]}, ["model.outputs", "model.pairs"]),
        ({"feedback": "positions", "recycles": 2}, ["model.feedback", "displacement"]),
        (
            {"feedback": "positions", "outputs": ["energy", "displacement"], "pairs": PAIRS},
            ["model.feedback", "recycles is 1"],
        ),
        ({"far_blocks": 4, "pairs": PAIRS}, ["far_blocks is 4", "num_layers, 3"]),
        ({"pairs": {"vector_blocks": 4}}, ["pairs.vector_blocks is 4", "num_layers, 3"]),
        ({"attention": "none"}, ["model.attention is none", "model.rpe"]),
        ({"spectral": {"charges": 2}, "pairs": {}, "readout": "mean"}, ["charges is 2", "readout"]),
        ({"spectral": {"charges": 2}}, ["charges is 2", "pairs with filter"]),
        ({"attention": "none", "rpe": None}, ["model.attention is none", "model.spectral"]),
        ({"images": {}, "rpe": None}, ["model.attention is linear", "exact"]),
        ({"images": {}, "attention": "exact"}, ["model.images", "model.rpe"]),
        ({"images": {"mask": "gaussian"}}, ["images.pair_types"]),
        ({"pairs": {"filter": False, "density": False}}, ["model.pairs"]),
        ({"pairs": {"vectors": 4, "density": False}}, ["pairs.vectors is 4", "density"]),
        ({"pairs": {"filter_vectors": 4, "filter": False}}, ["pairs.filter_vectors is 4"]),
        ({"pairs": {"correction": True}, "attention": "auto"}, ["pairs.correction is True"]),
    ],
)
def test_what_does_not_go_together(settings, names):
    text = message(settings)
    assert all(name in text for name in names), text


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"spectral": {"num_heads": 3}}, "num_heads 3"),
        ({"spectral": {"k_max": 0.05}}, "k_max is 0.05"),
        ({"feature_map": "hyperbolic", "num_features": 7}, "num_features 7"),
        ({"far_blocks": 2}, r"widths \[\]"),
        ({"attention": "auto", "feature_map": "relu"}, "auto"),
    ],
)
def test_what_no_part_can_be_made_of(settings, name):
    with pytest.raises(ValueError, match=name):
        EnergyModel(EnergyConfig.model_validate(settings))


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"dropuot": 0.1}, ["'model.dropuot'", "model.dropout?"]),
        ({"pairs": {"cutof": 4.0}}, ["'model.pairs.cutof'", "model.pairs.cutoff?"]),
        ({"zzz": 1}, ["'model.zzz'", "embed_dim"]),
        ({"rpe": {"num_terms": 8}}, ["'model.rpe.num_terms'", "spectrum"]),
        ({"rpe": {"spectrum": {"name": "matern", "sigma": 1.0}}}, ["'model.rpe.spectrum.sigma'"]),
        ({"rpe": {"spectrum": "gausian"}}, ["model.rpe.spectrum", "gaussian_mixture"]),
        ({"rpe": {"frequencies": "lattice"}}, ["model.rpe.frequencies", "radius"]),
    ],
)
def test_unknown_settings_are_named_with_the_nearest(settings, names):
    text = message(settings)
    assert all(name in text for name in names), text


def test_parts_that_are_switched_off_may_stay_as_they_are():
    EnergyConfig(rpe=None, attention="none", num_features=7, pairs=PAIRS, redraw_every=5)
    EnergyConfig(
        rpe=None,
        pairs=PairConfig(filter=False, density=False),
        outputs=MOVES,
    )
    assert EnergyConfig(rpe=None, pairs=PAIRS).cutoff == 5.0
    assert EnergyConfig().cutoff is None
    exact = EnergyConfig(rpe=None, attention="exact", images=ImageConfig(cutoff=6.0))
    assert exact.cutoff == 6.0


def test_settings_of_before_load_where_they_said_nothing():
    assert EnergyConfig(spectral={"max_vectors": None}) == EnergyConfig(spectral={})
    assert "max_vectors" in message({"spectral": {"max_vectors": 50}})


def test_settings_are_plain_data_and_travel():
    config = EnergyConfig(pairs=PairConfig(vectors=3), rpe=RPEConfig(spectrum="cauchy"))
    again = EnergyConfig.model_validate(config.model_dump())
    assert again == config == copy.deepcopy(config) == pickle.loads(pickle.dumps(config))
    assert EnergyConfig.model_validate_json(config.model_dump_json()) == config
    assert config.rpe.spectrum == {
        "name": "cauchy",
        "num_terms": 16,
        "length_min": 1.0,
        "length_max": 4.0,
    }


def test_a_model_is_made_of_a_configuration():
    for wrong in ("flt-small", {"embed_dim": 16}):
        with pytest.raises(ValueError, match=r"EnergyConfig.*named_config"):
            EnergyModel(wrong)


def test_named_configurations():
    assert named_config("flt_small") == named_config("flt-small")
    assert named_config("emt-small").rpe.spectrum["num_terms"] == 16
    with pytest.raises(ValueError, match="flt-tiny.*flt-small"):
        named_config("flt-tiny")


PLANE, AXIS = {"name": "gaussian", "dim": 2}, {"name": "box", "dim": 1}
MORE = {
    **{name: {"radius": 4.0, "sigma": 2.0} for name in ("lattice", "lebedev")},
    "sum": {"spectra": [{"name": "gaussian"}, {"name": "matern"}]},
    "product": {"spectra": [PLANE, AXIS]},
}
FAMILIES = [
    *(({"name": name, **MORE.get(name, {})}, {"name": "gaussian"}) for name in SPECTRA),
    *(({"name": "gaussian"}, {"name": name, **MORE.get(name, {})}) for name in FREQUENCIES),
    ({"name": "gaussian"}, {"name": "gaussian", "learned_mean": True}),
    ({"name": "gaussian"}, {"name": "gaussian", "learned_sigma": False}),
]


@pytest.mark.parametrize(("spectrum", "frequencies"), FAMILIES, ids=lambda x: x["name"])
def test_every_family_of_the_rpe_trains(spectrum, frequencies):
    rpe = RPEConfig(spectrum=spectrum, frequencies=frequencies)
    for part, name in ((rpe.spectrum, "num_terms"), (rpe.frequencies, "num_frequencies")):
        if name in part:
            part[name] = {"num_terms": 3, "num_frequencies": 6}[name]
    model = small_model(rpe=rpe, num_layers=1)
    batch = testing.random_structures(torch.Generator().manual_seed(1), natoms=(5, 7))
    target = torch.tensor([0.3, -0.2])
    before = {name: p.detach().clone() for name, p in model.encoder.rpe.named_parameters()}
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = (model(batch)["energy"] - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert min(losses[1:]) < losses[0]
    for name, p in model.encoder.rpe.named_parameters():
        assert not torch.equal(p, before[name]), name
    again = EnergyModel(EnergyConfig.model_validate(model.config.model_dump()))
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again.eval()(batch)["energy"], model.eval()(batch)["energy"])


def test_frequencies_of_sampled_families_are_resampled_where_no_width_is_learned():
    fixed = RPEConfig(frequencies={"name": "gaussian", "learned_sigma": False})
    for rpe, expected in ((RPEConfig(), None), (fixed, 7)):
        assert small_model(rpe=rpe, redraw_every=7).encoder.rpe.frequencies.redraw_every == expected
