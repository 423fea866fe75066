"""Files of any kind in a folder, as one data set."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from flt_mol.data import ShardedDataset, open_dataset
from flt_mol.data.aselmdb.dataset import AseLmdbDataset, encode_row, write_aselmdb
from flt_mol.data.compact import encode, pack
from flt_mol.data.compact.dataset import CompactDataset, write_compact
from flt_mol.data.joined import JoinedDataset
from flt_mol.structures import Structures

FIELDS = ("positions", "cell", "atomic_numbers", "tags", "fixed", "pbc", "ptr", "energy")
FIELDS += ("energy_initial", "positions_relaxed")


def assert_equal(a: Structures, b: Structures) -> None:
    for name in FIELDS:
        x, y = getattr(a, name), getattr(b, name)
        assert (x is None and y is None) or torch.equal(x, y), name
    assert a.sid == b.sid
    assert a.info == b.info


@pytest.fixture
def folder(make_record: Any, write_lmdb: Any, tmp_path: Path) -> Path:
    """Four shards: ASE's rows twice, compact blocks, pickles; 3 systems each, of 1 to 6 atoms."""
    folder = tmp_path / "mixed"
    folder.mkdir()

    def records(number: int) -> list[dict[str, Any]]:
        made = []
        for i in range(3):
            n = 1 + (3 * number + i) % 6
            record = make_record(sid=10 * number + i, y_relaxed=-number - i / 4, natoms=n)
            for field in ("pos", "pos_relaxed", "atomic_numbers", "tags", "fixed"):
                record[field] = record[field][-n:]
            if i:
                record["bulk_index"] = torch.tensor([number])
            made.append(record)
        return made

    write_aselmdb(folder / "data.10.aselmdb", [encode_row(r) for r in records(10)])
    write_aselmdb(folder / "data.2.aselmdb", [encode_row(r) for r in records(2)])
    write_compact(folder / "data.3.lmdb", [pack([encode(r, "") for r in records(3)])], 3)
    write_lmdb(dict(enumerate(records(4))), name="mixed/data.4.lmdb")
    return folder


SIDS = [10 * number + i for number in (2, 3, 4, 10) for i in range(3)]


def test_shards_of_every_kind(folder: Path) -> None:
    dataset = open_dataset(folder, require_energy=True)
    assert isinstance(dataset, JoinedDataset)
    kinds = [AseLmdbDataset, CompactDataset, None, AseLmdbDataset]
    assert [type(part) for part, kind in zip(dataset.parts, kinds, strict=True) if kind] == [
        kind for kind in kinds if kind
    ]
    assert [system.sid[0] for system in dataset] == SIDS
    assert dataset[-1].sid == (102,)
    assert "data.3.lmdb" in dataset.where(3)
    assert dataset.natoms().tolist() == [system.num_atoms for system in dataset]
    again = pickle.loads(pickle.dumps(dataset))
    assert [system.sid[0] for system in again] == SIDS


@pytest.mark.parametrize("only", [None, "lmdb"])
@pytest.mark.parametrize(
    "indices", [[0], [3, 4, 5], [5, 3], [4, 4, 0, 5, 1], [-1, 0], list(range(6))]
)
def test_batches_are_those_of_single_systems(only: Any, indices: Any, folder: Path) -> None:
    if only:
        for file in folder.glob("*.aselmdb"):
            file.unlink()
    dataset = open_dataset(folder)
    assert isinstance(dataset, JoinedDataset)
    expected = Structures.cat([dataset[i] for i in indices])
    assert_equal(dataset.batch(indices), expected)
    if only:
        found = dataset._at_once([i % len(dataset) for i in indices])
        assert found is None or found.sid == expected.sid


def test_parts_are_read_at_once_and_put_in_order(folder: Path) -> None:
    for file in (*folder.glob("*.aselmdb"), folder / "data.4.lmdb"):
        file.unlink()
    (folder / "data.5.lmdb").write_bytes((folder / "data.3.lmdb").read_bytes())
    dataset = open_dataset(folder)
    list(dataset)
    indices = [5, 0, 3, 2, 4, 1, 0]
    found = dataset._at_once(indices)
    assert found is not None
    assert_equal(found, Structures.cat([dataset[i] for i in indices]))


def test_shards_of_rows_in_order_with_one_warning(folder: Path) -> None:
    for file in folder.glob("*.lmdb"):
        file.unlink()
    (folder / "data.2.aselmdb-lock").touch()
    (folder / "notes.txt").touch()
    with pytest.warns(UserWarning, match=r"no \*\.lmdb: notes\.txt") as caught:
        dataset = open_dataset(folder)
    assert len(caught) == 1
    assert [system.sid[0] for system in dataset] == [20, 21, 22, 100, 101, 102]


def test_files_of_pickles_only_stay_one_sharded_data_set(folder: Path) -> None:
    for file in folder.glob("*.aselmdb"):
        file.unlink()
    (folder / "data.3.lmdb").unlink()
    assert isinstance(open_dataset(folder), ShardedDataset)


def test_a_bad_shard_of_many_kinds(folder: Path) -> None:
    (folder / "data.7.aselmdb").write_bytes(b"")
    with pytest.raises(ValueError, match=r"data\.7\.aselmdb is empty"):
        open_dataset(folder)
    dataset = open_dataset(folder, on_error="skip")
    assert [system.sid[0] for system in dataset] == SIDS
    assert ["data.7" in message for message in dataset.skipped] == [True]
    for file in folder.iterdir():
        file.write_bytes(b"")
    with pytest.raises(ValueError, match="every file is bad; the first"):
        open_dataset(folder, on_error="skip")


def test_names_of_systems_without_sid(make_record: Any, tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_aselmdb(tmp_path / f"{name}.aselmdb", [encode_row(make_record(sid=...))])
    with pytest.warns(UserWarning, match="no sid"):
        dataset = open_dataset(tmp_path)
    assert [system.sid[0] for system in dataset] == ["a:1", "b:1"]


@pytest.mark.parametrize("name", ["x.lmdb", "x.aselmdb", "x.db", "x.mdb", "x"])
def test_any_kind_under_any_name(name: str, folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        path = tmp_path / name
        path.write_bytes(file.read_bytes())
        expected = {"10": AseLmdbDataset, "2": AseLmdbDataset, "3": CompactDataset}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            dataset = open_dataset(path)
        kind = expected.get(file.name.split(".")[1])
        assert kind is None or type(dataset) is kind
        assert len(list(dataset)) == 3


def test_links_are_named_as_given(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"")
    link = tmp_path / "here.lmdb"
    link.symlink_to("there")
    with pytest.raises(ValueError, match=r"here\.lmdb: .*there is empty"):
        open_dataset(link)
    loop = tmp_path / "loop"
    loop.mkdir()
    (loop / "a.lmdb").symlink_to("b.lmdb")
    (loop / "b.lmdb").symlink_to("a.lmdb")
    with pytest.raises(ValueError, match="loop"):
        open_dataset(loop)
