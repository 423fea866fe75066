"""Folders of files, and paths that lead nowhere."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from flt_mol.data import ShardedDataset, open_dataset


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
