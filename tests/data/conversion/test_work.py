"""The work folder: what is kept, what is thrown away, who may work; and what is refused."""

from __future__ import annotations

import errno
import os
import shutil
from collections import namedtuple
from pathlib import Path

import lmdb
import pytest

from flt_mol.data import open_dataset
from flt_mol.data.conversion import convert, write
from flt_mol.data.conversion.work import Chunk, WorkFolder
from flt_mol.data.folder_lock import locked_folder

pytestmark = pytest.mark.filterwarnings("ignore:.*all tags.*:UserWarning")


@pytest.fixture
def work(tmp_path):
    folder = WorkFolder(tmp_path / "work")
    folder.plan = {"source": "a"}
    folder.path.mkdir()
    return folder


CHUNK = Chunk([b"one", b"", b"three"], {1: "why"}, ["edge_index"])


def test_chunk_comes_back(work):
    work.write_chunk(4, CHUNK)
    assert work.read_chunk(4) == CHUNK
    assert work.read_chunk(3) is None
    assert [path.name for path in work.path.iterdir()] == ["chunk-00000004"]


def test_a_damaged_chunk_is_none(work):
    work.write_chunk(0, CHUNK)
    content = work.chunk_path(0).read_bytes()
    for damaged in (
        [content[:size] for size in range(len(content))]
        + [content[:i] + bytes([content[i] ^ 4]) + content[i + 1 :] for i in range(len(content))]
        + [content + b"x", b"\0" * len(content)]
    ):
        work.chunk_path(0).write_bytes(damaged)
        assert work.read_chunk(0) is None


def test_a_chunk_of_another_plan_is_none(work):
    work.write_chunk(0, CHUNK)
    other = WorkFolder(work.path)
    other.plan = {"source": "b"}
    assert other.read_chunk(0) is None


def test_another_plan_starts_afresh(work):
    with work.locked():
        work.begin()
        work.write_chunk(0, CHUNK)
        (work.path / "folder").mkdir()
        work.begin()
        assert work.read_chunk(0) == CHUNK
        work.set_done({"systems": 1})
        assert work.done() == {"systems": 1}
    other = WorkFolder(work.path)
    other.plan = {"source": "b"}
    with other.locked():
        assert other.done() is None
        other.begin()
        assert sorted(os.listdir(other.path)) == [".conversion.lock", "plan.json"]


def test_what_says_that_all_is_done_goes_last(work, monkeypatch):
    removed = []
    unlink = Path.unlink

    def note(self, missing_ok=False):
        removed.append(self.name)
        unlink(self, missing_ok=missing_ok)

    work.begin()
    work.set_done({})
    for number in range(5):
        work.write_chunk(number, CHUNK)
    monkeypatch.setattr(Path, "unlink", note)
    work.remove()
    assert removed[5:] == ["plan.json", "done.json"]


def test_an_empty_folder_does_not_stay(tmp_path):
    work = WorkFolder(tmp_path / "some" / "work")
    with work.locked():
        pass
    assert not work.path.exists()


@pytest.fixture
def interrupted(source, tmp_path):
    """A conversion of 8 records that was interrupted when half of its chunks were made."""
    given, output = source(8), tmp_path / "out.lmdb"

    def stop(done, total):
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(given, output, workers=1, chunk_size=2, progress=stop)
    return given, output


def encoded(given, output, monkeypatch, **options):
    """The number of chunks that a run makes anew."""
    made = []
    write = WorkFolder.write_chunk

    def count(self, number, chunk):
        made.append(number)
        write(self, number, chunk)

    monkeypatch.setattr(WorkFolder, "write_chunk", count)
    convert(given, output, **{"workers": 1, "chunk_size": 2, **options})
    return made


def test_goes_on_with_what_is_missing(interrupted, monkeypatch):
    assert encoded(*interrupted, monkeypatch) == [2, 3]
    assert not interrupted[1].with_name(".out.lmdb.convert").exists()


def test_makes_a_damaged_chunk_again(interrupted, monkeypatch):
    path = interrupted[1].with_name(".out.lmdb.convert") / "chunk-00000001"
    path.write_bytes(path.read_bytes()[:-1])
    assert encoded(*interrupted, monkeypatch) == [1, 2, 3]


