"""Folders of earlier evaluations."""

import json

import pytest

from flt_mol.evaluation.earlier import free_folder, replaced

ONE = {
    "checkpoint": "run",
    "checkpoint_file": "/run/best.ckpt",
    "energy": "y_relaxed",
    "splits": {"val_id": {"path": "/data/a.lmdb", "mae": 1.0}},
}
OTHERS = [
    {**ONE, "checkpoint_file": "/run/last.ckpt"},
    {**ONE, "energy": "y_init"},
    {**ONE, "splits": {"val_id": {"path": "/data/b.lmdb"}}},
    {**ONE, "splits": {**ONE["splits"], "val_ood": {"path": "/data/b.lmdb"}}},
    {**ONE, "held_out": {"val_id": "/data/a.lmdb"}},
]


def put(folder, summary):
    folder.mkdir(exist_ok=True)
    (folder / "results.json").write_text(json.dumps(summary))


@pytest.mark.parametrize("other", OTHERS)
def test_another_evaluation_keeps_its_folder(tmp_path, other):
    folder = tmp_path / "evaluation"
    assert free_folder(folder, ONE) == folder
    folder.mkdir()
    assert free_folder(folder, ONE) == folder
    put(folder, ONE)
    assert free_folder(folder, other) == tmp_path / "evaluation-2"
    put(tmp_path / "evaluation-2", other)
    assert free_folder(folder, other) == tmp_path / "evaluation-2"
    assert free_folder(folder, {**ONE, "energy": "third"}) == tmp_path / "evaluation-3"
    again = {**ONE, "checkpoint": "run/best.ckpt", "splits": {"val_id": {"path": "/data/a.lmdb"}}}
    assert free_folder(folder, again) == folder, "other words, other numbers"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"splits": 3}'])
def test_results_that_cannot_be_made_out_are_kept(tmp_path, text):
    (tmp_path / "results.json").write_text(text)
    assert free_folder(tmp_path, ONE).name == f"{tmp_path.name}-2"
    assert replaced(tmp_path, ONE) == "something else"


def test_a_file_is_in_the_way(tmp_path):
    (tmp_path / "evaluation").touch()
    assert free_folder(tmp_path / "evaluation", ONE).name == "evaluation-2"


def test_what_is_replaced_is_named(tmp_path):
    assert replaced(tmp_path / "none", ONE) == ""
    put(tmp_path, ONE)
    assert replaced(tmp_path, ONE) == ""
    assert replaced(tmp_path, OTHERS[0]) == "run on val_id"
    put(tmp_path, {"predictions": "p.csv", "splits": {"a": {}, "b": {}}})
    assert replaced(tmp_path, ONE) == "p.csv on a, b"
