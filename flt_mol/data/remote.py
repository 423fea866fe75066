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
from urllib.parse import urlsplit

from filelock import FileLock, Timeout

from flt_mol.data.conversion import remove_leftovers
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
        name: of the data set.
        folder: where it is.
        archive: where the archive is, None if it is not there (any more).
        received: bytes that came over the network.
        present: splits that were there before.
        unpacked: splits that are new.
        files: split → file, of all that were asked for.
    """

    name: str
    folder: Path
    archive: Path | None
    received: int
    present: tuple[str, ...]
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
    source = _archive(found, base_url)
    folder = _default_folder() / found.name if to is None else Path(to).expanduser().absolute()
    chosen = list(dict.fromkeys(found.splits if splits is None else splits))
    rows = verify(found, chosen, folder=None if to is None else folder, progress=progress)
    files = {row.split: row.file if row.ok else None for row in rows}
    absent = {split: _member(found, split, folder) for split in chosen if files[split] is None}
    received, tarball = 0, folder / source.name
    if absent:  # else nothing is written: the data may be where one can only read
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(folder / ".download.lock", blocking=False):
                _check_room(source, tarball, list(absent.values()))
                if not tarball.is_file():
                    received = _fetch(source, tarball, wait, attempts, progress)
                _extract(tarball, absent, progress)
        except Timeout:
            raise ValueError(f"another download into {folder} is running; wait for it") from None
        (folder / ".download.lock").unlink(missing_ok=True)
    if not keep_archive:
        tarball.unlink(missing_ok=True)
    return DownloadResult(
        found.name,
        folder,
        tarball if tarball.is_file() else None,
        received,
        tuple(split for split in chosen if split not in absent),
        tuple(absent),
        {split: files[split] or absent[split].target for split in chosen},
    )


class _Archive(NamedTuple):
    url: str
    name: str
    size: int
    md5: str


class _Member(NamedTuple):
    """A file in the archive: its name there, what it is to become, and what to expect."""

    name: str
    target: Path
    size: int
    md5: str


def _archive(found: Recipe, base_url: str | None) -> _Archive:
    entry = found.metadata.get("archive")
    if not isinstance(entry, dict):
        raise ValueError(f"data set {found.name} has no archive to download: see {found.folder}")
    try:
        url, size, md5 = str(entry["url"]), int(entry["bytes"]), str(entry["md5"])
    except (KeyError, ValueError) as error:
        raise ValueError(f"{found.folder / 'dataset.yaml'}: archive lacks {error}") from None
    name = url.rsplit("/", 1)[-1]
    url = f"{base_url.rstrip('/')}/{name}" if base_url else url
    if urlsplit(url).scheme not in ("http", "https"):
        raise ValueError(f"{url} is not an http:// or https:// address")
    return _Archive(url, name, size, md5)


def _default_folder() -> Path:
    folders = data_folders()
    if not folders:
        raise ValueError("there is no home folder to put data in: set FLT_MOL_DATA to a folder")
    return folders[0]


def _member(found: Recipe, split: str, folder: Path) -> _Member:
    name, expected = PurePosixPath(found.relative(split).as_posix()), found.expected(split)
    if name.is_absolute() or ".." in name.parts:
        raise ValueError(f"split {split}: {name} is outside of the data set's folder")
    if "bytes" not in expected or "md5" not in expected:
        raise ValueError(f"split {split}: {found.folder / 'dataset.yaml'} lacks bytes or md5")
    return _Member(str(name), folder / name, int(expected["bytes"]), str(expected["md5"]))


def _check_room(source: _Archive, tarball: Path, absent: Sequence[_Member]) -> None:
    part = tarball.with_name(f"{tarball.name}.part")
    there = next((p.stat().st_size for p in (tarball, part) if p.is_file()), 0)
    needed = max(source.size - there, 0) + sum(member.size for member in absent)
    free = shutil.disk_usage(tarball.parent).free
    if needed > free:
        raise ValueError(
            f"{tarball.parent} has {free:,} bytes free, {needed:,} are needed; choose another "
            "place with --to FOLDER or FLT_MOL_DATA, or fewer splits"
        )


def _fetch(
    source: _Archive, target: Path, wait: float, attempts: int, progress: Progress | None
) -> int:
    """Download to `target` by way of ``target.part``, which later runs resume; bytes received."""
    part = target.with_name(f"{target.name}.part")
    received = 0
    for _ in range(2):  # a second time where what an earlier run left was of another file
        received += _complete(source, part, wait, attempts, progress)
        found = _digest(part, "md5", f"check {target.name}", progress)
        if found == source.md5:
            part.replace(target)
            return received
        part.unlink()
    raise ValueError(
        f"{source.url} is not the file that was expected: md5 {found}, expected {source.md5}, in "
        f"two downloads. By hand: put it at {target}, and run the same command again"
    )


def _complete(
    source: _Archive, part: Path, wait: float, attempts: int, progress: Progress | None
) -> int:
    """Attempt until all bytes are there, or several attempts in a row brought nothing new."""
    received, failures = 0, 0
    with part.open("ab") as file:
        furthest = file.tell()
        while file.tell() != source.size:
            try:
                received += _attempt(source, file, progress)
                reason = "the connection was closed early"
            except HTTPError as error:
                error.close()
                reason = f"the server answered {error.code} {error.reason}"
                if error.code == 416:
                    _restart(file)
                elif error.code not in _TEMPORARY:
                    failures = attempts
            except (OSError, HTTPException) as error:
                reason = str(getattr(error, "reason", error)) or type(error).__name__
            if file.tell() == source.size:
                break
            failures = 0 if file.tell() > furthest else failures + 1
            furthest = max(furthest, file.tell())
            if failures >= attempts:
                raise ValueError(
                    f"cannot fetch {source.url}: {reason} ({file.tell():,} of {source.size:,} "
                    f"bytes are kept). By hand: put it at {part.with_suffix('')}, and run the same "
                    "command again"
                )
            time.sleep(min(wait * 2 ** max(failures - 1, 0), _LONGEST_WAIT))
    return received


def _attempt(source: _Archive, file: IO[bytes], progress: Progress | None) -> int:
    """One request, and all that comes of it."""
    headers = {"User-Agent": f"flt_mol/{VERSION}", "Accept-Encoding": "identity"}
    begin, received = file.tell(), 0
    if begin:
        headers["Range"] = f"bytes={begin}-"
    request = urllib.request.Request(source.url, headers=headers)
    with _opener().open(request, timeout=_TIMEOUT) as response:
        place = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers["Content-Range"] or "")
        total = response.headers["Content-Length"] if place is None else place[2]
        if total not in (None, "*", str(source.size)):
            raise OSError(f"it has {total} bytes there, {source.size} are expected")
        if place is None or int(place[1]) != begin:
            _restart(file)  # the whole file is being sent, or another part
            if place is not None:
                raise OSError("it sent another part of the file than was asked for")
        # read1 hands over what has come, so that a lost connection loses nothing.
        while chunk := response.read1(min(_CHUNK, source.size - file.tell())):
            file.write(chunk)
            received += len(chunk)
            if progress is not None:
                progress(f"fetch {source.name}", file.tell(), source.size)
    return received


def _restart(file: IO[bytes]) -> None:
    file.seek(0)
    file.truncate()


def _opener() -> urllib.request.OpenerDirector:
    """Follows links to http and https only: without urllib's handlers of file: and ftp:."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler,
        urllib.request.UnknownHandler,
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPRedirectHandler,
        urllib.request.HTTPErrorProcessor,
    ):
        opener.add_handler(handler())
    return opener


