"""Whole runs on tiny sets of one's own."""

import csv
import io
import json

import pytest
import torch
import yaml
from ase.io import read, write
from rich.console import Console

from flt_mol.evaluation.splits import evaluate_model
from flt_mol.models.checkpoint import load_model, read_checkpoint
from flt_mol.training import callbacks, losses
from flt_mol.training.config import RunConfig, load_run_config
from flt_mol.training.data import load_splits
from flt_mol.training.run import build_model, closing_lines
from flt_mol.training.task import EnergyTask
from helpers.training import ALL_OUTPUTS, RANDOM, go, tiny_run


def printed(config, output=None):
    stream = io.StringIO()
    result = go(config, output, Console(file=stream, width=200))
    return result, stream.getvalue()


def rows(folder):
    with (folder / "logs/csv/metrics.csv").open() as file:
        return list(csv.DictReader(file))


def with_energies(config, energies):
    frames = read(config.data.paths["train"], ":")
    for frame, energy in zip(frames, energies, strict=True):
        del frame.info["y_relaxed"]
        if energy is not None:
            frame.info["y_relaxed"] = energy
    write(config.data.paths["train"], frames)
    return config


def test_what_a_run_writes_and_prints(tmp_path):
    config = tiny_run(tmp_path, model=ALL_OUTPUTS, epochs=3, loggers=["csv", "tensorboard"])
    result, text = printed(config)
    names = {str(path.relative_to(result.folder)).split("/events")[0] for path in result.files}
    assert names == {
        "best.ckpt",
        "last.ckpt",
        "config.yaml",
        "learning_curve.png",
        "parity.png",
        "logs/csv/metrics.csv",
        "logs/tensorboard",
    } | {name for name in names if "hparams" in name}
    lines = text.splitlines()
    files = [config.data.paths[split] for split in ("train", "val")]
    assert lines.pop(0) == "train: {}; val: {}".format(*files)
    assert lines[0].startswith("5 systems to train on, 2 to validate, ")
    assert lines[0].endswith(" parameters, 9 steps")
    assert [line[:11] for line in lines[1:]] == ["epoch    1/", "epoch    2/", "epoch    3/"]
    assert "  MAE train " in lines[-1]
    assert " (unmoved 0.1" in lines[-1], "one free atom of three moves by 0.3 Å"
    history = rows(result.folder)
    assert [row["epoch"] for row in history] == ["0", "1", "2"]
    assert [row["step"] for row in history] == ["2", "5", "8"]
    best = min(history, key=lambda row: float(row["val/mae"]))
    assert float(best["val/mae"]) == result.best["val/mae"]
    assert int(best["epoch"]) + 1 == result.best["epoch"]
    lines = closing_lines(config, result.best)
    assert len(lines) == 1
    assert lines[0].startswith(f"best epoch {int(result.best['epoch'])}: val MAE ")


def test_the_best_checkpoint_is_what_was_validated(tmp_path):
    config = tiny_run(tmp_path, model=RANDOM, epochs=2, ema_decay=0.5)
    result = go(config)
    found = evaluate_model(load_model(result.checkpoint), load_splits(config)[1], warn=False)
    assert found.metrics["mae"] == pytest.approx(result.best["val/mae"], rel=1e-5)
    content = read_checkpoint(result.checkpoint)
    assert content["metrics"] == result.best
    assert content["systems"] == {"trained": [f"slab-{i}" for i in range(5)]}
    assert content["elements_seen"] == [8, 29, 47, 79]
    assert content["trained_on"]["systems"] == 5


PER_ATOM = {29: -3.7, 47: -2.8, 79: -3.3, 8: -7.4}


def totals(path):
    """The energies of a file as total energies of about −20 eV."""
    frames = read(path, ":")
    for frame in frames:
        frame.info["y_relaxed"] += sum(PER_ATOM[z] for z in frame.numbers)
    write(path, frames)


@pytest.mark.parametrize("start", [False, True])
def test_total_energies_are_learned_beside_those_of_elements(start, tmp_path):
    config = tiny_run(tmp_path, 9, 3, data={"reference": "composition"})
    if start:
        config.finetune.checkpoint = go(tiny_run(tmp_path, 9, 3)).folder
        config.finetune.checkpoint = str(config.finetune.checkpoint / "best.ckpt")
    for path in config.data.paths.values():
        totals(path)
    result = go(config, tmp_path / "totals")
    model = load_model(result.checkpoint)
    found = evaluate_model(model, load_splits(config)[1], warn=False)
    assert found.target.max() < -15
    assert found.metrics["mae"] == pytest.approx(result.best["val/mae"], rel=1e-5)
    assert found.metrics["mae"] < 1
    assert model.normalizer.reference[29] < -3
    config = config.model_copy(update={"data": config.data.model_copy(update={"reference": None})})
    with pytest.warns(UserWarning, match="energies beyond ±10 eV in 12 of 12"):
        go(config, tmp_path / "without")


