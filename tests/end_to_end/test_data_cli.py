"""`flt-mol data …` through the command line: convert, split, verify, download, inspect."""

import json

import numpy as np
import pytest
from ase.build import add_adsorbate, fcc111
from ase.calculators.emt import EMT
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import write

from flt_mol.cli import main
from flt_mol.data import open_dataset
from flt_mol.files import shipped_folder as folder

VAL = folder("datasets") / "emt_adsorption" / "val_id.lmdb"


def run(*arguments, status=0):
    assert main(["data", *map(str, arguments)]) == status


def test_convert_says_what_it_did_and_keeps_the_systems(tmp_path, capsys):
    for name in ("a.lmdb", "b.aselmdb", "c.extxyz"):
        run("convert", VAL, tmp_path / name, "--workers", "1")
        said = capsys.readouterr().out
        assert said.startswith("411 systems in ")
        assert name in said
        there = open_dataset(tmp_path / name)
        assert [there[i].sid for i in (0, 410)] == [open_dataset(VAL)[i].sid for i in (0, 410)]
    run("convert", VAL, tmp_path / "a.lmdb", status=2)
    assert "a.lmdb exists already" in capsys.readouterr().err
    run("convert", VAL, tmp_path / "a.lmdb", "--overwrite", "--workers", "1")
    run("convert", VAL, tmp_path / "shards", "--to", "lmdb", "--shard-size", "300")
    assert len(list((tmp_path / "shards").iterdir())) == 2


def test_convert_a_split_of_a_recipe(tmp_path):
    run("convert", "emt-adsorption", "--split", "val_id", tmp_path / "x.lmdb", "--workers", "1")
    assert len(open_dataset(tmp_path / "x.lmdb")) == 411


def test_skipped_records_are_counted_and_named(tmp_path, capsys):
    slab = fcc111("Cu", (1, 1, 2), vacuum=6.0)
    frames = [slab.copy() for _ in range(3)]
    for i, frame in enumerate(frames):
        frame.info = {"sid": i, "E": float("nan") if i == 1 else -1.0}
    write(tmp_path / "x.traj", frames)
    arguments = (tmp_path / "x.traj", tmp_path / "x.lmdb", "--energy", "E", "--workers", "1")
    run("convert", *arguments, status=2)
    assert "sid 1: E is nan" in capsys.readouterr().err
    run("convert", *arguments, "--skip-bad")
    said = capsys.readouterr().out
    assert "2 systems in" in said
    assert "bad records left out: 1" in said
    assert "sid 1: E is nan" in said
    assert open_dataset(tmp_path / "x.lmdb")[1].energy.tolist() == [-1.0]


@pytest.fixture
def trajectories(tmp_path):
    inside = tmp_path / "runs"
    inside.mkdir()
    for name, height in (("one", 1.4), ("two", 1.1)):
        frames = []
        for step in range(3):
            slab = fcc111("Cu", (1, 1, 2), vacuum=6.0)
            add_adsorbate(slab, "O", height - 0.1 * step, "fcc")
            slab.set_tags([0, 1, 2])
            slab.calc = EMT()
            energy = slab.get_potential_energy()
            slab.calc = SinglePointCalculator(slab, energy=energy, forces=np.zeros((3, 3)))
            frames.append(slab)
        write(inside / f"{name}.traj", frames)
    return inside


def test_trajectories_become_records(trajectories, tmp_path, capsys):
    table = tmp_path / "references.csv"
    table.write_text("sid,energy\none,1.5\ntwo,2.5\n")
    run("convert", trajectories, tmp_path / "r.lmdb", "--references", table, "--workers", "1")
    one, two = open_dataset(tmp_path / "r.lmdb", require_energy=True)
    run("convert", trajectories, tmp_path / "n.lmdb", "--references", "none", "--workers", "1")
    free, _ = open_dataset(tmp_path / "n.lmdb")
    assert one.sid + two.sid == ("one", "two")
    assert float(one.energy) == float(free.energy) - 1.5
    assert abs(float(one.positions_relaxed[2, 2] - one.positions[2, 2]) + 0.2) < 1e-5
    table.write_text("sid,energy\none,1.5\n")
    capsys.readouterr()
    run("convert", trajectories, tmp_path / "x.lmdb", "--references", table, status=2)
    assert "two" in capsys.readouterr().err


def test_split_makes_a_data_set_that_verify_and_inspect_take(tmp_path, capsys):
    run("split", VAL, tmp_path / "mine", "--group-by", "slab", "--workers", "1")
    run("verify", tmp_path / "mine")
    assert capsys.readouterr().out.count("  ok\n") == 3
    run("inspect", tmp_path / "mine", "--split", "train", "--json", "--limit", "10")
    summary = json.loads(capsys.readouterr().out)
    assert summary["looked_at"] == 10
    assert summary["count"] > 300
    file = tmp_path / "mine" / "test.lmdb"
    file.write_bytes(file.read_bytes()[:-4096])
    run("verify", tmp_path / "mine", "--json", status=2)
    rows = json.loads(capsys.readouterr().out)
    assert [row["status"] for row in rows] == ["ok", "ok", "wrong size"]


