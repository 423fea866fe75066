"""Named models: their yaml, cards and runs; ten steps of each run at a narrow width."""

import math
import re
import runpy
import sys
import tomllib
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
import torch
import yaml

from flt_mol.analysis import paper_models
from flt_mol.analysis.accuracy.rows import ROWS, resolved
from flt_mol.analysis.paper_models import (
    HEAD,
    RunCost,
    named_models,
    notes,
    row,
    run_cost,
    run_of,
    runs,
    total_steps,
)
from flt_mol.analysis.timing import one_thread
from flt_mol.data import open_dataset
from flt_mol.data.recipes import recipe
from flt_mol.files import shipped_folder
from flt_mol.models.energy import EnergyConfig, EnergyModel
from flt_mol.training.config import load_run_config

ROOT = Path(__file__).resolve().parents[2]
MODELS = sorted(file.parent.name for file in shipped_folder("models").glob("*/model.yaml"))
NAMED = [
    "flt-base",
    "flt-large",
    "flt-small",
    "graphormer3d-exact",
    "paper-flt-10l",
    "paper-flt-12l",
    "paper-performer-12l",
]
RUNS = [run for run in runs() if run != "finetune"]  # it begins with trained weights
NARROW = [
    "model.embed_dim=32",
    "model.num_heads=2",
    "model.num_layers=1",
    "model.ffn_dim=32",
    "model.num_features=8",
]


def values_of(name):
    return yaml.safe_load((shipped_folder("models") / name / "model.yaml").read_text("utf-8"))


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


def card_of(name):
    return (shipped_folder("models") / name / "README.md").read_text("utf-8")


def parameters_of(name):
    with torch.random.fork_rng(devices=[]):
        model = EnergyModel(EnergyConfig.from_dict(values_of(name)))
    return sum(p.numel() for p in model.parameters())


def between(card, marker):
    """Lines of a card between the markers, without empty ones."""
    inside = card.split(f"<!-- begin: {marker} -->")[1].split(f"<!-- end: {marker} -->")[0]
    return [line for line in inside.splitlines() if line]


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("name", NAMED)
def test_card_states_parameters_and_names_its_runs(name):
    card = card_of(name)
    with torch.random.fork_rng(devices=[]):
        model = EnergyModel(EnergyConfig.from_dict(values_of(name)))
    assert f"{parameters_of(name):,} parameters" in card
    own = [run for run in RUNS if run.split("_")[-1] == name]
    assert own
    assert all(f"flt-mol train {run}\n" in card for run in own)
    supercell = "a supercell with n times as many atoms gives mean + n (E − mean): "
    says = {
        "Turning a system leaves its energy alone: ": model.rotation_invariant,
        "Periodic images are seen: ": model.sees_images,
        supercell: model.supercell_consistent,
    }
    for text, true in says.items():
        assert f"{text}{'yes' if true else 'no'}" in card
    assert re.search(re.escape(supercell) + r"(yes|no), because", card)


@pytest.mark.parametrize("name", NAMED)
def test_costs_on_the_card_are_of_this_model(name):
    lines = [line for line in between(card_of(name), "cost") if line.startswith("|")]
    if not lines:
        return  # not measured
    head, _, *rows = map(cells, lines)
    assert head == list(HEAD)
    assert rows
    for run, parameters, device, *_ in rows:
        assert run in RUNS
        assert run.split("_")[-1] == name
        assert parameters == f"{parameters_of(name):,}", f"{name}: measure {run} anew"
        assert device


