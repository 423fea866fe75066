"""Data sets from where they are published: fetched, checked and unpacked."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from flt_mol.data.catalog import Recipe, recipe
from flt_mol.data.data_folders import absolute, data_folder
from flt_mol.data.folder_lock import locked_folder
from flt_mol.data.remote.archive import Member, extract, temporary_name
from flt_mol.data.remote.http import Progress, fetch
from flt_mol.data.remote.source import Archive, archive_in, archive_of, check_size, remove_archive
from flt_mol.data.verify import check_bytes, check_records
from flt_mol.outputs import check_folder

__all__ = ["DownloadResult", "download"]


@dataclass(frozen=True)
class DownloadResult:
    """What a download has done.

    Args:
        name: of the data set.
        folder: where it lies.
        archive: where the archive lies, None if it is not there (any more).
        received: bytes that came over the network.
        present: splits that were there and right before.
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

    Stopped or killed at any moment and started again, it goes on where it was. An archive that was
    fetched by hand is used if it lies in the folder (or, for the default one, in the data folder
    above it). A split's file in the folder that is not right is replaced, unless the folder is a
    link to another.

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
        ValueError: a data set without archive, unknown splits; too little room; a folder that
            cannot be written, or in which another download runs; whatever goes wrong with network
            and archive; each with the mend.
    """
    found = recipe_or_name if isinstance(recipe_or_name, Recipe) else recipe(recipe_or_name)
    source = archive_of(found, base_url)
    folder = data_folder() / found.name if to is None else absolute(to, "--to")
    members = _members(found, splits, folder)
    only = None if to is None else folder
    files = {
        split: _present(found, member, split, only, progress) for split, member in members.items()
    }
    absent = {split: member for split, member in members.items() if files[split] is None}
    received = 0
    if absent:  # else nothing is written: the data may lie where one only may read
        _check_places(source, list(absent.values()), folder)
        with locked_folder(folder, "download"):
            _remove_left_over(found, folder)
            tarball = archive_in(source, folder, shared=to is None)
            _check_room(source, tarball, list(absent.values()), folder)
            if tarball is not None:
                check_size(source, tarball)
            else:
                tarball = folder / source.name
                received = _fetch(source, tarball, wait, attempts, progress)
            extract(tarball, list(absent.values()), progress)
    if not keep_archive:
        remove_archive(folder / source.name)
    return DownloadResult(
        found.name,
        folder,
        archive_in(source, folder, shared=to is None),
        received,
        tuple(split for split in members if split not in absent),
        tuple(absent),
        {split: files[split] or member.target for split, member in members.items()},
    )


def _check_places(source: Archive, absent: Sequence[Member], folder: Path) -> None:
    """Whether all can be written, asked before gigabytes are fetched."""
    for place in (folder, *(member.target.parent for member in absent)):
        try:
            check_folder(place, "--to FOLDER, or FLT_MOL_DATA")
        except OSError as error:  # it may not even be looked at
            raise ValueError(
                f"cannot write {place}: {error.strerror or error}; give another with --to FOLDER, "
                "or FLT_MOL_DATA"
            ) from error
    for path in (folder / source.name, folder / f"{source.name}.part"):
        if path.is_dir():
            raise ValueError(f"{path} is a folder, the archive is to be there; call it otherwise")


def _members(found: Recipe, splits: Sequence[str] | None, folder: Path) -> dict[str, Member]:
    """What to take out of the archive, by split."""
    chosen = list(dict.fromkeys(found.splits if splits is None else splits))
    if not chosen:
        raise ValueError(f"no split was chosen; there are: {', '.join(found.splits)}")
    members = {}
    for split in chosen:
        name = found.relative(split).as_posix()
        size, md5 = (found.expected(split).get(key) for key in ("bytes", "md5"))
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ValueError(f"split {split}: {name} lies outside of the data set's folder")
        if not isinstance(size, int) or not isinstance(md5, str):
            raise ValueError(f"split {split}: {found.folder / 'dataset.yaml'} needs bytes and md5")
        members[split] = Member(name, folder / name, size, md5, split)
    return members


def _present(
    found: Recipe, member: Member, split: str, folder: Path | None, progress: Progress | None
) -> Path | None:
    """Where a split lies that need not be fetched, None for one that is to be unpacked.

    Raises:
        ValueError: it is there, damaged, in a place that is not ours to write to.
    """
    path = found.find(split, folder)
    if path is None:
        return None
    expected = found.expected(split)
    compact = found.is_compact(path)
    if compact or path.is_dir():
        row = check_records(split, path, expected, every=compact, progress=progress)
    else:
        row = check_bytes(split, path, expected, progress)
    if row.ok:
        return path
    if path == member.target and _is_ours(found, member, shared=folder is None):
        return None
    raise ValueError(
        f"split {split} is there already, but it is not as it should be: {row.message}; it "
        "stays as it is, have a right one elsewhere with --to ANOTHER_FOLDER"
    )


def _is_ours(found: Recipe, member: Member, shared: bool) -> bool:
    """Whether a bad file may be replaced: not what is no file, or what links make of others' data.

    `shared` says that it lies in the data folder, not in a folder given for this download.
    """
    depth = len(found.relative(member.label).parts) - 1
    above = list(member.target.parents)[: depth + shared]
    return not (member.target.is_dir() or any(folder.is_symlink() for folder in above))


def _fetch(
    source: Archive, tarball: Path, wait: float, attempts: int, progress: Progress | None
) -> int:
    return fetch(
        source.url,
        tarball,
        size=source.size,
        md5=source.md5,
        wait=wait,
        attempts=attempts,
        progress=progress,
    )


def _check_room(
    source: Archive, tarball: Path | None, absent: Sequence[Member], folder: Path
) -> None:
    part = folder / f"{source.name}.part"
    there = part.stat().st_size if part.is_file() else 0
    fetched = 0 if tarball else max(source.size - there, 0)
    unpacked = sum(member.size for member in absent)
    free = shutil.disk_usage(folder).free
    if fetched + unpacked > free:
        raise ValueError(
            f"too little room in {folder}: {fetched + unpacked:,} bytes are needed ({fetched:,} "
            f"for the archive, {unpacked:,} unpacked), {free:,} are free; choose another place "
            "with --to FOLDER or FLT_MOL_DATA, or fewer splits"
        )


def _remove_left_over(found: Recipe, folder: Path) -> None:
    """Files that runs were writing when they were killed; the lock says that none is running."""
    for split in found.splits:
        with suppress(OSError):
            temporary_name(folder / found.relative(split)).unlink()
