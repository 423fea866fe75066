"""Published data sets: fetched with resumption, unpacked, and compared with their recipe."""

from __future__ import annotations

import gzip
import hashlib
import re
import shutil
import tarfile
import time
import urllib.request
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple
from urllib.error import HTTPError

from filelock import FileLock, Timeout

from flt_mol.data.conversion import remove_leftovers
from flt_mol.data.opening import open_dataset
from flt_mol.data.recipes import Recipe, data_folders, recipe
from flt_mol.files import VERSION, temporary_path

__all__ = ["DownloadResult", "Progress", "Verified", "download", "verify"]

Progress = Callable[[str, int, int | None], None]
"""Called with what is being done, how much of it is done, and of how much."""

_CHUNK = 1 << 20
_SHOW_EVERY = 1 << 24  # bytes
_TEMPORARY = (408, 425, 429, 500, 502, 503, 504)  # HTTP statuses that are worth another attempt
_LONGEST_WAIT = 60.0  # seconds
_TIMEOUT = 60.0  # seconds without a byte


@dataclass(frozen=True)
class DownloadResult:
    """What a download has done.

    Args:
        folder: where the data set is.
        received: bytes that came over the network.
        unpacked: splits that are new; the others were there before.
        files: split → file, of all that were asked for.
    """

    folder: Path
    received: int
    unpacked: tuple[str, ...]
    files: dict[str, Path]


def download(
    recipe_or_name: Recipe | str | Path,
    splits: Sequence[str] | None = None,
    *,
    to: str | Path | None = None,
    keep_archive: bool = True,
    base_url: str | None = None,
    wait: float = 1.0,
    attempts: int = 6,
    progress: Progress | None = None,
) -> DownloadResult:
    """Get splits of a published data set; what is there and right stays as it is.

    Stopped or killed at any moment and started again, it resumes. An archive that was fetched by
    hand is used if it is in the folder. A split's file in the folder that is not right is replaced.

    Args:
        recipe_or_name: a data set whose `dataset.yaml` names an `archive`.
        splits: names; None for all.
        to: folder to fetch and unpack into; default ``$FLT_MOL_DATA/NAME``, or `NAME` in the
            default data folder. Any other is found later with ``FLT_MOL_DATA=to``.
        keep_archive: whether the archive stays in the folder when all is done.
        base_url: of a mirror: the folder that has the archive.
        wait: seconds until a lost connection is tried again, growing.
        attempts: without a new byte, until it is given up.
        progress: called with a label, bytes done and bytes in all.

    Raises:
        ValueError: a data set without archive, unknown splits; too little room; a folder in which
            another download runs; an archive that cannot be fetched or is damaged.
        OSError: a folder that cannot be written.
    """
    found = recipe_or_name if isinstance(recipe_or_name, Recipe) else recipe(recipe_or_name)
    folder = Path(to or data_folders()[0] / found.name).expanduser().absolute()
    url, archive = _archive(found, folder, base_url)
    chosen = list(dict.fromkeys(found.splits if splits is None else splits))
    rows = verify(found, chosen, folder=None if to is None else folder, progress=progress)
    files = {row.split: row.file for row in rows if row.ok and row.file}
    absent = {split: _member(found, split, folder) for split in chosen if split not in files}
    received = 0
    if absent:  # else nothing is written: the data may be where one can only read
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(folder / ".download.lock", blocking=False):
                _check_room(archive, list(absent.values()))
                if not archive.target.is_file():
                    received = _fetch(url, archive, wait, attempts, progress)
                _extract(archive.target, list(absent.values()), progress)
        except Timeout:
            raise ValueError(f"another download into {folder} is running; wait for it") from None
        (folder / ".download.lock").unlink(missing_ok=True)
    if not keep_archive:
        archive.target.unlink(missing_ok=True)
    files |= {split: member.target for split, member in absent.items()}
    return DownloadResult(folder, received, tuple(absent), {x: files[x] for x in chosen})


class _Expected(NamedTuple):
    """A file: its name on the server or in the archive, and what is to come where."""

    name: str
    target: Path
    size: int
    md5: str

    @property
    def part(self) -> Path:
        return self.target.with_name(f"{self.target.name}.part")


def _archive(found: Recipe, folder: Path, base_url: str | None) -> tuple[str, _Expected]:
    entry = found.metadata.get("archive")
    if not isinstance(entry, dict):
        raise ValueError(f"data set {found.name} has no archive to download: see {found.folder}")
    url = str(entry["url"])
    name = url.rsplit("/", 1)[-1]
    url = f"{base_url.rstrip('/')}/{name}" if base_url else url
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url} is not an http:// or https:// address")
    return url, _Expected(name, folder / name, int(entry["bytes"]), str(entry["md5"]))


