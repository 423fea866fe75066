"""The whole road through the command line: train, evaluate, predict, inspect."""

import argparse
import csv
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from ase.build import add_adsorbate, fcc111
from ase.io import read, write

from flt_mol.cli import build_parser, main
from flt_mol.files import shipped_folder
from flt_mol.training.checkpoints import load_model

TINY = [
    "data.train=val_id",
    "data.validation=val_ood_both",
    "model.embed_dim=16",
    "model.num_layers=1",
    "model.num_features=16",
    "training.epochs=3",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a short training on a validation split."""
    folder = tmp_path_factory.mktemp("train") / "run"
    state = torch.get_rng_state()
    assert main(["train", "emt_small", *TINY, f"output={folder}"]) == 0
    assert torch.equal(state, torch.get_rng_state()), "training moved the global random state"
    return folder


@pytest.fixture
def slab_file(tmp_path):
    frames = []
    for metal in ("Cu", "Pt"):
        slab = fcc111(metal, (2, 2, 3), vacuum=7.0)
        tags = [1 if tag == 1 else 0 for tag in slab.get_tags()]
        add_adsorbate(slab, "O", 1.5, "fcc")
        slab.set_tags([*tags, 2])
        slab.pbc = True
        frames.append(slab)
    write(tmp_path / "slabs.traj", frames)
    return tmp_path / "slabs.traj"


def command(*arguments, check=True):
    """In a new process."""
    done = subprocess.run(
        [sys.executable, "-m", "flt_mol.cli", *map(str, arguments)], capture_output=True, text=True
    )
    assert not check or done.returncode == 0, done.stderr
    return done


def read_csv(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_training_writes_what_it_promises(run):
    plots = ("learning_curve.png", "parity.png")
    for name in ("best.ckpt", "last.ckpt", "config.yaml", "logs/csv/metrics.csv", *plots):
        assert (run / name).stat().st_size > 0, name
    assert list(run.glob("logs/tensorboard/events*"))
    mae = [
        float(row["val/mae"]) for row in read_csv(run / "logs/csv/metrics.csv") if row["val/mae"]
    ]
    assert len(mae) == 3
    assert mae[-1] < mae[0]
    content = torch.load(run / "best.ckpt", weights_only=True)
    assert content["metrics"]["val/mae"] == pytest.approx(min(mae), rel=1e-6)
    assert content["config"]["data"]["train"] == "val_id"
    assert {1, 6, 8, 13, 28, 29} <= set(content["elements_seen"])


def test_evaluate_repeats_the_validation_of_training(run, capsys):
    arguments = ["evaluate", str(run), "--split", "val_ood_both", "--split", "val_id", "--json"]
    assert main(arguments) == 0
    results = json.loads(capsys.readouterr().out)
    best = torch.load(run / "best.ckpt", weights_only=True)["metrics"]
    split = results["splits"]["val_ood_both"]
    assert split["mae"] == pytest.approx(best["val/mae"], rel=1e-5)
    assert split["ewt"] == pytest.approx(best["val/ewt"], abs=1e-6)
    rows = read_csv(run / "evaluation" / "predictions.csv")
    errors = [abs(float(r["energy"]) - float(r["target"])) for r in rows if r["split"] == "val_id"]
    assert results["splits"]["val_id"]["count"] == len(errors)
    assert results["splits"]["val_id"]["mae"] == pytest.approx(sum(errors) / len(errors))
    assert results["baselines"]["composition"]["val_id"] > 0
    assert (run / "evaluation" / "parity.png").stat().st_size > 0


def test_evaluate_prints_all_four_splits_and_names_its_files(run, capsys):
    assert main(["evaluate", str(run / "best.ckpt")]) == 0
    out = capsys.readouterr().out
    for split in ("val_id", "val_ood_ads", "val_ood_cat", "val_ood_both"):
        assert split in out
    assert re.search(rf"{run}/evaluation(-2)?/results\.json", out)


def test_predictions_are_the_same_in_new_processes_and_batches(run, slab_file, tmp_path):
    outs = [tmp_path / f"{i}.csv" for i in range(3)]
    for out, size in zip(outs, (64, 64, 1), strict=True):
        done = command("predict", run, slab_file, "-o", out, "--batch-size", size)
        assert done.stdout.startswith("2 structures: ")
        assert str(out) in done.stdout
    assert outs[0].read_bytes() == outs[1].read_bytes()
    for together, alone in zip(read_csv(outs[0]), read_csv(outs[2]), strict=True):
        assert together["sid"] == alone["sid"]
        assert float(together["energy"]) == pytest.approx(float(alone["energy"]), abs=1e-5)


def test_prediction_through_the_file_is_the_models(run, slab_file, tmp_path):
    from flt_mol.data import collate, open_dataset

    out = tmp_path / "out.json"
    assert main(["predict", str(run), str(slab_file), "-o", str(out)]) == 0
    data = open_dataset(slab_file)
    with torch.inference_mode():
        energy = load_model(run)(collate([data[0], data[1]]))["energy"]
    assert [row["energy"] for row in json.loads(out.read_text())] == pytest.approx(energy.tolist())


def test_inspect_a_data_set(capsys):
    assert main(["data", "inspect", "emt_adsorption", "--split", "train", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["count"] >= 2000
    assert main(["data", "inspect", "emt_adsorption", "--split", "val_id"]) == 0
    assert "Pt" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["evaluate", "missing.ckpt"], "no checkpoint at 'missing.ckpt'"),
        (["data", "inspect", "missing.lmdb"], "no file or folder 'missing.lmdb'"),
        (["data", "inspect", "emt_adsorption"], "choose one with --split"),
        (["train", "emt_small", "training.epoch=1"], "did you mean 'training.epochs'"),
        (["train", "nonsense"], "no run called 'nonsense'"),
    ],
)
def test_errors_are_one_line_for_people(arguments, message, capsys):
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.startswith("flt-mol: error: ")
    assert "Traceback" not in err


TINIEST = ["model.embed_dim=8", "model.num_layers=1", "model.num_features=8"]


@pytest.fixture
def own_data(slab_file, tmp_path):
    """Overrides for a small training on a file of one's own."""
    frames = read(slab_file, ":")
    for i, frame in enumerate(frames):
        frame.info = {"y_relaxed": float(i)}
    write(tmp_path / "it's, a=b.extxyz", frames)
    file = tmp_path / "it's, a=b.extxyz"
    return [f"data.paths.train={file}", f"data.paths.val_id={file}", *TINIEST]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["predict", "x", "y", "--device", "foo"], "no device is called 'foo'"),
        (["evaluate", "RUN", "--device", "xpu:3"], "finds no xpu device here"),
        (["predict", "x", "y", "-o", "p.txt"], "cannot write p.txt: use a name ending in .csv"),
        (["predict", "x", "y", "-o", "RUN"], "use a name ending in"),
        (["predict", "x", "y", "-o", "RUN/best.ckpt/p.csv"], "best.ckpt is a file; give another"),
        (["evaluate", "RUN", "--output", "RUN/best.ckpt"], "best.ckpt is a file; give another"),
        (["train", "emt_small", "output=RUN/best.ckpt"], "is a file; give another"),
        (["train", "emt_small", "output="], "output is empty"),
        (["train", "emt_small", "training.max_steps=-1"], "training.max_steps is -1"),
        (["data", "emt", "RUN/best.ckpt"], "best.ckpt is a file"),
    ],
)
def test_what_cannot_work_is_refused_before_the_work(arguments, message, run, capsys):
    assert main([a.replace("RUN", str(run)) for a in arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("flt-mol: error: ")
    assert message in err


def test_outputs_without_permission_are_refused_before_the_work(run, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "access", lambda *args, **more: False)
    assert main(["predict", "never looked for", "x", "-o", str(tmp_path / "p.csv")]) == 2
    assert "no permission in" in capsys.readouterr().err
    assert main(["evaluate", str(run)]) == 2
    assert "give another with --output" in capsys.readouterr().err


def test_batch_sizes_are_at_least_one(capsys):
    with pytest.raises(SystemExit):
        main(["predict", "x", "y", "--batch-size", "0"])
    assert "'0' is not a whole number from 1 on" in capsys.readouterr().err


def test_a_missing_extra_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "hydra", None)
    monkeypatch.delitem(sys.modules, "flt_mol.training.config", raising=False)
    monkeypatch.delitem(sys.modules, "flt_mol.training.overrides", raising=False)
    assert main(["train", "emt_small"]) == 2
    assert "pip install '.[train]'" in capsys.readouterr().err


def test_real_bugs_keep_their_traceback(monkeypatch):
    def broken(*args, **more):
        raise TypeError("a bug")

    monkeypatch.setattr("flt_mol.data.inspect.summarise", broken)
    with pytest.raises(TypeError, match="a bug"):
        main(["data", "inspect", "emt_adsorption", "--split", "val_id"])


@pytest.mark.parametrize(
    ("number", "status", "word"),
    [(signal.SIGTERM, 143, "terminated"), (signal.SIGINT, 130, "interrupted")],
)
def test_a_stopped_training_says_so_and_names_its_weights(number, status, word, own_data, tmp_path):
    folder = tmp_path / "run"
    more = ["training.epochs=1000000", f"output={folder}"]
    with subprocess.Popen(
        [sys.executable, "-m", "flt_mol.cli", "train", "emt_small", *own_data, *more],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # A suite in the background of a shell inherits an ignored Ctrl-C, which Python respects.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        try:
            end = time.monotonic() + 120
            while not (folder / "best.ckpt").exists() and time.monotonic() < end:
                time.sleep(0.05)
            process.send_signal(number)
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == status, err
    assert f"flt-mol: {word}" in err
    assert str(folder / "best.ckpt") in err
    assert "Traceback" not in err


def test_a_reader_that_leaves_early_loses_no_file(run, tmp_path):
    out = tmp_path / "p.csv"
    inside, outside = os.pipe()
    os.close(inside)
    arguments = ["predict", str(run), "datasets/emt_adsorption/val_id.lmdb", "-o", str(out)]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "flt_mol.cli", *arguments],
            stdout=outside,
            stderr=subprocess.PIPE,
            text=True,
            cwd=shipped_folder("datasets").parent,
        )
    finally:
        os.close(outside)
    assert (done.returncode, done.stderr) == (141, "")
    assert len(read_csv(out)) > 100


