"""Files compared with what their recipe says."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from flt_mol.data import verify as module
from flt_mol.data.catalog import recipe
from flt_mol.data.verify import verify


@pytest.fixture
def own(tmp_path: Path, write_lmdb: Any, make_record: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set of one's own, whose recipe says all of one split and little of the other."""
    monkeypatch.setenv("FLT_MOL_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "own"
    (folder / "parts").mkdir(parents=True)
    data = write_lmdb({i: make_record(sid=i) for i in range(3)}, name="own/a.lmdb").read_bytes()
    write_lmdb({0: make_record(sid="v")}, name="own/parts/data.0.lmdb")
    describe(folder, sha256=hashlib.sha256(data).hexdigest(), bytes=len(data), count=3)
    return folder


def describe(folder: Path, **entry: Any) -> None:
    splits = {"a": {"file": "a.lmdb", **entry}, "b": "parts"}
    (folder / "dataset.yaml").write_text(yaml.safe_dump({"name": "own", "splits": splits}))


def statuses(*arguments: Any, **options: Any) -> list[str]:
    return [row.status for row in verify(*arguments, **options)]


def test_all_is_well(own: Path) -> None:
    steps: list[tuple[str, int, int | None]] = []
    first, second = verify(own, progress=lambda *step: steps.append(step))
    size = (own / "a.lmdb").stat().st_size
    assert (first.split, first.file, first.status, first.ok) == ("a", own / "a.lmdb", "ok", True)
    assert {"file": "a.lmdb", **first.found} == recipe(own).expected("a")
    assert first.found == first.expected
    assert set(first.found) == {"bytes", "sha256", "count"}
    assert (second.status, second.expected, second.found) == ("ok", {}, {"count": 1})
    assert steps == [("verify a", size, size)]
    assert statuses(recipe(own), ["b", "a", "b"]) == ["ok", "ok"]


@pytest.mark.parametrize("kind", ["md5", "sha256"])
def test_each_fault_by_name(own: Path, kind: str) -> None:
    path = own / "a.lmdb"
    data = path.read_bytes()
    right = {kind: hashlib.new(kind, data).hexdigest(), "bytes": len(data), "count": 3}
    describe(own, **right)
    assert statuses(own, ["a"]) == ["ok"]
    path.write_bytes(data[:-1])
    (row,) = verify(own, ["a"])
    assert (row.status, row.found) == ("wrong size", {"bytes": len(data) - 1})
    assert row.expected == right
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    (row,) = verify(own, ["a"])
    assert row.status == f"wrong {kind}"
    assert row.found[kind] == hashlib.new(kind, path.read_bytes()).hexdigest()
    path.unlink()
    (row,) = verify(own, ["a"])
    assert (row.status, row.file, row.found) == ("missing", None, {})
    assert row.message == "a.lmdb"
    path.write_bytes(data)
    describe(own, **{**right, "count": 4})
    (row,) = verify(own, ["a"])
    assert (row.status, row.found["count"], row.ok) == ("wrong count", 3, False)
    # Capitals in a hash are no fault.
    describe(own, **{**right, kind: right[kind].upper()})
    assert statuses(own, ["a"]) == ["ok"]


def test_a_file_that_cannot_be_opened(own: Path) -> None:
    describe(own)
    (own / "a.lmdb").write_bytes(b"<html>")
    row, other = verify(own)
    assert (row.status, other.status) == ("cannot be opened", "ok")
    assert "web page" in row.message
    assert row.found == {"bytes": 6}


def test_a_file_that_cannot_be_read(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(module, "_hash", refuse)
    (row,) = verify(own, ["a"])
    assert (row.status, row.message) == ("cannot be opened", f"{own / 'a.lmdb'}: Permission denied")


def test_compact_versions_are_read(own: Path, write_lmdb: Any, make_record: Any) -> None:
    compact = own / "compact" / "a.lmdb"
    compact.parent.mkdir()
    shutil.copy(own / "a.lmdb", compact)
    steps: list[tuple[str, int, int | None]] = []
    (row,) = verify(own, ["a"], progress=lambda *step: steps.append(step))
    assert (row.file, row.status, row.found) == (compact, "ok", {"count": 3})
    assert steps == [("verify a", i, 3) for i in (1, 2, 3)]
    # One bad record is found, wherever it is; and a missing one.
    write_lmdb({0: make_record(), 1: make_record(), 2: b"\x80bad"}, name=compact)
    (row,) = verify(own, ["a"])
    assert (row.status, row.found) == ("cannot be opened", {"count": 3})
    assert "key 2" in row.message
    write_lmdb({0: make_record(), 1: make_record()}, name=compact)
    assert statuses(own, ["a"]) == ["wrong count"]


def test_files_elsewhere(own: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    assert statuses(own, ["a"], folder=other) == ["missing"]
    other.mkdir()
    shutil.copy(own / "a.lmdb", other)
    (own / "a.lmdb").unlink()
    assert statuses(own, ["a"], folder=other) == ["ok"]


def test_unknown_splits_come_first(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "open_dataset", lambda *_: pytest.fail("began to read"))
    with pytest.raises(ValueError, match=r"no split 'bb' \(did you mean b\?\); there are: a, b"):
        verify(own, ["a", "bb"])
    with pytest.raises(ValueError, match="no data set 'nothing'"):
        verify("nothing")


def test_the_shipped_data_set() -> None:
    rows = verify("emt-adsorption")
    assert [row.split for row in rows if row.ok] == list(recipe("emt_adsorption").splits)
    assert sum(row.found["count"] for row in rows) == 4851
    assert all(set(row.found) == {"bytes", "sha256", "count"} for row in rows)


def test_oc20_is_not_here(own: Path) -> None:
    rows = verify("oc20_is2re")
    assert {row.status for row in rows} == {"missing"}
    assert rows[3].message == "is2res_train_val_test_lmdbs/data/is2re/all/val_id/data.lmdb"
    assert max(len(row.message) for row in rows) < 80
    assert rows[3].expected["bytes"] == 3351724032


def test_what_is_wrong_is_told_with_a_mend_that_removes_nothing(own: Path) -> None:
    path = own / "a.lmdb"
    data = path.read_bytes()
    size = f"{len(data):,}"

    def message(**entry: Any) -> str:
        describe(own, **entry)
        (row,) = verify(own, ["a"])
        assert row.status.startswith("wrong")
        assert "remove" not in row.message
        return row.message

    here = f"; if it was changed on purpose, give its numbers in {own}/dataset.yaml; else bring a "
    facts = f"{path} has {size} bytes, expected are 1,234"
    assert message(bytes=1234) == f"{facts}{here}whole copy"
    found = hashlib.md5(data).hexdigest()
    assert message(md5="a" * 32).startswith(f"{path} has md5 {found}, expected is {'a' * 32}; ")
    assert message(count=4321).startswith(f"{path} holds 3 systems, expected are 4,321; ")
    # A published data set is fetched beside what is there.
    description = own / "dataset.yaml"
    description.write_text(f"archive: {{url: http://x}}\n{description.read_text()}")
    (row,) = verify(own, ["a"])
    assert (
        "a right one is fetched by flt-mol data download own --split a --to FOLDER" in row.message
    )
    # A compact version is made again.
    (own / "compact").mkdir()
    path.rename(own / "compact" / "a.lmdb")
    (row,) = verify(own, ["a"])
    assert row.message == (
        f"{own}/compact/a.lmdb holds 3 systems, expected are 4,321; make it again from the whole "
        "file with flt-mol data convert"
    )


def test_nothing_is_left_behind(own: Path) -> None:
    before = sorted(own.rglob("*"))
    verify(own)
    assert sorted(own.rglob("*")) == before