def _member(found: Recipe, split: str, folder: Path) -> _Expected:
    name, expected = PurePosixPath(found.relative(split).as_posix()), found.expected(split)
    if name.is_absolute() or ".." in name.parts:
        raise ValueError(f"split {split}: {name} is outside of the data set's folder")
    if "bytes" not in expected or "md5" not in expected:
        raise ValueError(f"split {split}: {found.folder / 'dataset.yaml'} lacks bytes or md5")
    return _Expected(str(name), folder / name, int(expected["bytes"]), str(expected["md5"]))


def _check_room(archive: _Expected, absent: Sequence[_Expected]) -> None:
    present = [p.stat().st_size for p in (archive.target, archive.part) if p.is_file()]
    needed = max(archive.size - max(present, default=0), 0) + sum(x.size for x in absent)
    free = shutil.disk_usage(archive.target.parent).free
    if needed > free:
        raise ValueError(
            f"{archive.target.parent} has {free:,} bytes free, {needed:,} are needed: choose "
            "another place (--to, FLT_MOL_DATA) or fewer splits"
        )


def _fetch(
    url: str, archive: _Expected, wait: float, attempts: int, progress: Progress | None
) -> int:
    """Download by way of `archive.part`, which later runs resume; bytes received."""
    received = 0
    for _ in range(2):  # a second time where what an earlier run left was of another file
        received += _complete(url, archive, wait, attempts, progress)
        found = _digest(archive.part, "md5", f"check {archive.name}", progress)
        if found == archive.md5:
            archive.part.replace(archive.target)
            return received
        archive.part.unlink()
    raise ValueError(f"{url} has md5 {found}, expected {archive.md5}: put it at {archive.target}")


def _complete(
    url: str, archive: _Expected, wait: float, attempts: int, progress: Progress | None
) -> int:
    """Attempt until all bytes are there, or several attempts in a row brought nothing new."""
    received, failures = 0, 0
    with archive.part.open("ab") as file:
        furthest = file.tell()
        while file.tell() != archive.size:
            reason = "the connection was closed early"
            try:
                received += _attempt(url, archive, file, progress)
            except HTTPError as error:
                error.close()
                reason = f"the server answered {error.code} {error.reason}"
                if error.code == 416:  # no such range: there are more bytes here than there
                    file.truncate(0)
                    file.seek(0)
                elif error.code not in _TEMPORARY:
                    failures = attempts
            except (OSError, HTTPException) as error:
                reason = str(getattr(error, "reason", error)) or type(error).__name__
            if file.tell() == archive.size:
                break
            failures = 0 if file.tell() > furthest else failures + 1
            furthest = max(furthest, file.tell())
            if failures >= attempts:
                raise ValueError(
                    f"cannot fetch {url}: {reason}, {file.tell():,} of {archive.size:,} bytes are "
                    f"kept: run the command again, or put the file at {archive.target}"
                )
            time.sleep(min(wait * 2 ** max(failures - 1, 0), _LONGEST_WAIT))
    return received


def _attempt(url: str, archive: _Expected, file: IO[bytes], progress: Progress | None) -> int:
    """One request, and all that comes of it."""
    headers = {"User-Agent": f"flt_mol/{VERSION}", "Accept-Encoding": "identity"}
    begin, received = file.tell(), 0
    if begin:
        headers["Range"] = f"bytes={begin}-"
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:
        place = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers["Content-Range"] or "")
        total = response.headers["Content-Length"] if place is None else place[2]
        if total not in (None, "*", str(archive.size)):
            raise OSError(f"it has {total} bytes there, expected {archive.size}")
        if place is None or int(place[1]) != begin:
            file.truncate(0)  # the whole file is being sent, or another part
            file.seek(0)
            if place is not None:
                raise OSError("it sent another part of the file than was asked for")
        # read1 hands over what has come, so that a lost connection loses nothing.
        while chunk := response.read1(min(_CHUNK, archive.size - file.tell())):
            file.write(chunk)
            received += len(chunk)
            if progress is not None:
                progress(f"fetch {archive.name}", file.tell(), archive.size)
    return received


