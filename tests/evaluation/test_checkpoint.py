import ase.io
import pytest
from slabs import platinum

from flt_mol.evaluation import evaluate_checkpoint
from flt_mol.evaluation.checkpoint import evaluation_folder
from flt_mol.models.checkpoint import load_model, save_checkpoint
from flt_mol.models.export import export_checkpoint


def write(path, sids, **info):
    frames = []
    for place, sid in enumerate(sids):
        atoms = platinum()
        atoms.positions[-1, 2] += 0.01 * place
        atoms.info = {"sid": sid, "y_relaxed": -1.0 - place / 10, **info}
        frames.append(atoms)
    ase.io.write(path, frames)
    return path


@pytest.fixture
def run(tmp_path):
    """A checkpoint trained on a, b, c of a file of its own, with d and e held out."""
    train = write(tmp_path / "train.extxyz", "abcde")
    further = write(tmp_path / "further.extxyz", ["a", "x"])
    data = {
        "name": None,
        "paths": {"train": str(train), "further": str(further), "other": str(train)},
        "train": "train",
        "validation": "val",
        "validation_fraction": 0.4,
        "evaluation": ["train", "further", "missing"],
    }
    systems = {"trained": ["a", "b", "c"], "held_out": ["e", "d"]}
    folder = tmp_path / "run"
    model = load_model("emt-small")
    save_checkpoint(folder / "best.ckpt", model, {"data": data}, systems=systems)
    return folder


@pytest.mark.filterwarnings("ignore:further. 1 of its 2")
def test_what_training_held_out_is_evaluated_and_the_splits_of_the_run(run):
    summary, results = evaluate_checkpoint(run)
    assert {split: result.sid for split, result in results.items()} == {
        "val": ("d", "e"),
        "further": ("a", "x"),
    }
    assert results["val"].target.tolist() == pytest.approx([-1.3, -1.4])
    assert results["val"].columns["held_out"] == ("yes", "yes")
    assert results["further"].columns["trained_on"] == ("yes", "no")
    assert list(summary["held_out"]) == ["val"]
    assert summary["trained_on"] == {"further": 1}
    assert set(summary["baselines"]) == {"constant", "own median"}


@pytest.mark.filterwarnings("ignore:further. 1 of its 2")
def test_of_an_ensemble_the_mean_is_evaluated(run, tmp_path):
    other = save_checkpoint(tmp_path / "other.ckpt", load_model("emt-performer-small"), {})
    file = tmp_path / "further.extxyz"
    summary, found = evaluate_checkpoint([run, other], file)
    each = [evaluate_checkpoint(one, file)[1]["further"].prediction for one in (run, other)]
    assert found["further"].prediction.tolist() == pytest.approx(sum(each) / 2)
    assert "other.ckpt" in summary["checkpoint"]


def test_systems_that_were_trained_on_are_warned_of(run):
    with pytest.warns(UserWarning, match="further: 1 of its 2 systems"):
        evaluate_checkpoint(run, splits=["further"])


def test_held_out_systems_are_known_by_sid_in_any_file(run, tmp_path):
    path = write(tmp_path / "copy.extxyz", ["x", "e", "a"])
    with pytest.warns(UserWarning, match=r"1 of 2 held-out systems .*sid d"):
        _, results = evaluate_checkpoint(run, path, held_out=True)
    assert results["copy"].sid == ("e",)
    _, results = evaluate_checkpoint(run, held_out=True)
    assert list(results) == ["val"]
    with (
        pytest.warns(UserWarning, match="2 of 2"),
        pytest.raises(ValueError, match="none of the 2 systems"),
    ):
        evaluate_checkpoint(run, write(tmp_path / "new.extxyz", ["x"]), held_out=True)


def test_splits_and_data_that_are_not_there_are_named(run, tmp_path):
    with pytest.raises(ValueError, match="no split 'vall'; there are: val, train, further, other"):
        evaluate_checkpoint(run, splits=["vall"])
    with pytest.raises(ValueError, match="no split 'val'; there are: train"):
        evaluate_checkpoint(run, tmp_path / "train.extxyz", ["val"])
    with pytest.raises(ValueError, match=r"none\.lmdb"):
        evaluate_checkpoint(run, tmp_path / "none.lmdb")
    with pytest.raises(ValueError, match="held out"):
        evaluate_checkpoint("emt-small", held_out=True)
    bare = save_checkpoint(tmp_path / "bare.ckpt", load_model("emt-small"), {})
    with pytest.raises(ValueError, match="--data"):
        evaluate_checkpoint(bare)


def test_a_file_of_other_names_and_invalid_records(run, tmp_path):
    path = write(tmp_path / "mine.extxyz", ["x", "y"], my_energy=-2.0)
    summary, results = evaluate_checkpoint(run, path, energy="my_energy")
    assert summary["energy"] == "my_energy"
    assert results["mine"].target.tolist() == [-2.0, -2.0]
    frames = ase.io.read(path, ":")
    frames[1].positions[0] = float("nan")
    ase.io.write(path, frames)
    with pytest.raises(ValueError, match="sid y"):
        evaluate_checkpoint(run, path)
    with pytest.warns(UserWarning, match="skipped 1 of 2"):
        summary, results = evaluate_checkpoint(run, path, skip_bad=True)
    assert (results["mine"].sid, summary["skipped"]) == (("x",), {"mine": 1})


def test_a_named_data_set_has_its_own_baselines(tmp_path):
    summary, results = evaluate_checkpoint("emt-performer-small", splits=["val_id"])
    assert summary["splits"]["val_id"]["count"] == 411
    assert set(summary["baselines"]) == {"constant", "composition"}
    assert summary["splits"]["val_id"]["mae"] < summary["baselines"]["composition"]["val_id"]
    assert "yes" not in results["val_id"].columns.get("trained_on", ())
    with pytest.raises(ValueError, match="no split 'val'"):
        evaluate_checkpoint("emt-small", splits=["val"])


def test_results_go_beside_what_was_evaluated(run, tmp_path):
    assert evaluation_folder(run) == run / "evaluation"
    assert str(evaluation_folder("emt-small")) == "runs/emt-small-evaluation"
    export_checkpoint("emt-small", tmp_path / "exported")
    assert evaluation_folder(tmp_path / "exported") == tmp_path / "exported-evaluation"
