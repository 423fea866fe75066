"""What a configuration holds, how it travels, and which ones are refused."""

import copy
import json
import math
import re
from dataclasses import asdict, fields, replace

import pytest
import torch
import yaml
from conftest import CUTOFF, KINDS, SPECTRAL, all_outputs, small_images, small_model, small_pairs

from flt_mol import testing
from flt_mol.files import shipped_folder
from flt_mol.models import EnergyConfig, EnergyModel, named_config
from flt_mol.models.checks import check_model, check_parts
from flt_mol.models.config import PARTS, ImageConfig, PairConfig, RPEConfig, SpectralConfig
from flt_mol.models.idle import refuse_idle, without_idle
from flt_mol.nn.feature_maps import FEATURE_MAPS
from flt_mol.models.checkpoint import load_model
from flt_mol.training.config import load_run_config

MODELS = shipped_folder("models")
SHIPPED = ["emt_performer_small", "emt_small"]
every_kind = pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS.keys())


@pytest.fixture
def structures():
    return testing.random_structures(torch.Generator().manual_seed(1), natoms=(5, 1, 9))


@every_kind
def test_a_configuration_travels_as_plain_data_and_with_the_weights(changes):
    model = small_model(**all_outputs(changes, 2, "positions"))
    config = model.config
    for text in (yaml.safe_dump(asdict(config)), json.dumps(asdict(config))):
        again = EnergyConfig.from_dict(yaml.safe_load(text))
        assert again == config
        for name, schema in PARTS.items():
            part = getattr(again, name)
            assert part is None or isinstance(part, schema)
    assert EnergyModel.config_of(model.state_dict()) == config
    stored = json.loads(bytes(model.state_dict()["config_json"].tolist()))
    assert stored["recycles"] == 2


@every_kind
def test_weights_alone_are_enough_to_build_the_model_again(changes, structures):
    model = small_model(**all_outputs(changes, 2)).eval()
    model.normalizer.fit(torch.tensor([-3.0, 1.0, 2.0]))
    model.normalizer_initial.fit(torch.tensor([5.0, 9.0]))
    model.mark_seen([1, 29])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        again = EnergyModel(EnergyModel.config_of(model.state_dict())).eval()
    again.load_state_dict(model.state_dict())
    for other in (again, copy.deepcopy(model)):
        with torch.no_grad():
            first, second = model(structures), other(structures)
        assert list(first) == list(second)
        assert all(torch.equal(x, second[name]) for name, x in first.items())
        assert other.elements_seen.nonzero().flatten().tolist() == [1, 29]
    testing.check_save_load(
        model, lambda: small_model(**all_outputs(changes, 2), seed=7), structures
    )


def test_weights_without_a_configuration():
    with pytest.raises(ValueError, match="config_json"):
        EnergyModel.config_of({"x": torch.zeros(1)})


@pytest.mark.parametrize("name", SHIPPED)
def test_weights_from_before_there_were_filters_load(name, structures):
    """Their configuration lacks what came later: it has the defaults, which change nothing."""
    folder = shipped_folder("models") / name
    weights = torch.load(folder / "weights.ckpt", weights_only=True)["state_dict"]
    stored = json.loads(bytes(weights["config_json"].tolist()))
    assert not {"spectral", "pairs", "images", "outputs", "feedback"} & set(stored)
    config = EnergyModel.config_of(weights)
    assert config.spectral is config.pairs is config.images is None
    assert (config.readout, config.outputs, config.feedback) == ("tags", ["energy"], "features")
    assert config.head_norm
    model = load_model(name)
    assert model.config == config
    out = model(structures)
    assert list(out) == ["energy"]
    assert out["energy"].isfinite().all()
    for key, x in model.state_dict().items():
        if key in weights and key != "config_json":
            assert torch.equal(x, weights[key].to(x.dtype)), key
    # Saved again, it has all there is now.
    again = json.loads(bytes(model.state_dict()["config_json"].tolist()))
    assert set(again) == {f.name for f in fields(EnergyConfig)}


def test_weights_from_before_waves_had_a_budget_load(structures):
    model = small_model(rpe=None, spectral=SPECTRAL).eval()
    weights = model.state_dict()
    stored = json.loads(bytes(weights["config_json"].tolist()))
    del stored["spectral"]["max_vectors"]
    weights["config_json"] = torch.tensor(list(json.dumps(stored).encode()), dtype=torch.uint8)
    again = EnergyModel(EnergyModel.config_of(weights)).eval()
    again.load_state_dict(weights)
    assert again.config == model.config
    assert torch.equal(again(structures)["energy"], model(structures)["energy"])


