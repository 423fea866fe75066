"""LMDB files: which records they hold, and the ways in which they are opened."""

from __future__ import annotations

import gc
import os
import pickle
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import lmdb
import pytest
import torch

from flt_mol.data import LmdbDataset, collate, make_loader, open_dataset
from flt_mol.data.lmdb.file import Environment, check_file, is_lmdb
from flt_mol.structures import Structures
from tests.data.test_columns import equal

# A second process on a busy machine, and torch's threads, are no news here.
few_cores = pytest.mark.filterwarnings("ignore:This DataLoader will create")
forks = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


def _sids(dataset: Any) -> list[Any]:
    return [system.sid[0] for system in dataset]


@pytest.fixture
def numbered(make_record: Any) -> Any:
    """Records 0 to n-1 with sids 100, 101, …"""
    return lambda n: {i: make_record(sid=100 + i) for i in range(n)}


def test_keys_are_in_numeric_order(numbered: Any, write_lmdb: Any) -> None:
    dataset = open_dataset(write_lmdb(numbered(12)))
    assert isinstance(dataset, LmdbDataset)
    assert _sids(dataset) == list(range(100, 112))
    assert [dataset.number(i) for i in range(12)] == list(range(12))
    assert dataset[-1].sid == (111,)
    with pytest.raises(IndexError, match="system 12 of 12"):
        dataset[12]


def test_padded_keys_are_read(make_record: Any, write_lmdb: Any) -> None:
    values = {f"{i:06d}".encode(): make_record(sid=i) for i in (0, 1, 2)}
    assert _sids(open_dataset(write_lmdb(values))) == [0, 1, 2]


@pytest.mark.parametrize("length", [3, b"3", b"3\n", pickle.dumps(3, 0), None])
def test_length_that_agrees_or_is_not_there(length: Any, numbered: Any, write_lmdb: Any) -> None:
    values = numbered(3) | ({} if length is None else {b"length": length})
    assert len(open_dataset(write_lmdb(values))) == 3


@pytest.mark.parametrize("length", [5, 2, b"4", 0, {"n": 3}, b"\xff\xfe"])
def test_length_that_disagrees_is_reported_once(
    length: Any, numbered: Any, write_lmdb: Any
) -> None:
    path = write_lmdb(numbered(3) | {b"length": length})
    with pytest.warns(UserWarning, match=r"data\.lmdb.*3 are stored") as caught:
        sids = _sids(open_dataset(path))
    assert sids == [100, 101, 102]
    assert len(caught) == 1
    assert str(path) in str(caught[0].message)


def test_other_keys_are_no_records(numbered: Any, write_lmdb: Any) -> None:
    others = {b"metadata": b"{}", b"schema": "text", b"nextid": 9}
    assert _sids(open_dataset(write_lmdb(numbered(3) | others))) == [100, 101, 102]


def test_keys_that_may_have_been_numbers_are_told(numbered: Any, write_lmdb: Any) -> None:
    with pytest.warns(UserWarning, match=r"2 keys of data.lmdb are no whole numbers .*3 records"):
        dataset = open_dataset(write_lmdb(numbered(3) | {b"1a": 1, b"-1": 2}))
    assert _sids(dataset) == [100, 101, 102]


def test_gaps_between_keys_are_reported(numbered: Any, write_lmdb: Any) -> None:
    values = {key: value for key, value in numbered(9).items() if key not in (3, 4)}
    with pytest.warns(UserWarning, match="2 records are missing between keys 0 and 8"):
        dataset = open_dataset(write_lmdb(values))
    assert len(dataset) == 7


def test_keys_that_are_names_have_no_gaps(make_record: Any, write_lmdb: Any) -> None:
    values = {key: make_record(sid=...) for key in (17, 4096, 999_999)}
    with pytest.warns(UserWarning, match="no sid") as caught:
        dataset = open_dataset(write_lmdb(values))
    assert len(caught) == 1
    assert _sids(dataset) == [17, 4096, 999_999]


@pytest.mark.parametrize("values", [{}, {b"length": 0}, {b"a": 1, b"b": 2}])
def test_no_records(values: Any, write_lmdb: Any) -> None:
    path = write_lmdb(values)
    with pytest.raises(ValueError, match="no records in ") as caught:
        open_dataset(path)
    assert str(path) in str(caught.value)


