"""Splitting a data set into files, and the recipe that describes them."""

from __future__ import annotations

import hashlib
import os
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flt_mol.data import open_dataset
from flt_mol.data.catalog import recipe
from flt_mol.data.conversion.shares import assign, good_records, groups_of, numbers
from flt_mol.data.conversion.split import split

pytestmark = pytest.mark.filterwarnings("ignore:.*all tags.*:UserWarning")
THREE = {"train": 0.8, "val": 0.1, "test": 0.1}


@pytest.fixture
def records(make_record):
    return [make_record(sid=i, y_relaxed=i / 7, slab=f"slab {i // 4}") for i in range(20)]


def test_every_system_is_in_exactly_one_split(records, tmp_path):
    given = open_dataset(records)
    result = split(given, tmp_path / "data", THREE, workers=1)
    found = recipe(tmp_path / "data")
    sids = {name: [s.sid[0] for s in found.open(name)] for name in found.splits}
    assert {name: len(of) for name, of in sids.items()} == {"train": 16, "val": 2, "test": 2}
    assert sorted(sid for of in sids.values() for sid in of) == list(range(20))
    assert all(of == sorted(of) for of in sids.values())
    assert sids["train"] != list(range(16))
    assert {name: r.systems for name, r in result.splits.items()} == {
        name: len(of) for name, of in sids.items()
    }
    assert sorted(os.listdir(tmp_path)) == ["data"]
    assert sorted(os.listdir(tmp_path / "data")) == [
        "dataset.yaml", "test.lmdb", "train.lmdb", "val.lmdb",
    ]  # fmt: skip