def test_a_budget_of_waves_reaches_every_filter_and_counts():
    crystal = testing.random_structures(torch.Generator().manual_seed(1), natoms=(40,))
    energies = {}
    for budget in (None, 10**6, 3):
        part = replace(SPECTRAL, max_vectors=budget)
        model = small_model(rpe=None, spectral=part, num_layers=2).eval()
        filters = [block.spectral for block in model.encoder.blocks]
        assert [layer.max_vectors for layer in filters] == [budget] * 2
        energies[budget] = model(crystal)["energy"]
    assert torch.equal(energies[None], energies[10**6])
    assert not torch.allclose(energies[None], energies[3])


@pytest.mark.parametrize("name", ["flt-small", "flt-base", "flt-large"])
def test_named_model_files_hold_every_setting_of_filters(name):
    values = yaml.safe_load((shipped_folder("models") / name / "model.yaml").read_text())
    assert set(values["spectral"]) == {f.name for f in fields(SpectralConfig)}


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_model_files_hold_every_setting(name):
    values = yaml.safe_load((shipped_folder("models") / name / "model.yaml").read_text())
    assert set(values) == {f.name for f in fields(EnergyConfig)}
    if values["rpe"] is not None:
        assert set(values["rpe"]) == {f.name for f in fields(RPEConfig)}


def test_parts_of_a_configuration_are_all_known():
    nested = {f.name for f in fields(EnergyConfig) if "Config" in str(f.type)}
    assert nested == set(PARTS)


@pytest.mark.parametrize("part", ["", *PARTS])
def test_unknown_settings_are_named(part):
    values = {"widht": 3}
    schema = PARTS.get(part, EnergyConfig)
    known = ", ".join(sorted(f.name for f in fields(schema)))
    with pytest.raises(ValueError, match=f"unknown model setting widht; known: {known}$"):
        EnergyConfig.from_dict({part: values} if part else values)


def test_the_cutoff_is_that_of_the_pairs_a_model_looks_at():
    assert EnergyConfig().cutoff is None
    assert EnergyConfig(spectral=SpectralConfig()).cutoff is None
    assert EnergyConfig(pairs=PairConfig(cutoff=4.5)).cutoff == 4.5
    images = {"attention": "exact", "rpe": None, "images": ImageConfig(cutoff=6.0)}
    assert EnergyConfig(**images).cutoff == 6.0
    assert EnergyModel(EnergyConfig(**images, embed_dim=8, num_layers=1)).cutoff == 6.0


# Refusals


def config(**changes):
    """A configuration with all parts that go together, and changes to it or, dotted, its parts."""
    base = EnergyConfig(rpe=None, spectral=SPECTRAL, pairs=small_pairs())
    if any(key.split(".")[0] == "images" for key in changes):
        base = replace(base, attention="exact", images=small_images())
    parts = {}
    for key, value in changes.items():
        name, _, inner = key.partition(".")
        if inner:
            parts[name] = replace(parts.get(name, getattr(base, name)), **{inner: value})
    plain = {key: value for key, value in changes.items() if "." not in key}
    return replace(base, **parts, **plain)


LENGTHS = [
    "spectral.k_max",
    "spectral.sigma_max",
    "spectral.padding",
    "pairs.cutoff",
    "images.cutoff",
]
COUNTS = {
    "spectral.num_heads": 1,
    "spectral.num_basis": 1,
    "pairs.num_basis": 2,
    "pairs.vectors": 0,
    "pairs.filter_vectors": 0,
    "pairs.vector_basis": 2,
    "images.num_basis": 2,
}
OR_NULL = ["far_blocks", "spectral.max_vectors", "pairs.num_filters", "pairs.vector_blocks"]
SWITCHES = [
    "pairs.filter",
    "pairs.norm",
    "pairs.density",
    "pairs.pair_types",
    "pairs.correction",
    "images.pair_types",
]
CHOICES = {
    "attention": "linear, exact, auto, none",
    "readout": "tags, sum, mean",
    "feedback": "features, positions",
    "feature_map": ", ".join(FEATURE_MAPS),
    "images.mask": "gaussian, centred",
}


def refused(message, **changes):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_parts(config(**changes))


@pytest.mark.parametrize("key", LENGTHS)
@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), True, "5"])
def test_lengths(key, value):
    refused(f"model.{key} is {value!r}, expected a number above 0", **{key: value})
    check_parts(config(**{key: {"spectral.k_max": 0.5}.get(key, CUTOFF)}))


