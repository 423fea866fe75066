"""The archive of a published data set: where it is to come from, and where it lies."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flt_mol.data.catalog import Recipe

__all__ = ["Archive", "archive_in", "archive_of", "check_size", "remove_archive"]


@dataclass(frozen=True)
class Archive:
    """What a recipe says of its archive.

    Args:
        url: of the file.
        name: of the file, the end of `url`.
        size: bytes.
        md5: hexadecimal.
    """

    url: str
    name: str
    size: int
    md5: str


def archive_of(found: Recipe, base_url: str | None) -> Archive:
    """The archive that a recipe names, or its like in the folder `base_url` of another server.

    Raises:
        ValueError: it names none, or lacks its address, size or md5.
    """
    entry = found.metadata.get("archive")
    if not isinstance(entry, dict):
        raise ValueError(
            f"data set {found.name} is not one to download: its dataset.yaml names no archive; "
            f"its files lie in {found.folder}"
        )
    url, size, md5 = entry.get("url"), entry.get("bytes"), entry.get("md5")
    if not isinstance(url, str) or not isinstance(size, int) or not isinstance(md5, str):
        raise ValueError(f"{found.folder / 'dataset.yaml'}: archive needs url, bytes and md5")
    name = url.rsplit("/", 1)[-1]
    return Archive(f"{base_url.rstrip('/')}/{name}" if base_url else url, name, size, md5)


def archive_in(source: Archive, folder: Path, shared: bool) -> Path | None:
    """The archive of an earlier run, or one that was fetched by hand."""
    places = (folder, folder.parent) if shared else (folder,)
    paths = (place / source.name for place in places)
    return next((path for path in paths if path.is_file()), None)


def check_size(source: Archive, tarball: Path) -> None:
    """Refuse an archive that has not come in full.

    Raises:
        ValueError: another size than the recipe's, with the mend.
    """
    size = tarball.stat().st_size
    if size != source.size:
        rename = f"rename it to {source.name}.part to have the rest fetched, or "
        raise ValueError(
            f"{tarball} has {size:,} bytes, expected are {source.size:,}: "
            f"{rename if size < source.size else ''}remove it, and run the same command again"
        )


def remove_archive(path: Path) -> None:
    """Remove it where it is there.

    Raises:
        ValueError: it may not be removed.
    """
    with suppress(FileNotFoundError, NotADirectoryError):
        try:
            path.unlink()
        except (PermissionError, IsADirectoryError) as error:
            raise ValueError(
                f"all splits are there, but cannot remove {path}: {error.strerror}"
            ) from error
