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


@pytest.mark.parametrize(
    "name", ["common.attentions", "common.results", "language.analysis", "long_range.charges"]
)
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


@pytest.mark.parametrize(
    "name", ["FLT, Gaussian RPE", "log-linear Performer", "softmax, dense bias"]
)
def test_sequences_of_a_batch_do_not_see_each_other(name):
    layers = importlib.import_module("speed.layers")
    layer = layers.LAYERS[name](layers.Size(6, 8, 2, 4, 3, 8)).eval()
    x, positions = torch.randn(18, 8), torch.randn(18, 3)
    alone = [layer(*part) for part in zip(x.split(6), positions.split(6), strict=True)]
    torch.testing.assert_close(layer(x, positions), torch.cat(alone))


def test_loss_curves_of_three_runs_are_their_logs(tmp_path):
    logs = {"P": [0.5, 0.4], "FLT": [0.4, 0.3, 0.2], "x": [0.3]}
    for name, errors in logs.items():
        (tmp_path / name / "logs/csv").mkdir(parents=True)
        rows = [f"{n},{10 * n + 9},,{error},{2 * error}" for n, error in enumerate(errors)]
        text = "\n".join(["epoch,step,train/loss,val/mae,train/mae", *rows])
        (tmp_path / name / "logs/csv/metrics.csv").write_text(text)
    figure = importlib.import_module("common.figures").curves({n: tmp_path / n for n in logs})
    axis = figure.axes[0]
    assert axis.get_legend_handles_labels()[1] == list(logs)
    for training, validation, errors in zip(
        axis.lines[::2], axis.lines[1::2], logs.values(), strict=True
    ):
        assert list(validation.get_xdata()) == [10, 20, 30][: len(errors)]
        assert list(validation.get_ydata()) == errors
        assert list(training.get_ydata()) == [2 * error for error in errors]
    run("figures/curves.py", f"P={tmp_path}/P", f"{tmp_path}/FLT", "--out", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 5000


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        "oc20/run.py --smoke --folder {folder}",
        "speed/figure2.py --smoke --figure {folder}/figure2.png",
        "accuracy/run.py --rows ours_positions2 schnet64 --seeds 0 --epochs 1 --limit 50",
        "images/run.py --smoke --seeds 0",
        "forces/run.py --systems 2 --dynamics 1 --steps 3",
        "long_range/run.py --rows pairs pairs_both --seeds 0 --epochs 1",
        "speed/run.py lengths --at-most 512 --rounds 1",
        "speed/run.py one_system --at-most 4000 --rounds 1",
    ],
)
def test_small_runs(arguments, tmp_path):
    given = arguments.format(folder=tmp_path).split()
    out = run(*given, "--results", tmp_path / "results.jsonl")
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


@pytest.mark.parametrize("folder", ["accuracy", "images", "long_range", "oc20"])
def test_tables_are_rendered_from_the_results_kept(folder):
    assert "±" in run(f"{folder}/run.py", "--render")