@pytest.mark.parametrize("key", COUNTS)
@pytest.mark.parametrize("value", [-1, 2.0, True, None, "4"])
def test_whole_numbers(key, value):
    low = COUNTS[key]
    message = f"expected a whole number of at least {low}"
    refused(f"model.{key} is {value!r}, {message}", **{key: value})
    if low:
        refused(f"model.{key} is {low - 1}, {message}", **{key: low - 1})


@pytest.mark.parametrize("value", [-0.1, 1, float("nan"), True, None, "0.5"])
def test_dropout_of_vectors(value):
    message = f"model.pairs.vector_dropout is {value!r}, expected at least 0 and below 1"
    refused(message, **{"pairs.vector_dropout": value})
    check_parts(config(**{"pairs.vector_dropout": 0.5}))


@pytest.mark.parametrize("key", OR_NULL)
@pytest.mark.parametrize("value", [0, -1, 2.0, True, "4"])
def test_whole_numbers_or_null(key, value):
    refused(f"model.{key} is {value!r}, expected a whole number of at least 1", **{key: value})
    check_parts(config(**{key: None}))
    check_parts(config(**{key: 1}))


@pytest.mark.parametrize("key", SWITCHES)
@pytest.mark.parametrize("value", [1, None, "yes"])
def test_switches(key, value):
    refused(f"model.{key} is {value!r}, expected true or false", **{key: value})


@pytest.mark.parametrize("key", CHOICES)
@pytest.mark.parametrize("value", ["Linear", "", None])
def test_choices(key, value):
    refused(f"model.{key} is {value!r}; known: {CHOICES[key]}", **{key: value})


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("value", [True, 5.0, [1], "yes", EnergyConfig()])
def test_parts_are_parts(name, value):
    keys = ", ".join(f.name for f in fields(PARTS[name]))
    message = f"model.{name} is {value!r}, expected null or a mapping with {keys}"
    refused(message, **{"attention": "exact", name: value})
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        EnergyModel(config(**{name: value}))


@pytest.mark.parametrize("name", PARTS)
def test_parts_are_no_dicts_in_python(name):
    schema = PARTS[name].__name__
    message = rf"^model.{name} is a dict, expected {schema}\(…\), or EnergyConfig.from_dict for a w"
    with pytest.raises(ValueError, match=message):
        EnergyModel(EnergyConfig(**{name: {}}))
    assert isinstance(getattr(EnergyConfig.from_dict({name: {}}), name), PARTS[name])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("flt-small", r"got a str: EnergyModel\(flt_mol.models.named_config\('flt-small'\)\) is a"),
        ({"embed_dim": 8}, "got a dict: EnergyConfig.from_dict makes one of it$"),
        (PairConfig(), "got a PairConfig$"),
        (3, "got a int$"),
    ],
)
def test_a_model_is_made_of_a_configuration(given, message):
    with pytest.raises(ValueError, match=f"^expected an EnergyConfig, {message}"):
        EnergyModel(given)
    with pytest.raises(ValueError, match=r"^model settings are .*, expected a mapping of keys"):
        EnergyConfig.from_dict(None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers is 0, expected at least 1"),
        ({"ffn_dim": 0}, "ffn_dim is 0, expected at least 1"),
        ({"head_norm": "no"}, "head_norm is 'no', expected true or false"),
        ({"recycles": 1.5}, "recycles is 1.5, expected a whole number"),
        ({"dropout": 1.0}, "dropout is 1.0, expected from 0 to below 1"),
        ({"num_heads": True}, "num_heads is True, expected a whole number"),
        ({"seed": None}, "seed is None, expected a whole number"),
        ({"rpe": RPEConfig(form="x")}, "rpe.form is 'x', expected one of "),
        ({"rpe": RPEConfig(sigma_min=9.0)}, "rpe.sigma_min is 9.0, expected no more than "),
        ({"rpe": RPEConfig(learned_sigma=1)}, "rpe.learned_sigma is 1, expected true or false"),
    ],
)
def test_models_in_python_are_checked_as_runs_are(changes, message):
    with pytest.raises(ValueError, match=f"^model.{message}"):
        EnergyModel(EnergyConfig(**changes))


