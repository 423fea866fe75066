"""LMDB files: which records they hold, and the ways in which they are opened."""

import gzip
import io
import math
import os
import pickle
import subprocess
import sys

import lmdb
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from flt_mol.data import LmdbDataset, open_dataset
from flt_mol.structures import Structures

# A second process on a busy machine, and torch's threads, are no news here.
few_cores = pytest.mark.filterwarnings("ignore:This DataLoader will create")
forks = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


def sids(dataset):
    return [system.sid[0] for system in dataset]


def first(batch):
    return batch


@pytest.fixture
def numbered(make_record):
    """Records 0 to n-1 with sids 100, 101, … and energies that tell them apart."""
    return lambda n: {i: make_record(sid=100 + i, y_relaxed=-float(i)) for i in range(n)}


def test_keys_are_in_numeric_order_with_gaps(make_record, write_lmdb):
    keys = (0, 1, 2, 10, 11, 100)
    path = write_lmdb({k: make_record(sid=1000 + k, y_relaxed=-float(k)) for k in keys})
    dataset = open_dataset(path)
    assert isinstance(dataset, LmdbDataset)
    assert sids(dataset) == [1000 + k for k in keys]
    batch = dataset.batch([5, -1, 0, 3])
    assert batch.sid == (1100, 1100, 1000, 1010)
    assert batch.energy.tolist() == [-100.0, -100.0, 0.0, -10.0]
    assert dataset.where(4).endswith("data.lmdb, key 11")
    assert dataset.natoms().tolist() == [6] * 6
    for index in (6, -7):
        with pytest.raises(IndexError, match=r"data\.lmdb.*6"):
            dataset[index]
    padded = {f"{i:06d}".encode(): make_record(sid=i) for i in (2, 0, 1)}
    assert sids(open_dataset(write_lmdb(padded, "padded.lmdb"))) == [0, 1, 2]


def test_keys_that_are_names(make_record, write_lmdb):
    values = {f"slab-{i}".encode(): make_record(sid=...) for i in (1, 2)}
    with pytest.warns(UserWarning, match="no sid"):
        assert sids(open_dataset(write_lmdb({**values, b"length": 2}))) == ["slab-1", "slab-2"]
    about = dict.fromkeys((b"__len__", b"__keys__", b"num_samples", b"version"), 2)
    assert len(open_dataset(write_lmdb({**values, **about}))) == 2
    with pytest.warns(UserWarning, match=r"keys ignored.*slab-1.*slab-2"):
        assert sids(open_dataset(write_lmdb({**values, 0: make_record(sid=5), **about}))) == [5]


@pytest.mark.parametrize("order", ["big", "little"])
def test_keys_of_bytes_may_end_with_zeros(order, numbered, write_lmdb):
    values = {i.to_bytes(4, order): record for i, record in numbered(3).items()}
    assert sids(open_dataset(write_lmdb(values))) == [100, 101, 102]


def test_records_of_torch_save_and_sids_of_numpy(make_record, write_lmdb):
    values = {}
    for key, zipped in enumerate((True, False)):
        written = io.BytesIO()
        record = make_record(sid=np.array([f"slab-{key}"]))
        torch.save(record, written, _use_new_zipfile_serialization=zipped)
        values[key] = written.getvalue()
    assert sids(open_dataset(write_lmdb(values))) == ["slab-0", "slab-1"]


@pytest.mark.parametrize("length", [3, b"3", b"3\n", pickle.dumps(3, 0), torch.tensor(3), None])
def test_length_that_agrees_or_is_not_there(length, numbered, write_lmdb):
    others = {b"metadata": b"{}", b"schema": {"a": 1}}
    others |= {} if length is None else {b"length": length}
    assert len(open_dataset(write_lmdb(numbered(3) | others))) == 3


@pytest.mark.parametrize("length", [5, 2, b"4", 0, {"n": 3}, math.inf, b"\xff\xfe"])
def test_length_that_disagrees_is_reported_once(length, numbered, write_lmdb):
    path = write_lmdb(numbered(3) | {b"length": length})
    with pytest.warns(UserWarning, match=r"data\.lmdb.*3 records are stored") as caught:
        assert sids(open_dataset(path)) == [100, 101, 102]
    assert len(caught) == 1