def test_results_are_shown_when_writing_fails(run, slab_file, tmp_path, capsys, monkeypatch):
    def full(self, target):
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(type(tmp_path), "replace", full)
    assert main(["predict", str(run), str(slab_file), "-o", str(tmp_path / "p.csv")]) == 2
    captured = capsys.readouterr()
    assert "slabs.traj#1" in captured.out
    assert f"No space left on device: '{tmp_path / 'p.csv'}'" in captured.err
    assert main(["evaluate", str(run), "--split", "val_id", "--output", str(tmp_path / "e")]) == 2
    captured = capsys.readouterr()
    assert "val_id" in captured.out
    assert f"No space left on device: '{tmp_path / 'e'}'" in captured.err


def test_odd_file_names_are_shown_with_escapes(run, slab_file, tmp_path):
    odd = os.fsencode(tmp_path) + b"/caf\xe9 \x1b[31m.traj"
    shutil.copyfile(slab_file, odd)
    done = command("predict", run, os.fsdecode(odd))
    assert "caf\\udce9 \\x1b[31m.traj#0" in done.stdout
    command("predict", run, os.fsdecode(odd), "-o", tmp_path / "p.csv")
    assert read_csv(tmp_path / "p.csv")[0]["sid"].startswith("caf\\udce9 ")


