"""Published data sets: fetched with resumption, unpacked, and compared with their recipe."""

from __future__ import annotations

import gzip
import hashlib
import shutil
import tarfile
import time
import urllib.request
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple
from urllib.error import HTTPError

from filelock import FileLock, Timeout

from flt_mol.data.opening import open_dataset
from flt_mol.data.recipes import FLAT, Recipe, data_folders, recipe
from flt_mol.files import VERSION, temporary_path

Progress = Callable[[str, int, int | None], None]
"""Called with what is being done, how much of it is done, and of how much."""

_CHUNK = 1 << 20
_TEMPORARY = (408, 425, 429, 500, 502, 503, 504)  # HTTP statuses that are worth another attempt
_ATTEMPTS, _WAIT = 6, 1.0  # without a new byte; seconds before the next, doubled each time
_TIMEOUT = 60.0  # seconds without a byte


@dataclass(frozen=True)
class DownloadResult:
    """Result of a download.

    Args:
        folder: where the data set is.
        unpacked: splits that are new; the others were there before.
        files: split → file, of all that were asked for.
    """

    folder: Path
    unpacked: tuple[str, ...]
    files: dict[str, Path]


def download(
    name_or_folder: Recipe | str | Path,
    splits: Sequence[str] | None = None,
    *,
    to: str | Path | None = None,
    keep_archive: bool = True,
    base_url: str | None = None,
    progress: Progress | None = None,
) -> DownloadResult:
    """Download splits of a published data set; files that are present and correct are kept.

    A download that was stopped resumes when started again. An archive that is in the folder is
    used. A damaged file is replaced.

    Args:
        name_or_folder: a data set whose `dataset.yaml` names an `archive`.
        splits: names; None for all.
        to: folder to fetch and unpack into; default ``$FLT_MOL_DATA/NAME``, or `NAME` in the
            default data folder. Any other is found later with ``FLT_MOL_DATA=to``.
        keep_archive: whether the archive stays in the folder when all is done.
        base_url: of a mirror: the folder that has the archive.
        progress: called with a label, bytes done and bytes in all.

    Raises:
        ValueError: a data set without archive, unknown splits; too little space; a folder in which
            another download runs; an archive that cannot be fetched or is damaged.
        OSError: a folder that cannot be written.
    """
    found, report = recipe(name_or_folder), progress or (lambda *_: None)
    folder = Path(to or data_folders()[0] / found.name).expanduser().absolute()
    url, archive = _archive(found, folder, base_url)
    rows = verify(found, splits, folder=None if to is None else folder, progress=progress)
    files = {row.split: row.file for row in rows if row.ok and row.file}
    absent = {row.split: _member(found, row.split, folder) for row in rows if not row.ok}
    if absent:  # else nothing is written: the data may be where one can only read
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(folder / ".download.lock", blocking=False):
                _check_space(archive, list(absent.values()))
                if not archive.target.is_file():
                    _fetch(url, archive, report)
                _extract(archive.target, list(absent.values()), report)
        except Timeout:
            raise ValueError(f"another download into {folder} is running; wait for it") from None
        (folder / ".download.lock").unlink(missing_ok=True)
    if not keep_archive:
        archive.target.unlink(missing_ok=True)
    files |= {split: member.target for split, member in absent.items()}
    return DownloadResult(folder, tuple(absent), {row.split: files[row.split] for row in rows})


class _Expected(NamedTuple):
    """A file: its name on the server or in the archive, and what is to come where."""

    name: str
    target: Path
    size: int
    md5: str


def _archive(found: Recipe, folder: Path, base_url: str | None) -> tuple[str, _Expected]:
    entry = found.metadata.get("archive")
    if not isinstance(entry, dict):
        raise ValueError(f"data set {found.name} has no archive to download: see {found.folder}")
    url = str(entry["url"])
    name = url.rsplit("/", 1)[-1]
    url = f"{base_url.rstrip('/')}/{name}" if base_url else url
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url} is not an http:// or https:// address")
    return url, _Expected(name, folder / name, entry["bytes"], entry["md5"])


def _member(found: Recipe, split: str, folder: Path) -> _Expected:
    expected = found.expected(split)
    name = PurePosixPath(expected["file"])
    if name.is_absolute() or ".." in name.parts:
        raise ValueError(f"split {split}: {name} is outside the data set's folder")
    if "bytes" not in expected or "md5" not in expected:
        raise ValueError(f"split {split}: {found.folder / 'dataset.yaml'} lacks bytes or md5")
    return _Expected(str(name), folder / name, expected["bytes"], expected["md5"])


def _part(archive: _Expected) -> Path:
    return archive.target.with_name(f"{archive.name}.part")


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _check_space(archive: _Expected, absent: Sequence[_Expected]) -> None:
    folder, present = archive.target.parent, max(_size(archive.target), _size(_part(archive)))
    needed = max(archive.size - present, 0) + sum(member.size for member in absent)
    if needed > (free := shutil.disk_usage(folder).free):
        raise ValueError(
            f"{folder} has {free:,} bytes free, {needed:,} are needed: choose another place (--to, "
            "FLT_MOL_DATA) or fewer splits"
        )


