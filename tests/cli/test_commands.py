import csv
import json
import re
from pathlib import Path

import ase.io
import numpy as np
import pytest
from ase.calculators.singlepoint import SinglePointCalculator
from slabs import platinum

from flt_mol import load_model
from flt_mol.cli import main
from flt_mol.data import from_ase, open_dataset
from flt_mol.files import shipped_folder
from flt_mol.prediction import surface_rule

VAL = shipped_folder("datasets") / "emt_adsorption" / "val_id.lmdb"


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """Runs a command in a folder of its own; its output."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments, status=0):
        found = main([str(argument) for argument in arguments])
        text = capsys.readouterr()
        assert found == status, text.err
        return text

    return run


@pytest.fixture
def slabs(tmp_path):
    frames = [platinum() for _ in range(3)]
    for place, atoms in enumerate(frames):
        atoms.positions[-2:, 2] += 0.1 * place
        atoms.info = {"sid": f"s{place}", "y_relaxed": -1.0 - place}
    ase.io.write(tmp_path / "slabs.extxyz", frames)
    return "slabs.extxyz"


def read_csv(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_predict_prints_a_line_a_structure(run, slabs):
    lines = run("predict", "emt-small", slabs).out.splitlines()
    assert [line.split()[0] for line in lines] == ["s0", "s1", "s2"]
    assert all(re.fullmatch(r"s\d +-?\d+\.\d{6} eV", line) for line in lines)
    lines = run("predict", "emt-small", slabs, "--ensemble", "emt-performer-small").out.splitlines()
    assert all(re.fullmatch(r"s\d +-?\d+\.\d{6} ± \d+\.\d{6} eV", line) for line in lines)


def test_predict_writes_the_same_energies_whatever_the_batches(run, slabs):
    text = run("predict", "emt-small", slabs, "-o", "new/a.csv").out
    assert text.startswith("3 structures: ")
    assert text.endswith("written:\n  new/a.csv\n")
    run("predict", "emt-small", slabs, "-o", "b.json", "--batch-size", 1)
    a, b = read_csv("new/a.csv"), json.loads(Path("b.json").read_text())
    assert [row["sid"] for row in a] == [row["sid"] for row in b] == ["s0", "s1", "s2"]
    np.testing.assert_allclose([float(x["energy"]) for x in a], [x["energy"] for x in b], atol=1e-5)
    assert len({row["energy"] for row in a}) == 3
    run("predict", "emt-small", slabs, "-o", "c.extxyz")
    assert [x.info["energy_predicted"] for x in ase.io.read("c.extxyz", ":")] == [
        float(x["energy"]) for x in a
    ]


def test_a_run_of_untagged_slabs_tags_them_wherever_it_reads_them(run):
    frames = [platinum(tags=False) for _ in range(6)]
    for i, atoms in enumerate(frames):
        atoms.info = {"sid": f"s{i}", "y_relaxed": -1.0 - 0.1 * i}
    ase.io.write("raw.extxyz", frames)
    text = run("data", "convert", "raw.extxyz", "tagged.extxyz", "--tag-slab", "--surface", "half")
    assert "all tags" not in text.err
    tags = ase.io.read("tagged.extxyz").get_tags().tolist()
    assert tags == [0] * 4 + [1] * 8 + [2] * 2
    text = run("data", "convert", "raw.extxyz", "raw.safetensors")
    assert "all tags are 0 in 6 of 6 structures (s0, s1, s2 and 3 more)" in text.err
    assert "--surface" in run("data", "convert", "raw.extxyz", "b.x", "--tag-slab", status=2).err
    run("data", "convert", "raw.extxyz", "c.extxyz", "--surface", "half", status=2)
    settings = ["data.paths.train=raw.safetensors", "training.epochs=1", "training.batch_size=4"]
    text = run("train", "finetune", "--finetune", "emt-small", *settings, "output=raw")
    assert text.err.count("all tags are 0") == 1
    settings += ["--tag-slab", "output=tagged"]
    text = run("train", "finetune", "--finetune", "emt-small", *settings)
    assert "all tags" not in text.err
    text = run("evaluate", "tagged", "--json", "--no-report")
    assert "all tags" not in text.err
    tagged = json.loads(text.out)["splits"]["val"]["mae"]
    assert surface_rule("tagged") == "half"
    same = run("evaluate", "tagged", "--data", "tagged.extxyz", "--held-out", "--json").out
    assert json.loads(same)["splits"]["tagged"]["mae"] == pytest.approx(tagged, abs=1e-6)


def test_systems_are_dropped_by_sid_and_energy(run, slabs):
    text = run("data", "convert", slabs, "a.extxyz", "--drop", "s1", "--max-abs-energy", 2.5)
    assert text.out.startswith("systems dropped: 2\n  s1\n  s2\n1 systems in ")
    text = run("data", "split", slabs, "b", "--drop", "s1", "--shares", "train=1", "val=rest")
    assert "systems dropped: 1\n  s1\ntrain: 1 systems" in text.out
    text = run("data", "convert", slabs, "c.extxyz", "--drop", '"no,body","s1"', status=2)
    assert "no system has the sid no,body" in text.err


def test_models_with_forces_are_not_compiled(run, slabs):
    assert "--compile" in run("predict", "emt-forces", slabs, "--compile", status=2).err


def test_predict_writes_relaxed_positions_and_embeddings(run, slabs):
    given = ["predict", "flt-small", slabs, "-o", "x.extxyz", "--relaxed", "--embeddings", "e.npz"]
    assert run(*given).out.endswith("x.extxyz\n  e.npz\n")
    model = load_model("flt-small")
    for before, after in zip(ase.io.read(slabs, ":"), ase.io.read("x.extxyz", ":"), strict=True):
        moved = model(from_ase(before))["displacement"].detach()
        assert moved.abs().max() > 1e-3
        np.testing.assert_allclose(after.positions - before.positions, moved, atol=1e-5)
    with np.load("e.npz") as file:
        assert file["sid"].tolist() == ["s0", "s1", "s2"]
        out = model(from_ase(before), embeddings=True)["system_embeddings"].detach()
        np.testing.assert_allclose(file["embeddings"][2:], out, atol=1e-3)
    run("predict", "flt-small", slabs, "--relaxed", status=2)
    run("predict", "flt-small", slabs, "-o", "x.csv", "--relaxed", status=2)
    run("predict", "emt-small", slabs, "-o", "x.extxyz", "--relaxed", status=2)
    two = ["--ensemble", "emt-performer-small", "--embeddings", "e.npz"]
    run("predict", "emt-small", slabs, *two, status=2)


def test_predict_tags_slabs_by_the_rule_of_the_model(run, slabs):
    untagged = platinum(tags=False)
    ase.io.write("POSCAR", untagged, format="vasp")
    text = run("predict", "emt-small", "POSCAR")
    assert "warning: all tags are 0" in text.err
    text = run("predict", "emt-small", "POSCAR", slabs, "--tag-slab", "-o", "p.csv")
    assert "1 × below 4, surface 8, adsorbate CO" in text.out
    assert "the rule 'half', which the model's checkpoint names" in text.err
    text = run(
        "predict", "emt-small", "POSCAR", "--tag-slab", "--surface", 1, "--adsorbate", "12,13"
    )
    assert "below 8, surface 4, adsorbate CO" in text.out
    assert "tagged by another rule than the model's training data, 'half', in 1 of 1" in text.err
    text = run("predict", "emt-small", "POSCAR", "--tag-slab", "--adsorbate", "N2", status=2)
    assert "N2" in text.err
    text = run("predict", "emt-small", "POSCAR", "--tag-slab", "--surface", "soft", status=2)
    assert "soft" in text.err


@pytest.mark.parametrize("suffix", [".extxyz", ".safetensors", ".aselmdb"])
def test_a_converted_file_keeps_the_rule_of_its_tags(run, suffix):
    frames = [platinum(tags=False) for _ in range(5)]
    for i, atoms in enumerate(frames):
        atoms.info = {"sid": f"s{i}", "y_relaxed": -1.0 - 0.1 * i} | ({"b": i} if i > 2 else {})
    frames[0].set_tags(platinum().get_tags())
    ase.io.write("raw.extxyz", frames)
    file = f"tagged{suffix}"
    run("data", "convert", "raw.extxyz", file, "--tag-slab", "--surface", 1)
    stored = open_dataset(file).batch(range(5))
    assert stored.info["tag_rule"] == (None, "1", "1", "1", "1")
    text = "tagged by another rule than the model's training data, 'half', in 4 of 5 structures (s1"
    assert text in run("predict", "emt-small", file).err
    assert text in run("evaluate", "emt-small", "--data", file, "--output", "found").err
    run("data", "split", file, "parts", "--shares", "train=1", "val=rest")
    assert open_dataset("parts/val.safetensors").batch(range(4)).info["tag_rule"].count("1") >= 3


def test_training_takes_the_rule_of_its_file(run):
    frames = [platinum(tags=False) for _ in range(4)]
    for i, atoms in enumerate(frames):
        atoms.info = {"sid": f"s{i}", "y_relaxed": -1.0 - 0.1 * i}
    ase.io.write("raw.extxyz", frames)
    run("data", "convert", "raw.extxyz", "one.extxyz", "--tag-slab", "--surface", 1)
    settings = ["data.paths.train=one.extxyz", "training.epochs=1", "training.batch_size=4"]
    tune = ["train", "finetune", "--finetune", "emt-small", *settings]
    text = run(*tune, "output=a")
    assert "one.extxyz: tagged by the rule '1', and the checkpoint's is 'half'" in text.err
    assert surface_rule("a") == 1
    assert "rule" not in run("predict", "a", "one.extxyz").err
    text = run(*tune, "data.tag_rule=half", "output=b")
    assert "one.extxyz: tagged by the rule '1', and data.tag_rule is 'half'" in text.err
    assert surface_rule("b") == "half"


def test_frames_of_relaxations_are_counted(run):
    for name in "ab":
        frames = [platinum() for _ in range(3)]
        for atoms in frames:
            atoms.calc = SinglePointCalculator(atoms, energy=1.0)
        ase.io.write(f"{name}.traj", frames)
    ase.io.write("c.traj", platinum())
    text = run("data", "convert", ".", "x.safetensors")
    assert text.out.startswith(
        "2 relaxations: each of their 6 frames is a system, energies as they stand"
    )
    assert "7 systems in" in text.out
    assert "relaxations" not in run("data", "convert", "x.safetensors", "y.extxyz").out


def test_invalid_records_are_refused_or_skipped(run, slabs):
    frames = ase.io.read(slabs, ":")
    frames[1].positions[0] = float("nan")
    ase.io.write(slabs, frames)
    assert "sid s1" in run("predict", "emt-small", slabs, status=2).err
    text = run("predict", "emt-small", slabs, "--skip-bad")
    assert [line.split()[0] for line in text.out.splitlines()] == ["s0", "s2"]
    assert "skipped 1 of 3" in text.err


def test_evaluate_prints_the_table_and_writes_its_files(run, slabs):
    text = run("evaluate", "emt-small", "--data", slabs, "--output", "out")
    (row,) = [line for line in text.out.splitlines() if line.startswith("slabs ")]
    names = ["results.json", "predictions.csv", "parity.png", "report.html"]
    assert text.out.endswith("\n  ".join(["written:", *(f"out/{name}" for name in names)]) + "\n")
    rows = read_csv("out/predictions.csv")
    errors = [abs(float(x["energy"]) - float(x["target"])) for x in rows]
    assert row.split()[1:3] == ["3", f"{np.mean(errors):.4f}"]
    assert [x["sid"] for x in rows] == ["s0", "s1", "s2"]
    text = run("evaluate", "emt-small", "--data", slabs, "--output", "out", "--no-report")
    assert text.err == "flt-mol: results in out are replaced\n"
    Path("out/results.json").unlink()
    text = run("evaluate", "emt-small", "--data", slabs, "--output", "out", status=2)
    assert "out holds other results" in text.err


def test_evaluate_predictions_repeats_the_results(run, slabs):
    shown = json.loads(
        run(
            "evaluate", "emt-small", "--data", slabs, "--json", "--output", "out", "--no-report"
        ).out
    )
    stored = json.loads(Path("out/results.json").read_text())
    assert shown == stored
    again = json.loads(run("evaluate", "--predictions", "out/predictions.csv", "--json").out)
    assert again["splits"]["slabs"]["mae"] == pytest.approx(stored["splits"]["slabs"]["mae"])
    assert set(again["baselines"]) == {"own median"}
    assert not Path("evaluation").exists()


def test_predictions_have_the_baselines_of_the_data_set(run):
    data = open_dataset(VAL).batch(range(411))
    rows = [f"{sid},{y + 0.5}" for sid, y in zip(data.sid, data.energy.tolist(), strict=True)]
    Path("p.csv").write_text("\n".join(["sid,energy", *rows]))
    given = ["--targets", "emt_adsorption", "--split", "val_id", "--json"]
    whole = json.loads(run("evaluate", "--predictions", "p.csv", *given).out)
    known = json.loads(run("evaluate", "emt-small", *given[2:], "--no-report", "--output", "o").out)
    assert whole["baselines"] == known["baselines"]
    assert set(known["baselines"]) == {"constant", "composition"}
    Path("p.csv").write_text("\n".join(["sid,energy", *rows[:20]]))
    text = run("evaluate", "--predictions", "p.csv", *given, status=2)
    assert "--common-ids" in text.err
    text = run("evaluate", "--predictions", "p.csv", *given, "--common-ids")
    assert "391 targets and 0 predictions are without the other" in text.err
    part = json.loads(text.out)
    assert part["splits"]["val_id"]["count"] == 20
    assert part["splits"]["val_id"]["mae"] == pytest.approx(0.5)
    assert set(part["baselines"]) == {"own median"}
    run("evaluate", "emt-small", "--common-ids", status=2)


def test_results_survive_a_folder_that_cannot_be_written(run, slabs, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device", "out/results.json")

    monkeypatch.setattr("flt_mol.evaluation.report.write_json", full)
    text = run("evaluate", "emt-small", "--data", slabs, "--output", "out", status=2)
    assert "slabs" in text.out
    assert "No space left" in text.err
    monkeypatch.setattr("flt_mol.prediction.table.write_predictions", full)
    assert "s2 " in run("predict", "emt-small", slabs, "-o", "p.csv", status=2).out


@pytest.fixture
def four(run, tmp_path):
    """Energies and ids of four splits."""
    options, ids = [], ["split,sid"]
    for place, split in enumerate(("id", "ood_ads", "ood_cat", "ood_both")):
        rows = [f"{10 * place + i},{-i / 10}" for i in range(3)]
        (tmp_path / f"{split}.csv").write_text("\n".join(["sid,energy", *rows]))
        options += [f"--{split.replace('_', '-')}", f"{split}.csv"]
        ids += [f"test_{split},{10 * place + i}" for i in range(3)]
    (tmp_path / "ids.csv").write_text("\n".join(ids))
    return options


def test_submissions_are_made_and_checked(run, four):
    text = run("submission", "make", "s.npz", *four, "--ids", "ids.csv").out
    assert "ood_both       3 systems" in text
    assert "complete" in run("submission", "check", "s.npz", "--ids", "ids.csv").out
    assert "24948" in run("submission", "check", "s.npz", status=2).err
    with open("ids.csv", "a") as file:
        file.write("\ntest_ood_cat,99")
    assert "sid 99" in run("submission", "check", "s.npz", "--ids", "ids.csv", status=2).err
    assert "s.csv" in run("submission", "make", "s.csv", *four, status=2).err


def test_data_is_inspected(run):
    found = json.loads(run("data", "inspect", VAL, "--json", "--limit", 10).out)
    assert (found["count"], found["looked_at"]) == (411, 10)
    text = run("data", "inspect", "emt_adsorption", "--split", "val_id", "--limit", 3).out
    assert text.startswith(f"{VAL}: 411 systems")


def test_data_is_converted(run, slabs):
    text = run("data", "convert", slabs, "flat.safetensors").out
    assert text.startswith("3 systems in ")
    assert open_dataset("flat.safetensors")[2].sid == ("s2",)
    assert "overwrite" in run("data", "convert", slabs, "flat.safetensors", status=2).err
    run("data", "convert", slabs, "flat.safetensors", "--overwrite", "--energy", "y_relaxed")
    ase.io.write("bare.traj", platinum())
    assert "warning: bare.traj" in run("data", "convert", "bare.traj", "b.aselmdb").err
    options = ["--references", "none", "--energy", "mine"]
    assert "--energy" in run("data", "convert", slabs, "c.safetensors", *options, status=2).err


def test_data_is_split_into_shares(run):
    shares = ["--shares", "train=0.5", "val_id=0.3", "test=rest", "--seed", "1"]
    run("data", "convert", VAL, "all.safetensors")
    text = run("data", "split", "all.safetensors", "mine", *shares, "--group-by", "slab").out
    counts = dict(re.findall(r"^(\w+): (\d+) systems", text, flags=re.MULTILINE))
    assert list(counts) == ["train", "val_id", "test"]
    assert sum(map(int, counts.values())) == 411
    text = run(
        "evaluate", "emt-small", "--data", "mine", "--split", "train", "--no-report", "--json"
    )
    assert json.loads(text.out)["splits"]["train"]["count"] == int(counts["train"])


def test_data_is_verified(run):
    text = run("data", "verify", "emt_adsorption", "--split", "val_id")
    assert re.fullmatch(r"val_id +ok\n", text.out)


def test_settings_are_printed(run):
    text = run("train", "emt-small", "--print-config", "training.epochs=7", "output=x").out
    assert "epochs: 7" in text
    assert run("train", "emt-small", "training.epochs=7", "output=x", "--print-config").out == text
    text = run(
        "train", "finetune", "--finetune", "emt-small", "--print-config", "data.paths.train=x"
    )
    assert "checkpoint: emt-small" in text.out


def test_a_run_is_trained_evaluated_exported_and_predicted_with(run, slabs):
    frames = [frame for frame in ase.io.read(slabs, ":") for _ in range(4)]
    for place, frame in enumerate(frames):
        frame.info["sid"] = f"t{place}"
    ase.io.write("train.extxyz", frames)
    settings = [
        "data.paths.train=train.extxyz",
        "data.paths.val=slabs.extxyz",
        "data.validation=val",
        "data.evaluation=[val]",
        "training.epochs=1",
        "output=mine",
    ]
    text = run("train", "finetune", "--finetune", "emt-small", *settings)
    assert "best epoch" in text.out
    assert "mine/best.ckpt" in text.out
    mae = json.loads(run("evaluate", "mine", "--json", "--no-report").out)["splits"]["val"]["mae"]
    assert Path("mine/evaluation/results.json").is_file()
    run("export", "mine", "exported")
    lines = [run("predict", where, slabs).out for where in ("mine", "mine/best.ckpt", "exported")]
    assert len(set(lines)) == 1
    errors = [float(x.split()[1]) + 1 + i for i, x in enumerate(lines[0].splitlines())]
    assert mae == pytest.approx(np.mean(np.abs(errors)), abs=1e-5)
