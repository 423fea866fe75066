"""Data sets by name and folder, and where their files are searched."""

import pytest
import yaml

from flt_mol.data import open_dataset
from flt_mol.data.recipes import (
    find_recipe,
    names,
    open_source,
    recipe,
    skipped_message,
)
from helpers.systems import make_record, write_records

FILE = "set/data/all/val_id/data.lmdb"


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("FLT_MOL_DATA", str(tmp_path / "data"))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "my_set").mkdir()
    archive = {"url": "http://x/set.tar.gz", "bytes": 7, "md5": "0" * 32}
    splits = {"val_id": {"file": FILE, "count": 3, "bytes": 9}, "train": "train.lmdb"}
    content = {"name": "my_set", "archive": archive, "splits": splits}
    (tmp_path / "my_set" / "dataset.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return tmp_path / "my_set"


def put(path, count=3):
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_records(path, [make_record(i) for i in range(count)])


def test_shipped_ones():
    assert names() == ["emt_adsorption", "emt_relaxations", "oc20_is2re", "xtb_clusters"]
    assert recipe("oc20-is2re").name == recipe("oc20_is2re").name == "oc20_is2re"
    for name in names():
        found = recipe(name)
        assert found.name == name
        assert all(found.expected(split)["count"] > 0 for split in found.splits)


def test_oc20():
    found = recipe("oc20-is2re")
    counts = {split: found.expected(split)["count"] for split in found.splits}
    assert counts == {
        "train_10k": 10000, "train_100k": 100000, "train_all": 460328,
        "val_id": 24943, "val_ood_ads": 24961, "val_ood_cat": 24963, "val_ood_both": 24987,
        "test_id": 24948, "test_ood_ads": 24930, "test_ood_cat": 24965, "test_ood_both": 24985,
    }  # fmt: skip
    assert found.expected("train_all")["md5"] == "13c3fa5f27e648468625c5c5bc840e82"
    assert found.metadata["archive"]["md5"] == "cfc04dd2f87b4102ab2f607240d25fb1"
    assert found.metadata["archive"]["bytes"] == 8593151089
    assert sum(found.expected(split)["bytes"] for split in found.splits) == 103_352_344_576
    assert found.expected("val_id")["file"].endswith("all/val_id/data.lmdb")


def test_a_folder_or_its_file(folder):
    for given in (folder, str(folder), folder / "dataset.yaml"):
        assert recipe(given).name == "my_set"
        assert list(recipe(given).splits) == ["val_id", "train"]
    assert recipe(folder).expected("train") == {"file": "train.lmdb"}


def test_places_in_order(folder, tmp_path):
    found = recipe(folder)
    with pytest.raises(ValueError, match=r"val_id.*flt-mol data download my-set --split val_id"):
        found.path("val_id")
    for path in (
        tmp_path / "cache" / "flt_mol" / "data" / "my_set" / "all" / "val_id" / "data.lmdb",
        tmp_path / "data" / FILE,
        tmp_path / "data" / "my-set" / FILE,
        tmp_path / "data" / "my_set" / FILE,
        tmp_path / "data" / "my_set" / "flat" / "val_id.safetensors",
        folder / FILE,
        folder / "flat" / "val_id.safetensors",
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
        assert found.path("val_id") == path
    assert found.find("val_id", tmp_path / "elsewhere") is None


def test_a_short_name_in_the_common_folder_may_be_of_another_data_set(folder, tmp_path):
    put(tmp_path / "data" / "train.lmdb")
    assert recipe(folder).find("train") is None
    put(tmp_path / "data" / "my-set" / "train.lmdb")
    assert recipe(folder).find("train") is not None


def test_a_data_folder_that_does_not_exist_is_named(folder, tmp_path):
    with pytest.raises(ValueError, match="searched in .*data"):
        recipe(folder).path("val_id")


def test_opening(folder):
    put(folder / FILE)
    assert len(recipe(folder).open("val_id", ignore_energy=True)) == 3
    put(folder / "train.lmdb")
    assert len(recipe(folder).open("train")) == 3


def test_a_part_is_not_taken_for_the_whole(folder):
    put(folder / FILE, 2)
    with pytest.warns(UserWarning, match="holds 2 systems.*3"):
        recipe(folder).open("val_id")


def test_unknown_names(folder):
    with pytest.raises(ValueError, match=r"val_di.*did you mean val_id"):
        recipe(folder).path("val_di")
    with pytest.raises(ValueError, match=r"oc20_is2er.*did you mean oc20_is2re"):
        recipe("oc20_is2er")
    with pytest.raises(ValueError, match=r"dataset\.yaml"):
        recipe(folder.parent)


@pytest.mark.parametrize("text", ["[1", "3", "splits: []", "splits: {}", "splits: {a: 3}", "\x00"])
def test_other_descriptions(text, folder):
    (folder / "dataset.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"dataset\.yaml"):
        recipe(folder)


def test_sources(folder, tmp_path):
    path = put(folder / FILE)
    assert find_recipe(path) is None
    assert find_recipe(folder).name == "my_set"
    assert len(open_source(path)) == len(open_source(folder, "val_id")) == 3
    with pytest.raises(ValueError, match="has no splits"):
        open_source(path, "val_id")
    with pytest.raises(ValueError, match=r"--split: val_id, train"):
        open_source(folder)
    with pytest.raises(ValueError, match=r"nothing does not exist"):
        open_source("nothing")


def test_the_name_of_a_data_set_in_place_of_a_path():
    with pytest.raises(ValueError, match=r"emt-adsorption.*recipe"):
        open_dataset("emt-adsorption")


def test_skipped_message(tmp_path):
    records = [make_record(i) for i in range(9)]
    for record in records[:7]:
        record["y_relaxed"] = float("nan")
    dataset = open_dataset(write_records(tmp_path / "a.lmdb", records), on_error="skip")
    text = skipped_message(dataset)
    assert "skipped 7 of 9 records" in text
    assert "and 2 more" in text