def test_skip_bad(run, tmp_path, slab_file, capsys):
    frames = read(slab_file, ":")
    for frame, energy in zip(frames, (1.0, math.nan), strict=True):
        frame.info = {"y_relaxed": energy}
    frames.append(frames[0].copy())
    frames[2].positions[0] = math.nan
    file = tmp_path / "some.traj"
    write(file, frames)
    assert main(["predict", str(run), str(file), "-o", str(tmp_path / "p.csv")]) == 2
    capsys.readouterr()
    predict = ["predict", str(run), str(file), "--skip-bad", "-o", str(tmp_path / "p.csv")]
    assert main(predict) == 0
    assert "left out 1 of 3 records" in capsys.readouterr().err
    assert len(read_csv(tmp_path / "p.csv")) == 2
    evaluate = ["evaluate", str(run), "--data", str(file), "--output", str(tmp_path / "e")]
    assert main(evaluate) == 2
    assert main([*evaluate, "--skip-bad", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["splits"]["some"]["count"] == 1
    assert "left out 2 of 3 records" in captured.err
    assert "some.traj#1" in captured.err


def test_wrong_splits_and_files_are_named(run, tmp_path, capsys):
    assert main(["evaluate", str(run), "--split", "val_odd"]) == 2
    assert "val_odd" in capsys.readouterr().err
    assert main(["predict", str(run), str(tmp_path / "missing.cif")]) == 2
    assert "missing.cif" in capsys.readouterr().err


def test_a_used_output_folder_is_not_overwritten(run, capsys):
    before = (run / "best.ckpt").read_bytes()
    assert main(["train", "emt_small", *TINY, f"output={run}"]) == 0
    out = capsys.readouterr().out
    assert f"the run in {run} is finished, and is left as it is" in out
    assert "written:" not in out
    assert out.count("best epoch") == 1
    assert main(["train", "emt_small", *TINY, "training.epochs=4", f"output={run}"]) == 2
    assert "holds a finished run with other settings: training.epochs=3" in capsys.readouterr().err
    assert (run / "best.ckpt").read_bytes() == before


def test_genuine_oc20_file_moved_and_read_only(run, oc20_data, tmp_path, capsys):
    place = tmp_path / "elsewhere" / "data.lmdb"
    place.parent.mkdir()
    shutil.copyfile(oc20_data / "is2re_val_20" / "data.lmdb", place)
    place.chmod(0o444)
    place.parent.chmod(0o555)
    try:
        assert main(["data", "inspect", str(place), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["count"] == 20
        assert main(["evaluate", str(run), "--data", str(place), "--json"]) == 0
        captured = capsys.readouterr()
        assert json.loads(captured.out)["splits"]["elsewhere"]["count"] == 20
        assert "never trained on" in captured.err
        for symbol in ("Mn", "Cr", "Ta", "Zr"):
            assert symbol in captured.err
        assert main(["predict", str(run), str(place), "-o", str(tmp_path / "p.csv")]) == 0
        assert len(read_csv(tmp_path / "p.csv")) == 20
        assert os.listdir(place.parent) == ["data.lmdb"]
    finally:
        place.parent.chmod(0o755)


def help_of(arguments, capsys):
    with pytest.raises(SystemExit):
        main([*arguments, "--help"])
    return " ".join(capsys.readouterr().out.split())


def test_every_option_and_argument_says_what_it_is():
    lacking = []

    def look(parser, name):
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for command, sub in action.choices.items():
                    look(sub, f"{name} {command}")
            elif not action.help:
                lacking.append(f"{name} {action.option_strings or action.dest}")

    look(build_parser(), "flt-mol")
    assert lacking == []


def test_train_asks_for_a_run_only_and_lists_them(capsys):
    text = help_of(["train"], capsys)
    assert "emt_flt-small" in text
    assert "--print-config" in text
    with pytest.raises(SystemExit):
        main(["train"])
    assert capsys.readouterr().err.strip().endswith("arguments are required: config")


def test_a_misspelt_run_is_met_with_the_nearest(capsys):
    assert main(["train", "emt_flt_small"]) == 2
    assert "(did you mean emt_flt-small?)" in capsys.readouterr().err
    assert main(["train", "nonsense"]) == 2
    assert "there are: emt_flt-base, " in capsys.readouterr().err


def test_a_runs_settings_train_it_anew_under_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "emt_small", *TINY, "training.max_steps=1", "output=runs/first"]) == 0
    assert main(["train", "runs/first/config.yaml"]) == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["first", "first-2"]