def test_energies_of_interaction_are_learned_without_their_mean(tmp_path):
    config = tiny_run(tmp_path, 9, 3, data={"reference": "zero"})
    first = go(config)
    model = load_model(first.checkpoint)
    assert float(model.normalizer.mean) == 0
    assert float(model.normalizer.std) > 0
    start = {"checkpoint": str(first.folder / "best.ckpt"), "normalizer": "keep"}
    again = RunConfig.model_validate({**config.model_dump(), "finetune": start})
    assert float(load_model(go(again, tmp_path / "again").checkpoint).normalizer.mean) == 0
    start["normalizer"] = "refit"
    with pytest.raises(ValueError, match="finetune.normalizer"):
        RunConfig.model_validate({**config.model_dump(), "finetune": start})


def test_its_configuration_trains_again_to_the_same_weights(tmp_path):
    first = go(tiny_run(tmp_path, model=RANDOM, seed=3))
    config = load_run_config(str(first.folder / "config.yaml"), [f"output={tmp_path / 'again'}"])
    again = go(config)
    a, b = (torch.load(x.folder / "last.ckpt", weights_only=True) for x in (first, again))
    assert all(torch.equal(a["state_dict"][k], b["state_dict"][k]) for k in a["state_dict"])
    settings = yaml.safe_load((first.folder / "config.yaml").read_text())
    assert "output" not in settings
    assert a["config"] == {"name": "run", **settings}
    assert a["config"]["model"] == json.loads(json.dumps(config.model.model_dump()))


def test_the_training_seed_draws_all_initial_weights(tmp_path):
    def initial(seed):
        config = tiny_run(tmp_path, model=RANDOM, seed=seed)
        torch.manual_seed(seed)
        return build_model(config, load_splits(config)[0])

    one, same, other = initial(1), initial(1), initial(2)
    assert one.config.seed == 1
    fixed = {"normalizer.mean", "normalizer.std", "elements_seen", "config_json"}
    for name, value in one.state_dict().items():
        assert torch.equal(value, same.state_dict()[name])
        drawn = value.is_floating_point() and name not in fixed and value.unique().numel() > 3
        if drawn and "log_" not in name and "weight" in name:
            assert not torch.equal(value, other.state_dict()[name]), name


@pytest.mark.parametrize("energies", [[1.5], pytest.param([1.5] * 3, marks=pytest.mark.slow)])
def test_targets_without_standard_deviation(tmp_path, energies):
    config = with_energies(tiny_run(tmp_path, len(energies), batch_size=32), energies)
    with pytest.warns(UserWarning, match="std is set to 1"):
        result = go(config)
    assert 0 <= result.best["val/mae"] < 100


def test_a_split_without_targets_is_refused_and_leaves_nothing(tmp_path):
    config = with_energies(tiny_run(tmp_path), [None] * 5)
    with pytest.raises(ValueError, match=r"train\.extxyz"):
        go(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("max_steps", "epochs"), [(4, 2), pytest.param(6, 2, marks=pytest.mark.slow)]
)
def test_a_stop_within_an_epoch_is_validated(tmp_path, max_steps, epochs):
    result = go(tiny_run(tmp_path, epochs=5, max_steps=max_steps))
    history = rows(result.folder)
    assert len(history) == epochs
    assert int(history[-1]["step"]) == max_steps - 1


def test_learning_rates_of_a_run(tmp_path, monkeypatch):
    rates = []
    original = EnergyTask.training_step

    def step(self, batch, batch_idx):
        rates.append(self.optimizers().param_groups[0]["lr"])
        return original(self, batch, batch_idx)

    monkeypatch.setattr(EnergyTask, "training_step", step)
    go(tiny_run(tmp_path, 4, epochs=4, warmup_steps=2, learning_rate=1.0, accumulate=1))
    expected = [0.5, 1.0, 1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]
    assert rates == pytest.approx(expected)


def test_a_step_follows_the_mean_over_its_systems_however_they_are_batched(tmp_path):
    steps = []
    for size in ({"batch_size": 6}, {"batch_size": 2}, {"batch_size": 4}, {"batch_atoms": 25}):
        accumulate = {6: 1, 2: 3, 4: 5}.get(size.get("batch_size"), 2)
        config = tiny_run(tmp_path, 6, model=ALL_OUTPUTS, epochs=1, accumulate=accumulate, **size)
        row = rows(go(config, tmp_path / f"of{size}").folder)[0]
        steps.append([float(row[f"train/{name}"]) for name in ("gradient_norm", "loss", "mae")])
    for step in steps[1:]:
        assert step == pytest.approx(steps[0], rel=1e-4)


