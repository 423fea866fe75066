"""Runs that differ in a few settings."""

import csv
import io
from dataclasses import replace

import pytest
import yaml
from rich.console import Console

from flt_mol.cli import main
from flt_mol.testing.killing_train import short_run
from flt_mol.training import sweep as module
from flt_mol.training.config import load_run_config
from flt_mol.training.run import run_settings, settings_yaml
from flt_mol.training.sweep import combinations, sweep


def test_all_combinations():
    found = combinations(
        ["training.seed=0,1", "output=a,b", "training.epochs=range(1,4)", "x=[1,2]"]
    )
    assert len(found) == 6
    assert found[1] == (
        ["training.seed=0", "output=a,b", "training.epochs=2", "x=[1,2]"],
        {"training.seed": "0", "training.epochs": "2"},
    )


@pytest.mark.parametrize("text", ["training.noise=interval(0,1)", "training.seed=0,1]"])
def test_what_cannot_be_counted_or_read(text):
    with pytest.raises(ValueError, match="several values are written"):
        combinations([text])


@pytest.fixture
def run_file(tmp_path):
    config = short_run(tmp_path, 6, epochs=1, batch_size=6)
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump({"defaults": ["run_schema", "_self_"], **run_settings(config)}))
    return str(file)


@pytest.mark.filterwarnings("ignore:elements never trained on")
def test_a_sweep(run_file, tmp_path, monkeypatch):
    overrides = ["training.learning_rate=1e-3,1e-2", f"output={tmp_path / 'out'}"]
    runs = sweep(run_file, overrides, Console(quiet=True))
    assert {run.name for run in runs} == {"learning_rate=0.001", "learning_rate=0.01"}
    maes = [run.best["val/mae"] for run in runs]
    assert maes == sorted(maes)
    with (tmp_path / "out/sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["val/mae"]) for row in rows] == maes
    assert {row["training.learning_rate"] for row in rows} == {"0.001", "0.01"}
    saved = yaml.safe_load((tmp_path / "out" / runs[0].name / "config.yaml").read_text())
    assert saved["training"]["learning_rate"] == float(runs[0].settings["training.learning_rate"])
    monkeypatch.setattr(module, "train", None)
    with pytest.raises(
        ValueError, match=r"holds a finished run with other settings: training\.epochs=1"
    ):
        sweep(run_file, [*overrides, "training.epochs=2"], Console(quiet=True))
    console = Console(file=io.StringIO(), width=200)
    assert sweep(run_file, overrides, console) == runs, "finished runs are kept"
    assert console.file.getvalue().count("finished before; best epoch 1: val_id MAE") == 2


@pytest.mark.filterwarnings("ignore:elements never trained on")
def test_the_command_says_where_all_of_it_is(run_file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", run_file, "--sweep", "training.learning_rate=1e-3,1e-2"]) == 0
    *_, first, second, written, table, best, other = capsys.readouterr().out.splitlines()
    assert (written, table) == ("written:", "  runs/tiny-sweep/sweep.csv")
    assert (tmp_path / table.strip()).is_file()
    for line, folder in ((first, best), (second, other)):
        assert folder == f"  runs/tiny-sweep/{line.split()[-1]}"
        assert (tmp_path / folder.strip() / "best.ckpt").is_file()


def test_settings_are_checked_before_the_first_run(run_file, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "train", None)
    for overrides, words in (
        (["training.epochs=2,0"], r"training\.epochs is 0"),
        (["training.epochs=2"], "several values"),
        (["training.epochs=2,2"], "give each value once"),
    ):
        with pytest.raises(ValueError, match=words):
            sweep(run_file, [*overrides, f"output={tmp_path / 'o'}"], Console(quiet=True))


def test_printed_settings_are_those_of_the_run(run_file, tmp_path):
    config = load_run_config(run_file, ["training.epochs=3", f"output={tmp_path / 'a: b'}"])
    (tmp_path / "again.yaml").write_text(settings_yaml(config))
    assert load_run_config(str(tmp_path / "again.yaml")) == config
    plain = replace(config, output=None)
    (tmp_path / "again.yaml").write_text(settings_yaml(plain))
    assert load_run_config(str(tmp_path / "again.yaml")) == plain
