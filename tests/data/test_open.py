"""Folders of files, and paths that lead nowhere."""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flt_mol.data import ShardedDataset, open_dataset
from flt_mol.data.recipes import recipe


@pytest.fixture
def shards(tmp_path: Path, write_lmdb: Any, make_record: Any) -> Path:
    """data.0.lmdb to data.11.lmdb with two records each, of sids 0, 1, 10, 11, …"""
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(12):
        values = {i: make_record(sid=10 * number + i) for i in (0, 1)}
        write_lmdb(values | {b"length": 2}, name=f"many/data.{number}.lmdb")
    (folder / "data.0.lmdb-lock").touch()
    (folder / ".keep").touch()
    return folder


def test_shards_are_in_numeric_order(shards: Path) -> None:
    dataset = open_dataset(shards)
    assert isinstance(dataset, ShardedDataset)
    assert len(dataset) == 24
    assert [system.sid[0] for system in dataset] == [10 * n + i for n in range(12) for i in (0, 1)]
    assert dataset[-1].sid == (111,)
    assert dataset.path == shards
    assert [s.sid for s in pickle.loads(pickle.dumps(dataset))] == [s.sid for s in dataset]


def test_other_files_are_passed_over_with_one_warning(shards: Path) -> None:
    (shards / "metadata.npz").touch()
    (shards / "README.txt").touch()
    with pytest.warns(UserWarning, match=r"passed over.*README\.txt, metadata\.npz") as caught:
        assert len(list(open_dataset(shards))) == 24
    assert len(caught) == 1


def test_one_warning_for_all_shards(shards: Path, write_lmdb: Any, make_record: Any) -> None:
    for number in (3, 5):
        write_lmdb({0: make_record(tags=None, sid=None)}, name=f"many/data.{number}.lmdb")
    with pytest.warns(UserWarning, match="no tags") as caught:
        sids = [system.sid[0] for system in open_dataset(shards)]
    assert len(caught) == 1
    assert sids[6] == "data.3:0"
    assert sids[9] == "data.5:0"


def test_a_bad_shard(shards: Path) -> None:
    (shards / "data.4.lmdb").write_bytes(b"")
    with pytest.raises(ValueError, match=r"data\.4\.lmdb is empty"):
        open_dataset(shards)
    dataset = open_dataset(shards, on_error="skip")
    assert len(dataset) == 22
    assert len(dataset.skipped) == 1
    assert "data.4.lmdb" in dataset.skipped[0]


def test_bad_records_of_shards_are_counted(shards: Path, write_lmdb: Any, make_record: Any) -> None:
    write_lmdb({0: make_record(sid=40), 1: b"?"}, name="many/data.4.lmdb")
    dataset = open_dataset(shards, on_error="skip")
    assert len(dataset) == 23
    assert [message.split(":")[0] for message in dataset.skipped] == [
        f"{shards / 'data.4.lmdb'}, key 1"
    ]


def test_only_bad_shards(tmp_path: Path) -> None:
    (tmp_path / "a.lmdb").touch()
    with pytest.raises(ValueError, match="every file is bad; the first"):
        open_dataset(tmp_path, on_error="skip")


def test_a_folder_with_one_file(write_lmdb: Any, make_record: Any, tmp_path: Path) -> None:
    (tmp_path / "val_id").mkdir()
    write_lmdb({4: make_record(sid=...)}, name="val_id/data.lmdb")
    with pytest.warns(UserWarning, match="no sid"):
        assert open_dataset(tmp_path / "val_id")[0].sid == (4,)


def test_folder_form_inside_a_folder(write_lmdb: Any, make_record: Any, tmp_path: Path) -> None:
    (tmp_path / "split").mkdir()
    write_lmdb({0: make_record()}, name="split/data.lmdb", subdir=True)
    assert len(open_dataset(tmp_path / "split")) == 1
    assert len(open_dataset(tmp_path / "split" / "data.lmdb")) == 1


def test_folders_without_lmdb(tmp_path: Path, write_lmdb: Any, make_record: Any) -> None:
    (tmp_path / "all").mkdir()
    with pytest.raises(ValueError, match=r"no \*\.lmdb was found in .*all; the folder is empty"):
        open_dataset(tmp_path / "all")
    (tmp_path / "all" / "train").mkdir()
    with pytest.raises(ValueError, match=r"no \*\.lmdb was found in .*; it holds train"):
        open_dataset(tmp_path / "all")
    write_lmdb({0: make_record()}, name="all/train/data.lmdb")
    with pytest.raises(ValueError, match="folders inside that have some: train"):
        open_dataset(tmp_path / "all")


def test_paths_that_do_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere\.lmdb does not exist"):
        open_dataset(tmp_path / "nowhere.lmdb")


def test_require_energy_of_shards(shards: Path, write_lmdb: Any, make_record: Any) -> None:
    assert len(open_dataset(shards, require_energy=True)) == 24
    write_lmdb({0: make_record(y_relaxed=None)}, name="many/data.4.lmdb")
    with pytest.raises(ValueError, match=r"data\.4\.lmdb: this split has no targets"):
        open_dataset(shards, require_energy=True)


