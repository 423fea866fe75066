"""Damaged LMDB files of the right size: an error that names the file, never the end of Python."""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import lmdb
import pytest

from flt_mol.data import open_dataset
from flt_mol.data.lmdb.file import check_file

PAGE = 4096

# Reads each file wholly; a crash ends it before the last line.
READ = """
import sys
from flt_mol.data import open_dataset
for path in sys.argv[1:]:
    said = []
    try:
        dataset = open_dataset(path)
        for index in range(len(dataset)):
            try:
                dataset[index]
            except ValueError as error:
                said.append(str(error))
    except ValueError as error:
        said.append(str(error))
    if not all(path in text for text in said):
        sys.exit(f"{path} is not named: {said}")
    print("refused" if said else "read")
"""


@pytest.fixture
def whole(make_record: Any, write_lmdb: Any, compressed: Any) -> Path:
    """Two levels of pages; small records, and large ones on pages of their own."""
    small = {i: compressed({k: _plain(v) for k, v in make_record().items()}) for i in range(40)}
    large = {i: make_record(graph=bytes(9000)) for i in range(40, 44)}
    path: Path = write_lmdb(small | large)
    check_file(path)
    return path


def _plain(value: Any) -> Any:
    return value.numpy() if hasattr(value, "numpy") else value


def _read(paths: list[Path]) -> list[str]:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", READ, *map(str, paths)],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout.split()