def _extract(archive: Path, members: Mapping[str, _Member], progress: Progress | None) -> None:
    """Write `members`, and nothing else that the archive holds, each when it is whole and right."""
    wanted = {str(PurePosixPath(member.name)): member for member in members.values()}
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
    tar: tarfile.TarFile, item: tarfile.TarInfo, to: _Member, progress: Progress | None
) -> None:
    source = tar.extractfile(item) if item.isreg() else None
    if source is None or item.size != to.size:
        raise tarfile.TarError(f"{item.name} has {item.size:,} bytes, expected are {to.size:,}")
    md5 = hashlib.md5(usedforsecurity=False)
    remove_leftovers(to.target)
    with temporary_path(to.target, durable=True) as temporary:
        with temporary.open("wb") as file:
            while chunk := source.read(_CHUNK):
                md5.update(chunk)
                file.write(chunk)
                if progress is not None:
                    progress(f"unpack {to.name}", file.tell(), to.size)
        if md5.hexdigest() != to.md5:
            raise tarfile.TarError(f"{item.name} has md5 {md5.hexdigest()}, expected {to.md5}")


@dataclass(frozen=True)
class Verified:
    """What was found of one split.

    Args:
        split: its name.
        file: file or folder, None where there is none.
        status: "ok", "missing", "wrong bytes", "wrong md5", "wrong sha256", "wrong count" or
            "cannot be opened".
        expected: by the recipe: bytes, md5 or sha256, count.
        found: the same, as far as it was looked at; the first that is wrong ends it.
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
            text = f"{file} has {key} {found[key]}, expected is {expected[key]}"
            if command := recipe.command([split]):
                text += f"; get the right one with {command} --to FOLDER"
            return Verified(split, file, f"wrong {key}", expected, found, text)
    return Verified(split, file, "ok", expected, found)


def _measured(file: Path, key: str, split: str, progress: Progress | None) -> Any:
    from flt_mol.data.opening import open_dataset

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
