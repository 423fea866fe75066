"""The file that a download grows in, continued by later attempts and runs."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPMessage
from pathlib import Path
from typing import BinaryIO

__all__ = ["Part", "Progress"]

Progress = Callable[[str, int, int | None], None]
"""Called with what is being done, how much of it is done, and of how much."""

_CHUNK = 2**20


class Part:
    """The bytes that have come so far, their md5, and what the server calls this version."""

    def __init__(self, url: str, target: Path, size: int, progress: Progress | None) -> None:
        self.url, self.target, self.size, self.progress = url, target, size, progress
        self.path = target.with_name(f"{target.name}.part")
        self.version_file = target.with_name(f"{target.name}.part.json")
        self.md5 = hashlib.md5(usedforsecurity=False)
        self.done = 0
        self.received = 0
        self.version: dict[str, str] = {}
        self._shown = -_CHUNK
        self._file: BinaryIO

    def __enter__(self) -> Part:
        try:
            self._file = self.path.open("r+b" if self.path.exists() else "w+b")
        except OSError as error:
            raise ValueError(f"cannot write {self.path}: {error.strerror}") from error
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # of a full disk; it has been reported
            self._file.close()

    def resume(self) -> None:
        """Take over what an earlier run has left."""
        while chunk := self._file.read(_CHUNK):
            self.md5.update(chunk)
            self.done += len(chunk)
            self.show("read again")
        try:
            version = json.loads(self.version_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return
        if isinstance(version, dict) and version.get("url") == self.url:
            self.version = {str(key): str(value) for key, value in version.items()}

    def restart(self, headers: HTTPMessage | None) -> None:
        """Drop all bytes; those to come are of the version that `headers` describe."""
        self._file.seek(0)
        self._file.truncate()
        self.md5 = hashlib.md5(usedforsecurity=False)
        self.done, self._shown = 0, -_CHUNK
        self.version = {} if headers is None else _version(self.url, headers)
        with suppress(OSError):  # without it, md5 alone tells versions apart
            self.version_file.write_text(json.dumps(self.version), encoding="utf-8")

    def same_version(self, headers: HTTPMessage) -> bool:
        """Whether an answer is of the version whose bytes are here, as far as it says."""
        etag, before = headers["ETag"], self.version.get("etag")
        return etag is None or before is None or etag == before

    def write(self, chunk: bytes) -> None:
        """Keep further bytes."""
        with self._writing():
            self._file.write(chunk)
        self.md5.update(chunk)
        self.done += len(chunk)
        self.received += len(chunk)
        self.show("fetch")

    def show(self, doing: str, why: str = "", *, always: bool = False) -> None:
        """Tell how far it is, now and then or `always`."""
        due = always or self.done == self.size or self.done - self._shown >= _CHUNK
        if self.progress and due:
            self._shown = self.done
            self.progress(f"{doing} {self.target.name}{why}", self.done, self.size)

    def finish(self) -> None:
        """All has come: give it its name."""
        with self._writing():
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self.path.replace(self.target)
        self.version_file.unlink(missing_ok=True)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Troubles with the disk are none of the network, and not tried again."""
        try:
            yield
        except OSError as error:
            raise ValueError(
                f"cannot write {self.path}: {error.strerror}; what has come is kept: make room and "
                "run the same command again"
            ) from error

    def remove(self) -> None:
        """Leave nothing."""
        self.path.unlink(missing_ok=True)
        self.version_file.unlink(missing_ok=True)


def _version(url: str, headers: HTTPMessage) -> dict[str, str]:
    """What tells this version of the file from others; `validator` is fit for If-Range."""
    etag = headers["ETag"] or ""
    strong = etag if etag.startswith('"') else ""
    validator = strong or headers["Last-Modified"] or ""
    found = {"url": url, "etag": etag, "validator": validator}
    return {key: value for key, value in found.items() if value}
