"""Every experiment runs at a small size, and what it compares with is right."""

import doctest
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXPERIMENTS = Path(__file__).parents[1] / "experiments"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(EXPERIMENTS))


def run(*arguments):
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=EXPERIMENTS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("name", ["common.attentions", "common.results", "long_range.charges"])
def test_examples(name):
    failed, tried = doctest.testmod(
        importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE
    )
    assert tried
    assert not failed


def test_log_linear_attention_is_the_quadratic_sum():
    layers = importlib.import_module("common.attentions")
    generator = torch.Generator().manual_seed(0)
    n, h, m, d = 7, 2, 6, 3
    query, key = (torch.rand(n, h, m, generator=generator).double() for _ in "qk")
    value = torch.randn(n, h, d, generator=generator).double()
    mask = torch.rand(h, 2 * n - 1, generator=generator).double() + 0.1
    place = torch.arange(n)

    def reference(query, key, value, mask):
        weights = torch.einsum("ihm,jhm->hij", query, key)
        weights = weights * mask[:, place[:, None] - place + n - 1]
        return torch.einsum("hij,jhd->ihd", weights / weights.sum(-1, keepdim=True), value)

    results = []
    for function in (layers.masked_attention, reference):
        inputs = [x.clone().requires_grad_() for x in (query, key, value, mask)]
        out = function(*inputs)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow)


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