@pytest.mark.parametrize("values", [{}, {b"length": 3}, {b"name": b"no pickle"}])
def test_no_records(values, write_lmdb):
    with pytest.raises(ValueError, match=r"no records in .*data\.lmdb"):
        open_dataset(write_lmdb(values))


@pytest.mark.parametrize("value", [7, "text", [1, 2], b"", b"not a pickle", b"x\x9c", b'{"a": 1}'])
def test_values_that_are_no_records_are_named_or_skipped(value, numbered, write_lmdb):
    path = write_lmdb(numbered(3) | {1: value})
    dataset = open_dataset(path)
    for ask in (lambda: dataset[1], lambda: dataset.batch([0, 1, 2]), lambda: dataset.record(1)):
        with pytest.raises(ValueError, match=r"data\.lmdb, key 1: "):
            ask()
    rest = open_dataset(path, on_error="skip")
    assert sids(rest) == [100, 102]
    assert [rest.where(i)[-5:] for i in (0, 1)] == ["key 0", "key 2"]
    assert len(rest.skipped) == 1
    with pytest.raises(ValueError, match="every record is invalid; the first: .*key 0"):
        open_dataset(write_lmdb({0: value}, "all.lmdb"), on_error="skip")


FOREIGN = {
    "empty": b"",
    "gzip": gzip.compress(b"x" * 10_000),
    "git-lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n",
    "zeros": bytes(9000),
    "web page": b"<html>" + b" " * 9000,
    "does not begin": b"abc" * 5000,
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_files_are_named(kind, tmp_path):
    path = tmp_path / "data.lmdb"
    path.write_bytes(FOREIGN[kind])
    with pytest.raises(ValueError, match=rf"data\.lmdb is not .*{kind}"):
        open_dataset(path)


def test_truncated_files_are_refused_before_any_read(numbered, write_lmdb, tmp_path):
    content = write_lmdb(numbered(20)).read_bytes()
    for part in (100, 5000, len(content) // 2, len(content) - 4096):
        (tmp_path / f"{part}.lmdb").write_bytes(content[:part])
    # In another process, which a page beyond the end would kill.
    code = f"""
import pathlib, sys
from flt_mol.data import open_dataset
kept = []  # errors keep what failed to open
for path in [*pathlib.Path({str(tmp_path)!r}).glob("[0-9]*.lmdb")] * 2:
    try:
        open_dataset(path)[0]
    except ValueError as error:
        kept.append(error)
        print(str(error).startswith(f"{{path}} is truncated"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["True"] * 8, done.stderr


def test_nothing_is_written_beside_the_data(numbered, write_lmdb, tmp_path):
    path = write_lmdb(numbered(3))
    before = path.read_bytes(), path.stat().st_mtime_ns
    path.chmod(0o444)
    tmp_path.chmod(0o555)
    try:
        assert len(list(open_dataset(path))) == 3
    finally:
        tmp_path.chmod(0o755)
    assert [p.name for p in tmp_path.iterdir()] == ["data.lmdb"]
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before


def test_folder_form_and_any_suffix(numbered, write_lmdb, tmp_path):
    write_lmdb(numbered(2), "folder", subdir=True)
    for path in (tmp_path / "folder", tmp_path / "folder" / "data.mdb"):
        assert sids(open_dataset(path)) == [100, 101]
    assert sids(open_dataset(write_lmdb(numbered(2), "records"))) == [100, 101]
    (tmp_path / "link.lmdb").symlink_to("records")
    (tmp_path / "hard.lmdb").hardlink_to(tmp_path / "records")
    both = [open_dataset(tmp_path / f"{name}.lmdb") for name in ("link", "hard")]
    assert [sids(one) for one in both] == [[100, 101]] * 2


def test_subfolders_that_cannot_be_read(numbered, write_lmdb, tmp_path, monkeypatch):
    write_lmdb(numbered(2), "records.lmdb")
    (tmp_path / "lost+found").mkdir()

    def stat(path, *args, plain=os.stat, **options):
        if "lost+found/" in os.fsdecode(path):
            raise PermissionError(13, "Permission denied", path)
        return plain(path, *args, **options)

    monkeypatch.setattr(os, "stat", stat)
    with pytest.warns(UserWarning, match=r"ignored.*lost\+found"):
        assert sids(open_dataset(tmp_path)) == [100, 101]


def test_the_same_file_twice_pickled_and_reopened(numbered, write_lmdb):
    path = write_lmdb(numbered(3))
    one, other = open_dataset(path), open_dataset(path)
    assert sids(one) == sids(other) == [100, 101, 102]
    again = pickle.loads(pickle.dumps(one))
    del one, other
    assert sids(again) == [100, 101, 102]
    assert sids(open_dataset(path, on_error="skip")) == [100, 101, 102]


def test_a_file_that_is_held_open_elsewhere(numbered, write_lmdb):
    path = write_lmdb(numbered(1))
    with (
        lmdb.open(str(path), subdir=False, readonly=True, lock=False),
        pytest.raises(ValueError, match=r"data\.lmdb cannot be opened"),
    ):
        open_dataset(path)


def test_overwritten_and_replaced_files_are_reported(numbered, write_lmdb, tmp_path):
    path = write_lmdb(numbered(2))
    dataset = open_dataset(path)
    path.write_bytes(write_lmdb(numbered(40), "more.lmdb").read_bytes())
    with pytest.raises(ValueError, match=r"data\.lmdb has changed"):
        dataset[0]
    assert len(open_dataset(path)) == 40
    replaced = open_dataset(path)
    os.replace(write_lmdb(numbered(3), "new.lmdb"), path)
    with pytest.raises(ValueError, match=r"data\.lmdb has changed"):
        replaced[0]
    assert len(open_dataset(path)) == 3


@few_cores
@forks
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_after_the_parent_has_read(method, numbered, write_lmdb):
    dataset = open_dataset(write_lmdb(numbered(12)))
    assert dataset[3].sid == (103,)
    loader = DataLoader(
        dataset,
        batch_size=4,
        num_workers=2,
        collate_fn=first,
        multiprocessing_context=method,
        persistent_workers=method == "fork",
    )
    for _ in range(2 if method == "fork" else 1):
        seen = [batch for batch in loader if isinstance(batch, Structures)]
        assert sorted(s for batch in seen for s in batch.sid) == list(range(100, 112))
        assert all(
            energy == 100 - sid
            for batch in seen
            for sid, energy in zip(batch.sid, batch.energy.tolist(), strict=True)
        )
    assert dataset[4].sid == (104,)


def test_reading_through_finds_the_first_invalid_record(numbered, write_lmdb, make_record):
    path = write_lmdb(numbered(70) | {66: make_record(pos=torch.zeros(5, 3))})
    with pytest.raises(ValueError, match="key 66"):
        open_dataset(path).read_through()


def test_genuine_records(oc20_data):
    dataset = open_dataset(oc20_data / "is2re_val_20" / "data.lmdb")
    assert len(dataset) == 20
    batch = dataset.batch(range(20))
    assert batch.natoms.tolist() == dataset.natoms().tolist()
    assert batch.energy.abs().max() < 10
    # Measured: atoms are held fixed exactly where they are below the surface.
    assert torch.equal(batch.fixed, batch.tags == 0)
    for index in (0, 7, 19):
        record, system = dataset.record(index), batch[index]
        assert torch.equal(system.positions, torch.from_numpy(record["pos"].copy()))
        assert torch.equal(system.cell[0], torch.from_numpy(record["cell"][0].copy()))
        assert system.sid == (record["sid"],)
        assert system.energy.item() == record["y_relaxed"]
        # Its graph tells which way round the cell is: all neighbours within 6 Å.
        edges, offsets = record["edge_index"], record["cell_offsets"]
        vectors = record["pos"][edges[0]] - record["pos"][edges[1]]
        vectors = vectors + offsets @ system.cell[0].numpy()
        assert (vectors**2).sum(1).max() < 36.01
