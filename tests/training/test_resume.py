"""Runs that are interrupted and given again: to the same weights, bit for bit."""

import importlib
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from flt_mol.models.checkpoint import load_model
from flt_mol.training.callbacks import History
from flt_mol.training.resume import RESUME, ResumePoint, resume_step
from flt_mol.training.task import EnergyTask
from helpers.kill_training import differing, disturbed_run, steps_done
from helpers.training import go, relaxations, tiny_run

STEPS_AN_EPOCH = 4  # 14 systems in 7 batches of 2, 2 of them for each step but the last


class Interrupted(BaseException):
    """Nobody catches it."""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return disturbed_run(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def undisturbed(base, tmp_path_factory):
    return go(base, tmp_path_factory.mktemp("whole") / "run")


def interrupt_at(patch, owner, name, when):
    """Raise at call number `when` (from 0) of a method, before it does anything."""
    original, calls = getattr(owner, name), []

    def method(*args, **kwargs):
        calls.append(name)
        if len(calls) == when + 1:
            raise Interrupted
        return original(*args, **kwargs)

    patch.setattr(owner, name, method)


def interrupted(config, folder, monkeypatch, owner, name, when):
    with monkeypatch.context() as patch:
        interrupt_at(patch, owner, name, when)
        with pytest.raises(Interrupted):
            go(config, folder)


@pytest.mark.parametrize(
    ("owner", "name", "when", "minutes", "kept"),
    [
        pytest.param(EnergyTask, "training_step", 1, 0.0, None, marks=pytest.mark.slow),
        pytest.param(EnergyTask, "training_step", 3, 0.0, 1, marks=pytest.mark.slow),
        (EnergyTask, "training_step", 9, 0.0, 5),
        (EnergyTask, "training_step", 9, 1e6, 4),
        pytest.param(EnergyTask, "validation_step", 1, 0.0, 3, marks=pytest.mark.slow),
        pytest.param(EnergyTask, "validation_step", 3, 1e6, 4, marks=pytest.mark.slow),
        pytest.param(History, "on_train_epoch_end", 1, 0.0, 7, marks=pytest.mark.slow),
        pytest.param(ResumePoint, "on_train_epoch_end", 2, 1e6, 8, marks=pytest.mark.slow),
        ("flt_mol.training.run", "parity", 0, 1e6, 12),
    ],
)
def test_to_the_same_weights(
    base, undisturbed, tmp_path, monkeypatch, owner, name, when, minutes, kept
):
    config = base.model_copy(deep=True)
    config.training.save_minutes = minutes
    owner = importlib.import_module(owner) if isinstance(owner, str) else owner
    interrupted(config, tmp_path, monkeypatch, owner, name, when)
    if kept is None:
        assert list(tmp_path.iterdir()) == []
    else:
        assert steps_done(tmp_path / RESUME) == kept
    result = go(config, tmp_path)
    assert differing(undisturbed.folder, result.folder) == []
    assert result.best == undisturbed.best


@pytest.mark.slow
def test_interrupted_again_and_again(base, undisturbed, tmp_path, monkeypatch):
    for _ in range(3):
        interrupted(base, tmp_path, monkeypatch, EnergyTask, "training_step", 5)
    interrupted(base, tmp_path, monkeypatch, EnergyTask, "validation_step", 0)
    shown = []
    original = EnergyTask.training_step

    def step(self, batch, batch_idx):
        shown.append(list(batch[0].sid))
        return original(self, batch, batch_idx)

    monkeypatch.setattr(EnergyTask, "training_step", step)
    result = go(base, tmp_path)
    assert differing(undisturbed.folder, result.folder) == []
    assert len(shown) < 21, "it did resume"


@pytest.mark.slow
def test_epochs_of_runs_that_resume_after_an_epoch(base, tmp_path, monkeypatch):
    """Lightning counts one epoch too few after such a point."""
    config = base.model_copy(deep=True)
    config.training.epochs, config.training.save_minutes = 5, 1e6
    whole = go(config, tmp_path / "whole")
    for when in (14, 7, 7):
        interrupted(config, tmp_path / "run", monkeypatch, EnergyTask, "training_step", when)
    result = go(config, tmp_path / "run")
    assert differing(whole.folder, result.folder) == []


@pytest.mark.slow
def test_early_stop(base, tmp_path, monkeypatch):
    config = base.model_copy(deep=True)
    config.training.epochs, config.training.early_stop = 6, 2
    config.training.learning_rate = 1e-12  # nothing falls
    config.training.noise = 0.0
    whole = go(config, tmp_path / "whole")
    epochs = (whole.folder / "logs/csv/metrics.csv").read_text().count("\n") - 1
    assert 3 <= epochs < 6
    interrupted(config, tmp_path / "run", monkeypatch, EnergyTask, "training_step", 7 * epochs - 3)
    result = go(config, tmp_path / "run")
    assert differing(whole.folder, result.folder) == []


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM]
)
def test_a_signal_stops_at_the_end_of_the_batch(base, undisturbed, tmp_path, monkeypatch, number):
    original, steps = EnergyTask.training_step, []

    def step(self, batch, batch_idx):
        steps.append(batch_idx)
        if len(steps) == 10:
            signal.raise_signal(number)
        return original(self, batch, batch_idx)

    config = base.model_copy(deep=True)
    config.training.save_minutes = 1e6
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        patch.setattr(EnergyTask, "training_step", step)
        with pytest.raises((KeyboardInterrupt, SystemExit)) as caught:
            go(config, tmp_path)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    if number == signal.SIGTERM:
        assert caught.value.code == 143
    else:
        assert caught.type is KeyboardInterrupt
    assert any("best.ckpt" in note for note in caught.value.__notes__)
    load_model(tmp_path)
    assert steps_done(tmp_path / RESUME) >= 5
    assert differing(undisturbed.folder, go(config, tmp_path).folder) == []


