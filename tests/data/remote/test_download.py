"""Published data sets: fetched, checked, unpacked, and gone on with after any interruption."""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from flt_mol.data.catalog import Recipe, recipe
from flt_mol.data.folder_lock import locked_folder
from flt_mol.data.remote import archive, download
from flt_mol.testing.flaky_server import FlakyServer, Reply, serving

SPLITS = ("train", "val_id", "test_id")


def published(folder: Path, write_lmdb: Any, make_record: Any) -> tuple[Recipe, bytes]:
    """A recipe in `folder/far_away`, and the archive that it names."""
    entries, top = {}, folder / "made"
    for number, split in enumerate(SPLITS):
        name = f"top/data/is2re/all/{split}/data.lmdb"
        (top / name).parent.mkdir(parents=True)
        records = {i: make_record(sid=10 * number + i) for i in range(number + 1)}
        data = write_lmdb(records, name=top / name).read_bytes()
        entries[split] = {
            "file": name,
            "count": len(records),
            "bytes": len(data),
            "md5": hashlib.md5(data).hexdigest(),
        }
    with tarfile.open(folder / "made.tar.gz", "w:gz") as tar:
        for entry in entries.values():
            tar.add(top / entry["file"], entry["file"])
    packed = (folder / "made.tar.gz").read_bytes()
    (folder / "far_away").mkdir()
    url = "http://127.0.0.1:9/sets/all.tar.gz"
    source = {"url": url, "bytes": len(packed), "md5": hashlib.md5(packed).hexdigest()}
    metadata = {"name": "far_away", "archive": source, "splits": entries}
    text = yaml.safe_dump(metadata, sort_keys=False)
    (folder / "far_away" / "dataset.yaml").write_text(text)
    return recipe(folder / "far_away"), packed


