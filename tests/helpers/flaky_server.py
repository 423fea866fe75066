"""A web server on this machine with the faults of real ones: for tests of what downloads."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

__all__ = ["FlakyServer", "Reply", "serving"]

_PIECE = 2**14


@dataclass(frozen=True)
class Reply:
    """How one request is answered.

    Args:
        drop_after: bytes after which the connection is cut.
        damage: place in the file whose byte is turned over.
        ranges: whether `Range` is heeded.
        etag: of the file; a request to continue another version gets the whole of this one.
        heeds_if_range: whether `If-Range` is.
        length: `Content-Length` to claim; None for the true one, 0 for none at all.
        start_shift: added to the first byte of a range that is sent.
        status: an error, or a redirect to `location`.
        location: see there.
    """

    drop_after: int | None = None
    damage: int | None = None
    ranges: bool = True
    etag: str | None = '"1"'
    heeds_if_range: bool = True
    length: int | None = None
    start_shift: int = 0
    status: int | None = None
    location: str = ""


@dataclass
class FlakyServer:
    """What is served, how, and what was asked for.

    Args:
        files: path without leading slash → contents.
        plan: one reply for each request; after its end all are answered properly.
        rate: bytes per second, None for all at once.

    Attributes:
        url: address, with no slash at the end.
        requests: path and headers of each request.
    """

    files: Mapping[str, bytes]
    plan: Iterable[Reply] = ()
    rate: float | None = None
    url: str = ""
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._replies = iter(self.plan)

    def next_reply(self, path: str, headers: Mapping[str, str]) -> Reply:
        """Note the request, and say how it is to be answered."""
        self.requests.append((path, dict(headers)))
        return next(self._replies, Reply())


@contextmanager
def serving(server: FlakyServer) -> Iterator[FlakyServer]:
    """Serve on a free port of 127.0.0.1 meanwhile; sets `server.url`."""

    class Handler(_Handler):
        flaky = server

    listener = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.url = f"http://127.0.0.1:{listener.server_address[1]}"
    thread = threading.Thread(target=listener.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        listener.shutdown()
        thread.join()
        listener.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    flaky: FlakyServer

    def do_GET(self) -> None:
        """Answer as planned."""
        path = self.path.split("://", 1)[-1].split("/", 1)[1]  # a proxy is asked for whole URLs
        reply = self.flaky.next_reply(self.path, dict(self.headers))
        body = self.flaky.files.get(path)
        if reply.status is not None or body is None:
            self._empty(reply.status or 404, reply.location)
            return
        if reply.damage is not None:
            flipped = bytes([body[reply.damage] ^ 255])
            body = body[: reply.damage] + flipped + body[reply.damage + 1 :]
        start = self._start(reply)
        if start >= len(body):
            self._empty(416)
            return
        self._head(reply, start, len(body))
        try:
            self._send(body[start:], reply)
        except OSError:  # the client has gone, or was killed
            self.close_connection = True

    def _start(self, reply: Reply) -> int:
        """First byte to send."""
        wanted = self.headers["Range"]
        validator = self.headers["If-Range"]
        stale = reply.heeds_if_range and validator is not None and validator != reply.etag
        if wanted is None or not reply.ranges or stale:
            return 0
        return int(wanted.removeprefix("bytes=").removesuffix("-")) + reply.start_shift

    def _head(self, reply: Reply, start: int, total: int) -> None:
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
        if reply.length != 0:
            self.send_header("Content-Length", str(reply.length or total - start))
        if reply.etag is not None:
            self.send_header("ETag", reply.etag)
        self.end_headers()

    def _send(self, body: bytes, reply: Reply) -> None:
        body = body if reply.drop_after is None else body[: reply.drop_after]
        for first in range(0, len(body), _PIECE):
            piece = body[first : first + _PIECE]
            self.wfile.write(piece)
            if self.flaky.rate is not None:
                time.sleep(len(piece) / self.flaky.rate)

    def _empty(self, status: int, location: str = "") -> None:
        self.send_response(status)
        if location:
            self.send_header("Location", location)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        """Say nothing."""