def _pages(path: Path) -> dict[str, list[int]]:
    """Numbers of the branch and leaf pages, as the file's own headers give them."""
    data = path.read_bytes()
    kinds: dict[str, list[int]] = {"branch": [], "leaf": []}
    for number in range(2, len(data) // PAGE):
        stored, flags = struct.unpack_from("<Q2xH", data, number * PAGE)
        if stored == number and flags in (1, 2):
            kinds["branch" if flags == 1 else "leaf"].append(number)
    return kinds


def _change(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def test_a_hole_instead_of_any_page(whole: Path) -> None:
    data = whole.read_bytes()
    kinds = _pages(whole)
    assert kinds["branch"]
    assert len(kinds["leaf"]) > 3
    copies = []
    for number in range(len(data) // PAGE):
        copy = whole.with_name(f"hole{number}.lmdb")
        copy.write_bytes(data[: number * PAGE] + bytes(PAGE) + data[(number + 1) * PAGE :])
        copies.append(copy)
    outcomes = _read(copies)
    assert len(outcomes) == len(copies)
    assert outcomes[0] == "refused"
    assert outcomes.count("refused") > len(copies) // 2


@pytest.mark.parametrize("kind", ["branch", "leaf"])
def test_a_hole_is_named_with_its_mend(kind: str, whole: Path) -> None:
    live = []
    for number in _pages(whole)[kind]:
        copy = whole.with_name(f"{kind}{number}.lmdb")
        copy.write_bytes(whole.read_bytes())
        _change(copy, number * PAGE, bytes(PAGE))
        said = _complaint(copy)
        if said:
            live.append(number)
            assert said == (
                f"{copy} is damaged: page {number} (zeros: a hole); download or write it again"
            )
    assert live


def _complaint(path: Path) -> str:
    try:
        check_file(path)
    except ValueError as error:
        return str(error)
    return ""


def _mutated(data: bytes, rng: random.Random) -> bytes:
    pages = len(data) // PAGE
    a, b = rng.randrange(pages) * PAGE, rng.randrange(pages) * PAGE
    changed = bytearray(data)
    match rng.randrange(6):
        case 0:
            changed[a : a + PAGE] = rng.randbytes(PAGE)
        case 1:
            changed[a : a + PAGE], changed[b : b + PAGE] = data[b : b + PAGE], data[a : a + PAGE]
        case 2:
            del changed[a:]
        case 3:
            changed[a + rng.randrange(32)] = rng.randrange(256)
        case 4:
            changed[rng.randrange(2) * PAGE + rng.randrange(152)] = rng.randrange(256)
        case _:
            for _ in range(100):
                changed[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(changed)


def test_random_damage(whole: Path) -> None:
    rng = random.Random(5)
    copies = [whole.with_name(f"m{i}.lmdb") for i in range(60)]
    for copy in copies:
        copy.write_bytes(_mutated(whole.read_bytes(), rng))
    outcomes = _read(copies)
    assert len(outcomes) == 60
    assert outcomes.count("refused") > 20


def _node(path: Path, number: int, index: int = 0) -> int:
    """Where a node of a page begins in the file."""
    data = path.read_bytes()
    return number * PAGE + int(struct.unpack_from("<H", data, number * PAGE + 16 + 2 * index)[0])


@pytest.fixture
def two_levels(tmp_path: Path) -> tuple[Path, int, int]:
    """A file without old pages, its branch page, and one leaf."""
    path = tmp_path / "two.lmdb"
    with (
        lmdb.open(str(path), subdir=False, map_size=2**22, lock=False) as environment,
        environment.begin(write=True) as transaction,
    ):
        for i in range(20):
            transaction.put(str(i).encode(), bytes(1000 if i else 9000))
    kinds = _pages(path)
    return path, kinds["branch"][0], kinds["leaf"][0]


@pytest.mark.parametrize(
    ("where", "content", "reason"),
    [
        ("child", struct.pack("<HHH", 60000, 0, 0), r"page 60000 \(the file has pages 2 to"),
        ("second child", "root", "is named twice"),
        ("branch lower", struct.pack("<H", 18), "its nodes end at 18"),
        ("leaf flags", struct.pack("<H", 0x22), "is not the page that it should be"),
        ("leaf offset", struct.pack("<H", 4094), "a node lies outside"),
        ("record size", struct.pack("<HH", 5000, 0), "a record lies outside"),
        ("record flags", struct.pack("<H", 4), "a record lies outside"),
        ("key size", struct.pack("<H", 600), "a record lies outside"),
        ("depth", struct.pack("<H", 0), "the tree is 0 pages deep"),
        ("depth", struct.pack("<H", 1), "is not the page that it should be"),
        ("flags", struct.pack("<H", 4), "no plain records"),
        ("entries", struct.pack("<Q", 21), "21 records are announced, 20 are there"),
    ],
)
def test_each_kind_of_damage(where: str, content: Any, reason: str, two_levels: Any) -> None:
    path, branch, leaf = two_levels
    check_file(path)
    newest = 1 if struct.unpack_from("<Q", path.read_bytes(), PAGE + 144)[0] else 0
    offset = {
        "child": _node(path, branch, 0),
        "second child": _node(path, branch, 1),
        "branch lower": branch * PAGE + 12,
        "leaf flags": leaf * PAGE + 10,
        "leaf offset": leaf * PAGE + 16,
        "record size": _node(path, leaf, 1),
        "record flags": _node(path, leaf) + 4,
        "key size": _node(path, leaf) + 6,
        "flags": newest * PAGE + 92,
        "depth": newest * PAGE + 94,
        "entries": newest * PAGE + 120,
    }[where]
    if content == "root":
        content = struct.pack("<HHH", branch, 0, 0)
    _change(path, offset, content)
    with pytest.raises(ValueError, match=reason) as caught:
        check_file(path)
    assert str(path) in str(caught.value)


def test_a_large_record_beyond_the_end(two_levels: Any) -> None:
    path, _, leaf = two_levels
    node = _node(path, leaf)
    assert path.read_bytes()[node + 4] == 1
    _change(path, node + 8 + 1, struct.pack("<Q", path.stat().st_size // PAGE - 1))
    with pytest.raises(ValueError, match="a large record lies outside the file"):
        check_file(path)


@pytest.fixture
def commits(tmp_path: Path) -> Path:
    """A file of three commits of ten records each, the last ones large."""
    path = tmp_path / "commits.lmdb"
    with lmdb.open(str(path), subdir=False, map_size=2**22, lock=False) as environment:
        for start in (0, 10, 20):
            with environment.begin(write=True) as transaction:
                for i in range(start, start + 10):
                    transaction.put(b"%d" % i, bytes(5000 if start == 20 else 900))
    return path


@pytest.mark.parametrize("transaction", [0, 1, 4, 5, 2**40])
def test_an_older_state_is_not_taken_for_the_newest(transaction: int, commits: Path) -> None:
    for page in (0, 1):
        copy = commits.with_name(f"page{page}.lmdb")
        copy.write_bytes(commits.read_bytes())
        _change(copy, page * PAGE + 144, struct.pack("<Q", transaction))
        said = _complaint(copy)
        # Page 0 holds transaction 2, page 1 transaction 3; 4 after 3 is told by the pages in use.
        assert f"{copy} is damaged: its transactions" in said


def test_meta_pages_in_each_others_place(commits: Path) -> None:
    data = commits.read_bytes()
    for head in (data[PAGE : 2 * PAGE] + data[:PAGE], data[:PAGE] * 2, data[PAGE : 2 * PAGE] * 2):
        commits.write_bytes(head + data[2 * PAGE :])
        assert "do not follow each other" in _complaint(commits)


@pytest.mark.parametrize("compact", [False, True])
def test_copies_that_lmdb_makes_are_whole(compact: bool, commits: Path) -> None:
    copy = commits.with_name("copy.lmdb")
    with (
        lmdb.open(str(commits), subdir=False, readonly=True, lock=False) as environment,
        copy.open("wb") as file,
    ):
        environment.copyfd(file.fileno(), compact=compact)
    check_file(copy)


@pytest.mark.parametrize(("index", "key"), [(0, b"2"), (0, b"9"), (1, b"1"), (1, b"3"), (2, b"0")])
def test_keys_out_of_order(index: int, key: bytes, write_lmdb: Any) -> None:
    path = write_lmdb({b"1": b"a", b"2": b"b", b"3": b"c"})
    (leaf,) = _pages(path)["leaf"]
    assert _complaint(path) == ""
    _change(path, _node(path, leaf, index) + 8, key)
    assert "its keys are out of order" in _complaint(path)


def test_keys_that_the_branch_does_not_lead_to(two_levels: Any) -> None:
    path, branch, _ = two_levels
    key = _node(path, branch, 1) + 8
    before = path.read_bytes()[key : key + 1]
    for wrong in (b"\x00", b"\xff"):
        _change(path, key, wrong)
        with pytest.raises(ValueError, match="its keys are out of order"):
            check_file(path)
    _change(path, key, before)
    check_file(path)
    _change(path, key - 2, struct.pack("<H", 0))
    with pytest.raises(ValueError, match="its keys are out of order"):
        check_file(path)


def test_pages_that_serve_twice(write_lmdb: Any) -> None:
    path = write_lmdb({b"1": bytes(9000), b"2": bytes(9000)})
    (leaf,) = _pages(path)["leaf"]
    first, second = (_node(path, leaf, index) + 9 for index in (0, 1))
    pages = path.read_bytes()[first : first + 8]
    (number,) = struct.unpack("<Q", pages)
    for twice in (number, number + 1, number - 1, leaf):
        _change(path, second, struct.pack("<Q", twice))
        assert "is named twice" in _complaint(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
@pytest.mark.parametrize("name", ["pipe.lmdb", "pipe"])
def test_pipes_are_refused(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=rf"{name} is no regular file"):
        open_dataset(tmp_path / name)


def test_no_flipped_bit_in_a_node_loses_a_record_unsaid(
    make_record: Any, write_lmdb: Any, compressed: Any
) -> None:
    """LMDB has no checksums: every bit of the nodes and keys of a file, one after the other."""
    path = write_lmdb({i: compressed({"sid": i}) for i in range(30)})
    (leaf,) = _pages(path)["leaf"]
    data = path.read_bytes()
    nodes = [_node(path, leaf, index) for index in range(30)]
    outcomes = {"refused": 0, "told": 0, "whole": 0}
    for bit in (8 * node + bit for node in nodes for bit in range(8 * 10)):
        copy = path.with_name(f"{bit}.lmdb")
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        copy.write_bytes(changed)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                count = len(open_dataset(copy))
            except ValueError:
                count = None
        copy.unlink()
        told = any("are read" in str(warning.message) for warning in caught)
        assert count in (None, 30) or told, (bit - 8 * leaf * PAGE, count)
        outcomes["refused" if count is None else "told" if told else "whole"] += 1
    assert min(outcomes.values()) > 20
