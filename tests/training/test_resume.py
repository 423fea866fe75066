"""Runs that are broken off and given again."""

import errno
import io
import random
import re
import signal
import warnings
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from flt_mol.data.folder_lock import locked_folder
from flt_mol.testing.killing_train import kill_trainings, short_run
from flt_mol.training import folders
from flt_mol.training.callbacks import History
from flt_mol.training.checkpoints import load_model
from flt_mol.training.resume import (
    RESUME,
    ResumePoint,
    WholeFiles,
    random_states,
    set_random_states,
)
from flt_mol.training.run import train
from flt_mol.training.task import EnergyTask

STEPS_AN_EPOCH = 3


class Broken(BaseException):
    """Nobody catches it."""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """12 systems in 6 batches, 2 for each step; everything that is random."""
    folder = tmp_path_factory.mktemp("data")
    return short_run(
        folder,
        12,
        epochs=3,
        batch_size=2,
        accumulate=2,
        ema_decay=0.8,
        noise=0.02,
        save_minutes=0.0,
    )


@pytest.fixture(scope="module")
def undisturbed(base, tmp_path_factory):
    return go(base, tmp_path_factory.mktemp("whole") / "run")


def go(config, output):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="elements never trained on")
        return train(replace(config, output=str(output)), console=Console(quiet=True))


def break_at(patch, owner, name, when):
    """Raise at call number `when` (from 0) of a method, before it does anything."""
    original, calls = getattr(owner, name), []

    def method(*args, **kwargs):
        calls.append(name)
        if len(calls) == when + 1:
            raise Broken
        return original(*args, **kwargs)

    patch.setattr(owner, name, method)


def assert_same(one, other):
    for name in ("best.ckpt", "last.ckpt"):
        a, b = (torch.load(run.folder / name, weights_only=True) for run in (one, other))
        assert a["metrics"] == b["metrics"]
        assert all(torch.equal(a["state_dict"][k], b["state_dict"][k]) for k in a["state_dict"])
    log = "logs/csv/metrics.csv"
    assert (one.folder / log).read_text() == (other.folder / log).read_text()
    assert not (other.folder / RESUME).exists()
    assert one.best == other.best


@pytest.mark.parametrize(
    ("owner", "name", "when", "minutes"),
    [
        (EnergyTask, "training_step", 1, 0.0),
        (EnergyTask, "training_step", 3, 0.0),
        (EnergyTask, "training_step", 9, 0.0),
        (EnergyTask, "training_step", 9, 1e6),
        (EnergyTask, "validation_step", 0, 0.0),
        (EnergyTask, "validation_step", 4, 0.0),
        (EnergyTask, "validation_step", 4, 1e6),
        (History, "on_train_epoch_end", 1, 0.0),
        (ResumePoint, "on_train_epoch_end", 1, 0.0),
        (ResumePoint, "on_train_epoch_end", 2, 1e6),
        (History, "finish", 0, 1e6),
    ],
)
def test_to_the_same_weights(base, undisturbed, tmp_path, monkeypatch, owner, name, when, minutes):
    config = replace(base, training=replace(base.training, save_minutes=minutes))
    with monkeypatch.context() as patch:
        break_at(patch, owner, name, when)
        with pytest.raises(Broken):
            go(config, tmp_path / "run")
    assert_same(undisturbed, go(config, tmp_path / "run"))


def test_broken_off_again_and_again(base, undisturbed, tmp_path, monkeypatch):
    for _ in range(4):
        with monkeypatch.context() as patch:
            break_at(patch, EnergyTask, "training_step", 4)
            with pytest.raises(Broken):
                go(base, tmp_path / "run")
    assert_same(undisturbed, go(base, tmp_path / "run"))