def test_the_folder_of_a_data_set_is_not_mixed(
    tmp_path: Path, write_lmdb: Any, make_record: Any
) -> None:
    for split in ("train", "val"):
        write_lmdb({0: make_record()}, name=f"{split}.lmdb")
    description = tmp_path / "dataset.yaml"
    description.write_text("splits: {train: train.lmdb, val: val.lmdb}")
    for path in (tmp_path, description):
        with pytest.raises(ValueError, match=r"is a data set with the splits train, val") as caught:
            open_dataset(path)
        message = str(caught.value)
        assert f'recipe("{tmp_path}").open("train")' in message
        assert str(tmp_path / "train.lmdb") in message
        assert "--split train" in message
    assert len(recipe(tmp_path).open("train")) == 1
    assert len(open_dataset(tmp_path / "train.lmdb")) == 1
    description.write_text("path: ../somebody/elses")
    with pytest.warns(UserWarning, match=r"passed over.*dataset\.yaml"):
        assert len(open_dataset(tmp_path)) == 2


@pytest.mark.parametrize("name", ["emt_adsorption", "emt-adsorption", Path("emt_adsorption")])
def test_names_of_data_sets_are_no_paths(
    name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="does not exist .*; it is the name of a data set") as told:
        open_dataset(name)
    assert f'recipe("{name}").open("val_id"); its splits are: train, val_id' in str(told.value)
    with pytest.raises(ValueError, match=r"looked in [^;]*\)$"):
        open_dataset("emt_adsorptions")


def test_without_targets_tells_what_is_stored(write_lmdb: Any, make_record: Any) -> None:
    others = {"y": torch.tensor([0.5]), "E_ads": -1.5, "step": 3, "bulk": "Pt", "ok": True}
    others |= {"charges": np.zeros(6), "force": np.zeros((6, 3))}
    values = {i: make_record(y_relaxed=None, sid=i) for i in range(70)}
    values[3] |= others
    path = write_lmdb(values)
    text = open_dataset(path).without_targets()
    assert text == (
        "this split has no targets (no record holds y_relaxed); train and evaluate need them, "
        "predict does not; stored are: E_ads, y, step: name it with energy=…, --energy or "
        "data.energy"
    )
    with pytest.raises(ValueError, match="no targets") as caught:
        open_dataset(path, require_energy=True)
    assert str(caught.value) == f"{path}: {text}"
    values[64]["y_relaxed"] = -1.0  # beyond those that are looked at
    assert open_dataset(write_lmdb(values)).without_targets() == text
    values[0] = b"damaged"
    assert open_dataset(write_lmdb(values)).without_targets() is None


def test_without_targets_under_another_name(write_lmdb: Any, make_record: Any) -> None:
    path = write_lmdb({0: make_record(sid=0)})
    assert open_dataset(path).without_targets() is None
    text = open_dataset(path, on_error="raise", energy="y_relax").without_targets()
    assert "(no record holds y_relax)" in text
    assert "; stored are: y_relaxed: name it" in text
    bare = open_dataset(write_lmdb({0: make_record(y_relaxed=None)})).without_targets()
    assert bare.endswith(
        "predict does not; stored is y_init, the energy before relaxation: name it with --energy"
    )
    path = write_lmdb({0: make_record(y_relaxed=None, y_init=None)})
    bare = open_dataset(path).without_targets()
    assert bare.endswith("predict does not; no other number is stored")
    assert open_dataset(write_lmdb({0: b"damaged"})).without_targets() is None


def test_without_targets_of_many_files(shards: Path, write_lmdb: Any, make_record: Any) -> None:
    assert open_dataset(shards).without_targets() is None
    for number in range(12):
        write_lmdb({0: make_record(y_relaxed=None, e=1.0)}, name=f"many/data.{number}.lmdb")
    assert "stored are: e: name it" in open_dataset(shards).without_targets()


def test_an_empty_path_is_not_the_working_folder(shards: Path, monkeypatch: Any) -> None:
    class Empty:
        def __fspath__(self) -> str:
            return ""

    monkeypatch.chdir(shards)
    for source in ("", Empty()):
        with pytest.raises(ValueError, match="the path is empty"):
            open_dataset(source)
    assert len(open_dataset(".")) == len(open_dataset(Path())) == 24


def test_anything_that_is_a_path(shards: Path) -> None:
    class Place:
        def __fspath__(self) -> str:
            return str(shards)

    class Bytes:
        def __fspath__(self) -> bytes:
            return str(shards).encode()

    (entry,) = os.scandir(shards.parent)
    for source in (Place(), Bytes(), entry):
        assert len(open_dataset(source)) == 24


def test_paths_that_no_file_system_takes() -> None:
    for source in ("x" * 5000, "a\0b"):
        with pytest.raises(ValueError, match=r"cannot be read: File name too long|does not exist"):
            open_dataset(source)


def test_a_file_that_may_not_be_read_is_named(
    shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = sorted(shards.glob("*.lmdb"))[0]
    original = Path.open

    def guarded(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self.name == first.name:
            raise PermissionError(13, "Permission denied", str(self))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", guarded)
    message = f"{first} cannot be read: Permission denied"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        open_dataset(shards)
    dataset = open_dataset(shards, on_error="skip")
    assert dataset.skipped == [message]
    assert len(dataset) > 0