def test_the_recipe_says_what_the_files_hold(records, tmp_path):
    split(open_dataset(records), tmp_path / "mine", THREE, workers=1, seed=3)
    about = recipe(tmp_path / "mine").metadata
    assert (about["name"], about["split"]["seed"]) == ("mine", 3)
    for name, entry in about["splits"].items():
        content = (tmp_path / "mine" / f"{name}.lmdb").read_bytes()
        assert entry == {
            "file": f"{name}.lmdb",
            "count": {"train": 16, "val": 2, "test": 2}[name],
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
    energies = [s.energy.item() for s in recipe(tmp_path / "mine").open("train")]
    assert about["normalizer"]["mean"] == pytest.approx(np.mean(energies), rel=1e-14)
    assert about["normalizer"]["std"] == pytest.approx(np.std(energies), rel=1e-14)
    assert about["elements"] == ["C", "O", "Pt"]


def test_without_targets_there_is_no_normaliser(make_record, tmp_path):
    given = open_dataset([make_record(y_relaxed=...) for _ in range(4)])
    split(given, tmp_path / "data", {"a": 2, "b": None}, workers=1)
    assert "normalizer" not in recipe(tmp_path / "data").metadata


@pytest.mark.parametrize("kind", ["lmdb", "aselmdb", "extxyz"])
def test_systems_of_a_group_stay_together(kind, records, tmp_path):
    result = split(
        open_dataset(records), tmp_path / "data", {"train": 0.6, "val": 0.2, "test": 0.2},
        group_by="slab", kind=kind, workers=1,
    )  # fmt: skip
    found = recipe(tmp_path / "data")
    slabs = [{s.info["slab"][0] for s in found.open(name)} for name in found.splits]
    assert sorted(slab for of in slabs for slab in of) == [f"slab {i}" for i in range(5)]
    assert [r.systems for r in result.splits.values()] == [12, 4, 4]


def test_groups_of_the_same_composition(make_record, tmp_path):
    numbers = [[78, 78, 6, 8, 1, 1 + i % 3] for i in range(12)]
    given = [make_record(sid=i, atomic_numbers=z) for i, z in enumerate(numbers)]
    given[5]["atomic_numbers"] = numbers[5][::-1]
    given[5]["pos"] = given[5]["pos"].flip(0)
    split(
        open_dataset(given), tmp_path / "data", {"train": 8, "val": 4}, group_by="composition",
        workers=1,
    )  # fmt: skip
    found = recipe(tmp_path / "data")
    train, val = ({s.sid[0] % 3 for s in found.open(name)} for name in found.splits)
    assert len(train) == 2
    assert not train & val


def test_a_record_without_the_group_is_named(records, tmp_path):
    del records[3]["slab"]
    with pytest.raises(ValueError, match="system 3: no field slab to group by; stored: .*natoms"):
        split(open_dataset(records), tmp_path / "data", THREE, group_by="slab")
    assert os.listdir(tmp_path) == []


def test_bad_records_are_left_out_on_demand(records, tmp_path):
    records[5]["pos"] = [1]
    given = open_dataset(records)
    with pytest.raises(ValueError, match="system 5, sid 5: pos"):
        split(given, tmp_path / "data", THREE, workers=1)
    result = split(given, tmp_path / "data", THREE, workers=1, on_error="skip")
    assert sum(r.systems for r in result.splits.values()) == 19
    assert len(result.skipped) == 1
    about = recipe(tmp_path / "data").metadata["splits"]
    assert sum(entry["count"] for entry in about.values()) == 19


def test_a_folder_with_something_in_it_is_refused(records, tmp_path):
    (tmp_path / "data").mkdir()
    split(open_dataset(records), tmp_path / "data", THREE, workers=1)
    with pytest.raises(ValueError, match="exists already; choose a new or empty folder"):
        split(open_dataset(records), tmp_path / "data", THREE, workers=1)


def test_the_source_is_not_split_into_itself(write_lmdb, records, tmp_path):
    (tmp_path / "data").mkdir()
    write_lmdb(dict(enumerate(records)), name="data/data.lmdb")
    for place in ("data", "data/inside"):
        with pytest.raises(ValueError, match="its own source"):
            split(open_dataset(tmp_path / "data"), tmp_path / place, THREE)


def test_progress_runs_to_the_end_once(records, tmp_path):
    seen = []
    split(
        open_dataset(records), tmp_path / "data", THREE, workers=1,
        progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    assert seen == sorted(seen)
    assert seen[-1] == (40, 40)


@pytest.mark.parametrize(("shares", "count", "expected"), [
    ({"a": 0.8, "b": 0.1, "c": 0.1}, 10, [8, 1, 1]),
    ({"a": 0.1, "b": 0.2, "c": 0.7}, 10, [1, 2, 7]),
    ({"a": 0.5, "b": 0.5}, 3, [2, 1]),
    ({"a": 7, "b": 3}, 10, [7, 3]),
    ({"a": None, "b": 3}, 10, [7, 3]),
    ({"a": None, "b": 0.3}, 10, [7, 3]),
    ({"all": None}, 10, [10]),
    ({"all": 1.0}, 10, [10]),
])  # fmt: skip
def test_shares_as_numbers(shares, count, expected):
    assert list(numbers(shares, count).values()) == expected


@pytest.mark.parametrize(("shares", "message"), [
    ({}, "takes the rest"),
    ({"a": None, "b": None}, "takes the rest"),
    ({"a": 0.8, "b": 0.1}, "sum to 0.9, not to 1"),
    ({"a": 0.8, "b": 0.3, "c": None}, "sum to 1.1, not to 1"),
    ({"a": 8, "b": 3}, "sum to 11, not to 10"),
    ({"a": 8, "b": 0.1}, "fractions or counts, not both"),
    ({"a": 1.5, "b": -0.5}, "split b has share -0.5"),
    ({"a": 0.0, "b": 1.0}, "split a has share 0.0"),
    ({"a": True}, "split a has share True"),
    ({"a": float("nan")}, "split a has share nan"),
    ({"a": "most"}, "split a has share 'most'"),
    ({"../a": 1.0}, "split '../a'"),
])  # fmt: skip
def test_shares_that_are_none(shares, message):
    with pytest.raises(ValueError, match=message):
        numbers(shares, 10)


def test_a_split_without_systems_is_refused():
    with pytest.raises(
        ValueError,
        match="split test gets none of 6 systems in 2 groups, up to 3 .* too few for 3 splits",
    ):
        assign(["x", "x", "x", "y", "y", "y"], {"train": 3, "val": 2, "test": 1}, 0)


@pytest.mark.parametrize(
    ("groups", "counts", "works"),
    [
        ("abc", {"train": 2, "val": 1, "test": 0}, "of 3 systems: .* train=1 val=1 test=1$"),
        (
            "aaaabbbbccc",
            {"train": 9, "val": 1, "test": 1},
            "systems in 3 groups, up to 4 in one",
        ),
        ("abcdefgh", {"train": 8, "val": 0}, "--shares train=7 val=1$"),
        ("aaaabbbbccccddddeeeeffff", {"train": 22, "val": 1, "test": 1}, "train=16 val=4 test=4$"),
        (
            "aaabbc",
            {"train": 5, "val": 1, "test": 0},
            r"\(which makes train \d, val \d, test \d, as",
        ),
    ],
)
def test_shares_that_work_are_named(groups, counts, works):
    with pytest.raises(ValueError, match=works) as error:
        assign(list(groups), counts, 0)
    told, _, makes = str(error.value).partition("--shares ")[2].partition(" (which makes ")
    words = told.split()
    shares = {name: int(count) for name, _, count in (word.partition("=") for word in words)}
    assert list(shares) == list(counts)
    assert sum(shares.values()) == len(groups)
    made = {name: len(indices) for name, indices in assign(list(groups), shares, 0).items()}
    assert all(made.values())
    if makes:
        assert makes.startswith(", ".join(f"{name} {count}" for name, count in made.items()))
    else:
        assert made == shares


def test_groups_worked_out_from_tags(make_record):
    def group(field, records):
        return groups_of(open_dataset(records), field, range(len(records)), "raise")

    atoms = [6, 8, 78, 78]
    one = make_record(atomic_numbers=atoms, pos=np.eye(4, 3), tags=[2, 2, 1, 0], slab=...)
    other = make_record(atomic_numbers=atoms, pos=np.eye(4, 3), tags=[2, 1, 1, 0], slab=...)
    assert group("adsorbate", [one, other]) == ["C1O1", "C1"]
    assert group("slab", [one, other]) == ["Pt2", "O1Pt2"]
    assert group("composition", [one, other]) == ["C1O1Pt2"] * 2
    bare = {**one, "tags": [0, 0, 0, 0]}
    with pytest.raises(ValueError, match=r"system 1: no field slab .*tag_slab\(atoms\) and wri"):
        group("slab", [one, bare])
    with pytest.raises(ValueError, match=r"as atoms.info\['facet'\], or .* composition, adsorbate"):
        group("facet", [one])
    with pytest.raises(ValueError, match="only some records have a field slab"):
        group("slab", [one, {**one, "slab": 3}])
    with pytest.raises(ValueError, match="system 1: no field slab to group by; stored"):
        group("slab", [{**one, "slab": 3}, one])


def test_groups_that_do_not_fit_are_told_of(records, tmp_path):
    for record in records[4:]:
        record["slab"] = "all the others"
    given = open_dataset(records)
    with pytest.warns(UserWarning, match="fit the shares: systems of train 4 .asked for: 10"):
        split(given, tmp_path / "data", {"train": 10, "val": 10}, group_by="slab", workers=1)


@settings(max_examples=100, deadline=None)
@given(
    groups=st.lists(st.sampled_from("abcdefgh"), min_size=3, max_size=60),
    weights=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    seed=st.integers(),
)
def test_any_groups_are_spread_as_wanted(groups, weights, seed):
    wanted = numbers({f"s{i}": w / sum(weights) for i, w in enumerate(weights)}, len(groups))
    assert sum(wanted.values()) == len(groups)
    try:
        places = assign(groups, wanted, seed)
    except ValueError:
        return  # fewer groups than splits, or nearly so
    assert sorted(i for of in places.values() for i in of) == list(range(len(groups)))
    for group in set(groups):
        assert sum(any(groups[i] == group for i in of) for of in places.values()) == 1
    largest = max(groups.count(group) for group in set(groups))
    assert all(abs(len(places[name]) - wanted[name]) <= 2 * largest for name in wanted)


def test_the_order_is_the_same_everywhere():
    """Only a hash decides, so that these numbers hold on every machine and for ever."""
    names = [str(i) for i in range(12)]
    assert assign(names, {"a": 8, "b": 4}, 0)["b"] == [1, 5, 6, 8]
    assert assign(names, {"a": 8, "b": 4}, 1)["b"] == [1, 3, 5, 10]


def test_the_normaliser_is_of_the_systems_that_have_targets(make_record, tmp_path):
    given = [make_record(sid=i, y_relaxed=None if i % 3 else i / 7) for i in range(12)]
    split(open_dataset(given), tmp_path / "data", {"train": 11, "val": None}, workers=1)
    made = recipe(tmp_path / "data")
    energies = [s.energy.item() for s in made.open("train") if s.energy is not None]
    assert 3 <= len(energies) <= 4
    normaliser = made.metadata["normalizer"]
    assert normaliser["mean"] == pytest.approx(np.mean(energies), rel=1e-14)
    assert normaliser["std"] == pytest.approx(np.std(energies), rel=1e-14)


@pytest.mark.parametrize("forms", [
    [(1, 1, 1), [1, 1, 1], np.array([1, 1, 1]), torch.tensor([1.0, 1.0, 1.0]), ("1", "1", 1.0)],
    [7, 7.0, np.int32(7), np.float32(7), "7", " 7", b"7", [7], (7,), torch.tensor([[7]])],
    ["Pt(111)", np.str_("Pt(111)"), b"Pt(111)", ["Pt(111)"], np.array("Pt(111)")],
    [True, np.True_, 1],
    [{"a": 1, "b": [2]}, {"b": (2.0,), "a": "1"}],
    [{1, 2}, frozenset((2, 1))],
])  # fmt: skip
def test_what_means_the_same_is_one_group(forms, make_record):
    given = open_dataset([make_record(sid=i, slab=form) for i, form in enumerate(forms)])
    assert len(set(groups_of(given, "slab", range(len(forms)), "raise"))) == 1


def test_what_differs_is_several_groups(make_record):
    forms = [(1, 1, 1), (1, 1, 0), [[1, 1], 1], 1, 1.5, "01", "1.5", "a", "b", (), float("nan")]
    given = open_dataset([make_record(sid=i, slab=form) for i, form in enumerate(forms)])
    assert len(set(groups_of(given, "slab", range(len(forms)), "raise"))) == len(forms)


def test_shares_are_drawn_of_the_good_records(records, tmp_path):
    drawn = split(open_dataset(records), tmp_path / "all", THREE, workers=1)
    test = recipe(tmp_path / "all").open("test")
    for system in test:
        records[system.sid[0]]["pos"] = [1]
    given = open_dataset(records)
    result = split(given, tmp_path / "data", THREE, workers=1, on_error="skip")
    assert drawn.skipped == drawn.bad == ()
    assert [r.systems for r in result.splits.values()] == [14, 2, 2]
    assert len(result.skipped) == len(result.bad) == 2
    assert given.skipped == []
    made = recipe(tmp_path / "data")
    sids = sorted(s.sid[0] for name in made.splits for s in made.open(name))
    assert sids == sorted(set(range(20)) - {s.sid[0] for s in test})


def test_numbers_of_systems_are_of_the_good_ones(records, tmp_path):
    records[5]["pos"] = [1]
    given = open_dataset(records)
    with pytest.raises(ValueError, match="sum to 20, not to 19 .*1 bad records of 20 .*system 5"):
        split(given, tmp_path / "data", {"a": 10, "b": 10}, workers=1, on_error="skip")
    for record in records:
        record["pos"] = [1]
    with pytest.raises(ValueError, match="every record is bad; the first: .*system 0"):
        split(open_dataset(records), tmp_path / "data", THREE, workers=1, on_error="skip")


def test_records_opened_without_the_bad_ones_are_not_read_again(records, write_lmdb, monkeypatch):
    records[5]["pos"] = [1]
    given = open_dataset(write_lmdb(dict(enumerate(records))), on_error="skip")
    monkeypatch.setattr(type(given), "batch", None)
    assert good_records(given) == (list(range(19)), [])


def test_a_split_of_which_nothing_can_be_written_is_named(records, tmp_path):
    for record in records[::2]:
        record["slab"] = 2
        record["notes"] = b"1" * (1 << 25)  # can be read, and has no place in the files
    for record in records[1::2]:
        record["slab"] = 1
    shares = {"train": 0.5, "val": 0.5}
    message = r"split (train|val): .*each of the 10 records chosen is bad; the first: .*notes"
    with pytest.raises(ValueError, match=message):
        split(
            open_dataset(records), tmp_path / "data", shares, group_by="slab", workers=1,
            on_error="skip",
        )  # fmt: skip


def test_a_rule_of_tags_goes_with_the_systems(records, tmp_path):
    folder = tmp_path / "mine"
    for name, rule in (("first", "half"), ("second", 2)):
        split(open_dataset(records), folder, THREE, workers=1)
        with (folder / "dataset.yaml").open("a") as file:
            file.write(f"tag_rule: {rule}\n")
        split(open_dataset(folder / "train.lmdb"), tmp_path / name, {"a": 0.5, "b": 0.5}, workers=1)
        assert recipe(tmp_path / name).metadata["tag_rule"] == rule
        shutil.rmtree(folder)
    split(open_dataset(records), tmp_path / "third", THREE, workers=1)
    assert "tag_rule" not in recipe(tmp_path / "third").metadata
