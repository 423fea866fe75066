"""Folders of earlier evaluations."""

import json

import pytest

from flt_mol.evaluation.earlier import free_folder, neighbours, replaced

FILE = {"file": "/data/a.lmdb", "fingerprint": "00"}
ONE = {
    "checkpoint": "run",
    "checkpoint_file": "/run/best.ckpt",
    "energy": "y_relaxed",
    "splits": {"val_id": {"path": "a.lmdb", "mae": 1.0, "count": 4}},
    "evaluated": {"val_id": FILE},
}
OTHERS = [
    {**ONE, "checkpoint_file": "/run/last.ckpt"},
    {**ONE, "energy": "y_init"},
    {**ONE, "evaluated": {"val_id": {**FILE, "file": "/data/b.lmdb"}}},
    {**ONE, "evaluated": {"val_id": {**FILE, "fingerprint": "01"}}},
    {**ONE, "splits": {"val_id": {"path": "a.lmdb", "count": 3}}},
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
    again = {"val_id": {"path": "../data/a.lmdb", "mae": 2.0, "count": 4}}
    again = {**ONE, "checkpoint": "run/best.ckpt", "splits": again}
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
    assert replaced(tmp_path, OTHERS[0]) == "run on val_id (4 systems, a.lmdb)"
    put(tmp_path, {"predictions": "p.csv", "splits": {"a": {}, "b": {}}})
    assert replaced(tmp_path, ONE) == "p.csv on a, b"


def test_what_is_beside_it_is_named(tmp_path):
    several = {"val_id": {"count": 1, "path": "a"}, "val_ood": {"count": 1999, "path": "b"}}
    for name, summary in (
        ("evaluation-10", {**ONE, "splits": several}),
        ("evaluation-2", ONE),
        ("evaluation", {**ONE, "checkpoint": "run/last.ckpt"}),
        ("evaluations", ONE),
        ("my-evaluation", ONE),
    ):
        put(tmp_path / name, summary)
    (tmp_path / "evaluation-3").mkdir()
    assert neighbours(tmp_path / "evaluation-2") == [
        f"{tmp_path / 'evaluation'}: run/last.ckpt on val_id (4 systems, a.lmdb)",
        f"{tmp_path / 'evaluation-10'}: run on val_id, val_ood (2,000 systems)",
    ]
    assert len(neighbours(tmp_path / "evaluation")) == 2
    assert neighbours(tmp_path / "other") == []