def test_broken_off_after_epochs_again_and_again(base, tmp_path, monkeypatch):
    """Breaks a few epochs apart, each after the point that an epoch's end left."""
    config = replace(base, training=replace(base.training, epochs=9, save_minutes=1e6))
    whole = go(config, tmp_path / "whole")
    for when in (2, 2, 1, 2):
        with monkeypatch.context() as patch:
            patch.setattr(
                ResumePoint, "_save_or_stop", lambda self, trainer, due: self._save(trainer)
            )
            break_at(patch, EnergyTask, "training_step", 6 * when)
            with pytest.raises(Broken):
                go(config, tmp_path / "run")
    assert_same(whole, go(config, tmp_path / "run"))


def test_it_does_go_on(base, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        break_at(patch, EnergyTask, "training_step", 15)
        with pytest.raises(Broken):
            go(base, tmp_path / "run")
    steps = []
    original = EnergyTask.training_step
    monkeypatch.setattr(
        EnergyTask, "training_step", lambda *args: steps.append(1) or original(*args)
    )
    text = told(base, tmp_path / "run")
    assert len(steps) == 18 - 14, "of 18 batches 14 were in the 7 steps that were kept"
    assert (
        f"going on with the run in {tmp_path / 'run'}, in epoch 3 of 3, after step 7 of 9" in text
    )


def told(config, output):
    console = Console(file=io.StringIO(), width=50)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="elements never trained on")
        train(replace(config, output=str(output)), console=console)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("owner", "name", "when", "place"),
    [
        (EnergyTask, "training_step", 12, "in epoch 3 of 3, after step 6 of 9"),
        (History, "finish", 0, "after the last of 9 steps"),
    ],
)
def test_where_it_goes_on_at_ends_of_epochs(base, tmp_path, monkeypatch, owner, name, when, place):
    with monkeypatch.context() as patch:
        break_at(patch, owner, name, when)
        with pytest.raises(Broken):
            go(base, tmp_path / "run")
    assert f"going on with the run in {tmp_path / 'run'}, {place}\n" in told(base, tmp_path / "run")


@pytest.mark.parametrize("when", [1, 2])
def test_early_stop(base, tmp_path, monkeypatch, when):
    settings = replace(base.training, early_stop=2, learning_rate=1e-30, epochs=9, ema_decay=None)
    config = replace(base, training=settings)
    whole = go(config, tmp_path / "whole")
    assert torch.load(whole.folder / "last.ckpt")["metrics"]["epoch"] == 3
    assert go(config, tmp_path / "whole").was_finished
    with monkeypatch.context() as patch:
        break_at(patch, History, "on_train_epoch_end", when)
        with pytest.raises(Broken):
            go(config, tmp_path / "run")
    assert_same(whole, go(config, tmp_path / "run"))


def test_stopped_early_and_broken_off_before_the_end(base, tmp_path, monkeypatch):
    settings = replace(base.training, early_stop=1, learning_rate=1e-30, epochs=9, ema_decay=None)
    config = replace(base, training=settings)
    whole = go(config, tmp_path / "whole")
    with monkeypatch.context() as patch:
        break_at(patch, History, "finish", 0)
        with pytest.raises(Broken):
            go(config, tmp_path / "run")
    assert_same(whole, go(config, tmp_path / "run"))


def test_an_interrupt_leaves_a_point_at_once(base, undisturbed, tmp_path, monkeypatch):
    config = replace(base, training=replace(base.training, save_minutes=1e6))
    original, calls = EnergyTask.training_step, []

    def step(self, *args):
        calls.append(1)
        if len(calls) == 8:
            signal_history(self)
        return original(self, *args)

    def signal_history(task):
        history = next(c for c in task.trainer.callbacks if isinstance(c, History))
        history.stop = signal.SIGINT

    with monkeypatch.context() as patch:
        patch.setattr(EnergyTask, "training_step", step)
        with pytest.raises(KeyboardInterrupt) as caught:
            go(config, tmp_path / "run")
    assert "give the same command again" in "".join(caught.value.__notes__)
    assert torch.load(tmp_path / "run" / RESUME, weights_only=True)["global_step"] == 4
    assert_same(undisturbed, go(config, tmp_path / "run"))


