"""`flt-mol evaluate` of runs that held out a part of what they were given."""

import csv
import json
import shutil

import pytest
import torch
from ase.build import add_adsorbate, fcc111
from ase.io import read, write

from flt_mol.cli import main
from flt_mol.data import open_dataset
from flt_mol.evaluation_data import open_evaluated
from flt_mol.evaluation_runs import Wanted
from flt_mol.training.seen import systems_seen

COUNT, HELD = 10, 2


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with mine.extxyz, and the run tuned that held two systems of it out."""
    folder = tmp_path_factory.mktemp("held_out")
    frames = []
    for i in range(COUNT):
        slab = fcc111(("Cu", "Ag", "Au")[i % 3], (1, 1, 3), vacuum=6.0)
        add_adsorbate(slab, "O", 1.2 + 0.1 * i, "fcc")
        slab.set_tags([0, 0, 1, 2])
        slab.info = {"sid": f"s{i}", "y_relaxed": 0.1 * i}
        frames.append(slab)
    write(folder / "mine.extxyz", frames)
    start = ["train", "finetune", "--finetune", "emt_small", "training.epochs=1"]
    data = f"data.paths.train={folder / 'mine.extxyz'}"
    assert main([*start, data, f"output={folder / 'tuned'}"]) == 0
    return folder


@pytest.fixture
def place(trained, tmp_path, monkeypatch):
    """A copy of the run, whose data lie where they were; they are put back afterwards."""
    file = trained / "mine.extxyz"
    before = file.read_bytes()
    shutil.copytree(trained / "tuned", tmp_path / "tuned")
    monkeypatch.chdir(tmp_path)
    yield file
    file.write_bytes(before)


def held_out(folder="tuned"):
    with open(f"{folder}/held_out.csv") as file:
        return {row["sid"] for row in csv.DictReader(file)}


def evaluated(*arguments, status=0, report=False):
    """The sids by split; and results.json."""
    more = [] if report else ["--no-report"]
    assert main(["evaluate", *arguments, "--output", "out", *more]) == status
    if status:
        return None
    with open("out/predictions.csv") as file:
        rows = [(row["split"], row["sid"]) for row in csv.DictReader(file)]
    with open("out/results.json") as file:
        return rows, json.load(file)


@pytest.mark.parametrize("name", ["tuned", "tuned/last.ckpt", "elsewhere.ckpt"])
def test_only_what_was_held_out(place, capsys, name):
    shutil.copyfile("tuned/best.ckpt", "elsewhere.ckpt")
    rows, summary = evaluated(name, report=True)
    assert set(rows) == {("val", sid) for sid in held_out()}
    assert len(rows) == HELD
    assert summary["held_out"] == {"val": str(place)}
    assert "trained_on" not in summary
    captured = capsys.readouterr()
    line = f"val: the 2 systems of {place} that training held out"
    assert line in captured.out.splitlines()
    assert captured.err == ""
    with open("out/report.html", encoding="utf-8") as file:
        assert line in file.read()


def test_the_best_epochs_error_comes_out(place):
    best = torch.load("tuned/best.ckpt", weights_only=True)["metrics"]
    _, summary = evaluated("tuned")
    assert summary["splits"]["val"]["mae"] == pytest.approx(best["val/mae"], rel=1e-5)


def test_a_file_in_another_order_and_with_more(place, capsys):
    frames = read(place, ":")
    more = frames[0].copy()
    more.info = {"sid": "new", "y_relaxed": 1.0}
    more.positions[-1, 2] += 1.0
    write(place, [more, *frames[::-1]])
    rows, _ = evaluated("tuned")
    assert {sid for _, sid in rows} == held_out()
    assert "has changed since the training: 11 systems, 10 then; evaluated are the 2 that were" in (
        capsys.readouterr().err
    )


def test_held_out_systems_that_are_no_longer_there(place, capsys):
    frames = read(place, ":")
    gone = sorted(held_out())[0]
    write(place, [frame for frame in frames if frame.info["sid"] != gone])
    rows, _ = evaluated("tuned")
    assert {sid for _, sid in rows} == held_out() - {gone}
    assert f"of 2 systems held out 1 cannot be found in it as they were (sid {gone})" in (
        capsys.readouterr().err
    )
    for frame in frames:
        frame.positions[-1, 2] += 0.5
    write(place, frames)
    evaluated("tuned", status=2)
    assert "put the file back, or give --data FILE" in capsys.readouterr().err
    place.unlink()
    evaluated("tuned", status=2)
    assert f"{place} does not exist" in capsys.readouterr().err


def test_energies_may_be_mended(place, capsys):
    frames = read(place, ":")
    for frame in frames:
        frame.info["y_relaxed"] += 100.0
    write(place, frames)
    rows, summary = evaluated("tuned")
    assert {sid for _, sid in rows} == held_out()
    assert summary["splits"]["val"]["mae"] > 50
    assert capsys.readouterr().err == ""


def test_systems_that_were_trained_on_are_counted(place, capsys):
    frames = read(place, ":")
    for frame in frames:
        del frame.info["sid"]
    write("copy.extxyz", frames)
    for data in (place, "copy.extxyz"):
        rows, summary = evaluated("tuned", "--data", str(data), report=True)
        assert len(rows) == COUNT
        (split,) = summary["splits"]
        assert summary["trained_on"] == {split: COUNT - HELD}
        line = f"{split}: 8 of its 10 systems were trained on; their errors say nothing of new ones"
        assert f"flt-mol: warning: {line}\n" in capsys.readouterr().err
        with open("out/report.html", encoding="utf-8") as file:
            assert line in file.read()
    write("others.extxyz", [f for f in read(place, ":") if f.info["sid"] in held_out()])
    _, summary = evaluated("tuned", "--data", "others.extxyz")
    assert "trained_on" not in summary
    assert "trained on" not in capsys.readouterr().err


def test_a_second_tuning_that_holds_out_others(place):
    start = ["train", "finetune", "--finetune", "tuned", "training.epochs=1", "training.seed=1"]
    assert main([*start, f"data.paths.train={place}", "output=again"]) == 0
    both = len(held_out("tuned") & held_out("again"))
    assert both < HELD
    _, summary = evaluated("again")
    assert summary["trained_on"] == {"val": HELD - both}


def test_splits_of_such_a_run(place, capsys):
    rows, summary = evaluated("tuned", "--split", "train", "--split", "val")
    assert [split for split, _ in rows].count("train") == COUNT
    assert [split for split, _ in rows].count("val") == HELD
    assert summary["trained_on"] == {"train": COUNT - HELD}
    capsys.readouterr()
    evaluated("tuned", "--split", "test", status=2)
    assert "no split 'test'; there are: val, train" in capsys.readouterr().err


def test_a_checkpoint_that_does_not_know(place, capsys):
    content = torch.load("tuned/best.ckpt", weights_only=True)
    del content["systems"]
    torch.save(content, "old.ckpt")
    evaluated("old.ckpt", status=2)
    assert (
        f"old.ckpt does not say which systems of {place} were held out" in capsys.readouterr().err
    )
    _, summary = evaluated("old.ckpt", "--data", str(place))
    assert summary["trained_on"] == {"mine": COUNT}, "of the file itself it is known"


def test_results_of_another_evaluation_stay(place, capsys):
    for name, folder in (("tuned", "evaluation"), ("tuned/last.ckpt", "evaluation-2")):
        for _ in range(2):
            assert main(["evaluate", name, "--no-report"]) == 0
            lines = capsys.readouterr().out.splitlines()
            assert f"  tuned/{folder}/results.json" in lines
    assert lines[-2:] == [
        "other evaluations beside it:",
        f"  tuned/evaluation: tuned on val (2 systems, {place})",
    ]
    assert evaluated("tuned")
    assert capsys.readouterr().err == ""
    assert evaluated("tuned/last.ckpt")
    told = f"out held an evaluation of tuned on val (2 systems, {place}), replaced"
    assert told in capsys.readouterr().err


def test_the_data_sets_own_validation_split_keeps_its_name(tmp_path):
    """Held out of val_ood_both, in place of a val_id that the data set has as well."""
    from flt_mol.data.catalog import recipe

    source = open_dataset(recipe("emt_adsorption").path("val_ood_both"))
    systems = [source[i] for i in (3, 5, 8)]
    data = {
        "name": "emt_adsorption",
        "train": "val_ood_both",
        "validation": "val_id",
        "evaluation": ["val_id", "val_ood_both", "other"],
        "validation_fraction": 0.1,
    }
    content = {
        "config": {"data": data},
        "systems": systems_seen([source[0], source[1]], systems),
        "trained_on": {"systems": len(source) - 3},
    }
    found = open_evaluated(tmp_path / "a.ckpt", content, Wanted(None, None, None, "raise"))
    assert [(name, len(data)) for name, data in found.splits.items()] == [
        ("held_out", 3),
        ("val_id", 411),
    ]
    held = found.splits["held_out"]
    assert [held[i].sid for i in range(3)] == [one.sid for one in systems]
    assert set(found.baselines["constant"]) == {"val_id"}
    wanted = Wanted("emt_adsorption", None, None, "raise", held_out=True)
    found = open_evaluated(tmp_path / "a.ckpt", content, wanted)
    assert [(name, len(data)) for name, data in found.splits.items()] == [("val_ood_both", 3)]
    assert found.baselines == {}, "those of the recipe are of whole splits"


@pytest.mark.filterwarnings("ignore:elements never trained on")
def test_of_large_data_sets_the_file_is_known(place, monkeypatch, capsys):
    monkeypatch.setattr("flt_mol.training.run_data.IN_MEMORY", 2)
    start = ["train", "finetune", "--finetune", "emt_small", "training.epochs=1"]
    assert main([*start, f"data.paths.train={place}", "output=large"]) == 0
    systems = torch.load("large/best.ckpt", weights_only=True)["systems"]
    assert len(systems["trained_on"]) == 3191, "those of what it was tuned from"
    (stated,) = systems["files"]
    assert stated["data"]["paths"] == {"train": str(place)}
    rows, summary = evaluated("large")
    assert {sid for _, sid in rows} == held_out("large")
    assert "trained_on" not in summary
    _, summary = evaluated("large", "--data", str(place))
    assert summary["trained_on"] == {"mine": COUNT - HELD}
    columns = written()
    assert columns["trained_on"].count("yes") == COUNT - HELD
    assert columns["held_out"].count("yes") == HELD


def written():
    """Columns of predictions.csv by name."""
    with open("out/predictions.csv") as file:
        rows = list(csv.DictReader(file))
    return {name: [row[name] for row in rows] for name in rows[0]}


def of_held_out(frames):
    """Targets of those frames, as text, that the run held out; the fixture made them by number."""
    return {f"{frame.info['y_relaxed']:.3f}" for frame in frames if frame.info["sid"] in held_out()}


def renamed(place, file, first=True):
    """The systems in another order, under other names, with another one before them."""
    frames = read(place, ":")
    wanted = of_held_out(frames)
    more = frames[0].copy()
    more.info = {"y_relaxed": 1.0}
    more.positions[-1, 2] += 1.0
    for frame in frames:
        del frame.info["sid"]
    write(file, [more, *frames[::-1]] if first else frames[::-1])
    return wanted


def test_held_out_systems_are_known_by_what_they_are(place, capsys):
    wanted = renamed(place, place)
    evaluated("tuned")
    columns = written()
    assert {f"{float(y):.3f}" for y in columns["target"]} == wanted
    assert columns["trained_on"] == ["no"] * HELD
    assert columns["held_out"] == ["yes"] * HELD
    assert "11 systems, 10 then" in capsys.readouterr().err


def test_only_held_out_ones_of_any_file(place, capsys):
    wanted = renamed(place, "other.extxyz")
    _, summary = evaluated("tuned", "--data", "other.extxyz", "--held-out", report=True)
    assert {f"{float(y):.3f}" for y in written()["target"]} == wanted
    assert summary["held_out"] == {"other": "other.extxyz"}
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "other: the 2 systems of other.extxyz that training held out" in captured.out
    _, summary = evaluated("tuned", "--data", "other.extxyz")
    columns = written()
    assert sorted(columns["trained_on"]) == ["no"] * 3 + ["yes"] * 8
    held = [
        y for y, held in zip(columns["target"], columns["held_out"], strict=True) if held == "yes"
    ]
    assert {f"{float(y):.3f}" for y in held} == wanted
    place.unlink()
    evaluated("tuned", status=2)
    assert "give --data FILE --held-out" in capsys.readouterr().err
    rows, _ = evaluated("tuned", "--data", "other.extxyz", "--held-out")
    assert len(rows) == HELD


def test_held_out_ones_that_are_not_there(place, capsys):
    frames = read(place, ":")
    gone = sorted(held_out())
    write("some.extxyz", [frame for frame in frames if frame.info["sid"] != gone[0]])
    rows, _ = evaluated("tuned", "--data", "some.extxyz", "--held-out")
    assert [sid for _, sid in rows] == gone[1:]
    assert f"1 cannot be found in some.extxyz (sid {gone[0]})" in capsys.readouterr().err
    write("none.extxyz", [frame for frame in frames if frame.info["sid"] not in gone])
    for arguments, told in (
        (["tuned", "--data", "none.extxyz", "--held-out"], "there is none in none.extxyz"),
        (["tuned", "--data", "some.extxyz", "--split", "val"], "--held-out, without --split"),
        (["tuned", "--split", "val", "--held-out"], "leave --split away"),
        (["emt_small", "--held-out"], "knows no systems that its training held out"),
        (["--predictions", "p.csv", "--held-out"], "--held-out goes with a checkpoint"),
    ):
        evaluated(*arguments, status=2)
        assert told in capsys.readouterr().err


def shipped_training_systems(count):
    from ase import Atoms

    from flt_mol.data.catalog import recipe

    data = open_dataset(recipe("emt_adsorption").path("train"))
    frames = []
    for i in range(count):
        one = data[i]
        z, x = one.atomic_numbers.numpy(), one.positions.numpy()
        frames.append(Atoms(z, x, cell=one.cell[0].numpy(), pbc=True, tags=one.tags.numpy()))
        frames[-1].info = {"y_relaxed": one.energy.item()}
    return frames


def test_what_the_shipped_model_was_trained_on_is_known_of_runs_tuned_from_it(place, capsys):
    write("theirs.extxyz", [*shipped_training_systems(3), *read(place, ":")])
    for name, count in (("emt_small", 3), ("tuned", 3 + COUNT - HELD)):
        evaluated(name, "--data", "theirs.extxyz")
        assert f"theirs: {count} of its 13 systems were trained on" in capsys.readouterr().err
        assert written()["trained_on"][:3] == ["yes"] * 3


def test_what_a_base_was_trained_on_that_knows_its_file_alone(place, capsys):
    content = torch.load("tuned/best.ckpt", weights_only=True)
    del content["systems"]
    torch.save(content, "base.ckpt")
    shutil.copyfile(place, "moved.extxyz")
    others = read(place, ":2")
    for frame in others:
        frame.positions[-1, 2] += 0.35
    write("others.extxyz", others)
    start = ["train", "finetune", "--finetune", "base.ckpt", "training.epochs=1"]
    assert main([*start, "data.paths.train=others.extxyz", "output=again"]) == 0
    capsys.readouterr()
    _, summary = evaluated("again", "--data", str(place))
    assert summary["trained_on"] == {"mine": COUNT}
    _, summary = evaluated("again", "--data", "moved.extxyz")
    assert "trained_on" not in summary
    assert "trained_on" not in written(), "it may have been"


def test_the_same_file_by_other_names_and_another_by_the_same(place, monkeypatch, capsys):
    from pathlib import Path

    frames = read(place, ":")
    for name, chosen in (("a", frames), ("b", frames[:4])):
        Path(name).mkdir()
        write(f"{name}/x.extxyz", chosen)

    def folder_of(here, run, data):
        monkeypatch.chdir(here)
        assert main(["evaluate", str(run), "--data", str(data), "--no-report"]) == 0
        lines = capsys.readouterr().out.splitlines()
        return Path(lines[lines.index("written:") + 1].strip()).resolve().parent.name

    root = Path.cwd()
    assert folder_of(root / "a", "../tuned", "x.extxyz") == "evaluation"
    assert folder_of(root / "b", "../tuned", "x.extxyz") == "evaluation-2"
    assert folder_of(root, "tuned", root / "a" / "x.extxyz") == "evaluation"
    assert folder_of(root, root / "tuned", "b/../b/x.extxyz") == "evaluation-2"
    write(root / "a" / "x.extxyz", frames[:4])
    assert folder_of(root, "tuned", "a/x.extxyz") == "evaluation-3"
    moved = [frame.copy() for frame in frames[:4]]
    moved[0].positions[-1, 2] += 0.1
    write(root / "a" / "x.extxyz", moved)
    assert folder_of(root, "tuned", "a/x.extxyz") == "evaluation-4"


def test_evaluations_of_an_export_are_not_put_into_it(place, monkeypatch, capsys):
    from pathlib import Path

    assert main(["export", "tuned", "mine/shared"]) == 0
    before = sorted(Path("mine/shared").iterdir())
    for here, name in ((".", "mine/shared"), ("mine/shared", ".")):
        monkeypatch.chdir(here)
        assert main(["evaluate", name, "--data", str(place), "--no-report"]) == 0
    monkeypatch.chdir("../..")
    assert sorted(Path("mine/shared").iterdir()) == before
    assert sorted(path.name for path in Path("mine").iterdir()) == ["shared", "shared-evaluation"]
