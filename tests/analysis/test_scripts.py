"""The scripts run, with the smallest of settings, and print tables."""

import runpy
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def run(name, *arguments, monkeypatch):
    script = SCRIPTS / f"{name}.py"
    if not script.is_file():
        pytest.skip("needs the checkout")
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    runpy.run_path(str(script), run_name="__main__")


def test_bench_layer(capsys, monkeypatch):
    run(
        "bench_layer", "--tokens", "32", "64", "--frequencies", "2", "--rounds", "1",
        "--features", "8", "--parts", "attention", monkeypatch=monkeypatch,
    )  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == [
        "attention, 32, 2",
        "attention, 64, 2",
    ]


@pytest.mark.parametrize(("check", "last"), [((), "equal at"), (("--check",), "worst")])
def test_crossover(capsys, monkeypatch, check, last):
    run(
        "crossover", "--sizes", "4", "8", "--shapes", "16,8", "--embed-dim", "32",
        "--passes", "forward", "--rounds", "1", *check, monkeypatch=monkeypatch,
    )  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    assert "heads, forward, D = 16, M = 8" in lines[0]
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["4", "8", last]


def test_fidelity_table(capsys, monkeypatch, tmp_path):
    run(
        "fidelity_table", "--folder", str(tmp_path), "--head-dims", "4", "--features", "8",
        "--scales", "0.5", "--magnitudes", "1", "--draws", "1", "--steps", "2",
        monkeypatch=monkeypatch,
    )  # fmt: skip
    text = (tmp_path / "fidelity_D4.md").read_text("utf-8")
    assert text.strip() in capsys.readouterr().out
    assert "softplus, fitted, M = 8" in text


def test_frequencies_table(capsys, monkeypatch):
    run(
        "frequencies_table", "--sigma", "4", "--counts", "4", "--radius", "12", "--draws", "2",
        monkeypatch=monkeypatch,
    )  # fmt: skip
    out = capsys.readouterr().out
    assert "σ = 4 Å, distances up to 12 Å" in out
    assert "shells, cutoff 4.2, margin 4" in out


def test_docs_figures(capsys, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    run(
        "docs_figures", "--folder", str(tmp_path), "--only", "learned_masks",
        monkeypatch=monkeypatch,
    )  # fmt: skip
    assert "learned_masks.png" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["learned_masks.png"]


def test_accuracy_table(capsys, monkeypatch, tmp_path):
    results, page = tmp_path / "results.jsonl", tmp_path / "table.md"
    arguments = ("--rows", "performer", "--seeds", "0", "--epochs", "1", "--limit", "64")
    run("accuracy_table", *arguments, "--results", str(results), monkeypatch=monkeypatch)
    assert "1 of 1 models to train" in capsys.readouterr().out
    run("accuracy_table", *arguments, "--results", str(results), monkeypatch=monkeypatch)
    assert "0 of 1 models to train" in capsys.readouterr().out
    run(
        "accuracy_table", *arguments, "--results", str(results), "--times", "2",
        monkeypatch=monkeypatch,
    )  # fmt: skip
    out = capsys.readouterr().out
    assert "to train" not in out
    assert "s/epoch" in out
    assert len(results.read_text("utf-8").splitlines()) == 2
    run(
        "accuracy_table", *arguments, "--results", str(results), "--render", str(page),
        monkeypatch=monkeypatch,
    )  # fmt: skip
    assert "Performer, no positions" in page.read_text("utf-8")


def test_a_page_is_not_written_without_rows_whose_package_is_missing(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch_geometric.nn.models.dimenet", None)
    page = tmp_path / "table.md"
    page.write_text("as it was", encoding="utf-8")
    arguments = ("--results", str(tmp_path / "none.jsonl"), "--render", str(page))
    with pytest.raises(SystemExit, match=r"is left as it is: it would lose .*dimenet\+\+"):
        run("accuracy_table", *arguments, monkeypatch=monkeypatch)
    assert page.read_text("utf-8") == "as it was"


def test_long_range_table(capsys, monkeypatch, tmp_path):
    run(
        "long_range_table", "--train", "32", "--test", "4", "--epochs", "1", "--seeds", "0",
        "--results", str(tmp_path / "results.jsonl"), monkeypatch=monkeypatch,
    )  # fmt: skip
    assert "pairs only" in capsys.readouterr().out


BENCHES = {
    "lengths": (
        ("--tokens", "16", "--embed-dim", "16", "--heads", "2", "--ffn", "8", "--features", "4",
         "--parts", "block", "--passes", "forward", "--layers", "Performer (ours)",
         "--gemm-size", "8"),
        "GEMM floor / Performer (ours)",
    ),
    "training_step": (
        ("--models", "ours", "--slabs", "1", "--layers", "1", "--width", "8", "--heads", "2",
         "--blocks", "1", "--ffn", "8", "--cutoff", "3"),
        "| ours ",
    ),
    "parts": (
        ("--passes", "forward", "--slabs", "1", "--layers", "1", "--width", "8", "--heads", "2",
         "--ffn", "8", "--cutoff", "3", "--gemm-size", "8"),
        "| pair filter ",
    ),
    "one_system": (
        ("--atoms", "32", "--what", "attention", "--passes", "forward", "--width", "8"),
        "## attention, forward",
    ),
}  # fmt: skip


@pytest.mark.parametrize("bench", BENCHES)
def test_benchmarks(bench, capsys, monkeypatch, tmp_path):
    arguments, expected = BENCHES[bench]
    arguments = (*arguments, "--docs", str(tmp_path), "--rounds", "1")
    run(f"bench_{bench}", *arguments, monkeypatch=monkeypatch)
    out = capsys.readouterr().out
    assert ": done" in out
    assert expected in out
    run(f"bench_{bench}", *arguments, "--missing", monkeypatch=monkeypatch)
    out = capsys.readouterr().out
    assert ": done" not in out
    assert expected in out
    assert [path.name for path in (tmp_path / "tables").iterdir()] == [f"bench_{bench}.jsonl"]
