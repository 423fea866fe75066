"""Splits: every system in exactly one file, groups whole, and a recipe that training takes."""

import hashlib
import os

import numpy as np
import pytest
import yaml

from flt_mol.data import open_dataset, split
from flt_mol.data.recipes import recipe
from flt_mol.data.splitting import _assign, _groups, _numbers
from flt_mol.structures import Structures
from helpers.systems import make_record, make_system, same, write_records


@pytest.fixture
def source(tmp_path):
    records = [make_record(i, 5 + i % 4) for i in range(60)]
    return open_dataset(write_records(tmp_path / "a.lmdb", records))


def test_every_system_once(source, tmp_path):
    done = []
    result = split(
        source,
        tmp_path / "mine",
        {"train": 0.8, "val_id": 0.1, "test": None},
        progress=lambda n, total: done.append((n, total)),
    )
    assert {name: part.systems for name, part in result.splits.items()} == {
        "train": 48, "val_id": 6, "test": 6,
    }  # fmt: skip
    mine = recipe(tmp_path / "mine")
    batches = [mine.open(name).batch(range(len(mine.open(name)))) for name in mine.splits]
    sids = [sid for batch in batches for sid in batch.sid]
    assert sorted(sids) == list(range(60))
    assert all(list(batch.sid) == sorted(batch.sid) for batch in batches)
    order = [int(np.argsort(sids)[i]) for i in range(60)]
    assert same(Structures.cat(batches).select(order), source.batch(range(60)))
    assert done[-1] == (120, 120)
    assert sorted(os.listdir(tmp_path)) == ["a.lmdb", "mine"]


def test_the_recipe(source, tmp_path):
    split(source, tmp_path / "mine", {"train": 40, "val_id": 20}, seed=3, group_by="slab")
    content = yaml.safe_load((tmp_path / "mine" / "dataset.yaml").read_text())
    assert content["name"] == "mine"
    assert content["split"] == {
        "seed": 3, "group_by": "slab", "fractions": {"train": 40, "val_id": 20},
        "by": "flt_mol.data.splitting.split",
    }  # fmt: skip
    for name, entry in content["splits"].items():
        data = (tmp_path / "mine" / entry["file"]).read_bytes()
        assert entry["file"] == f"{name}.safetensors"
        assert entry["bytes"] == len(data)
        assert entry["sha256"] == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("group_by", ["slab", "composition", "adsorbate"])
def test_groups_stay_together(group_by, source, tmp_path):
    split(source, tmp_path / "mine", {"train": 0.7, "val_id": 0.3}, group_by=group_by)
    mine = recipe(tmp_path / "mine")

    def group(system):
        z, tags = system.atomic_numbers, system.tags
        if group_by == "slab":
            return system.info["slab"][0]
        return tuple(sorted((z if group_by == "composition" else z[tags == 2]).tolist()))

    train, val = ({group(system) for system in mine.open(name)} for name in mine.splits)
    assert not train & val


def test_seeds(source, tmp_path):
    found = []
    for i, seed in enumerate((1, 1, 2)):
        split(source, tmp_path / f"mine{i}", {"train": 0.5, "val_id": 0.5}, seed=seed)
        found.append([s.sid[0] for s in recipe(tmp_path / f"mine{i}").open("train")])
    assert found[0] == found[1] != found[2]


def test_assignments_are_those_of_earlier_versions():
    train, val = _expected()
    groups = [str(i) for i in range(12)]
    assert _assign(groups, {"train": 8, "val": 4}, 0) == {"train": train, "val": val}


def _expected():
    order = sorted(range(12), key=lambda i: hashlib.sha256(f"0:{i}".encode()).digest())
    lacking, found = [8, 4], ([], [])
    for i in order:
        which = 0 if lacking[0] >= lacking[1] else 1
        lacking[which] -= 1
        found[which].append(i)
    return sorted(found[0]), sorted(found[1])


def test_shares():
    assert _numbers({"a": 0.8, "b": 0.1, "c": 0.1}, 12) == {"a": 10, "b": 1, "c": 1}
    assert _numbers({"train": None, "val": 5}, 12) == {"train": 7, "val": 5}
    assert sum(_numbers({"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}, 100).values()) == 100
    for wrong in (
        {},
        {"a": 0.5, "b": 0.4},
        {"a": 0.9, "b": 0.4},
        {"a": 20},
        {"a": 20, "b": None},
        {"a": None, "b": None},
        {"a": 0.5, "b": 6},
        {"a": -1, "b": None},
        {"a": True, "b": None},
        {"a": float("nan"), "b": None},
        {"../a": None},
    ):
        with pytest.raises(ValueError, match="share|split"):
            _numbers(wrong, 12)


def test_one_form_for_what_means_the_same():
    kinds = [7, "7", [7], "007"]
    source = open_dataset([make_system(i, info={"kind": kind}) for i, kind in enumerate(kinds)])
    assert _groups(source, "kind") == ["7", "7", "7", "007"]


def test_refusals(source, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    with pytest.raises(ValueError, match="full exists"):
        split(source, tmp_path / "full", {"train": None})
    with pytest.raises(ValueError, match=r"key 0.*nothing.*slab"):
        split(source, tmp_path / "mine", {"train": None}, group_by="nothing")
    with pytest.raises(ValueError, match=r"val.*60 systems in 1 groups"):
        split(source, tmp_path / "mine", {"train": 0.5, "val": 0.5}, group_by="facet")
    with pytest.raises(ValueError, match="train"):
        split(source, tmp_path / "mine", {"train": 61})
    assert not (tmp_path / "mine").exists()


def test_no_tags_to_group_by(tmp_path):
    source = open_dataset([make_system(i, 4, tags=[0] * 4) for i in range(4)])
    with pytest.raises(ValueError, match="tags"):
        split(source, tmp_path / "mine", {"train": None}, group_by="adsorbate")


def test_invalid_records(tmp_path):
    records = [make_record(i) for i in range(10)]
    records[4]["y_relaxed"] = float("nan")
    path = write_records(tmp_path / "a.lmdb", records)
    with pytest.raises(ValueError, match="sid 4"):
        split(open_dataset(path), tmp_path / "mine", {"train": 0.5, "val": 0.5})
    assert sorted(os.listdir(tmp_path)) == ["a.lmdb"]
    result = split(open_dataset(path, on_error="skip"), tmp_path / "mine", {"train": 6, "val": 3})
    assert len(result.skipped) == 1
    assert "sid 4" in result.skipped[0]


def test_the_rule_of_tags_goes_along(tmp_path):
    emt = recipe("emt_adsorption")
    split(emt.open("val_id"), tmp_path / "mine", {"train": 0.9, "val": 0.1}, group_by="slab")
    assert recipe(tmp_path / "mine").metadata["tag_rule"] == "half"