@pytest.fixture
def far(
    tmp_path: Path, write_lmdb: Any, make_record: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """The recipe, the archive, a server that has it, the data folder, and a download from there."""
    for name in ("http_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FLT_MOL_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found, packed = published(tmp_path, write_lmdb, make_record)
    with serving(FlakyServer({"sets/all.tar.gz": packed})) as server:
        far = namedtuple("Far", "recipe packed server data get")

        def get(splits: Any = None, **options: Any) -> download.DownloadResult:
            options = {"base_url": f"{server.url}/sets/", "wait": 0, "attempts": 2, **options}
            return download.download(found, splits, **options)

        yield far(found, packed, server, tmp_path / "data" / "far_away", get)


def contents(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir()}


def file(split: str) -> str:
    return f"top/data/is2re/all/{split}/data.lmdb"


def test_everything(far: Any) -> None:
    labels: list[str] = []
    result = far.get(progress=lambda *step: labels.append(step[0]))
    assert contents(far.data) == {"all.tar.gz", *map(file, SPLITS)}
    assert result == download.DownloadResult(
        "far_away",
        far.data,
        far.data / "all.tar.gz",
        len(far.packed),
        (),
        SPLITS,
        {split: far.data / file(split) for split in SPLITS},
    )
    assert [s.sid[0] for s in far.recipe.open("test_id")] == [20, 21, 22]
    assert "fetch all.tar.gz" in labels
    assert any(label.startswith(("unpack", "look for")) for label in labels)


def test_one_split_then_the_rest_of_them(far: Any) -> None:
    assert far.get(["val_id"]).unpacked == ("val_id",)
    assert contents(far.data) == {"all.tar.gz", file("val_id")}
    result = far.get()
    assert (result.present, result.unpacked) == (("val_id",), ("train", "test_id"))
    assert result.received == 0
    assert len(far.server.requests) == 1
    assert far.get(["train", "val_id", "train"]).present == ("train", "val_id")


def test_by_name(far: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flt_mol.data.catalog.resource_folder", lambda kind: tmp_path)
    options = {"base_url": f"{far.server.url}/sets", "keep_archive": False}
    result = download.download("far-away", ["train"], **options)
    assert result.archive is None
    assert contents(far.data) == {file("train")}


def test_a_place_of_ones_own(far: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    far.get(["train"])
    other = tmp_path / "other"
    result = far.get(["train"], to=other)  # what lies elsewhere does not count
    assert result.files == {"train": other / file("train")}
    assert contents(other) == {"all.tar.gz", file("train")}
    shutil.rmtree(far.data)
    monkeypatch.setenv("FLT_MOL_DATA", str(other))
    assert far.recipe.path("train") == other / file("train")


def test_without_the_archive_in_the_end(far: Any) -> None:
    assert far.get(["train"], keep_archive=False).archive is None
    assert contents(far.data) == {file("train")}
    assert far.get(["val_id"], keep_archive=False).received == len(far.packed)
    assert contents(far.data) == {file("train"), file("val_id")}


@pytest.mark.parametrize("place", ["far_away", "."])
def test_an_archive_fetched_by_hand(far: Any, place: str) -> None:
    far.data.mkdir(parents=True)
    by_hand = far.data.parent / place / "all.tar.gz"
    by_hand.write_bytes(far.packed)
    result = far.get(["val_id"], keep_archive=False)
    assert far.server.requests == []
    # What lies outside of the data set's folder is not ours to remove.
    assert by_hand.exists() == (place == ".")
    assert result.archive == (by_hand if place == "." else None)
    assert contents(far.data) == {file("val_id")}


@pytest.mark.parametrize(("change", "mend"), [(-1, "rename it to all.tar.gz.part to"), (1, "r")])
def test_an_archive_of_another_size(far: Any, change: int, mend: str) -> None:
    far.data.mkdir(parents=True)
    (far.data / "all.tar.gz").write_bytes((far.packed + b"x")[: len(far.packed) + change])
    with pytest.raises(ValueError, match=rf"all\.tar\.gz has .* bytes, expected are .*: {mend}"):
        far.get(["val_id"])
    if change < 0:
        (far.data / "all.tar.gz").rename(far.data / "all.tar.gz.part")
        assert far.get(["val_id"]).received == 1


def test_a_damaged_archive_by_hand(far: Any) -> None:
    far.data.mkdir(parents=True)
    path = far.data / "all.tar.gz"
    path.write_bytes(far.packed[:300] + b"xxxx" + far.packed[304:])
    with pytest.raises(ValueError, match=r"all\.tar\.gz.*(no sound|damaged)"):
        far.get()
    assert contents(far.data) == {"all.tar.gz"}


def test_a_damaged_split_is_replaced(far: Any) -> None:
    far.get(["val_id"])
    path = far.data / file("val_id")
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:5000] + b"x" + whole[5001:]):
        path.write_bytes(damaged)
        assert far.get(["val_id"]).unpacked == ("val_id",)
        assert path.read_bytes() == whole


def test_what_others_unpacked_is_used_and_not_written_to(far: Any, tmp_path: Path) -> None:
    theirs = tmp_path / "data" / "is2re" / "all" / "val_id" / "data.lmdb"
    theirs.parent.mkdir(parents=True)
    shutil.copy(tmp_path / "made" / file("val_id"), theirs)
    result = far.get(["val_id"])
    assert result.files == {"val_id": theirs}
    assert (result.present, far.server.requests) == (("val_id",), [])
    theirs.write_bytes(b"x")
    with pytest.raises(ValueError, match=rf"val_id is there.*not as it.*: {theirs} has 1 bytes"):
        far.get(["val_id"])
    assert theirs.read_bytes() == b"x"
    assert far.get(["val_id"], to=tmp_path / "another").unpacked == ("val_id",)


def test_what_a_link_leads_to_is_not_replaced(far: Any, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs" / file("val_id")
    theirs.parent.mkdir(parents=True)
    theirs.write_bytes(b"x")
    far.data.parent.mkdir()
    far.data.symlink_to(tmp_path / "theirs")
    with pytest.raises(ValueError, match=r"1 bytes, .*; it stays as it is, .*--to ANOTHER_FOLDER"):
        far.get(["val_id"])
    assert theirs.read_bytes() == b"x"
    assert far.server.requests == []
    # A folder that was named for this download is one's own; not so what links in it lead to.
    assert far.get(["val_id"], to=far.data).unpacked == ("val_id",)
    theirs.write_bytes(b"x")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "top").symlink_to(tmp_path / "theirs" / "top")
    with pytest.raises(ValueError, match="it stays as it is"):
        far.get(["val_id"], to=tmp_path / "mine")
    assert theirs.read_bytes() == b"x"


def test_folders_in_place_of_files(far: Any, tmp_path: Path) -> None:
    def refused(message: str, **options: Any) -> None:
        with pytest.raises(ValueError, match=message):
            far.get(["val_id"], **options)
        assert far.server.requests == []

    # An empty folder is not the split, wherever it lies.
    for place in (far.data / file("val_id"), far.data / "all" / "val_id" / "data.lmdb"):
        place.mkdir(parents=True)
        refused(r"val_id is there already, .*no \*\.lmdb was found in .*the folder is empty")
        shutil.rmtree(far.data)
    # One with the right number of systems is.
    place.mkdir(parents=True)
    shutil.copy(tmp_path / "made" / file("val_id"), place / "data.0.lmdb")
    assert far.get(["val_id"]).present == ("val_id",)
    shutil.rmtree(far.data)
    for name in ("all.tar.gz", "all.tar.gz.part"):
        (far.data / name).mkdir(parents=True)
        refused(rf"{far.data}/{name} is a folder, the archive is to be there")
        (far.data / name).rmdir()
    (far.data / "top").write_text("x")
    refused(r"cannot write .*val_id: .*/top is a file; give another with --to FOLDER, or FLT_MOL_D")


def test_folders_that_may_not_be_looked_at(far: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(download, "check_folder", refuse)
    with pytest.raises(ValueError, match=r"cannot write .*far_away: Permission denied; give ano"):
        far.get()


def test_an_archive_that_cannot_be_removed(far: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    far.get(["val_id"])

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refuse)
        with pytest.raises(ValueError, match=r"all splits are there, .*all\.tar\.gz: Permission"):
            far.get(["val_id"], keep_archive=False)
    # Data lie elsewhere, and the data folder is none.
    monkeypatch.setenv("XDG_CACHE_HOME", str(far.data.parent.parent / "cache"))
    (far.data.parent.parent / "cache" / "flt_mol").mkdir(parents=True)
    far.data.parent.rename(far.data.parent.parent / "cache" / "flt_mol" / "data")
    far.data.parent.write_text("a file")
    assert far.get(["val_id"], keep_archive=False).present == ("val_id",)


def test_the_home_of_nobody(far: Any) -> None:
    with pytest.raises(ValueError, match="--to is ~nobody-here/x, and there is no such home"):
        far.get(to="~nobody-here/x")


def test_a_compact_version_is_enough(far: Any, tmp_path: Path) -> None:
    compact = far.data / "compact" / "val_id.lmdb"
    compact.parent.mkdir(parents=True)
    shutil.copy(tmp_path / "made" / file("val_id"), compact)
    assert far.get(["val_id"]).files == {"val_id": compact}
    shutil.copy(tmp_path / "made" / file("train"), compact)
    with pytest.raises(ValueError, match=r"compact/val_id\.lmdb holds 1 systems, expected are 2"):
        far.get(["val_id"])


def test_damaged_bytes_once(far: Any) -> None:
    far.server._replies = iter([Reply(drop_after=1000), Reply(damage=1500)])
    assert far.get().received == len(far.packed) * 2
    assert contents(far.data) == {"all.tar.gz", *map(file, SPLITS)}


def test_unreachable(far: Any) -> None:
    message = r"127\.0\.0\.1:9/sets/all.tar.gz: .*put it at .*data/far_away/all\.tar\.gz, and run"
    with pytest.raises(ValueError, match=message):
        far.get(base_url=None)


def test_unknown_splits(far: Any) -> None:
    with pytest.raises(ValueError, match=r"no split 'val' \(did you mean val_id\?\); there are: t"):
        far.get(["val"])
    with pytest.raises(ValueError, match=r"no split was chosen; there are: train, val_id, test_id"):
        far.get([])
    assert not far.data.exists()


def test_data_sets_that_are_not_published(far: Any) -> None:
    def refused(metadata: dict[str, Any], message: str) -> None:
        changed = {**far.recipe.metadata, **metadata}
        (far.recipe.folder / "dataset.yaml").write_text(yaml.safe_dump(changed))
        with pytest.raises(ValueError, match=message):
            download.download(far.recipe.folder)

    refused({"archive": None}, "far_away is not one to download: .* names no archive; its files")
    refused({"archive": {"url": "http://x/y.tar.gz"}}, r"dataset\.yaml: archive needs url, bytes")
    entry = far.recipe.metadata["splits"]["train"]
    for file_ in ("/etc/data.lmdb", "top/../../data.lmdb"):
        refused({"splits": {"train": {**entry, "file": file_}}}, "train: .* lies outside of the")
    refused({"splits": {"train": {"file": "a"}}}, r"train: .*dataset\.yaml needs bytes and md5")
    with pytest.raises(ValueError, match="emt_adsorption is not one to download"):
        download.download("emt-adsorption")


Usage = namedtuple("Usage", "total used free")


def test_too_little_room(far: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    archive_bytes = len(far.packed)
    sizes = {split: far.recipe.expected(split)["bytes"] for split in SPLITS}
    free = archive_bytes + sizes["val_id"]

    def usage(path: Path) -> Usage:
        assert path == far.data
        return Usage(10**9, 0, free)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    message = (
        f"too little room in {far.data}: {archive_bytes + sum(sizes.values()):,} bytes are needed "
        rf"\({archive_bytes:,} for the archive, {sum(sizes.values()):,} unpacked\), {free:,} are "
        "free; choose another place with --to"
    )
    with pytest.raises(ValueError, match=message):
        far.get()
    assert contents(far.data) == set()
    assert far.server.requests == []
    far.get(["val_id"])
    # What is there needs no room again: neither the archive, nor the beginning of one.
    free = sizes["train"]
    far.get(["train", "val_id"])
    (far.data / "all.tar.gz").rename(far.data / "all.tar.gz.part")
    free = sizes["test_id"]
    far.get(["test_id"])
    free = 0
    far.get()


def test_folders_that_cannot_be_written(far: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match=r"file is a file; give another with --to FOLDER"):
        far.get(to=tmp_path / "file" / "below")


def test_nothing_is_written_when_all_is_there(
    far: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far.get(["val_id"])

    def refuse(*_: Any) -> None:
        raise AssertionError("wrote")

    monkeypatch.setattr(download, "locked_folder", refuse)
    monkeypatch.setattr(download, "check_folder", refuse)
    result = far.get(["val_id"])
    assert (result.present, result.archive) == (("val_id",), far.data / "all.tar.gz")
    # Somebody else's folder.
    monkeypatch.setenv("FLT_MOL_DATA", str(far.data / "top" / "data" / "is2re"))
    result = far.get(["val_id"])
    assert result.files == {"val_id": far.data / file("val_id")}
    assert not result.folder.exists()


def test_two_at_once(far: Any) -> None:
    with (
        locked_folder(far.data, "download"),
        pytest.raises(ValueError, match=r"another download into .*far_away is running"),
    ):
        far.get()
    assert far.server.requests == []
    far.get()


def test_killed_while_unpacking(far: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    write: Callable[..., str] = archive._write

    def killed(path: Path, source: Any, target: Path) -> str:
        if target.parent.name == "val_id":
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(b"half")
            # As SIGKILL would, leave the temporary file.
            monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)
            raise KeyboardInterrupt
        return write(path, source, target)

    with monkeypatch.context() as patched:
        patched.setattr(archive, "_write", killed)
        with pytest.raises(KeyboardInterrupt):
            far.get()
    monkeypatch.undo()
    monkeypatch.setenv("FLT_MOL_DATA", str(far.data.parent))
    half = "top/data/is2re/all/val_id/.data.lmdb.part"
    assert contents(far.data) == {".download.lock", "all.tar.gz", file("train"), half}
    # Even a run for other splits removes what was left half-written.
    assert far.get(["train", "test_id"]).present == ("train",)
    assert contents(far.data) == {"all.tar.gz", file("train"), file("test_id")}
    assert far.get().received == 0
    assert contents(far.data) == {"all.tar.gz", *map(file, SPLITS)}
    assert os.listdir(far.data.parent) == ["far_away"]
