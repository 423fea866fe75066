"""Named models: their yaml, cards and runs; ten steps of each run at a narrow width."""

import math
import runpy
import sys
import tomllib
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
import yaml

from flt_mol import resources
from flt_mol.analysis.paper_models import (
    HEAD,
    RunCost,
    device_name,
    named_models,
    row,
    run_cost,
    run_of,
    total_steps,
)
from flt_mol.data import open_dataset
from flt_mol.data.catalog import recipe
from flt_mol.models.energy import EnergyConfig, EnergyModel
from flt_mol.training.config import load_run_config

ROOT = Path(__file__).resolve().parents[2]
MODELS = sorted(file.parent.name for file in resources.folder("models").glob("*/model.yaml"))
NAMED = [
    "flt-base",
    "flt-large",
    "flt-small",
    "graphormer3d-exact",
    "paper-flt-10l",
    "paper-flt-12l",
    "paper-performer-12l",
]
RUNS = sorted(file.stem for file in resources.folder("configs").glob("*.yaml"))
NARROW = [
    "model.embed_dim=32",
    "model.num_heads=2",
    "model.num_layers=1",
    "model.ffn_dim=32",
    "model.num_features=8",
]


def values_of(name):
    return yaml.safe_load((resources.folder("models") / name / "model.yaml").read_text("utf-8"))


def narrow(run, **changes):
    """Overrides that make the model of a run small and its schedule ten steps long."""
    model = load_run_config(run).model
    out = [*NARROW, "training.max_steps=10", "training.warmup_steps=1"]
    if model.spectral is not None:
        out.append("model.spectral.num_heads=2")
    if model.pairs is not None and model.pairs.vectors:
        out.append("model.pairs.vectors=4")
    if model.pairs is not None:
        out.append("model.pairs.cutoff=4.0")
    if model.images is not None:
        out += ["model.images.num_basis=8", "model.images.cutoff=4.0"]
    return out + [f"{key}={value}" for key, value in changes.items()]


def emt_systems(count=4):
    return recipe("emt_adsorption").open("val_id").batch(range(count))


def test_these_models_have_names_and_runs():
    assert set(NAMED) <= set(MODELS)
    assert named_models() == NAMED
    assert all(run_of(name) in RUNS for name in NAMED)
    with pytest.raises(ValueError, match=r"'emt_small' has no run on OC20.*paper-flt-12l"):
        run_of("emt_small")


@pytest.mark.parametrize("name", NAMED)
def test_yaml_states_every_hyper_parameter(name):
    def check(values, schema, path):
        assert set(values) == {f.name for f in fields(schema)}, path
        for key, part in vars(schema).items():
            if hasattr(part, "__dataclass_fields__"):
                check(values[key], part, f"{path}.{key}")

    check(values_of(name), EnergyConfig.from_dict(values_of(name)), name)


@pytest.mark.parametrize("name", NAMED)
def test_card_states_parameters_and_names_its_runs(name):
    card = (resources.folder("models") / name / "README.md").read_text("utf-8")
    with torch.random.fork_rng(devices=[]):
        model = EnergyModel(EnergyConfig.from_dict(values_of(name)))
    assert f"{sum(p.numel() for p in model.parameters()):,} parameters" in card
    runs = [run for run in RUNS if run.split("_")[-1] == name]
    assert runs
    assert all(run in card for run in runs)
    says = {
        "Turning a system leaves its energy alone: ": model.rotation_invariant,
        "Periodic images are seen: ": model.sees_images,
        "A supercell gives the multiple of the energy: ": model.supercell_consistent,
    }
    for text, true in says.items():
        assert f"{text}{'yes' if true else 'no'}" in card


def test_wheels_carry_every_model():
    if not (ROOT / "pyproject.toml").is_file():
        pytest.skip("needs the checkout")
    files = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    listed = {Path(folder).name for folder in files["data-files"] if "/models/" in folder}
    assert listed == set(MODELS)


@pytest.mark.parametrize("model", NAMED)
def test_models_are_chosen_by_name_in_any_run(model):
    chosen = load_run_config("emt_small", [f"model={model}", "loss={}"]).model
    assert chosen == EnergyConfig.from_dict(values_of(model))