def test_a_run_on_own_data_is_evaluated_on_the_splits_that_there_are(tmp_path, capsys):
    run("split", VAL, tmp_path / "mine", "--shares", "train=100", "val_id=50", "test=rest")
    tiny = ["model.embed_dim=16", "model.num_layers=1", "training.epochs=1"]
    arguments = ["emt_small", f"data.name={tmp_path / 'mine'}", *tiny, f"output={tmp_path / 'r'}"]
    assert main(["train", *arguments]) == 0
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "r"), "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert list(results["splits"]) == ["val_id"]
    assert main(["evaluate", str(tmp_path / "r"), "--split", "val_ood_ads"]) == 2
    assert "no split 'val_ood_ads'" in capsys.readouterr().err


def test_inspect_lists_all_bad_records(tmp_path, capsys):
    slab = fcc111("Cu", (1, 1, 2), vacuum=6.0)
    frames = [slab.copy() for _ in range(4)]
    for frame, number in zip(frames, (1, 7, 1, 9), strict=True):
        frame.set_tags([0, number])
    write(tmp_path / "x.traj", frames)
    run("inspect", tmp_path / "x.traj")
    said = capsys.readouterr().out
    assert "tags holds 7" in said
    assert "tags holds 9" in said


def test_oc20_that_is_not_here_says_how_to_get_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FLT_MOL_DATA", str(tmp_path))
    run("inspect", "oc20-is2re", "--split", "val_id", status=2)
    assert "flt-mol data download oc20-is2re --split val_id" in capsys.readouterr().err
    run("download", "oc20-is2re", "--split", "val_idd", status=2)
    assert "did you mean val_id?" in capsys.readouterr().err
    run("download", "emt_adsorption", status=2)
    assert "emt_adsorption" in capsys.readouterr().err


@pytest.mark.parametrize("share", ["train", "train=", "=1", "train=a", "train=-1"])
def test_shares_that_are_none(share, capsys):
    with pytest.raises(SystemExit):
        main(["data", "split", "x", "y", "--shares", share])
    assert "is no NAME=SHARE" in capsys.readouterr().err


@pytest.fixture
def frames(tmp_path):
    """Four systems with an energy E, and the file they are in."""
    slab = fcc111("Cu", (1, 1, 2), vacuum=6.0)
    slab.set_tags([0, 1])
    frames = [slab.copy() for _ in range(4)]
    for i, frame in enumerate(frames):
        frame.info = {"sid": i, "E": -float(i)}
    write(tmp_path / "x.traj", frames)
    return tmp_path / "x.traj"


def test_a_split_is_given_one_share(frames, tmp_path, capsys):
    run("split", frames, tmp_path / "out", "--shares", "train=0.2", "train=rest", status=2)
    assert "--shares names train more than once" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_records_without_targets_are_told_of(frames, tmp_path, capsys):
    for arguments in (
        ("convert", frames, tmp_path / "a.lmdb"),
        ("split", frames, tmp_path / "a", "--shares", "train=2", "val=2"),
    ):
        run(*arguments)
        said = capsys.readouterr().err
        assert said.count("no targets (no record holds y_relaxed)") == 1
        assert "E: name it with" in said
    run("convert", frames, tmp_path / "b.lmdb", "--energy", "E")
    assert "no targets" not in capsys.readouterr().err


def test_inspect_of_nothing_but_bad_records_fails(frames, tmp_path, capsys):
    run("inspect", frames, "--energy", "F", status=2)
    assert "F was asked for" in capsys.readouterr().err
    run("convert", frames, tmp_path / "x.lmdb", "--energy", "E")
    capsys.readouterr()
    run("inspect", tmp_path / "x.lmdb", "--energy", "F", "--json", status=2)
    said = capsys.readouterr()
    assert json.loads(said.out)["counts"]["problems"] == 4
    assert "each of the 4 records looked at is bad; the first: " in said.err
    assert "F was asked for" in said.err
    run("inspect", tmp_path / "x.lmdb")


def test_forces_that_a_file_cannot_hold(frames, tmp_path, capsys):
    run("convert", frames, tmp_path / "o.extxyz", "--forces", "--energy", "E", status=2)
    said = capsys.readouterr().err
    assert "forces=False" in said
    assert "--forces" in said


@pytest.mark.parametrize("option", ["--energy", "--split", "--energy-initial"])
def test_options_that_references_would_ignore(option, trajectories, tmp_path, capsys):
    arguments = (trajectories, tmp_path / "o.lmdb", "--references", "none", option, "x")
    run("convert", *arguments, status=2)
    assert f"{option} does not go with --references" in capsys.readouterr().err


def test_closed_streams(frames, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout", None)
    run("inspect", frames, "--energy", "E", status=2)
    assert "standard output is closed" in capsys.readouterr().err
    monkeypatch.setattr("sys.stderr", None)
    run("inspect", frames, "--energy", "E", status=2)


def test_verify_says_what_is_done_and_once_how_to_get_what_is_missing(
    tmp_path, capsys, monkeypatch
):
    run("verify", "emt-adsorption", "--split", "val_id")
    assert capsys.readouterr().err == "verify val_id\n"
    monkeypatch.setenv("FLT_MOL_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    run("verify", "oc20-is2re", status=2)
    said = capsys.readouterr()
    assert said.out.count("  missing: ") == len(said.out.splitlines()) > 3
    assert "flt-mol data download" not in said.out
    assert said.err.count("flt-mol data download oc20-is2re") == 1
