"""Chosen files out of an archive, and nothing from a hostile or broken one."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import random
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from flt_mol.data.remote import archive as module
from flt_mol.data.remote.archive import Member, extract

A, B = random.Random(1).randbytes(70_000), random.Random(2).randbytes(3_000)


def pack(path: Path, *items: tuple[str, bytes | tarfile.TarInfo], **options: Any) -> Path:
    with tarfile.open(path, "w:gz", **options) as tar:
        for name, item in items:
            info = item if isinstance(item, tarfile.TarInfo) else tarfile.TarInfo(name)
            info.name = name
            if isinstance(item, bytes):
                info.size = len(item)
                tar.addfile(info, io.BytesIO(item))
            else:
                tar.addfile(info)
    return path


def special(kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo()
    info.type, info.linkname = kind, target
    return info


def member(folder: Path, name: str, data: bytes) -> Member:
    return Member(name, folder / name, len(data), hashlib.md5(data).hexdigest(), name)


def members(folder: Path) -> list[Member]:
    return [member(folder, "top/a/data", A), member(folder, "top/b/data", B)]


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if not path.is_dir())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


GOOD = [("top/a/data", A), ("top/readme", b"read me"), ("top/b/data", B)]


def test_only_what_was_chosen(tmp_path: Path) -> None:
    path, out = pack(tmp_path / "a.tar.gz", *GOOD), tmp_path / "out"
    steps: list[tuple[str, int, int | None]] = []
    extract(path, members(out)[:1], lambda *step: steps.append(step))
    assert contents(out) == {"top/a/data": A}
    assert steps
    extract(path, members(out)[1:])
    assert contents(out) == {"top/a/data": A, "top/b/data": B}


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_forms_of_names(tmp_path: Path, form: int) -> None:
    out = tmp_path / "out"
    long = "top/" + "x" * 90 + "/data"
    path = pack(
        tmp_path / "a.tar.gz", ("./top//a/data", A), (long, b"l"), ("./top/b/data", B), format=form
    )
    extract(path, [*members(out), member(out, long, b"l")])
    assert contents(out) == {"top/a/data": A, "top/b/data": B, long: b"l"}


def test_several_gzip_members(tmp_path: Path) -> None:
    """As pigz -i and bgzip write."""
    plain = gzip.decompress(pack(tmp_path / "a.tar.gz", *GOOD).read_bytes())
    path, out = tmp_path / "b.tar.gz", tmp_path / "out"
    path.write_bytes(gzip.compress(plain[:50_001]) + gzip.compress(plain[50_001:]))
    extract(path, members(out))
    assert set(contents(out)) == {"top/a/data", "top/b/data"}


def test_a_file_that_is_there_is_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "top" / "a").mkdir(parents=True)
    (out / "top" / "a" / "data").write_bytes(b"old")
    extract(pack(tmp_path / "a.tar.gz", *GOOD), members(out))
    assert contents(out)["top/a/data"] == A


@pytest.mark.parametrize(
    "hostile",
    [
        ("../escaped", b"x"),
        ("top/../../escaped", b"x"),
        ("{tmp}/escaped", b"x"),
        ("top/link", special(tarfile.SYMTYPE, "/etc")),
        ("top/a", special(tarfile.SYMTYPE, "{tmp}/elsewhere")),
        ("top/fifo", special(tarfile.FIFOTYPE)),
    ],
)
def test_hostile_members_are_not_written(tmp_path: Path, hostile: tuple[str, Any]) -> None:
    name, item = hostile
    (tmp_path / "elsewhere").mkdir()
    if isinstance(item, tarfile.TarInfo):
        item.linkname = item.linkname.replace("{tmp}", str(tmp_path))
    out = tmp_path / "out"
    items = [(name.replace("{tmp}", str(tmp_path)), item), *GOOD]
    extract(pack(tmp_path / "a.tar.gz", *items), members(out))
    assert set(contents(out)) == {"top/a/data", "top/b/data"}
    assert sorted(os.listdir(tmp_path)) == ["a.tar.gz", "elsewhere", "out"]
    assert not os.listdir(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    "kind",
    [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE],
)
def test_a_member_that_is_no_file(tmp_path: Path, kind: bytes) -> None:
    path, out = pack(tmp_path / "a.tar.gz", ("top/a/data", special(kind, "/etc/passwd"))), tmp_path
    with pytest.raises(ValueError, match=r"a\.tar\.gz: top/a/data is no file but a link.*refused"):
        extract(path, members(out / "out"))
    assert os.listdir(tmp_path) == ["a.tar.gz"]


def test_other_contents(tmp_path: Path) -> None:
    out = tmp_path / "out"
    longer = pack(tmp_path / "long.tar.gz", ("top/a/data", A + b"x"))
    with pytest.raises(ValueError, match=r"long\.tar\.gz: top/a/data has 70,001 .* 70,000; get"):
        extract(longer, members(out))
    changed = pack(tmp_path / "changed.tar.gz", ("top/b/data", B), ("top/a/data", b"x" + A[1:]))
    with pytest.raises(ValueError, match=r"changed\.tar\.gz: top/a/data is damaged: md5 .*, exp"):
        extract(changed, members(out))
    assert contents(out) == {"top/b/data": B}  # what was right before stays
    with pytest.raises(ValueError, match=r"long\.tar\.gz does not hold top/b/data: it is another"):
        extract(longer, members(out)[1:])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "truncated, damaged"),
        (b"<!DOCTYPE html>", "no sound gzip file"),
        (gzip.compress(b"no tar archive" * 100), "truncated, damaged, or no tar"),
        (gzip.compress(b""), "truncated, damaged"),
        (gzip.compress(bytes(10240)), "does not hold top/a/data, top/b/data"),
    ],
)
def test_foreign_files(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "a.tar.gz"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message) as caught:
        extract(path, members(tmp_path / "out"))
    assert str(path) in str(caught.value)


def test_no_file_at_all(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*a\.tar\.gz: No such file"):
        extract(tmp_path / "a.tar.gz", members(tmp_path / "out"))


def test_truncated_at_any_place(tmp_path: Path) -> None:
    whole = pack(tmp_path / "whole.tar.gz", *GOOD).read_bytes()
    path, out = tmp_path / "a.tar.gz", tmp_path / "out"
    # The end of the archive is padding that need not be there.
    for size in [*range(0, len(whole) - 200, 5003), len(whole) - 3000]:
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"a\.tar\.gz"):
            extract(path, members(out))
        assert set(contents(out)) <= {"top/a/data"}


def test_mutations_end_in_the_files_or_in_a_sentence(tmp_path: Path) -> None:
    """Of the compressed bytes, and of the tar headers inside."""
    rng = random.Random(7)
    whole = pack(tmp_path / "whole.tar.gz", *GOOD, format=tarfile.PAX_FORMAT).read_bytes()
    plain = gzip.decompress(whole)
    headers = [i for i in range(0, len(plain), 512) if plain[i : i + 3] == b"top"]
    path, refused = tmp_path / "a.tar.gz", 0
    for round_ in range(200):
        if round_ % 2:
            mutated = bytearray(plain)
            mutated[rng.choice(headers) + rng.randrange(512)] = rng.randrange(256)
            path.write_bytes(gzip.compress(mutated, 1))
        else:
            damaged = bytearray(whole)
            damaged[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
            path.write_bytes(damaged)
        out = tmp_path / f"out{round_}"
        complaint = None
        try:
            extract(path, members(out))
        except ValueError as error:
            complaint = str(error)
        if complaint is None:
            assert contents(out) == {"top/a/data": A, "top/b/data": B}
        else:
            refused += 1
            assert str(path) in complaint
        right = {"top/a/data": A, "top/b/data": B}
        assert all(right.get(name) == data for name, data in contents(out).items())
    assert 100 < refused < 200


def test_a_run_that_ends_between_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out = pack(tmp_path / "a.tar.gz", *GOOD), tmp_path / "out"
    write = module._write

    def killed(archive: Path, source: Any, target: Path) -> str:
        if target.parent.name == "b":
            target.parent.mkdir(parents=True)
            target.write_bytes(b"half")
            raise KeyboardInterrupt
        return write(archive, source, target)

    with monkeypatch.context() as patched:
        patched.setattr(module, "_write", killed)
        with pytest.raises(KeyboardInterrupt):
            extract(path, members(out))
    assert contents(out) == {"top/a/data": A}
    extract(path, members(out)[1:])
    assert contents(out) == {"top/a/data": A, "top/b/data": B}


def test_no_place_to_write(tmp_path: Path) -> None:
    path, out = pack(tmp_path / "a.tar.gz", *GOOD), tmp_path / "out"
    (out / "top").mkdir(parents=True)
    (out / "top" / "a").write_bytes(b"a file")
    with pytest.raises(ValueError, match=r"cannot write .*out/top/a/\.data\.part: "):
        extract(path, members(out))
    (out / "top" / "a").unlink()
    (out / "top" / "a" / "data").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"cannot write .*out/top/a/data: Is a directory"):
        extract(path, members(out))
    assert contents(out) == {}


def test_members_in_any_order(tmp_path: Path) -> None:
    out = tmp_path / "out"
    chosen: Sequence[Member] = members(out)
    extract(pack(tmp_path / "a.tar.gz", *reversed(GOOD)), chosen)
    assert contents(out) == {"top/a/data": A, "top/b/data": B}