def _extract(archive: Path, members: Sequence[_Expected], progress: Progress | None) -> None:
    """Write `members`, and nothing else that the archive holds, each when it is whole and right."""
    wanted = {member.name: member for member in members}
    try:
        # gzip inside, as tarfile's own decompression of streams reads one gzip member only.
        with gzip.open(archive) as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
            while wanted and (item := tar.next()) is not None:
                member = wanted.pop(str(PurePosixPath(item.name)), None)
                if member is not None:
                    _extract_one(tar, item, member, progress)
    except (EOFError, OverflowError, tarfile.TarError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{archive} is truncated or damaged ({error}); remove it") from error
    if wanted:
        raise ValueError(f"{archive} does not hold {', '.join(wanted)}; remove it")


def _extract_one(
    tar: tarfile.TarFile, item: tarfile.TarInfo, to: _Expected, progress: Progress | None
) -> None:
    source = tar.extractfile(item) if item.isreg() else None
    if source is None or item.size != to.size:
        raise tarfile.TarError(f"{item.name} has {item.size:,} bytes, expected {to.size:,}")
    remove_leftovers(to.target)
    with temporary_path(to.target, durable=True) as temporary:
        with temporary.open("wb") as file:
            while chunk := source.read(_CHUNK):
                file.write(chunk)
                if progress is not None:
                    progress(f"unpack {to.name}", file.tell(), to.size)
        if (found := _digest(temporary, "md5", f"check {to.name}", progress)) != to.md5:
            raise tarfile.TarError(f"{item.name} has md5 {found}, expected {to.md5}")


@dataclass(frozen=True)
class Verified:
    """What was found of one split.

    Args:
        split: its name.
        file: file or folder, None where there is none.
        status: "ok", "missing", "cannot be opened", or "wrong …": bytes, md5, sha256 or count.
        expected: by the recipe: bytes, md5 or sha256, count.
        found: the same, up to the first that is wrong.
        message: what is wrong; empty for "ok".
    """

    split: str
    file: Path | None
    status: str
    expected: Mapping[str, Any] = field(default_factory=dict)
    found: Mapping[str, Any] = field(default_factory=dict)
    message: str = ""

    @property
    def ok(self) -> bool:
        """Whether all is as it should be."""
        return self.status == "ok"


def verify(
    recipe_or_folder: Recipe | str | Path,
    splits: Sequence[str] | None = None,
    *,
    folder: Path | None = None,
    progress: Progress | None = None,
) -> list[Verified]:
    """Compare the files of a data set with its `dataset.yaml`: bytes, md5 or sha256, count.

    Of converted splits the recipe knows the count only.

    Args:
        recipe_or_folder: a recipe, its name, or a folder with `dataset.yaml`.
        splits: names; None for all.
        folder: look for the files there only; None for all places of :meth:`Recipe.path`.
        progress: called with bytes.

    Returns:
        One row for each split, in the order asked for.

    Raises:
        ValueError: no such data set or split.
    """
    found = recipe_or_folder if isinstance(recipe_or_folder, Recipe) else recipe(recipe_or_folder)
    chosen = list(dict.fromkeys(found.splits if splits is None else splits))
    places = {split: found.find(split, folder) for split in chosen}
    return [_verify_one(found, split, places[split], progress) for split in chosen]


def _verify_one(
    recipe: Recipe, split: str, file: Path | None, progress: Progress | None
) -> Verified:
    entry = recipe.expected(split)
    expected = {key: entry[key] for key in ("bytes", "sha256", "md5", "count") if key in entry}
    if file is None:
        return Verified(split, None, "missing", expected, message=str(recipe.relative(split)))
    found: dict[str, Any] = {}
    published = not file.is_dir() and not recipe.is_converted(file)
    keys = [key for key in expected if key != "count" and published]
    for key in (*keys, "count"):
        try:
            found[key] = _measured(file, key, split, progress)
        except (ValueError, OSError) as error:
            return Verified(split, file, "cannot be opened", expected, found, str(error))
        if found[key] != expected.get(key, found[key]):
            text = f"{file} has {key} {found[key]}, expected {expected[key]}"
            if command := recipe.command([split]):
                text += f"; get it with {command} --to FOLDER"
            return Verified(split, file, f"wrong {key}", expected, found, text)
    return Verified(split, file, "ok", expected, found)


def _measured(file: Path, key: str, split: str, progress: Progress | None) -> Any:
    if key == "bytes":
        return file.stat().st_size
    if key == "count":
        return len(open_dataset(file))
    return _digest(file, key, f"verify {split}", progress)


def _digest(file: Path, kind: str, label: str, progress: Progress | None) -> str:
    total, digest = file.stat().st_size, hashlib.new(kind, usedforsecurity=False)
    with file.open("rb") as stream:
        while chunk := stream.read(_SHOW_EVERY):
            digest.update(chunk)
            if progress is not None:
                progress(label, stream.tell(), total)
    return digest.hexdigest()
