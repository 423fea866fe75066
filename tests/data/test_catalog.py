"""Recipes: data sets by name and by folder."""

from __future__ import annotations

import gzip
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from ase.data import chemical_symbols

from flt_mol.data import catalog
from flt_mol.data.catalog import recipe
from flt_mol.data.open import open_dataset

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


def test_dashes_and_underscores_are_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "resource_folder", lambda kind: folder.parent)
    folder.rename(folder.parent / "two_slabs")
    (folder.parent / "in-dashes").mkdir()
    (folder.parent / "in-dashes" / "dataset.yaml").write_text(YAML)
    assert recipe("two-slabs").folder == recipe("two_slabs").folder == folder.parent / "two_slabs"
    assert recipe("in_dashes").folder == recipe("in-dashes").folder == folder.parent / "in-dashes"


LAYOUT = "pack/data/is2re/all/val/data.lmdb"
FAR = f"""\
name: far_away
archive: {{url: http://x/a.tar.gz, bytes: 8593151089}}
splits:
  val: {{file: {LAYOUT}, count: 1, bytes: 3351724032}}
  short: {{file: short.lmdb}}
"""


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> catalog.Recipe:
    """A data set whose files lie in `tmp_path/own` or `tmp_path/cache/flt_mol/data`."""
    monkeypatch.setenv("FLT_MOL_DATA", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "dataset.yaml").write_text(FAR)
    return recipe(tmp_path / "far")


def put(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")
    return path


# From the last that is looked at to the first.
PLACES = [
    "cache/flt_mol/data/far_away/" + LAYOUT,
    "cache/flt_mol/data/far_away/compact/val.lmdb",
    "own/all/val/data.lmdb",  # FLT_MOL_DATA=…/is2re
    "own/is2re/all/val/data.lmdb",  # …/data
    "own/data/is2re/all/val/data.lmdb",  # the old trainer's folder
    "own/" + LAYOUT,  # where the archive was unpacked
    "own/far-away/all/val/data.lmdb",  # a link by this name
    "own/far_away/all/val/data.lmdb",
    "own/far_away/is2re/all/val/data.lmdb",
    "own/far_away/data/is2re/all/val/data.lmdb",
    "own/far_away/" + LAYOUT,
    "own/far_away/compact/val.lmdb",
    "far/" + LAYOUT,
    "far/compact/val.lmdb",
]


def test_places_in_order(far: catalog.Recipe, tmp_path: Path) -> None:
    for place in PLACES:
        path = put(tmp_path / place)
        assert far.path("val") == path
        assert far.is_compact(path) == ("compact" in place)


def test_places_in_one_folder(far: catalog.Recipe, tmp_path: Path) -> None:
    put(tmp_path / "far" / LAYOUT)
    other = tmp_path / "other"
    assert far.find("val", other) is None
    for place in ("all/val/data.lmdb", LAYOUT, "compact/val.lmdb"):
        path = put(other / place)
        assert far.find("val", other) == path


def test_links_are_followed(far: catalog.Recipe, tmp_path: Path) -> None:
    put(tmp_path / "theirs" / "all" / "val" / "data.lmdb")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "far_away").symlink_to(tmp_path / "theirs")
    assert far.path("val") == tmp_path / "own" / "far_away" / "all" / "val" / "data.lmdb"


def test_files_that_may_be_of_another_data_set_are_not_taken(
    far: catalog.Recipe, tmp_path: Path
) -> None:
    for place in ("own/short.lmdb", "own/compact/val.lmdb", "own/val/data.lmdb", "own/data.lmdb"):
        put(tmp_path / place)
    assert far.find("short") is None
    assert far.find("val") is None