def test_the_papers_numbers():
    """Choromanski, Li et al. 2024, appendix on OC20."""
    for name, layers in (("performer-12l", 12), ("flt-10l", 10), ("flt-12l", 12)):
        config = load_run_config(f"oc20_all_paper-{name}")
        model, training = config.model, config.training
        assert (model.embed_dim, model.num_heads, model.ffn_dim) == (768, 48, 2048)
        assert (model.num_layers, model.recycles, model.num_features) == (layers, 4, 64)
        if name == "performer-12l":
            assert model.rpe is None
        else:
            assert model.rpe is not None
            rpe = model.rpe
            assert (rpe.num_frequencies, rpe.num_terms, rpe.form) == (16, 32, "weight")
        assert (training.optimizer, training.learning_rate) == ("adam", 3e-4)
        assert (training.beta1, training.beta2, training.eps) == (0.9, 0.98, 1e-6)
        assert (training.weight_decay, training.batch_size) == (1e-3, 64)
        assert (training.warmup_steps, training.decay) == (10_000, "linear")
        assert total_steps(config) == 500_000
        assert len(config.loss.pass_weights) == model.recycles


def test_steps_are_those_of_the_data_set():
    config = load_run_config("oc20_10k_flt-small")
    assert total_steps(config) == config.training.epochs * 157  # ceil(10,000 / 64)
    with pytest.raises(ValueError, match="states no count for split 'here'"):
        total_steps(load_run_config("oc20_10k_flt-small", ["data.train=here"]))


@pytest.fixture(scope="module")
def genuine(oc20_data):
    return open_dataset(oc20_data / "is2re_val_20" / "data.lmdb").batch(range(20))


@pytest.fixture(scope="module")
def steps_taken():
    return {}


@pytest.mark.parametrize("run", RUNS)
def test_ten_steps_of_each_run_on_genuine_systems(run, genuine, steps_taken):
    config = load_run_config(run, narrow(run))
    # Runs that differ in nothing but their data and length take the same ten steps: once is enough.
    same = replace(config.training, epochs=1, num_workers=0)
    key = repr((config.model, same, config.loss))
    if key not in steps_taken:
        steps_taken[key] = run_cost(run, genuine, 10, batch_size=4, overrides=narrow(run))
    cost = steps_taken[key]
    assert len(cost.losses) == len(cost.seconds) == 10
    assert all(map(math.isfinite, cost.losses))
    # Five batches hold the 20 systems; the second five are the same ones again.
    assert sum(cost.losses[5:]) < sum(cost.losses[:5])


@pytest.mark.parametrize("model", NAMED)
def test_a_step_under_autocast_has_a_finite_loss(model):
    run = run_of(model)
    overrides = narrow(run, **{"training.precision": "bf16-mixed"})
    cost = run_cost(run, emt_systems(), steps=2, batch_size=2, overrides=overrides)
    assert all(map(math.isfinite, cost.losses))


def test_costs_are_of_this_model_and_leave_global_state_alone():
    state = torch.random.get_rng_state()
    run = "oc20_all_paper-flt-12l"
    systems = emt_systems(3)
    cost = run_cost(run, systems, steps=2, batch_size=4, overrides=narrow(run))
    assert torch.equal(torch.random.get_rng_state(), state)
    with torch.random.fork_rng(devices=[]):
        model = EnergyModel(load_run_config(run, narrow(run)).model)
    assert cost.parameters == sum(p.numel() for p in model.parameters())
    sizes = systems.natoms.tolist()
    assert cost.atoms == sum(sizes[k % 3] for k in range(8)) / 2
    assert (cost.systems, cost.scale, cost.steps) == (4, 16.0, 10)
    assert cost.memory > 1e8
    with pytest.raises(ValueError, match="a step and a system at least"):
        run_cost(run, systems, steps=0)


def test_a_row_of_the_table():
    cost = RunCost("r", 1234, [9.0, 2.0, 4.0], [3.0, 2.5, 2.0], 2_500_000_000, 8, 640.0, 8.0, 500)
    assert cost.seconds_per_step == 3.0
    assert cost.total_seconds == 500 * 3.0 * 8
    cells = row(cost)
    assert len(cells) == len(HEAD)
    assert cells == ["r", "1,234", "8, 640", "3", "2.5", "3.000 → 2.000", "500", "3.3 h"]
    assert cost._replace(seconds=[9.0]).seconds_per_step == 9.0
    assert device_name()


def test_the_script_prints_a_row_for_each_model(capsys, monkeypatch):
    script = ROOT / "scripts" / "paper_models.py"
    if not script.is_file():
        pytest.skip("needs the checkout")
    settings = ["--models", "flt-small", "--steps", "1", "--batch-size", "2", "--set"]
    data = str(recipe("emt_adsorption").path("val_id"))
    monkeypatch.setattr(sys, "argv", [str(script), data, *settings, *narrow("oc20_10k_flt-small")])
    runpy.run_path(str(script), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("| oc20_100k_flt-small |")
    assert "1 step(s)" in lines[2]