TOGETHER = [
    ({"outputs": "energy"}, "model.outputs is 'energy', expected a list of different outputs"),
    ({"outputs": ["energy", "energy"]}, "expected a list of different outputs"),
    ({"outputs": ["energy", "forces"]}, "model.outputs has 'forces'; known: energy, energy_init"),
    ({"outputs": []}, r"model.outputs is \[\], expected 'energy' among them"),
    ({"outputs": ["displacement"]}, "expected 'energy' among them"),
    (
        {"outputs": ["energy", "displacement"], "pairs": None},
        "'displacement', which is made of vectors between neighbours: set model.pairs",
    ),
    ({"feedback": "positions"}, "add 'displacement' to model.outputs"),
    ({"spectral.num_heads": 3}, "model.spectral.num_heads is 3, expected a divisor of model.emb"),
    ({"spectral.k_max": 0.1}, "no room for a function of width .* expected at least 0.127"),
    (
        {"pairs": small_pairs(filter=False, density=False)},
        "neither filter nor density nor correction, and no output needs it: set one, or",
    ),
    (
        {"pairs": small_pairs(vectors=3, density=False)},
        "model.pairs.vectors is 3 and model.pairs.density false, which would hold them",
    ),
    (
        {"pairs": small_pairs(filter_vectors=3, filter=False)},
        "model.pairs.filter_vectors is 3 and model.pairs.filter false, which would hold them",
    ),
    (
        {"images": small_images(), "attention": "linear"},
        "for exact attention: model.attention is 'linear', expected 'exact'",
    ),
    ({"images": small_images(), "rpe": RPEConfig()}, "model.images and model.rpe are both set"),
    ({"attention": "none", "rpe": RPEConfig()}, "model.rpe is set and model.attention is 'none'"),
    (
        {"attention": "none", "spectral": None, "pairs": small_pairs(filter=False)},
        "model.attention is 'none' and there is no filter: set model.spectral, or model.pairs",
    ),
    (
        {"far_blocks": 1, "num_layers": 2, "pairs": None},
        "model.far_blocks is 1 of 2 blocks, and the others would be empty: set model.pairs with",
    ),
    ({"far_blocks": 1, "num_layers": 2, "pairs": small_pairs(filter=False)}, "would be empty"),
    ({"attention": "none", "pairs.correction": True}, "model.pairs.correction corrects attention"),
    ({"images.cutoff": CUTOFF, "pairs.correction": True}, "without image keys, .* set correction"),
    ({"attention": "auto", "pairs.correction": True}, "model.attention is 'auto': set correction"),
    (
        {"feature_map": "hyperbolic", "num_features": 7},
        "model.num_features is 7, and model.feature_map 'hyperbolic' .* expected an even number",
    ),
    ({"far_blocks": 3, "num_layers": 2}, "far_blocks is 3, .* expected at most 2, or null for all"),
    ({"pairs.vector_blocks": 4}, "model.pairs.vector_blocks is 4, .* expected at most 3, or null"),
    (
        {"feedback": "positions", "outputs": ["energy", "displacement"]},
        "moves atoms between passes, and model.recycles is 1: set it to 2 or more, or feedback",
    ),
    (
        {"images.mask": "gaussian", "images.pair_types": True, "images.density": True},
        "pair_types is true, .* 'gaussian', .*: set pair_types and density to false, or mask to c",
    ),
    (
        {"images.mask": "gaussian"},
        "images.density is true, .*: set density to false, or mask to ce",
    ),
    ({"spectral.k_max": 5.0}, "k_max is 5 1/Å, with 10 Å of .*: 1,767,146 waves in a usual system"),
    ({"spectral.k_max": 1e300}, "k_max is 1e.300 1/Å, .* inf waves in a usual system"),
    ({"spectral.padding": 1e300}, "with 1e.300 Å of padding: inf waves"),
    ({"spectral.k_max": 2.0}, "113,097 waves .* expected at most 100,000; usual are k_max of 0.2"),
    ({"spectral.sigma_max": 25.0}, "k_max is 0.45 1/Å, with 100 Å of padding"),
    ({"spectral.padding": 60.0}, "k_max is 0.45 1/Å, with 60 Å of padding"),
    (
        {"images.cutoff": 6.0},
        r"model.images.cutoff and model.pairs.cutoff are \[4.0, 6.0\]: .* make them equal",
    ),
]


@pytest.mark.parametrize(("changes", "message"), TOGETHER, ids=[str(c)[:40] for c, _ in TOGETHER])
def test_what_does_not_go_together(changes, message):
    with pytest.raises(ValueError, match=message):
        check_parts(config(**changes))
    with pytest.raises(ValueError, match=message):
        EnergyModel(config(**changes))