def test_a_finished_run_is_left_as_it_is(undisturbed, base):
    files = {path: path.stat().st_mtime_ns for path in undisturbed.files}
    again = go(base, undisturbed.folder)
    assert again.was_finished
    assert again.best == undisturbed.best
    assert {path: path.stat().st_mtime_ns for path in again.files} == files
    other = base.model_copy(deep=True)
    other.training.epochs = 4
    with pytest.raises(ValueError, match=r"training\.epochs=3, here 4"):
        go(other, undisturbed.folder)


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty"])
def test_a_damaged_point_is_refused(tmp_path, damage):
    file = tmp_path / RESUME
    content = {"flt_mol": {"data": 7}, "weights": torch.zeros(1000), "global_step": 3}
    torch.save(content, file)
    assert resume_step(file, 7) == 3
    with pytest.raises(ValueError, match="have changed"):
        resume_step(file, 8)
    data = bytearray(file.read_bytes())
    if damage == "flipped":
        data[len(data) // 2] ^= 255
    file.write_bytes({"flipped": data, "cut": data[:-500], "empty": b""}[damage])
    with pytest.raises(ValueError, match=r"resume\.ckpt is damaged"):
        resume_step(file, 7)


def test_other_data_are_refused(tmp_path, monkeypatch):
    config = tiny_run(tmp_path, save_minutes=0.0)
    interrupted(config, tmp_path / "run", monkeypatch, EnergyTask, "training_step", 2)
    relaxations(Path(config.data.paths["train"]), 5, first=10)
    with pytest.raises(ValueError, match="the data.* have changed"):
        go(config, tmp_path / "run")


def test_random_states_and_threads_are_kept(base, tmp_path):
    config = base.model_copy(deep=True)
    config.training.epochs = 1
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
    threads = torch.get_num_threads()
    go(config, tmp_path / "run")
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
    assert after == before
    assert torch.get_num_threads() == threads


def test_the_average_follows_its_formula(base, tmp_path, monkeypatch):
    """θ̄ ← β θ̄ + (1 − β) θ from the first step, which copies; validated and saved."""
    config = base.model_copy(deep=True)
    config.training.ema_decay = None
    config.training.epochs = 1
    weights = []

    def note(self, trainer, task, *args):
        if trainer.global_step > len(weights):
            weights.append({k: v.clone() for k, v in task.model.state_dict().items()})

    with monkeypatch.context() as patch:
        patch.setattr(History, "on_train_batch_end", note)
        go(config, tmp_path / "plain")
    assert len(weights) == STEPS_AN_EPOCH
    config.training.ema_decay = 0.8
    averaged = load_model(go(config, tmp_path / "average").folder / "last.ckpt").state_dict()
    parameters = [name for name, _ in load_model(tmp_path / "plain").named_parameters()]
    for name in parameters:
        expected = weights[0][name]
        for later in weights[1:]:
            expected = 0.8 * expected + 0.2 * later[name]
        torch.testing.assert_close(averaged[name], expected, rtol=1e-5, atol=1e-7)