@pytest.mark.parametrize("options", [{"chunk_size": 4}, {"indices": range(7)}, {"forces": True}])
def test_other_options_start_afresh(options, interrupted, monkeypatch):
    assert encoded(*interrupted, monkeypatch, **options)[0] == 0


def test_another_source_starts_afresh(interrupted, monkeypatch):
    given, output = interrupted
    os.utime(given.path, ns=(0, 10**18))
    assert encoded(open_dataset(given.path), output, monkeypatch) == [0, 1, 2, 3]


def test_reading_otherwise_starts_afresh(interrupted, monkeypatch):
    given, output = interrupted
    given = open_dataset(given.path, ignore_energy=True)
    assert encoded(given, output, monkeypatch) == [0, 1, 2, 3]


def test_what_was_skipped_is_not_skipped_unasked(source, make_record, tmp_path):
    given, output = source([make_record(pos=[1]), make_record()]), tmp_path / "out.lmdb"

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(given, output, workers=1, chunk_size=1, on_error="skip", progress=stop)
    with pytest.raises(ValueError, match="key 0, sid 101: pos"):
        convert(given, output, workers=1, chunk_size=1)


def test_interrupted_while_tidying_up(source, tmp_path, monkeypatch):
    given, output = source(4), tmp_path / "out.lmdb"

    def stop(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(WorkFolder, "remove", stop)
    with pytest.raises(KeyboardInterrupt):
        convert(given, output, workers=1)
    monkeypatch.undo()
    content = output.read_bytes()
    output.write_bytes(b"of somebody else")
    with pytest.raises(ValueError, match="exists already"):
        convert(given, output, workers=1)
    assert output.read_bytes() == b"of somebody else"
    output.write_bytes(content)
    assert convert(given, output, workers=1).systems == 4
    assert sorted(os.listdir(tmp_path)) == ["out.lmdb", "source"]


def test_a_source_that_changes_meanwhile(source, tmp_path):
    given, output = source(4), tmp_path / "out.lmdb"

    def touch(done, total):
        os.utime(given.path, ns=(0, 10**18 + done))

    with pytest.raises(
        ValueError, match="was changed while it was converted|has changed since it was opened"
    ):
        convert(given, output, workers=1, progress=touch)
    assert not output.exists()


def test_the_second_of_two_at_a_time_is_refused(source, tmp_path):
    output = tmp_path / "out.lmdb"
    given = source(4)
    with locked_folder(tmp_path / ".out.lmdb.convert", "conversion"):
        with pytest.raises(ValueError, match="another conversion into .*out.lmdb.* is running"):
            convert(given, output, workers=1)
        convert(given, tmp_path / "other.lmdb", workers=1)
    convert(given, output, workers=1)


def test_an_output_is_not_overwritten_unasked(source, tmp_path):
    given, output = source(4), tmp_path / "out.lmdb"
    output.write_bytes(b"precious")
    with pytest.raises(ValueError, match="exists already"):
        convert(given, output, workers=1)
    assert output.read_bytes() == b"precious"
    convert(given, output, workers=1, overwrite=True)
    assert len(open_dataset(output)) == 4


def test_a_folder_is_overwritten_only_by_its_like(source, tmp_path):
    given, output = source(4), tmp_path / "out"
    convert(given, output, workers=1, shard_size=1)
    convert(given, output, workers=1, shard_size=3, overwrite=True)
    assert sorted(os.listdir(output)) == ["data.0000.lmdb", "data.0001.lmdb"]
    (output / "notes.txt").touch()
    with pytest.raises(ValueError, match="holds notes.txt"):
        convert(given, output, workers=1, shard_size=3, overwrite=True)
    (tmp_path / "out.lmdb").mkdir()
    with pytest.raises(ValueError, match="is a folder; remove it first"):
        convert(given, tmp_path / "out.lmdb", workers=1, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["out", "out.lmdb", "source"]


@pytest.mark.parametrize("place", ["source/data.lmdb", "source/x.lmdb", "source/a/x.lmdb", "."])
def test_an_output_in_its_source_is_refused(place, source, tmp_path):
    source(4)
    given = open_dataset(tmp_path / "source")
    shards = {"shard_size": 2} if place == "." else {}
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match="its own source"):
        convert(given, tmp_path / place, workers=1, overwrite=True, **shards)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_output_beside_its_source_is_not(source, tmp_path):
    given = source(4)
    convert(given, given.path.with_name("x.lmdb"), workers=1)
    with pytest.raises(ValueError, match="its own source"):
        convert(given, given.path, workers=1, overwrite=True)


Usage = namedtuple("Usage", "total used free")


def test_too_little_room_is_seen_before(source, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 10**9 - 1000, 1000))
    with pytest.raises(OSError, match="out.lmdb") as caught:
        convert(source(4), tmp_path / "out.lmdb", workers=1)
    assert caught.value.errno == errno.ENOSPC
    assert "1,000 are free" in str(caught.value)
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.parametrize("kind", ["lmdb", "aselmdb", "extxyz"])
def test_a_disk_that_fills_up_keeps_the_work(kind, source, tmp_path, monkeypatch):
    given, output = source(8), tmp_path / f"out.{kind}"
    replace = Path.replace

    def fail(self, target):
        if Path(target).name in ("chunk-00000002", self.with_name(output.name).name):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", fail)
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is full.*kept in .*out") as caught:
            convert(given, output, workers=1, chunk_size=2)
        assert caught.value.filename == str(output)
    monkeypatch.undo()
    assert encoded(given, output, monkeypatch) == [2, 3]


