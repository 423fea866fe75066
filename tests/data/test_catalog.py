"""Recipes: data sets by name and by folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flt_mol.data import catalog
from flt_mol.data.catalog import recipe

YAML = """\
name: two_slabs
license: MIT
splits:
  train: {file: train.lmdb, count: 2}
  val: {file: parts}
"""


@pytest.fixture
def folder(tmp_path: Path, write_lmdb: Any, make_record: Any) -> Path:
    """A data set of one's own."""
    (tmp_path / "own" / "parts").mkdir(parents=True)
    (tmp_path / "own" / "dataset.yaml").write_text(YAML)
    write_lmdb({i: make_record(sid=i) for i in range(2)}, name="own/train.lmdb")
    write_lmdb({0: make_record(sid="v")}, name="own/parts/data.0.lmdb")
    return tmp_path / "own"


def test_a_folder(folder: Path) -> None:
    found = recipe(folder)
    assert found.name == "two_slabs"
    assert found.folder == folder
    assert dict(found.splits) == {"train": folder / "train.lmdb", "val": folder / "parts"}
    assert found.metadata["license"] == "MIT"
    assert found.metadata["splits"]["train"]["count"] == 2
    assert found.path("val") == folder / "parts"
    assert [system.sid[0] for system in found.open("train", require_energy=True)] == [0, 1]
    assert found.open("val")[0].sid == ("v",)
    assert recipe(str(folder)).folder == recipe(folder / "dataset.yaml").folder == folder


def test_paths_do_not_depend_on_the_working_directory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    found = recipe("own")
    monkeypatch.chdir("/")
    assert len(found.open("train")) == 2


def test_names(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "resource_folder", lambda kind: folder.parent)
    assert catalog.names() == ["own"]
    assert recipe("own").name == "two_slabs"
    with pytest.raises(
        ValueError, match=r"no data set 'onw' \(did you mean own\?\); there are: own"
    ):
        recipe("onw")


def test_unknown_splits(folder: Path) -> None:
    with pytest.raises(
        ValueError, match=r"no split 'tran' \(did you mean train\?\); .* train, val"
    ):
        recipe(folder).open("tran")


def test_a_split_whose_file_is_missing(folder: Path) -> None:
    (folder / "train.lmdb").unlink()
    with pytest.raises(ValueError, match=r"train\.lmdb does not exist"):
        recipe(folder).open("train")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("splits: [a", "no readable yaml"),
        ("", "no mapping `splits:`"),
        ("name: x", "no mapping `splits:`"),
        ("splits: {}", "no mapping `splits:`"),
        ("splits: {train: {count: 3}}", "split train names no file"),
        ("splits: {train: 3}", "split train names no file"),
    ],
)
def test_bad_descriptions(text: str, message: str, folder: Path) -> None:
    (folder / "dataset.yaml").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        recipe(folder)
    assert str(folder / "dataset.yaml") in str(caught.value)


def test_folders_without_a_description(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no dataset\.yaml in the folder"):
        recipe(tmp_path)


def test_every_shipped_description_can_be_read() -> None:
    for name in catalog.names():
        found = recipe(name)
        assert found.name == name
        for split, file in found.splits.items():
            if file.exists():
                count = found.metadata["splits"][split]["count"]
                assert len(found.open(split)) == count