def test_flt_small_is_the_accuracy_tables_ours_but_for_its_outputs():
    small = asdict(EnergyConfig.from_dict(values_of("flt-small")))
    ours = asdict(EnergyConfig.from_dict(resolved(ROWS["ours"], "joint")))
    assert {key for key in small if small[key] != ours[key]} == {"outputs"}
    assert small["outputs"] == ["energy", "displacement"]
    assert ours["outputs"] == ["energy", "energy_initial"]
    text = " ".join(between(card_of("flt-small"), "accuracy"))
    assert "scripts/accuracy_table.py" in text
    assert "docs/tables/accuracy.md" in text


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
    overrides = narrow(run, **{"training.accelerator": "cpu"})
    with one_thread():
        cost = run_cost(run, systems, steps=2, batch_size=4, overrides=overrides)
    assert torch.equal(torch.random.get_rng_state(), state)
    with torch.random.fork_rng(devices=[]):
        model = EnergyModel(load_run_config(run, narrow(run)).model)
    assert cost.parameters == sum(p.numel() for p in model.parameters())
    sizes = systems.natoms.tolist()
    assert cost.atoms == sum(sizes[k % 3] for k in range(8)) / 2
    assert (cost.systems, cost.batch_size, cost.steps) == (4, 64, 10)
    assert cost.total_seconds == pytest.approx(10 * cost.seconds[1] * 16)
    assert cost.changed
    assert cost.device == "CPU, one thread"
    assert cost.memory > 1e8
    with pytest.raises(ValueError, match="a step and a system at least"):
        run_cost(run, systems, steps=0)


def some_cost(**changes):
    cost = RunCost(
        "r", 1234, [9.0, 2.0, 4.0], [3.0, 2.5, 2.0], 2_500_000_000, 8, 640.0, 64, 500, "GPU"
    )
    return cost._replace(**changes)


def test_a_row_of_the_table():
    cost = some_cost()
    assert cost.seconds_per_step == 3.0
    assert cost.total_seconds == 500 * 3.0 * 8
    assert row(cost) == ["r", "1,234", "GPU", "8, 640", "3", "2.5", "500", "≈ 3.3 h"]
    assert len(row(cost)) == len(HEAD)
    assert row(some_cost(systems=64))[-1] == "25.0 min"
    assert row(some_cost(changed=True))[0] == "r †"
    assert some_cost(seconds=[9.0]).seconds_per_step == 9.0


def test_notes_say_what_was_scaled_and_overridden():
    plain = notes([some_cost(systems=64)])
    assert len(plain) == 1
    assert "without validation" in plain[0]
    changes = ["training.max_steps=9", "model.embed_dim=8"]
    costs = [some_cost(), some_cost(systems=64, changed=True)]
    assert notes(costs, changes)[1:] == [
        "≈: scaled to the run's batch of 64 systems, as if time were proportional to the systems "
        "of a step.",
        "Overrides: training.max_steps=9 model.embed_dim=8.",
        "†: overrides changed the model; it is not the one of this name.",
    ]


def printed(capsys, monkeypatch, *settings):
    script = ROOT / "scripts" / "paper_models.py"
    if not script.is_file():
        pytest.skip("needs the checkout")
    data = str(recipe("emt_adsorption").path("val_id"))
    monkeypatch.setattr(sys, "argv", [str(script), data, *settings])
    runpy.run_path(str(script), run_name="__main__")
    return capsys.readouterr().out.splitlines()


SHORT = ["--steps", "1", "--batch-size", "2", "--set", "training.accelerator=cpu"]


def test_the_script_prints_a_row_for_each_model(capsys, monkeypatch):
    settings = ["--models", "flt-small", *SHORT, *narrow("oc20_10k_flt-small")]
    lines = printed(capsys, monkeypatch, *settings)
    assert lines[0].startswith("oc20_100k_flt-small: ")
    assert "in 1 step(s)" in lines[0]
    rows = [cells(line) for line in lines if line.startswith("|")]
    assert rows[0] == list(HEAD)
    assert rows[2][0] == "oc20_100k_flt-small †"
    assert rows[2][2].startswith("CPU, ")
    assert "scaled to the run's batch of 64" in lines[-3]
    assert "model.embed_dim=32" in lines[-2]
    assert lines[-1].startswith("†")


def test_the_script_measures_any_run(capsys, monkeypatch):
    def costs(runs, data, *settings):
        return [some_cost(run=run, systems=64) for run in runs]

    monkeypatch.setattr(paper_models, "costs_apart", costs)
    lines = printed(capsys, monkeypatch, "--runs", "oc20_10k_flt-base", "emt_flt-small")
    rows = [cells(line) for line in lines if line.startswith("|")]
    assert [line[0] for line in rows[2:]] == ["oc20_10k_flt-base", "emt_flt-small"]
    assert [line[2] for line in rows[2:]] == ["GPU", "GPU"]
    with pytest.raises(SystemExit):
        printed(capsys, monkeypatch, "--runs", "nothing")
    assert "oc20_10k_flt-base" in capsys.readouterr().err
