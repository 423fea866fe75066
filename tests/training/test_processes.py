"""Processes that train together, on this machine's CPU."""

import csv
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest
import torch
import yaml

from flt_mol.testing.killing_train import short_run
from flt_mol.training.processes import World, followed_folder, gathered, shares, world_of
from flt_mol.training.resume import steps_done
from flt_mol.training.run import run_settings


def run(config, *overrides, launcher=()):
    """`flt-mol train` in a process of its own, which may start others."""
    command = [*(launcher or [sys.executable]), "-m", "flt_mol.cli", "train", str(config)]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK")}
    done = subprocess.run(
        [*command, *overrides], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done


def metrics(folder):
    with (folder / "logs/csv/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [{k: float(v) for k, v in row.items()} for row in rows]


def test_two_make_the_epochs_of_one(tmp_path):
    """Same global batches, of which the last has 4 systems for one process and 2 for the other.

    No dropout: each process draws its own. Sums over two halves round otherwise: 1e-5 relative.
    """
    config = short_run(tmp_path, 22, epochs=2, rotation="none", shift_images=False)
    config.model.dropout, config.model.pairs.vector_dropout = 0.0, 0.0
    config.model.outputs = ["energy"]
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({"defaults": ["run_schema", "_self_"], **run_settings(config)}))
    run(file, f"output={tmp_path / 'one'}", "training.batch_size=8")
    both = run(file, f"output={tmp_path / 'two'}", "training.batch_size=4", "training.devices=2")
    assert both.stdout.count("best epoch") == 1
    one, two = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    assert len(one) == 2
    for a, b in zip(one, two, strict=True):
        assert b == pytest.approx(a, rel=1e-5)
    weights = [
        torch.load(tmp_path / name / "last.ckpt", weights_only=True)["state_dict"]
        for name in ("one", "two")
    ]
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-3, atol=1e-5)


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_a_signal_stops_all_after_the_same_step(tmp_path):
    """Whether the first process alone gets it, or all at once, as from a terminal or SLURM."""
    config = short_run(tmp_path, 22, epochs=100_000)
    file, folder = tmp_path / "config.yaml", tmp_path / "run"
    file.write_text(yaml.safe_dump({"defaults": ["run_schema", "_self_"], **run_settings(config)}))

    def until(there, send, number):
        command = [sys.executable, "-m", "flt_mol.cli", "train", str(file), "training.devices=2"]
        with subprocess.Popen(
            [*command, f"output={folder}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        ) as process:
            try:
                end = time.monotonic() + 120
                while not there() and time.monotonic() < end:
                    time.sleep(0.05)
                send(process.pid, number)
                out, err = process.communicate(timeout=60)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == {signal.SIGTERM: 143, signal.SIGINT: 130}[number], err
        assert "Traceback" not in err
        assert err.count("flt-mol: the best weights so far") == 1, err
        return out

    until((folder / "best.ckpt").exists, os.kill, signal.SIGTERM)
    for number in (signal.SIGTERM, signal.SIGINT):
        before = steps_done(folder / "resume.ckpt")
        out = until(lambda: steps_done(folder / "resume.ckpt") > before, os.killpg, number)  # noqa: B023
        assert f"going on with the run in {folder}" in out


def test_the_world_of_a_run(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert world_of(1, 1) == World(1, 1, 0)
    assert world_of(2, 1) == World(2, 1, 1)
    with pytest.raises(ValueError, match="torchrun"):
        world_of(2, 2)
    for name, value in (("LOCAL_WORLD_SIZE", 2), ("WORLD_SIZE", 6), ("RANK", 3)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    assert world_of(1, 1) == world_of(2, 3) == World(2, 3, 3)
    assert world_of(2, 1).size == 6
    with pytest.raises(ValueError, match=r"training\.devices is 4, and torchrun started 2"):
        world_of(4, 3)


def test_seeds():
    seeds = [World(4, 1, rank).seed(7) for rank in range(4)]
    assert seeds[0] == 7
    assert len({*seeds, World(4, 1, 1).seed(8)}) == 5


def test_the_folder_of_those_who_follow(monkeypatch):
    monkeypatch.delenv("FLT_MOL_RUN_FOLDER", raising=False)
    with pytest.raises(ValueError, match="output=FOLDER"):
        followed_folder(None)
    assert str(followed_folder("x")) == "x"
    monkeypatch.setenv("FLT_MOL_RUN_FOLDER", "/y")
    assert str(followed_folder("x")) == "/y"


def test_alone():
    assert gathered(3) == [3]
    assert shares(torch.tensor([5, 0])).tolist() == [1.0, 1.0]