def test_a_split_that_lies_nowhere(far: catalog.Recipe, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist, the file of split val of") as caught:
        far.path("val")
    message = str(caught.value)
    for part in (
        f"looked in {tmp_path}/far, {tmp_path}/own/far_away, {tmp_path}/own/far-away, "
        f"{tmp_path}/own, {tmp_path}/cache/flt_mol/data/far_away, "
        f"{tmp_path}/cache/flt_mol/data/far-away, {tmp_path}/cache/flt_mol/data; ",
        f"; FLT_MOL_DATA is {tmp_path}/own, which does not exist; ",
        "flt-mol data download far-away --split val",
        "8,593,151,089 bytes to fetch, 3,351,724,032 bytes on disk",
        "FLT_MOL_DATA",
    ):
        assert part in message
    with pytest.raises(ValueError, match=r"no split 'vla' \(did you mean val\?\)"):
        far.find("vla")


def test_what_is_wrong_with_the_data_folder(
    far: catalog.Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(value: str | None = None) -> str:
        if value is not None:
            monkeypatch.setenv("FLT_MOL_DATA", value)
        with pytest.raises(ValueError, match="does not exist, the file of split val") as caught:
            far.path("val")
        assert str(caught.value).endswith(f"; {far.how_to_get(['val'])}")
        return str(caught.value)

    own = tmp_path / "own"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert f"; FLT_MOL_DATA is own, that is {own}, which does not exist; " in told("own")
    assert f"; FLT_MOL_DATA is ~/own, that is {own}, which does not exist; " in told("~/own")
    own.write_text("x")
    assert f"; FLT_MOL_DATA is {own}, which is no folder; " in told(str(own))
    assert "/own/x, which lies below a file, not a folder; " in told(f"{own}/x")
    own.unlink()
    own.symlink_to("gone")
    assert f"; FLT_MOL_DATA is {own}, which is a link to gone, which does not" in told(str(own))
    own.unlink()
    own.mkdir()
    assert "FLT_MOL_DATA is" not in told()
    (own / "far_away").symlink_to("gone")
    assert f"; {own}/far_away is a link to gone, which does not exist; " in told()
    (own / "far-away").write_text("x")
    assert f"; {own}/far-away is no folder; " in told()
    # What nobody's home is, is told, and the default folder is looked in all the same.
    home = "FLT_MOL_DATA is ~nobody-here/x, and there is no such home folder"
    assert f"; {home}; " in told("~nobody-here/x")
    with pytest.raises(ValueError, match=home):
        catalog.data_folder()
    path = put(tmp_path / "cache" / "flt_mol" / "data" / LAYOUT)
    assert far.path("val") == path


def test_folders_that_may_not_be_read(
    far: catalog.Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "stat", refuse)
    monkeypatch.setattr(os, "scandir", refuse)
    assert far.find("val") is None
    told = far.how_to_get(["val"])
    why = f"FLT_MOL_DATA is {tmp_path}/own, which cannot be read (Permission denied); looked in "
    assert told.startswith(why)


def test_how_to_get_several(far: catalog.Recipe, folder: Path, tmp_path: Path) -> None:
    told = far.how_to_get(["val", "short"])
    assert told.count("looked in") == told.count(f"{tmp_path}/own/far_away") == 1
    command = "; get them with: flt-mol data download far-away (8,593,151,089 bytes to fetch); or "
    assert command in told  # all there are, of one of which the size is not known
    oc20 = recipe("oc20_is2re").how_to_get(["val_id", "val_ood_ads"])
    assert "download oc20-is2re --split val_id --split val_ood_ads (8,593,151,089 bytes" in oc20
    assert "6,661,042,176 bytes on disk); or set FLT_MOL_DATA" in oc20
    with pytest.raises(ValueError, match="no split 'x'"):
        far.how_to_get(["x"])
    # What is not published cannot be fetched.
    own = recipe(folder).how_to_get(["train"])
    assert own.startswith(f"looked in {folder}, ")
    assert own.endswith(f"what is to lie there is said by {folder}/dataset.yaml")
    (folder / "dataset.yaml").write_text("splits: {train: /not/here.lmdb}")
    with pytest.raises(ValueError, match=r"^/not/here\.lmdb does not exist, the .*set own$"):
        recipe(folder).path("train")


def test_a_part_is_not_taken_for_the_whole(folder: Path, write_lmdb: Any, make_record: Any) -> None:
    found = recipe(folder)
    text = "train of two_slabs: .*train.lmdb holds {} systems, the recipe says 2: results cannot be"
    for count in (1, 3):
        write_lmdb({i: make_record(sid=i) for i in range(count)}, name="own/train.lmdb")
        with pytest.warns(UserWarning, match=text.format(count)) as caught:
            assert len(found.open("train")) == count
        assert [warning.filename for warning in caught] == [__file__]
    # Records that were skipped are there; a recipe without a count says nothing.
    write_lmdb({0: make_record(sid=0), 1: b"\x80bad"}, name="own/train.lmdb")
    dataset = found.open("train", on_error="skip")
    assert (len(dataset), len(dataset.skipped)) == (1, 1)
    assert len(found.open("val")) == 1
    write_lmdb({i: make_record(sid=i) for i in range(3)}, name="own/train.lmdb")
    with pytest.warns(UserWarning, match=text.format(3)) as caught:
        found.check_count("train", open_dataset(folder / "train.lmdb"))
    assert [warning.filename for warning in caught] == [__file__]


def test_a_file_in_place_of_a_folder(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"train\.lmdb is a file; give the name of a data set, or"):
        recipe(folder / "train.lmdb")


def test_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    default = tmp_path / "home" / ".cache" / "flt_mol" / "data"
    for own, cache, expected in (
        ("", "", default),
        ("", "relative/is/ignored", default),
        ("", "/cache", Path("/cache/flt_mol/data")),
        ("/own", "/cache", Path("/own")),
        ("~/own", "", tmp_path / "home" / "own"),
        ("own", "", tmp_path / "own"),
    ):
        monkeypatch.setenv("FLT_MOL_DATA", own)
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
        assert catalog.data_folder() == expected


def test_without_a_home(far: catalog.Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(self: Path) -> Path:
        if str(self).startswith("~"):
            raise RuntimeError("Could not determine home directory.")
        return self

    monkeypatch.setattr(Path, "expanduser", homeless)
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert catalog.data_folder().name == "own"
    monkeypatch.delenv("FLT_MOL_DATA")
    with pytest.raises(ValueError, match="no home folder .* set FLT_MOL_DATA"):
        catalog.data_folder()
    with pytest.raises(ValueError, match="does not exist"):
        far.path("val")


def test_expected_numbers(far: catalog.Recipe, folder: Path) -> None:
    assert far.expected("val") == {"file": LAYOUT, "count": 1, "bytes": 3351724032}
    (folder / "dataset.yaml").write_text("splits: {1: train.lmdb}")
    assert recipe(folder).expected("1") == {}
    assert recipe(folder).relative("1") == Path("train.lmdb")


def test_oc20() -> None:
    oc20 = recipe("oc20-is2re")
    assert oc20.folder.name == oc20.name == "oc20_is2re"
    entries = [oc20.expected(split) for split in oc20.splits]
    assert len(entries) == 11
    assert all(set(e) == {"file", "count", "bytes", "md5", "targets"} for e in entries)
    assert all(re.fullmatch("[0-9a-f]{32}", entry["md5"]) for entry in entries)
    assert len({entry["md5"] for entry in entries}) == len({e["file"] for e in entries}) == 11
    val = [oc20.expected(split)["count"] for split in oc20.splits if split.startswith("val")]
    assert sum(val) == 99_854
    assert [s for s in oc20.splits if not oc20.expected(s)["targets"]] == [
        s for s in oc20.splits if s.startswith("test")
    ]
    elements = oc20.metadata["elements"]
    assert len(elements) == 56
    assert set(elements) <= set(chemical_symbols)  # in yaml, a bare Y or No is no text
    assert set(oc20.metadata["baselines"]) == {s for s in oc20.splits if s.startswith("val")}


def test_val_counts_of_oc20(oc20_data: Path) -> None:
    with gzip.open(oc20_data / "val_targets.csv.gz", "rt", encoding="utf-8") as file:
        found = Counter(line.split(",", 1)[0] for line in file)
    oc20 = recipe("oc20_is2re")
    assert {s: n for s, n in found.items() if s in oc20.splits} == {
        s: oc20.expected(s)["count"] for s in oc20.splits if s.startswith("val")
    }


def test_every_shipped_description_can_be_read() -> None:
    for name in catalog.names():
        found = recipe(name)
        assert found.name == name
        for split, file in found.splits.items():
            if file.exists():
                count = found.metadata["splits"][split]["count"]
                assert len(found.open(split)) == count
