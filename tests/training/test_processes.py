"""Processes that train together, on this machine's CPU."""

import csv
import os
import subprocess
import sys

import pytest
import torch
import yaml

from flt_mol.testing.killing_train import short_run
from flt_mol.training.processes import World, followed_folder, gathered, shares, world_of
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
