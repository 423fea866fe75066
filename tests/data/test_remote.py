"""Downloads from a server with the faults of real ones; and files compared with their recipe."""

import gzip
import hashlib
import io
import os
import tarfile
import threading

import pytest
import yaml

from flt_mol.data import remote
from flt_mol.data.recipes import recipe
from flt_mol.data.remote import download, verify
from helpers.flaky_server import FlakyServer, Reply, serving
from helpers.systems import make_record, write_records

SPLITS = ("train", "val_id", "test_id")


def md5(data):
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


@pytest.fixture
def published(tmp_path, monkeypatch):
    """A recipe of three splits, and their archive."""
    monkeypatch.setenv("FLT_MOL_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "_WAIT", 0)
    folder, stream, splits = tmp_path / "far", io.BytesIO(), {}
    folder.mkdir()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for i, name in enumerate(SPLITS):
            records = [make_record(100 * i + j, graph=True) for j in range(4)]
            data = write_records(tmp_path / "x.lmdb", records).read_bytes()
            (tmp_path / "x.lmdb").unlink()
            info = tarfile.TarInfo(f"./set/all/{name}/data.lmdb")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
            file = f"set/all/{name}/data.lmdb"
            splits[name] = {"file": file, "bytes": len(data), "md5": md5(data), "count": 4}
    packed = stream.getvalue()
    archive = {"url": "http://127.0.0.1:9/set.tar.gz", "bytes": len(packed), "md5": md5(packed)}
    content = {"name": "set", "archive": archive, "splits": splits}
    (folder / "dataset.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return folder, packed


def fetch(published, *plan, splits=None, **options):
    """Download from a server that answers as planned; the result and the requests."""
    folder, packed = published
    with serving(FlakyServer({"set.tar.gz": packed}, plan)) as server:
        options = {"base_url": server.url, **options}
        return download(folder, splits, **options), server.requests


def test_everything(published, tmp_path):
    labels = []
    result, requests = fetch(published, progress=lambda label, done, total: labels.append(label))
    assert len(requests) == 1
    assert result.folder == tmp_path / "data" / "set"
    assert result.unpacked == SPLITS
    assert (result.folder / "set.tar.gz").is_file()
    assert all(row.ok for row in verify(published[0]))
    assert {label.split()[0] for label in labels} >= {"fetch", "check", "unpack"}
    again, requests = fetch(published)
    assert not requests
    assert not again.unpacked
    assert tuple(again.files) == SPLITS
    found = [p.name for p in result.folder.rglob("*") if p.is_file()]
    assert sorted(found) == ["data.lmdb"] * 3 + ["set.tar.gz"]


def test_one_split_then_the_rest(published):
    first, _ = fetch(published, splits=["val_id"])
    assert list(first.files) == ["val_id"]
    second, requests = fetch(published)
    assert not requests
    assert second.unpacked == ("train", "test_id")


def test_elsewhere_without_the_archive(published, tmp_path, monkeypatch):
    result, _ = fetch(published, to=tmp_path / "there", keep_archive=False)
    assert not (result.folder / "set.tar.gz").exists()
    assert not (tmp_path / "data").exists()
    monkeypatch.setenv("FLT_MOL_DATA", str(tmp_path / "there"))
    assert len(recipe(published[0]).open("val_id")) == 4


def test_nothing_is_written_where_all_is_there(published, tmp_path, monkeypatch):
    fetch(published, to=tmp_path / "there", keep_archive=False)
    monkeypatch.setenv("FLT_MOL_DATA", str(tmp_path / "there"))
    result, requests = fetch(published)
    assert not requests
    assert not result.unpacked
    assert not (tmp_path / "there" / "set.tar.gz").exists()


def test_an_archive_fetched_by_hand(published, tmp_path):
    target = tmp_path / "data" / "set" / "set.tar.gz"
    target.parent.mkdir(parents=True)
    target.write_bytes(published[1])
    result, requests = fetch(published)
    assert not requests
    assert result.unpacked == SPLITS


@pytest.mark.parametrize("length", [None, 0])
def test_lost_connections_are_resumed(length, published):
    size = len(published[1])
    cuts = [Reply(drop_after=size // 5, length=length) for _ in range(4)]
    _, requests = fetch(published, *cuts)
    assert [headers.get("Range") for _, headers in requests][1:4] == [
        f"bytes={i * (size // 5)}-" for i in (1, 2, 3)
    ]


def test_a_later_run_resumes(published):
    size = len(published[1])
    with pytest.raises(ValueError, match=r"set\.tar\.gz.* bytes"):
        fetch(published, Reply(drop_after=size // 2), *[Reply(status=503)] * 6)
    _, requests = fetch(published)
    assert [headers["Range"] for _, headers in requests] == [f"bytes={size // 2}-"]


FAULTS = {
    "no ranges": [Reply(drop_after=5000), Reply(ranges=False)],
    "another part": [Reply(drop_after=5000), Reply(start_shift=7)],
    "busy": [Reply(status=503), Reply(status=429)],
    "cut at once": [Reply(drop_after=0)],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_that_pass(fault, published):
    fetch(published, *FAULTS[fault])
    assert all(row.ok for row in verify(published[0]))


@pytest.mark.parametrize("fault", ["damaged", "status", "length", "starts over", "elsewhere"])
def test_faults_that_stay(fault, published, tmp_path):
    plan = {
        "damaged": Reply(damage=100),
        "status": Reply(status=403),
        "length": Reply(length=77),
        "starts over": Reply(ranges=False, drop_after=5000),
        "elsewhere": Reply(status=302, location="file:///etc/passwd"),
    }[fault]
    with pytest.raises(ValueError, match=r"set\.tar\.gz"):
        fetch(published, *[plan] * 60)
    assert not list((tmp_path / "data").rglob("data.lmdb"))
    assert not (tmp_path / "data" / "set" / "set.tar.gz").exists()


def test_redirects_are_followed(published):
    packed = published[1]
    with serving(FlakyServer({"set.tar.gz": packed, "b/set.tar.gz": packed})) as other:
        fetch(published, Reply(status=302, location=f"{other.url}/b/set.tar.gz"))
        assert len(other.requests) == 1


def test_a_part_of_another_file_is_not_used(published, tmp_path):
    part = tmp_path / "data" / "set" / "set.tar.gz.part"
    part.parent.mkdir(parents=True)
    for extra in (-1000, 0, 5):
        part.write_bytes(b"x" * (len(published[1]) + extra))
        if extra <= 0:
            with pytest.raises(ValueError, match="md5"):
                fetch(published)
        fetch(published)
        assert all(row.ok for row in verify(published[0]))
        for path in [*part.parent.rglob("data.lmdb"), part.parent / "set.tar.gz"]:
            path.unlink()


def test_a_damaged_split_is_replaced(published, tmp_path):
    result, _ = fetch(published)
    with result.files["val_id"].open("r+b") as file:
        file.seek(5000)
        file.write(b"\xff\x00\xff")
    (row,) = verify(published[0], ["val_id"])
    assert row.status == "wrong md5"
    again, requests = fetch(published)
    assert again.unpacked == ("val_id",)
    assert not requests
    assert all(row.ok for row in verify(published[0]))


def archive_of(content, tmp_path):
    path = tmp_path / "data" / "set" / "set.tar.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("kind", ["truncated", "damaged", "other", "link", "size", "content"])
def test_archives_that_are_refused(kind, published, tmp_path):
    packed = published[1]
    plain = bytearray(gzip.decompress(packed))
    if kind == "truncated":
        packed = packed[: len(packed) // 6]
    elif kind == "damaged":
        packed = packed[:3000] + b"\0" * 50 + packed[3050:]
    elif kind == "other":
        packed = gzip.compress(b"\0" * 10240)
    elif kind == "content":
        plain[40000] ^= 1
        packed = gzip.compress(bytes(plain))
    else:
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w:gz") as tar:
            info = tarfile.TarInfo("set/all/train/data.lmdb")
            if kind == "link":
                info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
                tar.addfile(info)
            else:
                info.size = 3
                tar.addfile(info, io.BytesIO(b"abc"))
        packed = stream.getvalue()
    archive_of(packed, tmp_path)
    with pytest.raises(ValueError, match=r"set\.tar\.gz"):
        fetch(published, splits=["train"])
    assert not list((tmp_path / "data").rglob("*.lmdb"))


def test_members_that_nobody_asked_for_are_not_written(published, tmp_path):
    stream = io.BytesIO()
    plain = gzip.decompress(published[1])
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for name in ("../evil", "/tmp/evil-absolute", "set/all/other"):
            info = tarfile.TarInfo(name)
            info.size = 4
            tar.addfile(info, io.BytesIO(b"evil"))
        with tarfile.open(fileobj=io.BytesIO(plain)) as old:
            for member in old:
                tar.addfile(member, old.extractfile(member))
    archive_of(stream.getvalue(), tmp_path)
    fetch(published)
    found = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert not [name for name in found if "evil" in name or name.endswith("other")]


def test_killed_while_unpacking(published, tmp_path, monkeypatch):
    folder = tmp_path / "data" / "set" / "set" / "all" / "val_id"
    folder.mkdir(parents=True)
    leftover = folder / f".data.lmdb.{2**22 - 1}.tmp.lmdb"
    leftover.write_bytes(b"half")
    fetch(published)
    assert os.listdir(folder) == ["data.lmdb"]


def test_refusals(published, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="val_di"):
        fetch(published, splits=["val_di"])
    with pytest.raises(ValueError, match="emt_adsorption has no archive"):
        download("emt_adsorption")
    with pytest.raises(ValueError, match="http"):
        download(published[0], base_url="file:///tmp")
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("x", (), {"free": 10}))
    with pytest.raises(ValueError, match="10 bytes free"):
        fetch(published)


def test_a_member_outside_of_the_folder(published):
    file = published[0] / "dataset.yaml"
    file.write_text(file.read_text().replace("set/all/train", "../train"))
    with pytest.raises(ValueError, match="outside"):
        fetch(published)


def test_two_at_once(published, tmp_path):
    from filelock import FileLock

    (tmp_path / "data" / "set").mkdir(parents=True)
    caught = []

    def run():
        try:
            fetch(published)
        except ValueError as error:
            caught.append(str(error))

    with FileLock(tmp_path / "data" / "set" / ".download.lock"):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert "another download" in caught[0]


def test_no_network(published):
    with pytest.raises(ValueError, match=r"cannot fetch http://127\.0\.0\.1:9/"):
        download(published[0])


def test_verify(published, tmp_path):
    (missing, *_) = verify(published[0])
    assert (missing.status, missing.file) == ("missing", None)
    fetch(published)
    rows = verify(published[0], progress=lambda *_: None)
    assert [row.status for row in rows] == ["ok"] * 3
    file = published[0] / "dataset.yaml"
    text = file.read_text()
    file.write_text(text.replace("count: 4", "count: 5", 1))
    (row,) = verify(published[0], ["train"])
    assert row.status == "wrong count"
    assert "has count 4, expected 5" in row.message
    file.write_text(text)
    rows[1].file.write_bytes(rows[1].file.read_bytes()[:-1])
    (row,) = verify(published[0], ["val_id"])
    assert row.status == "wrong bytes"


def test_verify_of_converted_and_shipped_splits(published, tmp_path):
    from flt_mol.data import convert, open_dataset

    result, _ = fetch(published)
    flat = result.folder / "flat" / "val_id.safetensors"
    convert(open_dataset(result.files["val_id"]), flat)
    (row,) = verify(published[0], ["val_id"])
    assert row.ok
    assert row.file == flat
    flat.write_bytes(flat.read_bytes()[:-1])
    (row,) = verify(published[0], ["val_id"])
    assert row.status == "cannot be opened"
    assert all(row.ok for row in verify("emt-adsorption"))
