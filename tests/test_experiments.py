"""Every experiment runs at a small size, and what it compares with is right."""

import doctest
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

EXPERIMENTS = Path(__file__).parents[1] / "experiments"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(EXPERIMENTS))


def run(*arguments):
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=EXPERIMENTS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize(
    "name", ["common.attentions", "common.results", "language.analysis", "long_range.charges"]
)
def test_examples(name):
    failed, tried = doctest.testmod(
        importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE
    )
    assert tried
    assert not failed


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        "accuracy/run.py --rows ours_positions2 schnet64 --seeds 0 --epochs 1 --limit 50",
        "forces/run.py --systems 2 --dynamics 1 --steps 3",
        "long_range/run.py --rows pairs pairs_both --seeds 0 --epochs 1",
        "speed/run.py lengths --at-most 512 --rounds 1",
        "speed/run.py one_system --at-most 4000 --rounds 1",
    ],
)
def test_small_runs(arguments, tmp_path):
    out = run(*arguments.split(), "--results", tmp_path / "results.jsonl")
    assert out.count("|") > 10
    assert (tmp_path / "results.jsonl").read_text().strip()


@pytest.mark.slow
def test_the_named_models_on_this_machine():
    small = "--runs oc20_10k_flt-small --largest 1 --steps 1 --precisions fp32"
    out = run("speed/gpu.py", *small.split())
    assert "compiled" in out
    assert "whole run" in out


@pytest.mark.slow
def test_fidelity_and_figures(tmp_path):
    small = [
        "--features",
        "16",
        "--scales",
        "1",
        "--magnitudes",
        "1",
        "--draws",
        "1",
        "--steps",
        "2",
    ]
    assert "softmax" in run("fidelity/run.py", "features", *small)
    small = ["--sigma", "4", "--counts", "16", "--draws", "1"]
    assert "lattice" in run("fidelity/run.py", "masks", *small)
    run("figures/run.py", "--folder", tmp_path, "--only", "learned_masks", "attention_matrices")
    assert len(list(tmp_path.glob("*.png"))) == 2


@pytest.mark.parametrize("folder", ["accuracy", "long_range"])
def test_tables_are_rendered_from_the_results_kept(folder):
    assert "±" in run(f"{folder}/run.py", "--render")
