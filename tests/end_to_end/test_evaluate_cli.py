"""`flt-mol evaluate` and `flt-mol submission`, with the shipped model and data set."""

import csv
import json
import statistics

import numpy as np
import pytest

from flt_mol.cli import main
from flt_mol.data import open_dataset
from flt_mol.files import shipped_folder
from flt_mol.training.checkpoints import load_model, save_checkpoint

SPLITS = ("id", "ood_ads", "ood_cat", "ood_both")


@pytest.fixture(scope="module")
def shipped():
    return shipped_folder("datasets") / "emt_adsorption"


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluate") / "out"
    assert main(["evaluate", "emt_small", "--split", "val_id", "--output", str(folder)]) == 0
    return folder


def read_csv(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_everything_is_written_and_agrees(evaluated):
    content = json.loads((evaluated / "results.json").read_text())
    rows = read_csv(evaluated / "predictions.csv")
    split = content["splits"]["val_id"]
    errors = [abs(float(row["energy"]) - float(row["target"])) for row in rows]
    assert split["count"] == len(rows) == 411
    assert split["mae"] == pytest.approx(sum(errors) / 411)
    assert split["median_ae"] == pytest.approx(np.median(errors))
    low, high = split["intervals"]["mae"]
    assert 0.09 < low < split["mae"] < high < 0.13
    assert {row["facet"] for row in rows} == {"111", "100", "110"}
    for kind in ("adsorbate", "size", "facet"):
        assert sum(group["count"] for group in split["breakdowns"][kind]) == 411
    of_co = [e for e, row in zip(errors, rows, strict=True) if row["adsorbate"] == "CO"]
    group = next(g for g in split["breakdowns"]["adsorbate"] if g["group"] == "CO")
    assert (group["count"], group["mae"]) == (len(of_co), pytest.approx(np.mean(of_co)))
    assert max(errors) == pytest.approx(abs(content["worst"][0]["error"]))
    report = (evaluated / "report.html").read_text(encoding="utf-8")
    assert f'value="{split["mae"]!r}"' in report
    assert report.count("<img") == 20


def test_its_predictions_alone_give_the_same(evaluated, tmp_path, capsys):
    predictions = str(evaluated / "predictions.csv")
    assert main(["evaluate", "--predictions", predictions, "--json"]) == 0
    again = json.loads(capsys.readouterr().out)["splits"]["val_id"]
    before = json.loads((evaluated / "results.json").read_text())["splits"]["val_id"]
    for name in ("count", "mae", "ewt", "rmse", "me", "median_ae", "intervals", "breakdowns"):
        assert again[name] == before[name], name
    out = tmp_path / "again"
    arguments = ["--predictions", predictions, "--targets", predictions, "--output", str(out)]
    assert main(["evaluate", *arguments, "--no-report"]) == 0
    printed = capsys.readouterr().out
    assert "own median" in printed
    assert sorted(p.name for p in out.iterdir()) == [
        "parity.png",
        "predictions.csv",
        "results.json",
    ]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ([], "give either a checkpoint, or --predictions"),
        (["emt_small", "--predictions", "p.csv"], "give either a checkpoint"),
        (["emt_small", "--targets", "t.csv"], "--targets goes with --predictions"),
        (["--predictions", "p.csv", "--data", "emt_adsorption"], "--data and --energy go with"),
        (["--predictions", "none.csv"], "none.csv does not exist"),
    ],
)
def test_options_that_do_not_go_together(arguments, match, capsys):
    assert main(["evaluate", *arguments]) == 2
    assert match in capsys.readouterr().err


