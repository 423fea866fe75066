"""Chosen files out of a .tar.gz, in one pass, each checked while it is written."""

from __future__ import annotations

import gzip
import hashlib
import os
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, BinaryIO

from flt_mol.data.remote.http import Progress

__all__ = ["Member", "extract", "temporary_name"]

_CHUNK = 2**20
_SHOW_EVERY = 2**22  # bytes of the archive


@dataclass(frozen=True)
class Member:
    """A file in an archive, and what it is to become.

    Args:
        name: in the archive.
        target: file to write.
        size: bytes expected.
        md5: expected, hexadecimal.
        label: what to call it while it is unpacked.
    """

    name: str
    target: Path
    size: int
    md5: str
    label: str


def temporary_name(target: Path) -> Path:
    """What `target` is called while it is written; the same in every run."""
    return target.with_name(f".{target.name}.part")


def extract(archive: Path, members: Sequence[Member], progress: Progress | None = None) -> None:
    """Write `members`, and nothing else that the archive holds.

    Reads until the last of them has been found. Each appears under its name when it is whole and
    right; a run that is killed leaves those it had finished.

    Args:
        archive: a gzip-compressed tar file; its own checksum need not be known.
        members: to write; an existing target is replaced.
        progress: called with bytes of the archive read.

    Raises:
        ValueError: no such archive, a truncated or damaged one, one without a member, or with a
            member that is a link or device, or has another size or md5; a full disk.
    """
    wanted = {_plain(member.name): member for member in members}
    with ExitStack() as opened:
        with _readable(archive):
            file = opened.enter_context(archive.open("rb"))
            watched = _Watched(file, archive.stat().st_size, progress)
            # gzip inside, as tarfile's own decompression of streams knows one gzip member only.
            stream = gzip.GzipFile(fileobj=watched)  # type: ignore[call-overload]
            tar = opened.enter_context(tarfile.open(fileobj=stream, mode="r|", bufsize=_CHUNK))
        while wanted:
            watched.label = f"look for {', '.join(m.label for m in wanted.values())}"
            with _readable(archive):
                item = tar.next()
            if item is None:
                raise ValueError(
                    f"{archive} does not hold {', '.join(m.name for m in wanted.values())}: it is "
                    "another archive than the one expected, or was cut off; get it again"
                )
            member = wanted.pop(_plain(item.name), None)
            if member is not None:
                watched.label = f"unpack {member.label}"
                _extract_one(archive, tar, item, member)


def _extract_one(archive: Path, tar: tarfile.TarFile, item: tarfile.TarInfo, to: Member) -> None:
    if not item.isreg():
        raise ValueError(f"{archive}: {item.name} is no file but a link, folder or device; refused")
    if item.size != to.size:
        raise ValueError(
            f"{archive}: {item.name} has {item.size:,} bytes, expected are {to.size:,}; get the "
            "archive again"
        )
    source = tar.extractfile(item)
    assert source is not None  # of a file it is there
    temporary = temporary_name(to.target)
    try:
        found = _write(archive, source, temporary)
        if found != to.md5:
            raise ValueError(
                f"{archive}: {item.name} is damaged: md5 {found}, expected {to.md5}; get the "
                "archive again"
            )
        with _writable(to.target):
            temporary.replace(to.target)
    finally:
        with suppress(OSError):  # gone, or in no folder: there is nothing to remove
            temporary.unlink()


def _write(archive: Path, source: IO[bytes], target: Path) -> str:
    """Copy to `target` and return the md5."""
    md5 = hashlib.md5(usedforsecurity=False)
    with _writable(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as file:
            while True:
                with _readable(archive):
                    chunk = source.read(_CHUNK)
                if not chunk:
                    break
                md5.update(chunk)
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
    return md5.hexdigest()


@contextmanager
def _writable(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"cannot write {target}: {error.strerror or error}") from error


@contextmanager
def _readable(archive: Path) -> Iterator[None]:
    """Whatever is wrong with the archive is said by its name."""
    try:
        yield
    except gzip.BadGzipFile as error:
        raise ValueError(f"{archive} is no sound gzip file ({error}); get it again") from error
    except (EOFError, OverflowError, ValueError, tarfile.TarError, zlib.error) as error:
        raise ValueError(
            f"{archive} is truncated, damaged, or no tar archive ({error}); get it again"
        ) from error
    except OSError as error:
        raise ValueError(f"cannot read {archive}: {error.strerror or error}") from error


def _plain(name: str) -> str:
    """`./a//b` is `a/b`; `..` stays, and fits no member."""
    return str(PurePosixPath(name))


class _Watched:
    """A file that tells how far it has been read."""

    def __init__(self, file: BinaryIO, size: int, progress: Progress | None) -> None:
        self.file, self.size, self.progress = file, size, progress
        self.label = "unpack"
        self._done, self._shown = 0, 0

    def read(self, size: int = -1) -> bytes:
        """As of a file."""
        data = self.file.read(size)
        self._done += len(data)
        if self.progress and (self._done - self._shown >= _SHOW_EVERY or self._done == self.size):
            self._shown = self._done
            self.progress(self.label, self._done, self.size)
        return data