@pytest.mark.parametrize(
    ("clip", "moved"), [pytest.param(None, True, marks=pytest.mark.slow), (1e-12, False)]
)
def test_gradient_clipping(tmp_path, clip, moved):
    config = tiny_run(tmp_path, epochs=1, gradient_clip=clip, weight_decay=0.0, eps=1.0)
    torch.manual_seed(0)
    before = build_model(config, load_splits(config)[0]).state_dict()
    result = go(config)
    after = load_model(result.folder / "last.ckpt").state_dict()
    difference = max(float((after[k].double() - before[k].double()).abs().max()) for k in before)
    assert (difference > 1e-7) == moved
    assert float(rows(result.folder)[0]["train/gradient_norm"]) > 1e-3, "before clipping"


def test_a_gradient_that_is_not_finite_stops_with_the_sids(tmp_path, monkeypatch):
    original = EnergyTask.training_step

    def step(self, batch, batch_idx):
        weight = next(self.model.head.parameters())
        return original(self, batch, batch_idx) + (0 * weight.sum()).sqrt()

    monkeypatch.setattr(EnergyTask, "training_step", step)
    with pytest.raises(ValueError, match=r"'train'.*gradient.*slab-"):
        go(tiny_run(tmp_path))
    assert not (tmp_path / "run").exists()


def test_a_rate_that_is_too_high_is_blamed_and_not_the_systems(tmp_path):
    config = tiny_run(tmp_path, epochs=40, learning_rate=1e25, warmup_steps=0, gradient_clip=None)
    with pytest.raises(ValueError, match=r"steps; .*learning_rate, 1e\+25"):
        go(config)


@pytest.mark.slow
def test_training_lowers_the_error(tmp_path):
    model = {**ALL_OUTPUTS, "recycles": 1, "feedback": "features"}
    config = tiny_run(tmp_path, 4, model=model, epochs=30, batch_size=4, learning_rate=3e-2)
    history = rows(go(config).folder)
    assert float(history[-1]["train/loss"]) < 0.8 * float(history[0]["train/loss"])


@pytest.mark.slow
def test_bfloat16_and_no_loggers(tmp_path):
    result = go(tiny_run(tmp_path, epochs=1, precision="bf16-mixed", loggers=[]))
    assert 0 <= result.best["val/mae"] < 100
    assert not (result.folder / "logs").exists()


def test_a_logger_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="wandb"):
        go(tiny_run(tmp_path, loggers=["wandb"]))


def test_the_loss_is_told_how_far_training_is(tmp_path, monkeypatch):
    seen = []
    original = losses.training_loss

    def loss(outputs, structures, progress, *args):
        seen.append(progress)
        return original(outputs, structures, progress, *args)

    monkeypatch.setattr("flt_mol.training.task.training_loss", loss)
    go(tiny_run(tmp_path, 4, epochs=2, accumulate=2))
    assert seen == [0.0, 0.0, 0.5, 0.5]


def test_a_share_is_held_out_and_recorded(tmp_path):
    config = tiny_run(tmp_path, 8, data={"validation_fraction": 0.25})
    result = go(config)
    with (result.folder / "held_out.csv").open() as file:
        held = [row["sid"] for row in csv.DictReader(file)]
    systems = read_checkpoint(result.checkpoint)["systems"]
    assert systems["held_out"] == held
    assert len(held) == 2
    assert sorted(systems["trained"] + held) == sorted(f"slab-{i}" for i in range(8))


@pytest.mark.slow
def test_sids_are_left_out_of_checkpoints_of_large_sets(tmp_path, monkeypatch):
    monkeypatch.setattr("flt_mol.training.data._IN_MEMORY", 1)
    result = go(tiny_run(tmp_path, model=ALL_OUTPUTS))
    assert "trained" not in (read_checkpoint(result.checkpoint).get("systems") or {})


def test_an_accelerator_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = tiny_run(tmp_path)
    config.training.accelerator = "cuda"
    with pytest.raises(ValueError, match=r"training.accelerator=cuda"):
        go(config)
    assert not (tmp_path / "run").exists()


def test_settings_reach_loggers_and_a_wandb_run_keeps_its_id(tmp_path, monkeypatch):
    made = []

    class Stub:
        def __init__(self, name, save_dir, **given):
            made.append(given)

        def log_hyperparams(self, settings):
            made[-1]["settings"] = settings

    monkeypatch.setattr(callbacks, "WandbLogger", Stub)
    monkeypatch.setattr(callbacks.importlib.util, "find_spec", lambda name: name)
    (tmp_path / "config.yaml").touch()
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    config = {"training": {"epochs": 2}}
    history = callbacks.History(tmp_path, config, {}, None, False, Console())
    callbacks.make_loggers(["wandb"], history, None)
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password key")
    callbacks.make_loggers(["wandb"], history, None)
    first, second = made
    assert first["id"] == second["id"]
    assert (first["mode"], second["mode"]) == ("offline", None)
    assert first["settings"] == config
    callbacks.make_loggers(["tensorboard"], history, None)[0].save()
    assert "epochs: 2" in (tmp_path / "logs/tensorboard/hparams.yaml").read_text()
