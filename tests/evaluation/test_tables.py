import gzip
import json

import numpy as np
import pytest

from flt_mol.data import convert, open_dataset
from flt_mol.data.recipes import recipe
from flt_mol.data.tables import read_ids
from flt_mol.evaluation import SplitResult, read_energies, score_files, write_csv
from flt_mol.structures import Structures

PLAIN = "sid,energy\na,1.5\nb,-2\n"
WANTED = {("", "a"): 1.5, ("", "b"): -2.0}


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("p.csv", PLAIN.encode()),
        ("p.csv", PLAIN.replace(",", ";").encode("utf-8-sig")),
        ("p.tsv", PLAIN.replace(",", "\t").replace("\n", "\r\n\r\n").encode()),
        ("p.csv", b"note, prediction ,sid\nx, 1.5 , a \ny,-2,b"),
        ("p.json", json.dumps([{"sid": "a", "energy": 1.5}, {"sid": "b", "energy": -2}]).encode()),
        ("p.csv.gz", gzip.compress(PLAIN.encode(), mtime=0)),
    ],
)
def test_tables_of_many_programs(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    assert read_energies(tmp_path / name).energies == WANTED


def test_arrays_of_ids_and_energies(tmp_path):
    ids, energy = np.array([3, 1]), np.array([[0.5], [-1.0]], dtype=np.float32)
    for numbers in (ids, ids.astype(float), ids[:, None]):
        np.savez(tmp_path / "p.npz", ids=numbers, energy=energy)
        assert read_energies(tmp_path / "p.npz").energies == {("", "3"): 0.5, ("", "1"): -1.0}
    np.savez(tmp_path / "b.npz", ids=np.array([b"1"], "S1"), energy=np.array([1.5]))
    assert read_energies(tmp_path / "b.npz").energies == {("", "1"): 1.5}
    for arrays, words in (
        ({"ids": ids}, "holds ids, expected ids and energy"),
        ({"ids": ids, "energy": np.ones((2, 2))}, r"energy has shape \(2, 2\), expected \(2,\) or"),
        ({"ids": np.ones((2, 2)), "energy": energy}, r"ids has shape \(2, 2\)"),
        ({"ids": ids, "energy": np.ones((1, 2))}, r"energy has shape \(1, 2\)"),
    ):
        np.savez(tmp_path / "q.npz", **arrays)
        with pytest.raises(ValueError, match=rf"q\.npz .*{words}"):
            read_energies(tmp_path / "q.npz")
    np.savez(tmp_path / "s.npz", id_ids=ids, id_energy=energy)
    with pytest.raises(ValueError, match=r"s\.npz .*submission"):
        read_energies(tmp_path / "s.npz")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", r"p\.csv holds no energies"),
        ("sid,energy\n", r"p\.csv holds no energies"),
        ("name,energy\na,1\n", "name, energy; expected sid"),
        ("sid,value\na,1\n", "sid, value; expected sid and one of energy"),
        ("sid,energy,energy\na,1,1\n", "energy, energy"),
        ("sid,energy,prediction\na,1,1\n", "expected sid and one of energy, prediction"),
        ("sid,energy\na,1\nb\n", "line 3: expected 2 columns"),
        ("sid,energy\na,nan\n", r"line 2, sid a: energy is 'nan'"),
        ("sid,energy\na,\n", r"line 2, sid a: energy is ''"),
        ("sid,energy\na,1_0\n", r"line 2, sid a: energy is '1_0'"),
        ("sid,energy\na,\u0661\n", r"line 2, sid a: energy is '\u0661'"),
        ('[{"sid": "a", "energy": "1_0"}]', r"line 1, sid a: energy is '1_0'"),
        ("sid,energy\n,1\n", "line 2: .*empty"),
        ("sid,split,energy\na,,1\n", "line 2: .*empty"),
        ("sid,energy\na,1\na,2\n", "line 3, sid a: energy is 2.0, in line 2 1.0"),
        ("[1, 2]", "list of objects"),
        ("[{]", r"p\.csv"),
        ("[" * 100_000, r"p\.csv"),
        ('[{"sid": null, "energy": 1}]', "line 1: .*empty"),
        ('{"sid": ["a"], "energy": [1]}', "list of objects"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, text, words):
    with pytest.raises(ValueError, match=words):
        read_energies(write(tmp_path / "p.csv", text))


@pytest.mark.parametrize(
    "data", [gzip.compress(b"sid,energy\n" * 99, mtime=0)[:30], b"sid,\xff", b"PK\x03\x04"]
)
def test_damaged_files_are_named(tmp_path, data):
    (tmp_path / "p.csv").write_bytes(data)
    with pytest.raises(ValueError, match=r"p\.csv"):
        read_energies(tmp_path / "p.csv")
    with pytest.raises(ValueError, match=r"none\.csv"):
        read_energies(tmp_path / "none.csv")


def test_repeated_lines_are_dropped_and_counted(tmp_path):
    with pytest.warns(UserWarning, match="dropped 2 lines"):
        table = read_energies(write(tmp_path / "p.csv", PLAIN + "a,1.50\nb,-2.0\n"))
    assert table.energies == WANTED


def test_targets_are_matched_by_sid_not_by_place(tmp_path):
    predictions = write(tmp_path / "p.csv", "sid,energy\n1,0.5\n2,2.5\n3,1.0\n")
    targets = write(tmp_path / "ids.csv", "y_relaxed,energy,sid\n1.0,9,3\n0.0,9,1\n2.0,9,2\n")
    results = score_files(predictions, targets)
    assert list(results) == ["ids"]
    assert results["ids"].sid == ("3", "1", "2")
    assert results["ids"].error.tolist() == [0.0, 0.5, 0.5]


@pytest.mark.parametrize("suffix", [".extxyz", ".safetensors", ".aselmdb"])
def test_targets_of_stored_structures(suffix, tmp_path):
    cell = {"cell": 9 * np.eye(3), "pbc": True, "tags": [1, 2]}
    positions = [[0, 0, 0], [0, 0, 2]]
    systems = [
        Structures.single([29, 8], positions, sid=f"s{i}", energy=0.5 * i, **cell) for i in range(3)
    ]
    convert(open_dataset(systems), tmp_path / f"t{suffix}")
    predictions = write(tmp_path / "p.csv", "sid,energy\ns2,1.25\ns0,0.25\ns1,0.75\n")
    (result,) = score_files(predictions, tmp_path / f"t{suffix}").values()
    assert result.sid == ("s0", "s1", "s2")
    assert result.error.tolist() == [0.25] * 3
    twice = [*systems, Structures.single([29, 8], positions, sid="s1", energy=9.0, **cell)]
    convert(open_dataset(twice), tmp_path / f"twice{suffix}")
    with pytest.raises(ValueError, match=r"twice.*[34], sid s1: .* 9\.0, in .*twice.*[12] 0\.5"):
        score_files(predictions, tmp_path / f"twice{suffix}")


def test_targets_of_a_data_set_need_a_split(tmp_path):
    first = recipe("emt_adsorption").open("val_id").batch(range(411))
    rows = [f"{sid},{y}\n" for sid, y in zip(first.sid, first.energy.tolist(), strict=True)]
    predictions = write(tmp_path / "p.csv", "sid,energy\n" + "".join(rows))
    assert score_files(predictions, "emt-adsorption", ["val_id"])["val_id"].metrics["mae"] == 0
    with pytest.raises(ValueError, match="val_id"):
        score_files(predictions, "emt-adsorption")
    with pytest.raises(ValueError, match="nowhere"):
        score_files(predictions, "nowhere")


def test_splits_are_told_apart_where_both_files_have_them(tmp_path):
    text = "split,sid,energy\na,1,0\nb,1,1\nb,2,2\n"
    targets = write(tmp_path / "t.csv", text.replace("energy", "target"))
    predictions = write(tmp_path / "p.csv", text)
    results = score_files(predictions, targets)
    assert {split: result.error.tolist() for split, result in results.items()} == {
        "a": [0.0],
        "b": [0.0, 0.0],
    }
    assert list(score_files(predictions, targets, ["b"])) == ["b"]
    with pytest.raises(ValueError, match="no split 'c'; there are: a, b"):
        score_files(predictions, targets, ["c"])
    with pytest.raises(ValueError, match=r"p\.csv: sid 1 is in several splits"):
        score_files(predictions, write(tmp_path / "u.csv", "sid,energy\n1,0\n2,2\n"))


def test_missing_and_surplus_ids_are_named(tmp_path):
    predictions = write(tmp_path / "p.csv", "sid,energy\n1,0\n2,0\n7,0\n")
    targets = write(tmp_path / "t.csv", "sid,energy\n1,0\n2,0\n5,0\n")
    with pytest.raises(ValueError, match=r"no prediction for sid 5;"):
        score_files(predictions, targets)
    with pytest.raises(ValueError, match=r"no target for sid 7;"):
        score_files(predictions, write(tmp_path / "u.csv", "sid,energy\n1,0\n2,0\n"))
    with pytest.warns(UserWarning, match="1 targets and 1 predictions"):
        (result,) = score_files(predictions, targets, common_ids=True).values()
    assert result.sid == ("1", "2")
    nothing = write(tmp_path / "v.csv", "sid,energy\n9,0\n")
    with pytest.raises(ValueError, match="no prediction for sid 9"):
        score_files(predictions, nothing, common_ids=True)
    other = write(tmp_path / "w.csv", "sid,energy,split\n1,0,mine\n")
    of_split = write(tmp_path / "x.csv", "sid,energy,split\n1,0,val_id\n")
    with pytest.raises(ValueError, match="splits are mine against val_id"):
        score_files(other, of_split, common_ids=True)


def test_what_an_evaluation_wrote_is_read_back(tmp_path):
    result = SplitResult(
        sid=(1, "b"),
        prediction=np.array([1 / 3, -0.1]),
        target=np.array([0.25, -0.2]),
    )
    path = write_csv({"val": result}, tmp_path / "p.csv")
    (back,) = score_files(path).values()
    assert back.sid == ("1", "b")
    assert back.prediction.tolist() == result.prediction.tolist()
    assert back.target.tolist() == result.target.tolist()
    assert score_files(path, path)["val"].target.tolist() == [0.25, -0.2]
    write(path, "sid,energy\na,1\n")
    with pytest.raises(ValueError, match="sid and one of target, y_relaxed"):
        score_files(path, path)


def test_sids_that_repeat_are_told_apart(tmp_path):
    numbers = np.arange(4.0)
    result = SplitResult(sid=("a", "b", "a", "c"), prediction=numbers, target=numbers)
    with pytest.warns(UserWarning, match=r"val: sids that repeat.*\(a\)"):
        path = write_csv({"val": result}, tmp_path / "p.csv")
    assert score_files(path)["val"].sid == ("a#0", "b", "a#1", "c")


def test_ids_by_split(tmp_path):
    path = write(tmp_path / "ids.csv", "sid,split\n1,a\n1,b\n2,b\n")
    assert read_ids(path) == {"a": ["1"], "b": ["1", "2"]}
    for text in ("sid,split\n1,a\n1,a\n", "sid\n1\n", "sid,split\n1,\n", ""):
        with pytest.raises(ValueError, match=r"ids\.csv"):
            read_ids(write(path, text))
    with pytest.raises(ValueError, match="sid 1 of a is in lines 2 and 4"):
        read_ids(write(path, "sid,split\n1,a\n1,b\n1,a\n"))
