"""The whole road through the command line: train, evaluate, predict, inspect."""

import csv
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from ase.build import add_adsorbate, fcc111
from ase.io import write

from flt_mol.cli import main
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
    assert str(run / "evaluation" / "results.json") in out


def test_predictions_are_the_same_in_new_processes_and_batches(run, slab_file, tmp_path):
    outs = [tmp_path / f"{i}.csv" for i in range(3)]
    for out, size in zip(outs, (64, 64, 1), strict=True):
        done = command("predict", run, slab_file, "-o", out, "--batch-size", size)
        assert "slabs.traj#0" in done.stdout
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


def test_wrong_splits_and_files_are_named(run, tmp_path, capsys):
    assert main(["evaluate", str(run), "--split", "val_odd"]) == 2
    assert "val_odd" in capsys.readouterr().err
    assert main(["predict", str(run), str(tmp_path / "missing.cif")]) == 2
    assert "missing.cif" in capsys.readouterr().err


def test_a_used_output_folder_is_not_overwritten(run, capsys):
    before = (run / "best.ckpt").read_bytes()
    assert main(["train", "emt_small", *TINY, f"output={run}"]) == 2
    assert "holds a run already" in capsys.readouterr().err
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
