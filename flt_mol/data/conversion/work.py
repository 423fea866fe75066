"""The work folder of a conversion: its lock, what it is for, and the finished chunks of records."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from flt_mol.data.folder_lock import locked_folder

__all__ = ["Chunk", "WorkFolder", "sync", "write_whole"]

_PLAN = "plan.json"
_LOCK = ".conversion.lock"
_DONE = "done.json"
_DIGEST = hashlib.sha256().digest_size


@dataclass(frozen=True)
class Chunk:
    """Some records, encoded.

    Args:
        payloads: one encoded record each.
        skipped: place in the chunk → why the record there is left out.
        left_out: names of stored fields that the payloads do not hold.
    """

    payloads: Sequence[bytes]
    skipped: Mapping[int, str]
    left_out: Sequence[str]


class WorkFolder:
    """A folder for unfinished work, with which a later run goes on.

    Args:
        path: the folder; its parent need not exist.

    Attributes:
        plan: what the work is for; what is there of another plan is of no use.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.plan: Mapping[str, Any] = {}

    @cached_property
    def _plan(self) -> bytes:
        return json.dumps(self.plan, indent=1, sort_keys=True).encode() + b"\n"

    @cached_property
    def digest(self) -> str:
        """Of the plan."""
        return hashlib.sha256(self._plan).hexdigest()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps all others out; leaves no folder behind that holds no work.

        Raises:
            ValueError: somebody else works in it.
        """
        try:
            with locked_folder(self.path, "conversion"):
                try:
                    yield
                finally:
                    if all(e.name in (_PLAN, _LOCK) for e in self.path.iterdir()):
                        self.remove()
        finally:
            with suppress(OSError):  # it holds unfinished work, or somebody else's
                self.path.rmdir()

    def begin(self) -> None:
        """Goes on with what is there of the same plan, else clears the folder."""
        plan = self.path / _PLAN
        if plan.is_file() and plan.read_bytes() == self._plan:
            return
        self._clear(keep=())
        write_whole(self.path / _PLAN, self._plan)

    def chunk_path(self, number: int) -> Path:
        """File of a chunk."""
        return self.path / f"chunk-{number:08d}"

    def write_chunk(self, number: int, chunk: Chunk) -> None:
        """One file with its own checksum, under its name only when whole."""
        header = {
            "plan": self.digest,
            "lengths": [len(payload) for payload in chunk.payloads],
            "skipped": {str(place): text for place, text in chunk.skipped.items()},
            "left_out": list(chunk.left_out),
        }
        head = json.dumps(header).encode()
        body = b"".join([struct.pack("<Q", len(head)), head, *chunk.payloads])
        write_whole(self.chunk_path(number), hashlib.sha256(body).digest() + body)

    def read_chunk(self, number: int) -> Chunk | None:
        """A finished chunk; None where it is missing, not whole, or of another plan."""
        try:
            content = self.chunk_path(number).read_bytes()
        except FileNotFoundError:
            return None
        body = memoryview(content)[_DIGEST:]
        if hashlib.sha256(body).digest() != content[:_DIGEST]:
            return None
        start = 8 + struct.unpack_from("<Q", body)[0]
        header = json.loads(bytes(body[8:start]))
        if header["plan"] != self.digest:
            return None
        payloads = []
        for length in header["lengths"]:
            payloads.append(bytes(body[start : start + length]))
            start += length
        skipped = {int(place): text for place, text in header["skipped"].items()}
        return Chunk(payloads, skipped, header["left_out"])

    def bytes(self) -> int:
        """Bytes of all files in the folder."""
        return sum(entry.stat().st_size for entry in self.path.iterdir() if entry.is_file())

    def set_done(self, result: Mapping[str, Any]) -> None:
        """Remembers that the output is whole and checked; only its name is still to be given."""
        content = {"plan": self.digest, "result": result}
        write_whole(self.path / _DONE, json.dumps(content).encode())
        sync(self.path / _DONE)
        sync(self.path)

    def done(self) -> dict[str, Any] | None:
        """What :meth:`set_done` remembered, of the same plan."""
        try:
            content = json.loads((self.path / _DONE).read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        result: dict[str, Any] | None = content["result"]
        return result if content["plan"] == self.digest else None

    def remove(self) -> None:
        """Removes all work; what says that it is done goes last."""
        self._clear(keep=(_PLAN, _DONE))
        for name in (_PLAN, _DONE):
            (self.path / name).unlink(missing_ok=True)

    def _clear(self, keep: Sequence[str]) -> None:
        for entry in self.path.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry.name not in (*keep, _LOCK):
                entry.unlink()


def write_whole(path: Path, content: bytes) -> None:
    """A file that is under its name only when it is whole. Its folder must be there."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Waits until a file, or the list of names in a folder, is on the disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows keeps folders by itself
    descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
