"""One file over a bad network: what comes out is the file, or a sentence that says why not."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flt_mol.data.remote import part as download_part
from flt_mol.data.remote.http import fetch
from flt_mol.testing.flaky_server import FlakyServer, Reply, serving

BODY = random.Random(5).randbytes(300_000)
MD5 = hashlib.md5(BODY).hexdigest()


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@contextmanager
def served(*plan: Reply, **options: Any) -> Iterator[FlakyServer]:
    with serving(FlakyServer({"data.tar": BODY}, plan, **options)) as server:
        yield server


def get(server: FlakyServer, folder: Path, **options: Any) -> int:
    options = {"size": len(BODY), "md5": MD5, "wait": 0, "timeout": 5, **options}
    return fetch(f"{server.url}/data.tar", folder / "data.tar", **options)


def ranges(server: FlakyServer) -> list[str | None]:
    return [headers.get("Range") for _, headers in server.requests]


def check_whole(folder: Path) -> None:
    """The file, and nothing beside it."""
    assert (folder / "data.tar").read_bytes() == BODY
    assert [path.name for path in folder.iterdir()] == ["data.tar"]


def leave_part(folder: Path, data: bytes, **version: str) -> None:
    (folder / "data.tar.part").write_bytes(data)
    if version:
        (folder / "data.tar.part.json").write_text(json.dumps(version))


def test_in_one_go(tmp_path: Path) -> None:
    steps: list[tuple[str, int, int | None]] = []
    with served() as server:
        assert get(server, tmp_path, progress=lambda *step: steps.append(step)) == len(BODY)
    check_whole(tmp_path)
    assert ranges(server) == [None]
    assert server.requests[0][1]["Accept-Encoding"] == "identity"
    assert steps[-1] == ("fetch data.tar", len(BODY), len(BODY))
    assert [done for _, done, _ in steps] == sorted(done for _, done, _ in steps)


@pytest.mark.parametrize("length", [None, 0])
def test_dropped_connections_go_on_where_they_were(tmp_path: Path, length: int | None) -> None:
    drops = (
        Reply(drop_after=100_000, length=length),
        Reply(drop_after=50_000),
        Reply(drop_after=1),
    )
    with served(*drops) as server:
        assert get(server, tmp_path) == len(BODY)
    check_whole(tmp_path)
    assert ranges(server) == [None, "bytes=100000-", "bytes=150000-", "bytes=150001-"]
    assert {headers.get("If-Range") for _, headers in server.requests[1:]} == {'"1"'}


def test_many_drops_with_progress_are_no_reason_to_give_up(tmp_path: Path) -> None:
    rng = random.Random(1)
    plan = [Reply(drop_after=rng.randrange(1, 20_000)) for _ in range(20)]
    with served(*plan) as server:
        get(server, tmp_path, attempts=2)
    check_whole(tmp_path)


def test_attempts_without_progress_end(tmp_path: Path) -> None:
    with (
        serving(FlakyServer({"data.tar": BODY}, itertools.repeat(Reply(drop_after=0)))) as server,
        pytest.raises(ValueError, match="closed early .3 attempts without progress; 0 of 300,000"),
    ):
        get(server, tmp_path, attempts=3)
    assert len(server.requests) == 3


def test_a_later_run_goes_on(tmp_path: Path) -> None:
    with served(Reply(drop_after=70_000), *[Reply(status=503)] * 2) as server:
        with pytest.raises(ValueError, match=r"503 .*2 attempts.*70,000 of .* kept.*By hand: get"):
            get(server, tmp_path, attempts=2)
        steps: list[str] = []
        assert get(server, tmp_path, progress=lambda *step: steps.append(step[0])) == 230_000
    check_whole(tmp_path)
    assert ranges(server)[-1] == "bytes=70000-"
    assert server.requests[-1][1]["If-Range"] == '"1"'
    assert steps[0] == "read again data.tar"


def test_a_part_without_a_version_or_of_another_address_is_continued(tmp_path: Path) -> None:
    for version in ({}, {"url": "http://elsewhere/data.tar", "etag": '"9"', "validator": '"9"'}):
        leave_part(tmp_path, BODY[:1000], **version)
        with served() as server:
            assert get(server, tmp_path) == len(BODY) - 1000
        assert "If-Range" not in server.requests[0][1]
        check_whole(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff"])
def test_an_unreadable_version_does_no_harm(tmp_path: Path, text: str) -> None:
    leave_part(tmp_path, BODY[:1000])
    (tmp_path / "data.tar.part.json").write_text(text, encoding="latin-1")
    with served() as server:
        assert get(server, tmp_path) == len(BODY) - 1000
    check_whole(tmp_path)


def test_a_whole_part_needs_no_server(tmp_path: Path) -> None:
    leave_part(tmp_path, BODY)
    with served() as server:
        assert get(server, tmp_path) == 0
    check_whole(tmp_path)
    assert server.requests == []


def test_a_server_without_ranges_begins_anew(tmp_path: Path) -> None:
    with served(Reply(drop_after=100_000), Reply(ranges=False)) as server:
        assert get(server, tmp_path) == len(BODY) + 100_000
    check_whole(tmp_path)
    assert ranges(server) == [None, "bytes=100000-"]


@pytest.mark.parametrize("other", [100_000, 50_000])
def test_a_server_that_begins_anew_for_ever_is_given_up(tmp_path: Path, other: int) -> None:
    endless = [Reply(ranges=False, drop_after=n) for n in (100_000, other)] * 10
    with (
        serving(FlakyServer({"data.tar": BODY}, endless)) as server,
        pytest.raises(ValueError, match="4 attempts without progress"),
    ):
        get(server, tmp_path, attempts=4)
    assert len(server.requests) == 5


def test_a_changed_file_begins_anew(tmp_path: Path) -> None:
    for heeds in (True, False):  # a server that does not heed If-Range still sends its ETag
        leave_part(tmp_path, b"x" * 1000)
        with served(Reply(heeds_if_range=heeds)) as server:
            version = {"url": f"{server.url}/data.tar", "etag": '"0"', "validator": '"0"'}
            leave_part(tmp_path, b"x" * 1000, **version)
            assert get(server, tmp_path) == len(BODY)
        check_whole(tmp_path)
        assert ranges(server) == (["bytes=1000-"] if heeds else ["bytes=1000-", None])


def test_weak_etags_are_not_sent_back(tmp_path: Path) -> None:
    plan = (Reply(drop_after=10, etag='W/"1"'), Reply(etag='W/"1"'))
    with served(*plan) as server:
        assert get(server, tmp_path) == len(BODY)
    assert "If-Range" not in server.requests[1][1]
    check_whole(tmp_path)


def test_what_cannot_be_continued_begins_anew(tmp_path: Path) -> None:
    """416, another range than asked for, and a part that is too long."""
    leave_part(tmp_path, BODY[:1000])
    with served(Reply(status=416)) as server:
        assert get(server, tmp_path) == len(BODY)
    assert ranges(server) == ["bytes=1000-", None]
    check_whole(tmp_path)
    leave_part(tmp_path, BODY[:1000])
    with served(Reply(start_shift=5)) as server:
        assert get(server, tmp_path) == len(BODY)
    assert ranges(server) == ["bytes=1000-", None]
    check_whole(tmp_path)
    leave_part(tmp_path, BODY + b"x")
    with served() as server:
        assert get(server, tmp_path) == len(BODY)
    assert ranges(server) == [None]
    check_whole(tmp_path)


def test_bytes_damaged_once(tmp_path: Path) -> None:
    with served(Reply(damage=150_000)) as server:
        assert get(server, tmp_path) == 2 * len(BODY)
    assert ranges(server) == [None, None]
    check_whole(tmp_path)


def test_bytes_damaged_in_an_earlier_run(tmp_path: Path) -> None:
    leave_part(tmp_path, b"x" * 1000)
    with served() as server:
        get(server, tmp_path)
    assert ranges(server) == ["bytes=1000-", None]
    check_whole(tmp_path)


def test_bytes_damaged_always(tmp_path: Path) -> None:
    found = hashlib.md5(BODY[:9] + bytes([BODY[9] ^ 255]) + BODY[10:]).hexdigest()
    with (
        served(Reply(damage=9), Reply(damage=9)) as server,
        pytest.raises(ValueError, match=f"data.tar is not .*md5 {found}, expected {MD5}.*By hand"),
    ):
        get(server, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_another_length_is_refused_before_it_comes(tmp_path: Path) -> None:
    with served(Reply(length=299_999)) as server:  # once may be a mishap
        get(server, tmp_path)
    check_whole(tmp_path)
    (tmp_path / "data.tar").unlink()
    with served() as server:
        with pytest.raises(ValueError, match=r"has 300,000 bytes, expected are 300,001.*2 att"):
            get(server, tmp_path, size=len(BODY) + 1, attempts=2)
        leave_part(tmp_path, BODY[:50])
        with pytest.raises(ValueError, match=r"has 300,000 bytes, expected are 300,001.*50 of"):
            get(server, tmp_path, size=len(BODY) + 1, attempts=2)
    assert ranges(server)[-1] == "bytes=50-"


def test_another_file_in_its_place_costs_nothing_of_what_has_come(tmp_path: Path) -> None:
    leave_part(tmp_path, BODY[:50])
    with served(Reply(ranges=False, length=299_999)) as server:
        assert get(server, tmp_path) == len(BODY) - 50
    assert ranges(server) == ["bytes=50-", "bytes=50-"]
    check_whole(tmp_path)


def test_redirects_are_followed(tmp_path: Path) -> None:
    with served() as last:
        plan = (Reply(drop_after=10), Reply(status=302, location=f"{last.url}/data.tar"))
        with served(*plan) as first:
            assert get(first, tmp_path) == len(BODY)
    assert ranges(last) == ["bytes=10-"]
    check_whole(tmp_path)


@pytest.mark.parametrize("location", ["ftp://127.0.0.1/data.tar", "file:///etc/hostname"])
def test_redirects_elsewhere_are_refused(tmp_path: Path, location: str) -> None:
    with (
        served(Reply(status=302, location=location)) as server,
        pytest.raises(ValueError, match=r"no http\(s\) address|is not allowed"),
    ):
        get(server, tmp_path)
    assert len(server.requests) == 1


@pytest.mark.parametrize("url", ["file:///etc/hostname", "ftp://127.0.0.1/x", "data.tar", "http:"])
def test_other_addresses_are_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(ValueError, match="no http:// or https:// address"):
        fetch(url, tmp_path / "x", size=1, md5="")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("status", [403, 404, 410])
def test_refusals_are_final(tmp_path: Path, status: int) -> None:
    with (
        served(Reply(status=status)) as server,
        pytest.raises(ValueError, match=f"/data.tar: the server answered {status} .*By hand: get"),
    ):
        get(server, tmp_path)
    assert len(server.requests) == 1


def test_busy_servers_are_asked_again(tmp_path: Path) -> None:
    with served(Reply(status=429), Reply(status=500), Reply(status=503)) as server:
        get(server, tmp_path)
    check_whole(tmp_path)


def test_no_network(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/data.tar"
        steps: list[str] = []
        with pytest.raises(ValueError, match=r"refused .2 attempts.*put it at .*data\.tar, and"):
            fetch(
                url,
                tmp_path / "data.tar",
                size=1,
                md5=MD5,
                wait=0,
                attempts=2,
                progress=lambda *step: steps.append(step[0]),
            )
    assert steps == ["fetch data.tar", "fetch data.tar (once more in 0 s: Connection refused)"]


def test_labels_are_few_and_each_wait_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    labels: list[str] = []
    replies = [Reply(drop_after=50_000), *[Reply(status=503)] * 3]
    with served(*replies) as server:
        get(server, tmp_path, wait=1, attempts=5, progress=lambda *step: labels.append(step[0]))
    assert list(dict.fromkeys(labels)) == [
        "fetch data.tar",
        "fetch data.tar (once more in 1 s: the connection was closed early)",
        "fetch data.tar (once more in 1 s: the server answered 503 Service Unavailable)",
        "fetch data.tar (once more in 2 s: the server answered 503 Service Unavailable)",
        "fetch data.tar (once more in 4 s: the server answered 503 Service Unavailable)",
    ]


def test_a_silent_server_is_given_up(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/data.tar"
        with pytest.raises(ValueError, match="nothing came for too long"):
            fetch(url, tmp_path / "d", size=1, md5=MD5, wait=0, attempts=1, timeout=0.05)


def test_waits_grow_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    busy = [Reply(status=503)] * 3
    with (
        served(*busy, Reply(drop_after=5), *[Reply(status=503)] * 8) as server,
        pytest.raises(ValueError, match="8 attempts without progress"),
    ):
        get(server, tmp_path, wait=1, attempts=8)
    # Progress makes them small again; none is longer than a minute.
    assert waits == [1, 2, 4, 1, 1, 2, 4, 8, 16, 32, 60]


def test_proxies_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served() as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        url = "http://data.invalid/data.tar"
        fetch(url, tmp_path / "data.tar", size=len(BODY), md5=MD5, wait=0, attempts=1)
    assert [path for path, _ in proxy.requests] == [url]
    check_whole(tmp_path)


def test_a_full_disk_keeps_what_has_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = download_part.Part.__enter__

    def enter(self: Any) -> Any:
        part = real(self)
        part._file = Full(part._file)
        return part

    with monkeypatch.context() as patched:
        patched.setattr(download_part.Part, "__enter__", enter)
        with served() as server, pytest.raises(ValueError, match=r"\.part: No space left.*is kept"):
            get(server, tmp_path)
    assert len(server.requests) == 1
    there = (tmp_path / "data.tar.part").stat().st_size
    assert 0 < there < len(BODY)
    with served() as server:
        assert get(server, tmp_path) == len(BODY) - there
    check_whole(tmp_path)


class Full:
    """A file on a disk that has room for 100 kB more."""

    def __init__(self, file: Any) -> None:
        self._file, self._room = file, 100_000

    def write(self, chunk: bytes) -> int:
        if len(chunk) > self._room:
            raise OSError(28, "No space left on device")
        self._room -= len(chunk)
        return self._file.write(chunk)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with (
        served() as server,
        pytest.raises(ValueError, match=r"cannot write .*\.part: No such"),
    ):
        get(server, tmp_path / "absent")