def test_structures_in_the_place_of_something_else(tmp_path, monkeypatch, capsys):
    from ase.build import molecule
    from ase.io import write

    monkeypatch.chdir(tmp_path)
    write("mine.extxyz", molecule("H2O"))
    lmdb = str(shipped_folder("datasets") / "emt_adsorption" / "val_id.lmdb")
    for name in ("mine.extxyz", lmdb, "emt_adsorption"):
        assert main(["evaluate", name]) == 2
        told = f"{name} is no checkpoint, but data: did you mean flt-mol evaluate CHECKPOINT --data"
        assert told in capsys.readouterr().err
    (tmp_path / "broken.ckpt").write_bytes(b"nothing")
    assert main(["evaluate", "broken.ckpt"]) == 2
    assert "incomplete, or not a checkpoint" in capsys.readouterr().err
    (tmp_path / "p.csv").write_text("sid,energy\na,1.0\n")
    assert main(["evaluate", "--predictions", "p.csv", "--targets", "mine.extxyz"]) == 2
    assert "mine.extxyz is no table: it begins with '3'" in capsys.readouterr().err
    (tmp_path / "t.csv").write_text("id,target\na,1.0\n")
    assert main(["evaluate", "--predictions", "p.csv", "--targets", "t.csv"]) == 2
    assert "the columns are id, target; expected sid and" in capsys.readouterr().err


def write_splits(shipped, folder, capsys):
    """Ten systems of each split, predicted; the sids that were asked for."""
    from ase.io import write

    ids = {}
    for split in SPLITS:
        data = open_dataset(shipped / f"val_{split}.lmdb")
        frames = []
        for i in range(10):
            frame = to_ase(data[i])
            frame.info["sid"] = data[i].sid[0]
            frames.append(frame)
        write(folder / f"{split}.traj", frames)
        ids[split] = [str(data[i].sid[0]) for i in range(10)]
        out = str(folder / f"{split}.csv")
        assert main(["predict", "emt_small", str(folder / f"{split}.traj"), "-o", out]) == 0
    capsys.readouterr()
    rows = [f"test_{split},{sid}\n" for split, sids in ids.items() for sid in sids]
    (folder / "ids.csv").write_text("split,sid\n" + "".join(rows))
    return ids


def to_ase(structures):
    from ase import Atoms
    from ase.constraints import FixAtoms

    return Atoms(
        structures.atomic_numbers.numpy(),
        structures.positions.numpy(),
        cell=structures.cell[0].numpy(),
        pbc=True,
        tags=structures.tags.numpy(),
        constraint=FixAtoms(mask=structures.fixed.numpy()),
    )


def test_a_submission_from_predictions_and_from_a_checkpoint(shipped, tmp_path, capsys):
    ids = write_splits(shipped, tmp_path, capsys)
    tables = [x for s in SPLITS for x in (f"--{s.replace('_', '-')}", str(tmp_path / f"{s}.csv"))]
    made = tmp_path / "s.npz"
    known = ["--ids", str(tmp_path / "ids.csv")]
    assert main(["submission", "make", str(made), *tables, *known]) == 0
    assert "ood_both      10 systems" in capsys.readouterr().out
    assert main(["submission", "check", str(made), *known]) == 0
    assert "complete and sound" in capsys.readouterr().out
    with np.load(made, allow_pickle=False) as file:
        content = dict(file)
    for split in SPLITS:
        rows = read_csv(tmp_path / f"{split}.csv")
        assert content[f"{split}_ids"].tolist() == ids[split] == [row["sid"] for row in rows]
        assert content[f"{split}_energy"].tolist() == [float(row["energy"]) for row in rows]
    files = [x.replace(".csv", ".traj") for x in tables]
    direct = tmp_path / "direct.npz"
    model = ["--checkpoint", "emt_small"]
    assert main(["submission", "make", str(direct), *files, *known, *model]) == 0
    with np.load(direct, allow_pickle=False) as file:
        assert all(np.allclose(file[n], content[n], atol=1e-5) for n in content if "energy" in n)
        assert all(file[n].tolist() == content[n].tolist() for n in content if "ids" in n)
    capsys.readouterr()
    assert main(["submission", "check", str(made)]) == 2
    assert "the test split has 24948" in capsys.readouterr().err
    assert main(["submission", "check", str(made), "--data", "emt_adsorption"]) == 2
    assert "id lacks sid 1" in capsys.readouterr().err