def test_compressed_and_old_records(
    make_record: Any, write_lmdb: Any, compressed: Any, pickle_pyg: Any
) -> None:
    record = make_record()
    arrays = {k: v.numpy() if isinstance(v, torch.Tensor) else v for k, v in record.items()}
    spellings = [compressed(arrays), pickle_pyg(record, 1), pickle_pyg(record, 2), record]
    first, *others = open_dataset(write_lmdb(dict(enumerate(spellings))))
    for other in others:
        for name in ("positions", "cell", "atomic_numbers", "tags", "fixed", "pbc", "energy"):
            assert torch.equal(getattr(first, name), getattr(other, name))
        assert first.sid == other.sid


@pytest.mark.parametrize("value", [[1, 2], 7, "text", None])
def test_values_that_are_no_records(value: Any, write_lmdb: Any) -> None:
    dataset = open_dataset(write_lmdb({0: value}))
    with pytest.raises(ValueError, match=r"data\.lmdb, key 0: the record is a"):
        dataset[0]


@pytest.mark.parametrize("damage", [b"", b"\x80", b"not a pickle", b"x\x9c123", "cut", "class"])
def test_damaged_records_are_named_or_skipped(damage: Any, numbered: Any, write_lmdb: Any) -> None:
    values = numbered(3)
    cut = pickle.dumps(values[1])[:-40]
    values[1] = {"cut": cut, "class": b"cos\nsystem\n(Vtrue\ntR."}.get(damage, damage)
    path = write_lmdb(values)
    dataset = open_dataset(path)
    assert dataset[0].sid == (100,)
    with pytest.raises(ValueError, match="key 1") as caught:
        dataset[1]
    assert str(path) in str(caught.value)
    rest = open_dataset(path, on_error="skip")
    assert _sids(rest) == [100, 102]
    assert len(rest.skipped) == 1
    assert "key 1" in rest.skipped[0]


def test_all_records_bad(write_lmdb: Any) -> None:
    with pytest.raises(ValueError, match=r"every record is bad; the first: .*key 0"):
        open_dataset(write_lmdb({0: b"", 1: b""}), on_error="skip")


def test_unknown_option(write_lmdb: Any, numbered: Any) -> None:
    with pytest.raises(ValueError, match="on_error is 'ignore'"):
        open_dataset(write_lmdb(numbered(1)), on_error="ignore")