def test_other_settings_are_refused(base, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        break_at(patch, EnergyTask, "training_step", 9)
        with pytest.raises(Broken):
            go(base, tmp_path / "run")
    other = replace(base, training=replace(base.training, learning_rate=1e-3))
    with pytest.raises(
        ValueError, match=r"broken off.*training\.learning_rate=0\.002, here 0\.001"
    ):
        go(other, tmp_path / "run")
    workers = replace(base, training=replace(base.training, save_minutes=3.0))
    go(workers, tmp_path / "run")
    with pytest.raises(ValueError, match=r"holds a finished run with other.*\. Choose another"):
        go(other, tmp_path / "run")
    assert go(base, tmp_path / "run").was_finished


def contents(folder):
    return {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.rglob("*") if p.is_file()}


def test_a_finished_run_is_left_as_it_is(base, undisturbed, monkeypatch):
    before = contents(undisturbed.folder)
    monkeypatch.setattr("flt_mol.training.run.load_splits", None)  # nor are data looked at
    console = Console(file=io.StringIO(), width=50)
    again = train(replace(base, output=str(undisturbed.folder)), console=console)
    assert contents(undisturbed.folder) == before
    assert again == replace(undisturbed, was_finished=True)
    first, second, third = console.file.getvalue().splitlines()
    assert first == f"the run in {undisturbed.folder} is finished, and is left as it is"
    assert second.startswith(f"best epoch {undisturbed.best['epoch']}: val_id MAE ")
    assert "to train longer" in third
    assert f"--finetune {undisturbed.folder}" in third


def test_processes_agree_on_a_finished_run(base, undisturbed, monkeypatch, capsys):
    for name, value in (("LOCAL_WORLD_SIZE", 2), ("WORLD_SIZE", 2), ("RANK", 1)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    again = train(replace(base, output=str(undisturbed.folder)))
    assert again.was_finished
    assert capsys.readouterr().out == "", "the first process tells"


def test_a_run_that_another_process_finishes_meanwhile(base, undisturbed, monkeypatch):
    before = contents(undisturbed.folder)
    monkeypatch.setattr("flt_mol.training.run.finished_run", lambda *args: None)
    with pytest.raises(ValueError, match="another process has just finished"):
        go(base, undisturbed.folder)
    assert contents(undisturbed.folder) == before


def test_one_process_at_a_time(base, tmp_path):
    with (
        locked_folder(tmp_path / "run", "training"),
        pytest.raises(ValueError, match="another training into"),
    ):
        go(base, tmp_path / "run")


def test_numbered_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings, other = {"training": {"epochs": 2}}, {"training": {"epochs": 3}}

    def name(given, error=None, leave=("best.ckpt",)):
        with folders.run_folder(None, "x", given) as folder:
            for file in leave:
                (folder.path / file).touch()
            if error is not None:
                raise error
            return folder.path.name, folder.resume

    with pytest.raises(Broken):
        name(settings, Broken(), ("best.ckpt", RESUME))
    assert name(other) == ("x-2", None), "other settings are another run"
    with folders.run_folder(None, "x", settings) as held:
        assert (held.path.name, held.resume.name) == ("x", RESUME)
        assert name(settings, leave=("last.ckpt",)) == ("x-3", None), "somebody is in it"
    assert name(settings, leave=("last.ckpt",))[0] == "x"
    assert name(settings)[0] == "x-4", "a run that is done stays"


def test_random_states():
    before = random_states()
    numbers = (random.random(), np.random.rand(), torch.rand(()).item())  # noqa: NPY002
    set_random_states(before)
    assert numbers == (random.random(), np.random.rand(), torch.rand(()).item())  # noqa: NPY002
    set_random_states(before)


def test_training_leaves_random_states_alone(base, tmp_path):
    before = random_states()
    go(base, tmp_path / "run")
    after = random_states()
    assert before["python"] == after["python"]
    assert before["numpy"] == after["numpy"]
    assert torch.equal(before["torch"], after["torch"])


def test_averaged_weights_are_those_saved(base, undisturbed, tmp_path):
    plain = go(replace(base, training=replace(base.training, ema_decay=None)), tmp_path / "run")
    averaged, last = (load_model(run.folder / "last.ckpt") for run in (undisturbed, plain))
    name = "encoder.blocks.0.ffn.0.weight"
    names = dict(averaged.named_parameters())
    name = name if name in names else next(k for k, p in names.items() if p.dim() == 2)
    assert not torch.equal(names[name], dict(last.named_parameters())[name])


def test_the_average_follows_its_formula(base, tmp_path, monkeypatch):
    """θ̄ ← β θ̄ + (1 − β) θ, from the weights after the first step on."""
    seen = []
    original = History.on_train_batch_end

    def note(self, trainer, task, *args):
        if trainer.global_step > len(seen):
            seen.append([p.detach().clone().double() for p in task.model.parameters()])
        return original(self, trainer, task, *args)

    monkeypatch.setattr(History, "on_train_batch_end", note)
    result = go(base, tmp_path / "run")
    assert len(seen) == 3 * STEPS_AN_EPOCH
    average = seen[0]
    for weights in seen[1:]:
        average = [0.8 * a + 0.2 * w for a, w in zip(average, weights, strict=True)]
    saved = load_model(result.folder / "last.ckpt")
    for expected, found in zip(average, saved.parameters(), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-7)


def test_killed(tmp_path):
    config = short_run(tmp_path, 12, epochs=2, save_minutes=0.0)
    rows = list(kill_trainings(config, tmp_path, kills=2))
    assert sum(len(row.seconds) for row in rows) == 2
    assert [row.differing for row in rows] == [()] * len(rows)


@pytest.fixture
def broken_off(base, tmp_path, monkeypatch):
    """A run with a point, and its folder."""
    with monkeypatch.context() as patch:
        break_at(patch, EnergyTask, "training_step", 9)
        with pytest.raises(Broken):
            go(base, tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty"])
def test_a_damaged_point_is_refused_by_name(base, broken_off, damage):
    file = broken_off / RESUME
    content = bytearray(file.read_bytes())
    with zipfile.ZipFile(file) as archive:
        entry = max(archive.infolist(), key=lambda one: one.file_size)
    name, extra = content[entry.header_offset + 26 :][:2], content[entry.header_offset + 28 :][:2]
    start = entry.header_offset + 30 + int.from_bytes(name, "little")
    content[start + int.from_bytes(extra, "little") + entry.file_size // 2] ^= 1
    damaged = {"flipped": bytes(content), "cut": bytes(content[:5000]), "empty": b""}
    file.write_bytes(damaged[damage])
    with pytest.raises(ValueError, match=r"resume\.ckpt: .*damaged.*remove .*to begin anew"):
        go(base, broken_off)


def test_other_data_under_the_same_name_are_refused(base, broken_off):
    file = Path(base.data.paths["train"])
    before = file.read_text()
    try:
        file.write_text(re.sub(r"y_relaxed=-?\d", "y_relaxed=3", before))
        with pytest.raises(ValueError, match="the data have changed since"):
            go(base, broken_off)
    finally:
        file.write_text(before)
    go(base, broken_off)


def test_a_full_disk_is_told_as_such(base, tmp_path, monkeypatch):
    def full(*args):
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError as error:
            raise RuntimeError("enforce fail at inline_container.cc") from error

    monkeypatch.setattr("flt_mol.training.resume.torch.save", full)
    with pytest.raises(OSError, match=r"No space left.*resume\.ckpt"):
        WholeFiles().save_checkpoint({}, tmp_path / RESUME)
    assert not list(tmp_path.iterdir())