def test_repeated_lines_of_a_submission_are_counted(tmp_path, capsys):
    lines = {split: [f"{k}{i},{i}.5\n" for i in range(3)] for k, split in enumerate(SPLITS, 1)}
    rows = [f"test_{s},{x.partition(',')[0]}\n" for s, found in lines.items() for x in found]
    (tmp_path / "ids.csv").write_text("split,sid\n" + "".join(rows))
    arguments = ["submission", "make", str(tmp_path / "s.npz"), "--ids", str(tmp_path / "ids.csv")]
    for split, found in lines.items():
        text = "sid,energy\n" + "".join([*found, found[0]])
        (tmp_path / f"{split}.csv").write_text(text)
        arguments += [f"--{split.replace('_', '-')}", str(tmp_path / f"{split}.csv")]
    assert main(arguments) == 0
    assert "ood_cat.csv: dropped 1 lines" in capsys.readouterr().err
    (tmp_path / "ood_cat.csv").write_text(text.replace("40,", "30,") + "30,9\n")
    assert main(arguments) == 2
    assert "sid 30: the energy is 9.0, and 0.5 in line 2" in capsys.readouterr().err


def test_splits_without_targets_and_with_bad_ones(shipped, tmp_path, capsys):
    from ase.io import write

    frames = [to_ase(open_dataset(shipped / "val_id.lmdb")[i]) for i in range(4)]
    out = ["--output", str(tmp_path / "e")]
    write(tmp_path / "test.extxyz", frames)
    assert main(["evaluate", "emt_small", "--data", str(tmp_path / "test.extxyz"), *out]) == 2
    assert "this split has no targets" in capsys.readouterr().err
    for i, (frame, energy) in enumerate(zip(frames, (-1.0, np.nan, -0.5, np.inf), strict=True)):
        frame.info |= {"sid": f"s{i}", "y_relaxed": energy}
    bad = str(tmp_path / "bad.extxyz")
    write(bad, frames)
    assert main(["evaluate", "emt_small", "--data", bad, *out]) == 2
    assert "s1" in capsys.readouterr().err
    assert not (tmp_path / "e").exists()
    assert main(["evaluate", "emt_small", "--data", bad, *out, "--skip-bad"]) == 0
    assert "left out 2 of 4 records" in capsys.readouterr().err
    content = json.loads((tmp_path / "e" / "results.json").read_text())
    assert content["left_out"] == {"bad": 2}
    assert content["splits"]["bad"]["count"] == 2
    assert "bad: 2 bad records were left out" in (tmp_path / "e" / "report.html").read_text()


def test_own_data_have_constants_to_compare_with(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    source = shipped_folder("datasets") / "emt_adsorption" / "val_id.lmdb"
    targets = [system.energy.item() for system in open_dataset(source)]
    model = load_model("emt_small")
    model.trained_on = {}  # as weights from before it was saved
    save_checkpoint("old.ckpt", model, {})
    assert main(["evaluate", "old.ckpt", "--data", str(source), "--json"]) == 0
    own = statistics.fmean(abs(y - statistics.median(targets)) for y in targets)
    baselines = json.loads(capsys.readouterr().out)["baselines"]
    assert baselines == {"own median": {"val_id": pytest.approx(own)}}
    model.trained_on = {"energy_median": 1.5}
    save_checkpoint("mine.ckpt", model, {})
    assert main(["evaluate", "mine.ckpt", "--data", str(source), "--no-report"]) == 0
    heading, _, row = capsys.readouterr().out.splitlines()[:3]
    assert heading.endswith("constant  own median")
    constant = statistics.fmean(abs(y - 1.5) for y in targets)
    assert row.split()[-2:] == [f"{constant:.4f}", f"{own:.4f}"]
