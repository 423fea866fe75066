"""What the README shows does what it says."""

import re
from pathlib import Path

import pytest

from flt_mol.training.config import load_run_config

README = Path(__file__).resolve().parents[2] / "README.md"


def blocks(language):
    if not README.is_file():
        pytest.skip("needs the checkout")
    return re.findall(rf"```{language}\n(.*?)```", README.read_text("utf-8"), flags=re.DOTALL)


def test_the_example_of_the_block_runs_and_prints_what_it_says(capsys):
    example, _ = blocks("python")
    exec(compile(example, "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out.strip() == example.rstrip().rpartition("# ")[2]


def test_the_example_of_a_prediction_runs(capsys):
    _, example = blocks("python")
    exec(compile(example, "README.md", "exec"), {"__name__": "readme"})
    energy = float(capsys.readouterr().out.strip("[]\n "))
    assert -2.5 < energy < 0.5  # the range of energies trained on


def test_the_example_of_a_run_is_a_valid_configuration(tmp_path):
    (example,) = blocks("yaml")
    (tmp_path / "mine.yaml").write_text(example, encoding="utf-8")
    config = load_run_config(str(tmp_path / "mine.yaml"))
    assert config.data.paths["train"] == str(tmp_path / "train.lmdb")
    assert config.training.epochs == 100
