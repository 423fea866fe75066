"""Compact files: written whole or not at all, and read one by one and in batches alike."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import pickle
import struct
import warnings
import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
import torch

from flt_mol.data import collate, make_loader, open_dataset
from flt_mol.data.compact import BLOCK, encode, in_blocks, pack, write_compact, writing
from flt_mol.data.compact.blocks import Table
from flt_mol.data.compact.dataset import CompactDataset, is_compact, read_at_once
from flt_mol.data.options import ReadOptions
from flt_mol.structures import Structures

forks = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
few_cores = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def varied(make_record: Any, index: int, **changes: Any) -> dict[str, Any]:
    """Records of 6 or 12 atoms, of which some move and some do not."""
    record = make_record(sid=100 + index, y_relaxed=-0.5 * index)
    copies = 1 + index % 2
    for name in ("pos", "pos_relaxed", "atomic_numbers", "tags", "fixed"):
        record[name] = torch.cat([record[name]] * copies)
    record["pos"] = record["pos"] + 0.01 * index
    record["pos_relaxed"][: index % 5] = record["pos"][: index % 5]
    record["natoms"] = 6 * copies
    return {k: v for k, v in {**record, **changes}.items() if v is not ...}


@pytest.fixture
def make_file(make_record: Any, tmp_path: Path) -> Any:
    """Writes a compact file of `count` records; `changes(i)` are those of record i."""

    def make(
        count: int = 10, changes: Any = lambda i: {}, per_block: int = 4, name: str = "x.lmdb"
    ) -> Path:
        records = (varied(make_record, i, **changes(i)) for i in range(count))
        path = tmp_path / name
        write_compact(path, in_blocks((encode(r, "r") for r in records), per_block), count)
        return path

    return make


def change(path: Path, edit: Any) -> Path:
    """Rewrite the values of an LMDB file: `edit` changes a dict of them, in which no index is."""
    with lmdb.open(str(path), subdir=False, readonly=True, lock=False) as environment:
        values = dict(environment.begin().cursor())
    values.pop(b"index", None)
    edit(values)
    path.unlink()
    with (
        lmdb.open(str(path), subdir=False, lock=False, map_size=1 << 24) as environment,
        environment.begin(write=True) as transaction,
    ):
        for key, value in values.items():
            transaction.put(key, value)
    return path


def content(system: Structures) -> Any:
    """All bits of a batch."""
    fields = {}
    for name, value in vars(system).items():
        if isinstance(value, torch.Tensor):
            value = (value.dtype, value.shape, value.numpy().tobytes())
        fields[name] = value
    return {**fields, "info": dict(system.info), "system": None}


def one_by_one(dataset: Any, indices: Any) -> Structures:
    return Structures.cat([dataset[i] for i in indices])


def sids(dataset: Any) -> list[Any]:
    return [system.sid[0] for system in dataset]


def test_records_come_back_in_order(make_file: Any, make_record: Any) -> None:
    dataset = CompactDataset(make_file())
    assert sids(dataset) == list(range(100, 110))
    assert dataset.natoms().tolist() == [6, 12] * 5
    assert dataset.natoms().dtype == np.int64
    assert dataset.where(7).endswith("x.lmdb, record 7")
    record = dataset.record(7)
    assert record["pos_relaxed"].tobytes() == (
        varied(make_record, 7)["pos_relaxed"].numpy().tobytes()
    )
    with pytest.raises(IndexError, match="system 10 of 10"):
        dataset[10]


@pytest.mark.parametrize("count", [1, 4, 5, 9])
def test_last_blocks_may_be_short(count: int, make_file: Any) -> None:
    dataset = CompactDataset(make_file(count))
    assert sids(dataset) == list(range(100, 100 + count))
    assert content(dataset.batch(range(count))) == content(one_by_one(dataset, range(count)))


CHANGES: dict[str, Any] = {
    "the common kind": lambda i: {},
    "no targets": lambda i: {"y_relaxed": ..., "y_init": ..., "pos_relaxed": ...},
    "no relaxed": lambda i: {"pos_relaxed": ...},
    "float64": lambda i: {
        "pos": torch.full((6 + 6 * (i % 2), 3), i / 3, dtype=torch.float64),
        "cell": torch.eye(3, dtype=torch.float64) * 9.1,
    },
    "text sids": lambda i: {"sid": f"é{i}"},
    "mixed sids": lambda i: {"sid": [i, f"text {i}", ""][i % 3]},
    "pbc": lambda i: {"pbc": [True, i % 2 == 0, False]},
    "further values": lambda i: {"facet": "111"[: i % 4], "place": (i, None), "bulk": 1.5},
    "further values of some": lambda i: {f"only {i}": i} if i % 3 else {},
}


@pytest.mark.parametrize("options", [{}, {"ignore_energy": True}, {"on_error": "skip"}])
@pytest.mark.parametrize("kind", CHANGES)
def test_batches_are_quick_and_equal_to_records_one_by_one(
    kind: str, options: dict[str, Any], make_file: Any
) -> None:
    dataset = CompactDataset(make_file(changes=CHANGES[kind]), ReadOptions(**options))
    indices = [9, 3, 3, -8, 0, 5]
    assert content(dataset.batch(indices)) == content(one_by_one(dataset, indices))
    assert dataset._at_once([9, 3, 3, 2, 0, 5]) is not None


UNCOMMON: dict[str, Any] = {
    "some float64": lambda i: {"pos": torch.zeros(6 + 6 * (i % 2), 3).double()} if i == 3 else {},
    "types that differ": lambda i: {"pos": torch.ones(6 + 6 * (i % 2), 3).double() / 3},
    "some without targets": lambda i: {"y_relaxed": ...} if i == 3 else {},
    "far away": lambda i: {"pos": torch.full((6 + 6 * (i % 2), 3), 200.0)} if i == 3 else {},
    "sid bool": lambda i: {"sid": True} if i == 3 else {},
}


@pytest.mark.parametrize("kind", UNCOMMON)
def test_other_batches_are_equal_to_records_one_by_one(kind: str, make_file: Any) -> None:
    dataset = CompactDataset(make_file(changes=UNCOMMON[kind]))
    indices = [9, 3, 3, -8, 0, 5]
    assert content(dataset.batch(indices)) == content(one_by_one(dataset, indices))


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("tags", "no tags"),
        ("fixed", "no field fixed"),
        ("natoms", "no natoms"),
        ("sid", "no sid"),
        ("cell", "not periodic"),
        ("y_init", "y_init left out"),
    ],
)
@pytest.mark.parametrize("first", [0, 3])
def test_notes_come_once_and_batches_agree(
    field: str, text: str, first: int, make_file: Any
) -> None:
    value = "text" if field == "y_init" else ...
    path = make_file(changes=lambda i: {field: value} if i >= first else {})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dataset = CompactDataset(path)
        batch = dataset.batch(range(10))
    assert len(caught) == 1
    assert text in str(caught[0].message)
    assert content(batch) == content(one_by_one(dataset, range(10)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert content(dataset.batch([4, 4])) == content(one_by_one(dataset, [4, 4]))


def test_records_without_sid_are_named_by_their_number(make_file: Any) -> None:
    path = make_file(changes=lambda i: {"sid": ...})
    with pytest.warns(UserWarning, match="no sid"):
        dataset = CompactDataset(path, prefix="x:")
    assert dataset.batch([7, 2]).sid == ("x:7", "x:2")
    with pytest.warns(UserWarning, match="no sid"):
        assert CompactDataset(path).batch([7, 2]).sid == (7, 2)


def test_batches_of_none_and_indices_outside(make_file: Any) -> None:
    dataset = CompactDataset(make_file())
    with pytest.raises(ValueError, match="at least one"):
        dataset.batch([])
    with pytest.raises(IndexError, match="system 10 of 10"):
        dataset.batch([0, 10])


def test_targets_by_other_names(make_file: Any) -> None:
    path = make_file(changes=lambda i: {"energy": -float(i), "y_relaxed": ...})
    dataset = CompactDataset(path, ReadOptions(energy="energy", require_energy=True))
    assert dataset.batch([4, 2]).energy.tolist() == [-4, -2]
    path = make_file(changes=lambda i: {"energy": 9.0}, name="y.lmdb")
    for name, expected in (("energy", 9), ("y_relaxed", -1)):
        assert CompactDataset(path, ReadOptions(energy=name)).batch([2]).energy.item() == expected


def test_missing_targets_where_required(make_file: Any) -> None:
    path = make_file(changes=lambda i: {"y_relaxed": ...} if i == 3 else {})
    dataset = CompactDataset(path, ReadOptions(require_energy=True))
    with pytest.raises(ValueError, match=r"x\.lmdb, record 3, sid 103: y_relaxed is missing"):
        dataset.batch([1, 3])
    with pytest.raises(ValueError, match=r"x\.lmdb, record 3, sid 103: y_relaxed is missing"):
        dataset.batch([3, 3])
    path = make_file(changes=lambda i: {"y_relaxed": ...}, name="y.lmdb")
    with pytest.raises(ValueError, match=r"y\.lmdb: this split has no targets"):
        CompactDataset(path, ReadOptions(require_energy=True))


def test_several_files_in_one_batch(make_file: Any) -> None:
    one, two = CompactDataset(make_file()), CompactDataset(make_file(7, name="y.lmdb"))
    places = [(two, 6), (one, 9), (two, 0), (one, 0)]
    expected = Structures.cat([part[i] for part, i in places])
    found = read_at_once(one, places, [0, 1, 2, 3])
    assert found is not None
    assert content(found) == content(expected)


@few_cores
@forks
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_and_pickles(context: str, make_file: Any) -> None:
    dataset = CompactDataset(make_file())
    again = pickle.loads(pickle.dumps(dataset))
    assert sids(again) == sids(dataset)
    loader = make_loader(dataset, 4, num_workers=1, multiprocessing_context=context)
    for _ in range(2):
        assert content(collate(list(loader))) == content(dataset.batch(range(10)))


def _read(path: Path, results: Any) -> None:
    results.put(sids(CompactDataset(path)))


@forks
def test_one_file_in_several_data_sets_and_processes(make_file: Any) -> None:
    path = make_file()
    datasets = [CompactDataset(path), CompactDataset(path)]
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    process = context.Process(target=_read, args=(path, results))
    process.start()
    found = results.get(timeout=60)
    process.join()
    assert found == sids(datasets[0]) == sids(datasets[1])


def test_reading_leaves_nothing_behind(make_file: Any) -> None:
    path = make_file()
    before = path.read_bytes()
    CompactDataset(path).batch(range(10))
    assert list(path.parent.iterdir()) == [path]
    assert path.read_bytes() == before


def test_is_compact(make_file: Any, write_lmdb: Any, make_record: Any) -> None:
    path = make_file()
    assert is_compact(path)
    assert not is_compact(write_lmdb({0: make_record()}))
    assert is_compact(
        change(path, lambda values: values.update({b"format": b"flt_mol compact 77"})) or path
    )


def damage(number: int, offset: int) -> Any:
    def edit(values: dict[bytes, bytes]) -> None:
        key = b"%08d" % number
        block = bytearray(values[key])
        block[offset] ^= 1
        values[key] = bytes(block)

    return edit


def test_damaged_records_are_named_and_the_others_read(make_file: Any) -> None:
    path = make_file()
    with lmdb.open(str(path), subdir=False, readonly=True, lock=False) as environment:
        table = Table.read(environment.begin().get(b"%08d" % 1))
    change(path, damage(1, int(table.offsets[2]) + 90))
    dataset = CompactDataset(path)
    for read in (lambda: dataset[6], lambda: dataset.batch([0, 6])):
        with pytest.raises(ValueError, match=r"x\.lmdb, record 6 \(block 1\): damaged record"):
            read()
    assert dataset.batch([5, 7]).sid == (105, 107)
    kept = CompactDataset(path, ReadOptions(on_error="skip"))
    assert sids(kept) == [100, 101, 102, 103, 104, 105, 107, 108, 109]
    assert kept.batch([6, 8]).sid == (107, 109)
    assert kept.where(6).endswith("record 7")
    assert kept.natoms().tolist() == [6, 12, 6, 12, 6, 12, 12, 6, 12]
    (message,) = kept.skipped
    assert "record 6 (block 1)" in message
    kept._keep([1, 6, 8])
    assert sids(kept) == [101, 107, 109]
    assert kept.batch([2, 1]).sid == (109, 107)


@pytest.mark.parametrize("offset", [0, 8, 13, 30])
def test_damaged_tables_cost_their_block_only(offset: int, make_file: Any) -> None:
    dataset = CompactDataset(change(make_file(), damage(1, offset)))
    assert len(dataset) == 10
    for read in (lambda: dataset[5], lambda: dataset.batch([0, 5])):
        with pytest.raises(ValueError, match=r"x\.lmdb, record 5 \(block 1\): the block's table"):
            read()
    assert dataset.batch([3, 8]).sid == (103, 108)
    assert dataset.natoms().tolist() == [6, 12, 6, 12, 0, 0, 0, 0, 6, 12]


@pytest.mark.parametrize("index", ["whole", "longer", "damaged", "of others", "empty"])
def test_index_or_tables(index: str, make_file: Any) -> None:
    path, other = make_file(), make_file(12, name="y.lmdb")
    with lmdb.open(str(path), subdir=False, readonly=True, lock=False) as environment:
        values = dict(environment.begin().cursor())
    with lmdb.open(str(other), subdir=False, readonly=True, lock=False) as environment:
        longer = environment.begin().get(b"index") + values[b"index"]
    stored = {
        "whole": values[b"index"],
        "longer": longer,
        "damaged": values[b"index"][:40] + b"?" + values[b"index"][41:],
        "of others": b"\xff" * 90,
        "empty": b"",
    }[index]
    damage(1, 13)(values)
    change(path, lambda new: new.update({**values, b"index": stored}))
    dataset = CompactDataset(path)
    assert len(dataset) == 10
    assert dataset.batch([0, 9]).sid == (100, 109)
    if index == "whole":
        assert dataset.batch([5]).sid == (105,)
        return
    with pytest.raises(ValueError, match=r"record 5 \(block 1\): the block's table"):
        dataset[5]


def test_damaged_counts_are_reported(make_file: Any) -> None:
    for value in (b"", b"\0" * 8, b"\0" * 4 + b"\xff" * 4, b"\0" * 4 + b"\5\0\0\0" + b"\0" * 60):
        path = change(make_file(), lambda values, value=value: values.update({b"00000001": value}))
        with pytest.warns(UserWarning, match=r"says that it holds 10 records, 7 are stored"):
            dataset = CompactDataset(path)
        with pytest.raises(ValueError, match=r"record 4 \(block 1\)"):
            dataset[4]
        assert dataset.batch([3, 5]).sid == (103, 108)


def test_blocks_that_are_missing_are_reported(make_file: Any) -> None:
    path = change(make_file(), lambda values: values.pop(b"00000001"))
    with pytest.warns(
        UserWarning, match=r"10 records, 6 are stored.*1 blocks of records"
    ) as caught:
        dataset = CompactDataset(path)
    assert len(caught) == 1
    assert sids(dataset) == [100, 101, 102, 103, 108, 109]
    path = make_file(name="y.lmdb")
    with pytest.raises(ValueError, match=r"no records in .*y\.lmdb"):
        CompactDataset(change(path, lambda v: [v.pop(k) for k in list(v) if k[:1] == b"0"]))


@pytest.mark.parametrize("length", [b"9", b"", b"ten", b"1" * 30, None])
def test_length_that_disagrees_is_reported(length: Any, make_file: Any) -> None:
    def edit(values: dict[bytes, bytes]) -> None:
        values[b"length"] = length
        if length is None:
            del values[b"length"]

    with pytest.warns(UserWarning, match=r"x\.lmdb says .* 10 are stored"):
        assert len(CompactDataset(change(make_file(), edit))) == 10


@pytest.mark.parametrize(
    ("stored", "reason"),
    [
        (b"flt_mol compact 2", "version 2 .* reads version 1; update flt_mol"),
        (b"flt_mol compact x", "no compact file"),
        (b"pickles", "no compact file"),
        (b"", "no compact file"),
    ],
)
def test_other_formats_are_refused(stored: bytes, reason: str, make_file: Any) -> None:
    path = change(make_file(), lambda values: values.update({b"format": stored}))
    with pytest.raises(ValueError, match=rf"x\.lmdb .*{reason}"):
        CompactDataset(path)


def test_metadata(make_record: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.lmdb"
    write_compact(path, [pack([encode(make_record(), "r")])], 1, {"source": "é", "a": [1]})
    assert CompactDataset(path).metadata == {"source": "é", "a": [1]}
    for value in (b"{", b"[]", b"[" * 100_000, b"\xff"):
        change(path, lambda values, value=value: values.update({b"metadata": value}))
        with pytest.raises(ValueError, match=r"x\.lmdb: its metadata"):
            _ = CompactDataset(path).metadata


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("size", [50, 3000, 40_000])
def test_the_same_blocks_give_the_same_file(size: int, make_record: Any, tmp_path: Path) -> None:
    blocks = [pack([encode(make_record(sid=i, text="x" * size), "r")]) for i in range(40)]
    digests = set()
    for number, chunk in enumerate((1, 5000, 1 << 24)):
        path = tmp_path / f"{number}.lmdb"
        assert write_compact(path, iter(blocks), metadata={"a": 1}, chunk=chunk) == 40
        digests.add(digest(path))
        assert sids(CompactDataset(path)) == list(range(40))
    assert len(digests) == 1


def test_the_map_grows(make_record: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(writing, "_MAP", 1)
    blocks = [pack([encode(make_record(sid=i, text="x" * 9000), "r")]) for i in range(40)]
    for chunk in (1, 1 << 24):
        path = tmp_path / "x.lmdb"
        writing.write_compact(path, blocks, 40, chunk=chunk)
        assert sids(CompactDataset(path)) == list(range(40))


@pytest.mark.parametrize("failure", ["interrupt", "length", "none", "damaged", "nan", "object"])
def test_files_that_fail_leave_what_was_there(failure: str, make_file: Any) -> None:
    path = make_file()
    before = path.read_bytes()
    with lmdb.open(str(path), subdir=False, readonly=True, lock=False) as environment:
        block = environment.begin().get(b"00000000")

    def blocks() -> Iterator[bytes]:
        if failure != "none":
            yield block
        if failure == "interrupt":
            raise KeyboardInterrupt
        if failure == "damaged":
            yield block[:-1]

    kinds = (ValueError, KeyboardInterrupt)
    metadata = {"nan": {"a": float("nan")}, "object": {"a": object()}}.get(failure)
    with pytest.raises(kinds):
        write_compact(path, blocks(), 5 if failure == "length" else None, metadata, chunk=1)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_blocks() -> None:
    payloads = [encode({"pos": [[0, 0, i]] * i, "atomic_numbers": [1] * i}, "r") for i in (1, 2, 3)]
    block = pack(payloads)
    table = Table.read(block)
    assert table.natoms.tolist() == [1, 2, 3]
    assert [block[a:b] for a, b in pairwise(table.offsets)] == payloads
    assert [len(Table.read(b).natoms) for b in in_blocks(payloads, 2)] == [2, 1]
    assert list(in_blocks([])) == []
    assert BLOCK > 1
    for wrong in ([], [b"short"]):
        with pytest.raises(ValueError, match="at least"):
            pack(wrong)
    with pytest.raises(ValueError, match="count = 0"):
        next(in_blocks(payloads, 0))


@pytest.mark.parametrize("entry", range(4))
def test_tables_that_lie_are_damaged(entry: int) -> None:
    payloads = [encode({"pos": [[0, 0, i]] * i, "atomic_numbers": [1] * i}, "r") for i in (1, 2, 3)]
    block = bytearray(pack(payloads))
    struct.pack_into("<I", block, 8 + 4 * entry, 2**32 - 1 if entry else 0)
    size = int(Table.read(pack(payloads)).offsets[0])
    struct.pack_into("<I", block, 0, zlib.crc32(block[4:size]))
    table = Table.read(bytes(block))
    assert not table.sound
    assert table.offsets.tolist() == [0, 0, 0, 0]


def test_genuine_file(oc20_data: Path, tmp_path: Path) -> None:
    source = open_dataset(oc20_data / "is2re_val_20" / "data.lmdb")
    path = tmp_path / "x.lmdb"
    payloads = [encode(source.record(i), source.where(i)) for i in range(len(source))]
    write_compact(path, in_blocks(payloads), len(source))
    dataset = CompactDataset(path)
    assert path.stat().st_size / len(source) <= 2500
    assert content(dataset.batch(range(20))) == content(one_by_one(source, range(20)))
    assert dataset._at_once(range(20)) is not None
    assert content(one_by_one(dataset, range(20))) == content(one_by_one(source, range(20)))
    assert json.loads(json.dumps(dataset.metadata)) == {}