@pytest.mark.parametrize(
    ("content", "looks"),
    [
        (b"", "is empty"),
        (b"\x1f\x8b" + bytes(range(200)), "gzip"),
        (b"PK\x03\x04" + bytes(200), "zip"),
        (bytes(257) + b"ustar" + bytes(300), "tar"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "git-lfs"),
        (b"<!DOCTYPE html><html>404</html>", "web page"),
        (b"SQLite format 3\0" + bytes(200), "SQLite"),
        (bytes(8192), "zeros"),
        (b"a,b,c\n1,2,3\n" * 50, "text, beginning with 'a,b,c"),
        (bytes(range(256)) * 40, "bytes 00 01 02"),
        (b"x", "text"),
    ],
)
def test_foreign_files_are_named(content: bytes, looks: str, tmp_path: Path) -> None:
    path = tmp_path / "data.lmdb"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=looks) as caught:
        open_dataset(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("fraction", [0.003, 0.01, 0.2, 0.5, 0.9, 1.0])
def test_truncated_files_are_refused_before_any_read(
    fraction: float, numbered: Any, write_lmdb: Any
) -> None:
    path = write_lmdb(numbered(12))
    check_file(path)
    size = path.stat().st_size
    os.truncate(path, min(int(size * fraction), size - 1))
    with pytest.raises(ValueError, match="truncated") as caught:
        open_dataset(path)
    assert str(path) in str(caught.value)


def test_zeroed_pages_are_an_error(numbered: Any, write_lmdb: Any) -> None:
    path = write_lmdb(numbered(12))
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(2 * 4096)
        file.write(bytes(size - 2 * 4096))
    with pytest.raises(ValueError, match=r"data\.lmdb"):
        list(open_dataset(path))


def test_folder_form_and_its_data_file(numbered: Any, write_lmdb: Any) -> None:
    path = write_lmdb(numbered(3), name="folder.lmdb", subdir=True)
    assert (path / "data.mdb").is_file()
    assert _sids(open_dataset(path)) == _sids(open_dataset(path / "data.mdb")) == [100, 101, 102]


def test_any_suffix_will_do(numbered: Any, write_lmdb: Any) -> None:
    path = write_lmdb(numbered(2), name="records")
    assert is_lmdb(path)
    assert len(open_dataset(path)) == 2


def test_nothing_is_written_beside_the_data(numbered: Any, write_lmdb: Any, tmp_path: Path) -> None:
    folder = tmp_path / "ro"
    folder.mkdir()
    path = write_lmdb(numbered(3), name="ro/data.lmdb")
    before = path.read_bytes(), path.stat().st_mtime_ns
    path.chmod(0o444)
    folder.chmod(0o555)
    try:
        assert _sids(open_dataset(path)) == _sids(open_dataset(folder)) == [100, 101, 102]
        assert [file.name for file in folder.iterdir()] == ["data.lmdb"]
    finally:
        folder.chmod(0o755)
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before


def test_the_same_file_twice(numbered: Any, write_lmdb: Any) -> None:
    path = write_lmdb(numbered(4))
    link = path.with_name("link.lmdb")
    link.symlink_to(path)
    first, second, third = open_dataset(path), open_dataset(str(path)), open_dataset(link)
    for a, b, c in zip(first, second, third, strict=True):
        assert a.sid == b.sid == c.sid
    del first
    assert _sids(second) == _sids(third)


def test_pickled_data_sets_read(numbered: Any, write_lmdb: Any) -> None:
    dataset = open_dataset(write_lmdb(numbered(4)))
    assert dataset[1].sid == (101,)
    data = pickle.dumps(dataset)
    assert _sids(pickle.loads(data)) == _sids(dataset)
    assert len(data) < 2000


def test_file_held_open_elsewhere_says_so(numbered: Any, write_lmdb: Any) -> None:
    path = write_lmdb(numbered(1))
    other = lmdb.open(str(path), subdir=False, readonly=True, lock=False)
    try:
        lmdb.open(str(path.resolve()), subdir=False, readonly=True, lock=False).close()
    except lmdb.Error:
        with pytest.raises(ValueError, match="close that one first"):
            open_dataset(path)
    other.close()
    assert len(open_dataset(path)) == 1


def test_replaced_and_overwritten_files(numbered: Any, write_lmdb: Any, tmp_path: Path) -> None:
    path = write_lmdb(numbered(3))
    old = open_dataset(path)
    longer = write_lmdb(numbered(9), name="longer.lmdb")
    os.replace(longer, path)
    assert _sids(old) == [100, 101, 102]  # the old file lives on while it is open
    again = open_dataset(path)
    assert len(again) == 9
    with pytest.raises(ValueError, match="has changed since it was opened"):
        old[0]
    shorter = write_lmdb(numbered(2), name="shorter.lmdb")
    shutil.copyfile(shorter, path)  # the same inode
    assert _sids(open_dataset(path)) == [100, 101]
    with pytest.raises(ValueError, match="has changed since it was opened"):
        again[0]
    with pytest.raises(ValueError, match="has changed since it was opened"):
        pickle.loads(pickle.dumps(again))[0]


def _epoch(loader: Any) -> list[Any]:
    return [sid for batch in loader for sid in batch.sid]


@few_cores
@forks
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_after_the_parent_has_read(method: str, numbered: Any, write_lmdb: Any) -> None:
    path = write_lmdb(numbered(11))
    training, validation = open_dataset(path), open_dataset(path)
    assert training[3].sid == (103,)
    loader = make_loader(training, 3, shuffle=True, num_workers=2, multiprocessing_context=method)
    epochs = [_epoch(loader), _epoch(loader)]
    assert [sorted(sids) for sids in epochs] == [list(range(100, 111))] * 2
    assert epochs[0] != epochs[1]
    if method == "fork":
        assert _epoch(make_loader(validation, 4, num_workers=1)) == list(range(100, 111))
    assert validation[10].sid == (110,)
    assert training[0].sid == (100,)
    del loader


@forks
def test_a_forked_child_reads_while_the_parent_reads_on(numbered: Any, write_lmdb: Any) -> None:
    dataset = open_dataset(write_lmdb(numbered(3)))
    assert dataset[0].sid == (100,)
    child = os.fork()
    if child == 0:
        good = False
        try:
            good = _sids(dataset) == _sids(open_dataset(dataset.path)) == [100, 101, 102]
            good &= Environment.of(dataset.file).usable
        finally:
            os._exit(0 if good else 1)
    assert _sids(dataset) == [100, 101, 102]
    assert os.waitpid(child, 0)[1] == 0


def _one_by_one(dataset: Any, indices: Any) -> Structures:
    return Structures.cat([dataset[i] for i in indices])


@pytest.fixture
def sharded(numbered: Any, write_lmdb: Any, tmp_path: Path) -> Any:
    """Four files with 24 records in all."""
    folder = tmp_path / "shards"
    folder.mkdir()
    records = numbered(24)
    for shard in range(4):
        part = {i: records[6 * shard + i] for i in range(6)}
        write_lmdb(part, name=f"shards/data.{shard}.lmdb")
    return open_dataset(folder)


def test_batches_of_one_file_and_of_many(numbered: Any, write_lmdb: Any, sharded: Any) -> None:
    single = open_dataset(write_lmdb(numbered(24)))
    for dataset in (single, sharded):
        for indices in ([3], [23, 0, 7, 7, -1, 12], list(range(24))):
            batch = dataset.batch(indices)
            assert batch.sid == tuple(100 + i % 24 for i in indices)
            assert equal(batch, _one_by_one(dataset, indices))
            assert dataset._at_once([i % 24 for i in indices]) is not None
        assert dataset.natoms().tolist() == [6] * 24
        assert equal(dataset.__getitems__([1, 2]), dataset.batch([1, 2]))


def test_batches_of_files_of_different_kinds(sharded: Any) -> None:
    class Other(LmdbDataset):
        pass

    sharded.parts[2] = Other(sharded.parts[2].path)
    assert sharded._at_once([13, 0]) is not None
    assert equal(sharded.batch([13, 0, 14]), _one_by_one(sharded, [13, 0, 14]))


def test_batches_of_shards_without_sids(make_record: Any, write_lmdb: Any, tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    for shard in range(2):
        write_lmdb({4: make_record(sid=...)}, name=f"shards/data.{shard}.lmdb")
    with pytest.warns(UserWarning, match="no sid"):
        dataset = open_dataset(tmp_path / "shards")
    assert dataset.batch([1, 0]).sid == ("data.1:4", "data.0:4")
    assert dataset._at_once([1, 0]) is not None


def test_bad_records_in_batches(numbered: Any, make_record: Any, write_lmdb: Any) -> None:
    values = numbered(100) | {70: b"damaged", 71: make_record(atomic_numbers=[0] * 6)}
    path = write_lmdb(values)
    dataset = open_dataset(path)
    with pytest.raises(ValueError, match="key 71, sid 101: atomic_numbers holds 0"):
        dataset.batch([69, 71, 70])
    with pytest.raises(ValueError, match="key 70: damaged record"):
        dataset.batch([0, 70, 71])
    with pytest.raises(ValueError, match="key 70: damaged record"):
        dataset.natoms()
    rest = open_dataset(path, on_error="skip")
    assert len(rest) == 98
    assert [message.split("data.lmdb, ")[1][:6] for message in rest.skipped] == ["key 70", "key 71"]
    assert rest.batch(range(98)).sid == tuple(100 + i for i in range(100) if i not in (70, 71))


def test_batches_outlive_the_file(numbered: Any, write_lmdb: Any, pickle_pyg: Any) -> None:
    records = {i: pickle_pyg(record) for i, record in numbered(5).items()}
    dataset = open_dataset(write_lmdb(records))
    batch, parts = dataset.batch(range(5)), _one_by_one(dataset, range(5))
    dataset.file.unlink()
    dataset._open().close()
    del dataset
    gc.collect()
    assert equal(batch, parts)


def test_a_file_that_has_changed_in_batches(numbered: Any, write_lmdb: Any) -> None:
    path = write_lmdb(numbered(3))
    dataset = open_dataset(path)
    shutil.copyfile(write_lmdb(numbered(2), name="shorter.lmdb"), path)
    assert _sids(open_dataset(path)) == [100, 101]
    with pytest.raises(ValueError, match="has changed since it was opened"):
        dataset.batch([0, 1])


def test_torch_loads_batches_at_once(sharded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LmdbDataset, "__getitem__", None)
    monkeypatch.setattr(type(sharded), "__getitem__", None)
    sids = [
        sid
        for loader in (
            torch.utils.data.DataLoader(sharded, 7, collate_fn=collate),
            torch.utils.data.DataLoader(
                torch.utils.data.Subset(sharded, range(20, 24)), 3, collate_fn=collate
            ),
        )
        for batch in loader
        for sid in batch.sid
    ]
    assert sids == [*range(100, 124), *range(120, 124)]


def test_streaming_holds_no_memory(numbered: Any, write_lmdb: Any) -> None:
    dataset = open_dataset(write_lmdb(numbered(200)))
    pickled = len(pickle.dumps(dataset))
    tracemalloc.start()
    try:
        sizes = []
        for _ in range(4):
            for start in range(0, 200, 20):
                dataset.batch(range(start, start + 20))
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert sizes[3] < sizes[1] + 20_000
    assert len(pickle.dumps(dataset)) == pickled < 6000


def test_a_loop_of_links_is_an_error(numbered: Any, write_lmdb: Any, tmp_path: Path) -> None:
    first, second = tmp_path / "a.lmdb", tmp_path / "b.lmdb"
    first.symlink_to(second)
    second.symlink_to(first)
    with pytest.raises(ValueError, match=r"a\.lmdb"):
        LmdbDataset(first)


def test_errors_about_a_link_name_it_too(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"no LMDB file")
    (tmp_path / "data.lmdb").symlink_to(tmp_path / "target")
    with pytest.raises(ValueError, match=r"data\.lmdb: .*target is no LMDB file"):
        LmdbDataset(tmp_path / "data.lmdb")


def test_genuine_oc20_records_in_batches(oc20_data: Path) -> None:
    dataset = open_dataset(oc20_data / "is2re_val_20" / "data.lmdb", require_energy=True)
    indices = [19, *range(20), 3]
    assert dataset._at_once(indices) is not None
    assert equal(dataset.batch(indices), _one_by_one(dataset, indices))
    assert dataset.natoms().tolist() == dataset.batch(range(20)).natoms.tolist()


def test_genuine_oc20_records(oc20_data: Path) -> None:
    import csv
    import gzip

    dataset = open_dataset(oc20_data / "is2re_val_20" / "data.lmdb", require_energy=True)
    with gzip.open(oc20_data / "val_targets.csv.gz", "rt") as file:
        rows = [row for row in csv.DictReader(file) if row["split"] == "val_id"][:20]
    batch = collate(list(dataset))
    assert len(dataset) == len(batch) == 20
    assert [str(sid) for sid in batch.sid] == [row["sid"] for row in rows]
    assert batch.energy.dtype == torch.float64
    targets = [float(row["y_relaxed"]) for row in rows]
    assert batch.energy.tolist() == pytest.approx(targets, abs=1e-6)
    assert torch.equal(batch.fixed, batch.tags == 0)
    assert set(batch.tags.tolist()) == {0, 1, 2}
    assert batch.pbc.all()
    assert batch.cell.shape == (20, 3, 3)
    assert int(batch.natoms.min()) >= 7
    assert int(batch.natoms.max()) <= 225
    # Initial and relaxed positions are wrapped differently: differences up to 23 Å.
    assert 5 < (batch.positions - batch.positions_relaxed).abs().max() < 40
    assert batch.energy_initial is not None


def test_genuine_graph_fits_the_positions(oc20_data: Path) -> None:
    dataset = open_dataset(oc20_data / "is2re_val_20" / "data.lmdb")
    record = dataset.record(0)
    pos, (neighbour, centre) = record["pos"], record["edge_index"]
    shift = record["cell_offsets"].to(pos.dtype) @ record["cell"][0]
    assert (pos[neighbour] - pos[centre] + shift).norm(dim=1).max() < 6.001


def test_reading_needs_no_pyg(oc20_data: Path) -> None:
    code = (
        "import sys\n"
        "sys.modules['torch_geometric'] = None  # any import of it fails\n"
        "from flt_mol.data import open_dataset\n"
        "print(len(list(open_dataset(sys.argv[1]))))\n"
        "assert sys.modules['torch_geometric'] is None\n"
    )
    path = str(oc20_data / "is2re_val_20" / "data.lmdb")
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, path], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "20"


@pytest.mark.parametrize("change", ["truncate", "overwrite"])
def test_a_file_written_to_while_it_is_open_is_not_read_on(
    numbered: Any, write_lmdb: Any, change: str, tmp_path: Path
) -> None:
    path = write_lmdb(numbered(300))
    dataset = open_dataset(path)
    assert dataset[0].sid == (100,)
    if change == "truncate":
        os.truncate(path, 16384)
    else:
        shutil.copyfile(write_lmdb(numbered(7), name="other.lmdb"), path)
    for read in (lambda: dataset[250], lambda: dataset.batch([1, 2]), dataset.natoms):
        with pytest.raises(ValueError, match="has changed since it was opened"):
            read()


def test_a_file_that_is_removed_or_replaced_is_read_on(numbered: Any, write_lmdb: Any) -> None:
    path = write_lmdb(numbered(5))
    dataset = open_dataset(path)
    assert dataset[0].sid == (100,)
    os.replace(write_lmdb(numbered(7), name="other.lmdb"), path)
    assert dataset[4].sid == (104,)
    assert len(open_dataset(path)) == 7
    with pytest.raises(ValueError, match="has changed since it was opened"):
        dataset[3]
    path.unlink()
    assert len(list(open_dataset(write_lmdb(numbered(3), name="x.lmdb")))) == 3