def _fetch(url: str, archive: _Expected, report: Progress) -> None:
    """Download by way of a file `.part`, which later runs resume."""
    part, failures = _part(archive), 0
    furthest = _size(part)
    while _size(part) != archive.size:
        reason = "the connection was closed early"
        try:
            _attempt(url, archive, report)
        except HTTPError as error:
            error.close()
            reason = f"the server answered {error.code} {error.reason}"
            failures = failures if error.code in _TEMPORARY else _ATTEMPTS
        except (OSError, HTTPException) as error:
            reason = str(getattr(error, "reason", error)) or type(error).__name__
        done = _size(part)
        failures = 0 if done > furthest else failures + 1
        furthest = max(furthest, done)
        if failures >= _ATTEMPTS:
            raise ValueError(
                f"cannot fetch {url}: {reason}, {done:,} of {archive.size:,} bytes are kept: run "
                f"the command again, or put the file at {archive.target}"
            )
        time.sleep(_WAIT * 2**failures if failures else 0.0)
    if (found := _digest(part, "md5", f"check {archive.name}", report)) != archive.md5:
        part.unlink()
        raise ValueError(f"{url} has md5 {found}, expected {archive.md5}: run the command again")
    part.replace(archive.target)


def _attempt(url: str, archive: _Expected, report: Progress) -> None:
    """One request, for what the part lacks, and all that comes of it."""
    begin = _size(_part(archive))
    begin = begin if begin < archive.size else 0  # else it is of another file
    headers = {"User-Agent": f"flt_mol/{VERSION}", "Accept-Encoding": "identity"}
    if begin:
        headers["Range"] = f"bytes={begin}-"
    request = urllib.request.Request(url, headers=headers)
    with (
        urllib.request.urlopen(request, timeout=_TIMEOUT) as response,
        _part(archive).open("ab") as file,
    ):
        resumed = (response.headers["Content-Range"] or "").startswith(f"bytes {begin}-")
        if not resumed:  # the whole file is being sent, or another part
            file.truncate(0)
            file.seek(0)
        rest = archive.size - file.tell()
        if response.length not in (None, rest) or (response.status == 206) != resumed:
            raise OSError(f"the server sends {response.length} bytes of it, expected {rest}")
        # read1 hands over what has come, so that a lost connection loses nothing.
        while chunk := response.read1(min(_CHUNK, archive.size - file.tell())):
            file.write(chunk)
            report(f"fetch {archive.name}", file.tell(), archive.size)


def _extract(archive: Path, members: Sequence[_Expected], report: Progress) -> None:
    """Write `members`, and nothing else that the archive holds, each when it is whole and right."""
    wanted = {member.name: member for member in members}
    try:
        # gzip inside, as tarfile's own decompression of streams reads one gzip member only.
        with gzip.open(archive) as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
            while wanted and (item := tar.next()) is not None:
                member = wanted.pop(str(PurePosixPath(item.name)), None)
                if member is not None:
                    _write(tar.extractfile(item) if item.isreg() else None, member, report)
    except (EOFError, OverflowError, tarfile.TarError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{archive} is truncated or damaged ({error}); remove it") from error
    if wanted:
        raise ValueError(f"{archive} does not hold {', '.join(wanted)}; remove it")


def _write(source: IO[bytes] | None, to: _Expected, report: Progress) -> None:
    with temporary_path(to.target, durable=True) as temporary:
        with temporary.open("wb") as file:
            while source is not None and (chunk := source.read(_CHUNK)):
                file.write(chunk)
                report(f"unpack {to.name}", file.tell(), to.size)
        if (found := _digest(temporary, "md5", f"check {to.name}", report)) != to.md5:
            raise tarfile.TarError(f"{to.name} has md5 {found}, expected {to.md5}")


@dataclass(frozen=True)
class Verified:
    """Result of verifying one split.

    Args:
        split: its name.
        file: file or folder, None where there is none.
        status: "ok", "missing", "cannot be opened", or "wrong …": bytes, md5, sha256 or count.
        message: what is wrong; empty for "ok".
    """

    split: str
    file: Path | None
    status: str
    message: str = ""

    @property
    def ok(self) -> bool:
        """Whether everything agrees with the recipe."""
        return self.status == "ok"


def verify(
    name_or_folder: Recipe | str | Path,
    splits: Sequence[str] | None = None,
    *,
    folder: Path | None = None,
    progress: Progress | None = None,
) -> list[Verified]:
    """Compare the files of a data set with its `dataset.yaml`: bytes, md5 or sha256, count.

    Of converted splits the recipe knows the count only.

    Args:
        name_or_folder: of a data set; or its recipe.
        splits: names; None for all.
        folder: look for the files there only; None for all places of `Recipe.path`.
        progress: called with bytes.

    Returns:
        One row for each split, in the order asked for.

    Raises:
        ValueError: no such data set or split.
    """
    found = recipe(name_or_folder)
    chosen = dict.fromkeys(found.splits if splits is None else splits)
    places = {split: found.find(split, folder) for split in chosen}
    report = progress or (lambda *_: None)
    return [_verify_one(found, *place, report) for place in places.items()]


def _verify_one(recipe: Recipe, split: str, file: Path | None, report: Progress) -> Verified:
    expected = recipe.expected(split)
    if file is None:
        return Verified(split, None, "missing", expected["file"])
    published = not file.is_dir() and file.parent.name != FLAT
    kinds = [kind for kind in ("bytes", "sha256", "md5") if kind in expected and published]
    try:
        for kind in [*kinds, "count"]:
            found: int | str
            if kind == "count":
                found = len(open_dataset(file))
            elif kind == "bytes":
                found = _size(file)
            else:
                found = _digest(file, kind, f"verify {split}", report)
            if found != expected.get(kind, found):
                text = f"{file} has {kind} {found}, expected {expected[kind]}"
                return Verified(split, file, f"wrong {kind}", text)
    except (ValueError, OSError) as error:
        return Verified(split, file, "cannot be opened", str(error))
    return Verified(split, file, "ok")


def _digest(file: Path, kind: str, label: str, report: Progress) -> str:
    total, digest = _size(file), hashlib.new(kind, usedforsecurity=False)
    with file.open("rb") as stream:
        while chunk := stream.read(16 * _CHUNK):
            digest.update(chunk)
            report(label, stream.tell(), total)
    return digest.hexdigest()