@every_kind
def test_what_can_be_built_is_not_refused(changes):
    check_parts(small_model(**all_outputs(changes, 2, "positions")).config)


def test_pairs_may_be_for_the_displacement_alone():
    outputs = ["energy", "displacement"]
    check_parts(config(pairs=small_pairs(filter=False, density=False), outputs=outputs))


def test_waves_are_counted_for_the_larger_of_a_slab_and_a_molecule():
    for k_max, padding, volume in ((1.99, 5.0, 3000), (1.91, None, 15**3), (0.45, 58.0, 63**3)):
        check_parts(config(**{"spectral.k_max": k_max, "spectral.padding": padding}))
        waves = 4 / 3 * math.pi * k_max**3 * volume
        assert 0.9e5 < waves < 1e5
        with pytest.raises(ValueError, match="waves in a usual system"):
            check_parts(config(**{"spectral.k_max": 1.04 * k_max, "spectral.padding": padding}))


def test_modifiers_of_what_is_switched_off_may_stay():
    check_parts(config(far_blocks=1, far_scale=0.1, attention="none", spectral=None))
    check_parts(config(**{"pairs.vector_blocks": 1, "pairs.vector_dropout": 0.5}))


IDLE = [
    {"far_blocks": 3, "num_layers": 2, "outputs": ["energy", "displacement"]},
    {"pairs.vector_blocks": 4, "pairs.filter_vectors": 2, "feedback": "positions"},
    {"images.mask": "gaussian", "images.pair_types": True},
    {"images.mask": "gaussian", "feedback": "positions", "far_blocks": 9},
]


@pytest.mark.parametrize("changes", IDLE, ids=str)
def test_weights_that_were_saved_with_settings_without_effect_load(changes, structures):
    """An earlier version let them pass: what they hold is the model without them."""
    changes = {"embed_dim": 8, "ffn_dim": 8, **changes}
    stored = config(outputs=["energy", "displacement"], **{"pairs.num_basis": 4})
    stored = config(**{**changes, "outputs": stored.outputs})
    with pytest.raises(ValueError, match="model"):
        refuse_idle(stored)
    plain = without_idle(stored)
    refuse_idle(plain)
    assert without_idle(plain) == plain
    weights = EnergyModel(plain).state_dict()
    weights["config_json"] = torch.tensor(list(json.dumps(asdict(stored)).encode()))
    again = EnergyModel.config_of(weights)
    assert again == plain
    model = EnergyModel(again)
    model.load_state_dict(weights)
    assert model(structures)["energy"].isfinite().all()


@every_kind
def test_what_has_an_effect_is_left_as_it_is(changes):
    kept = small_model(**all_outputs(changes, 2, "positions")).config
    assert without_idle(kept) == kept


# Named models


@pytest.mark.parametrize("name", sorted(f.parent.name for f in MODELS.glob("*/model.yaml")))
def test_named_configurations(name):
    found = named_config(name)
    assert asdict(found) == {
        **asdict(found),
        **yaml.safe_load((MODELS / name / "model.yaml").read_text()),
    }
    check_model(found)
    found.embed_dim = 3
    assert named_config(name).embed_dim != 3


def test_a_named_model_is_that_of_a_run():
    assert named_config("flt-small") == load_run_config("emt_flt-small").model
    with pytest.raises(ValueError, match="no model called 'flt-smal'; known: .*, flt-small, "):
        named_config("flt-smal")


# What is claimed


def flags(**changes):
    """sees_images, rotation_invariant, supercell_consistent."""
    model = small_model(**changes)
    return model.sees_images, model.rotation_invariant, model.supercell_consistent


def test_flags_say_what_a_model_claims():
    assert flags() == (False, False, False)
    assert flags(rpe=None) == (False, True, True)
    assert flags(rpe=None, attention="auto") == (False, True, False)
    assert flags(rpe=None, spectral=SPECTRAL) == (True, True, True)
    budget = replace(SPECTRAL, max_vectors=9)
    assert flags(rpe=None, spectral=budget) == (True, True, False)
    assert flags(rpe=None, pairs=small_pairs()) == (True, True, True)
    assert flags(rpe=None, pairs=small_pairs(), readout="mean") == (True, True, True)
    assert flags(rpe=None, pairs=small_pairs(correction=True)) == (True, True, False)
    assert flags(pairs=small_pairs(), spectral=SPECTRAL) == (False, False, False)
    images = {"rpe": None, "attention": "exact", "images": small_images()}
    assert flags(**images) == (True, True, True)