@pytest.mark.parametrize(("code", "free", "full"), [
    (errno.ENOSPC, 10**9, True), (errno.EIO, 100, True), (errno.EIO, 10**9, False),
])  # fmt: skip
def test_what_lmdb_says_of_a_full_disk(code, free, full, source, tmp_path, monkeypatch):
    """It calls it an input/output error where a part of a page was written."""

    def fail(*_):
        monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 10**9 - free, free))
        raise lmdb.Error(f"mdb_txn_commit: {os.strerror(code)}")

    monkeypatch.setattr(write.KINDS["lmdb"], "write", fail)
    with pytest.raises(OSError if full else lmdb.Error, match="disk is full" if full else "commit"):
        convert(source(2), tmp_path / "out.lmdb", workers=1)


@pytest.mark.parametrize(("output", "options", "message"), [
    ("out.npz", {}, "names no kind of file; give one of lmdb, aselmdb, extxyz"),
    ("out.lmdb", {"kind": "npz"}, "kind is 'npz'"),
    ("out.lmdb", {"kind": "extxyz"}, "end in .extxyz"),
    ("out.extxyz", {"shard_size": 2}, "shard_size is for kind lmdb"),
    ("out", {"shard_size": 0}, "shard_size is 0"),
    ("out.lmdb", {"workers": 0}, "workers is 0"),
    ("out.lmdb", {"chunk_size": 0}, "chunk_size is 0"),
    ("out.lmdb", {"on_error": "ignore"}, "on_error is 'ignore'"),
    ("out.lmdb", {"indices": []}, "no systems to convert"),
    ("out.lmdb", {"indices": [0, 4]}, "has 4 systems and none of index 4"),
])  # fmt: skip
def test_options_that_make_no_sense(output, options, message, source, tmp_path):
    with pytest.raises(ValueError, match=message):
        convert(source(4), tmp_path / output, **options)
    assert os.listdir(tmp_path) == ["source"]


def test_what_did_not_come_back_is_not_put_in_place(source, tmp_path, monkeypatch):
    """A writer that alters one number is found out."""
    encode = write.KINDS["lmdb"].encode

    def alter(record, structures, where, *, forces):
        changed = dict(record)
        if record["sid"] == 1007:
            changed["pos"] = record["pos"].clone()
            changed["pos"][2, 1] += 1e-6
        return encode(changed, structures, where, forces=forces)

    monkeypatch.setattr(write.KINDS["lmdb"], "encode", alter)
    with pytest.raises(ValueError, match="key 1, sid 1007: positions is not the same"):
        convert(source(4), tmp_path / "out.lmdb", workers=1)
    assert not (tmp_path / "out.lmdb").exists()
