"""Whether the files of a data set are whole: bytes, md5 or sha256, and number of records."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flt_mol.data.catalog import Recipe, recipe
from flt_mol.data.open import open_dataset
from flt_mol.data.remote.http import Progress

__all__ = ["Verified", "check_bytes", "check_records", "verify"]

_CHUNK = 2**20
_SHOW_EVERY = 2**24  # bytes hashed
_HASHES = ("sha256", "md5")


@dataclass(frozen=True)
class Verified:
    """What was found of one split.

    Args:
        split: its name.
        file: file or folder, None where there is none.
        status: "ok", "missing", "wrong size", "wrong md5", "wrong sha256", "wrong count" or "cannot
            be opened".
        expected: by the recipe: bytes, md5 or sha256, count, as far as it says.
        found: the same, as far as it was looked at; the first that is wrong ends it.
        message: what is wrong, and the mend; of a missing file its path only, as
            :meth:`Recipe.how_to_get` says the rest for all of them; empty for "ok".
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
    """Compare the files of a data set with its `dataset.yaml`.

    Files as distributed: bytes, then md5 or sha256, then the number of records. Compact versions
    have no such numbers: all their records are read, which checks each one's checksum, and counted.

    Args:
        recipe_or_folder: a recipe, its name, or a folder with `dataset.yaml`.
        splits: names; None for all.
        folder: look for the files there only; None for all places of :meth:`Recipe.path`.
        progress: called with bytes, or with records of compact versions.

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
    found: Recipe, split: str, file: Path | None, progress: Progress | None
) -> Verified:
    expected = {
        key: value
        for key, value in found.expected(split).items()
        if key in ("bytes", "count", *_HASHES)
    }
    if file is None:
        return Verified(split, None, "missing", expected, message=str(found.relative(split)))
    if found.is_compact(file):
        row = check_records(split, file, expected, every=True, progress=progress)
    else:
        row = check_bytes(split, file, expected, progress)
        if row.ok:
            counted = check_records(split, file, expected)
            row = replace(counted, found={**row.found, **counted.found})
    if row.status.startswith("wrong"):
        row = replace(row, message=f"{row.message}; {_mend(found, split, file)}")
    return row


def _mend(found: Recipe, split: str, file: Path) -> str:
    """How to get a right file, beside one that may be somebody's own."""
    if found.is_compact(file):
        return "make it again from the whole file with flt-mol data convert"
    if command := found.command([split]):
        return (
            f"a right one is fetched by {command} --to FOLDER, and found with FLT_MOL_DATA=FOLDER"
        )
    return (
        "if it was changed on purpose, give its numbers in "
        f"{found.folder / 'dataset.yaml'}; else bring a whole copy"
    )


def check_bytes(
    split: str, file: Path, expected: Mapping[str, Any], progress: Progress | None = None
) -> Verified:
    """Size and hash of a file, without opening it; of a folder, nothing.

    Args:
        split: its name.
        file: that exists.
        expected: `bytes`, and `sha256` or `md5`; what is not given is not compared.
        progress: called with bytes.
    """
    if file.is_dir():
        return Verified(split, file, "ok", expected)
    found: dict[str, Any] = {"bytes": file.stat().st_size}
    size = expected.get("bytes", found["bytes"])
    if size != found["bytes"]:
        why = f"{file} has {found['bytes']:,} bytes, expected are {size:,}"
        return Verified(split, file, "wrong size", expected, found, why)
    for kind in _HASHES:
        if kind in expected:
            try:
                found[kind] = _hash(file, kind, f"verify {split}", progress)
            except OSError as error:
                why = f"{file}: {error.strerror or error}"
                return Verified(split, file, "cannot be opened", expected, found, why)
            if found[kind] != str(expected[kind]).lower():
                why = f"{file} has {kind} {found[kind]}, expected is {expected[kind]}"
                return Verified(split, file, f"wrong {kind}", expected, found, why)
    return Verified(split, file, "ok", expected, found)


def check_records(
    split: str,
    file: Path,
    expected: Mapping[str, Any],
    *,
    every: bool = False,
    progress: Progress | None = None,
) -> Verified:
    """Open a file and count its records.

    Args:
        split: its name.
        file: file or folder that exists.
        expected: `count`; not compared where it is not given.
        every: read each record, too.
        progress: called with records, when they are read.
    """
    found: dict[str, Any] = {}
    try:
        data = open_dataset(file)
        found["count"] = len(data)
        for index in range(len(data)) if every else ():
            data.record(index)
            if progress is not None:
                progress(f"verify {split}", index + 1, len(data))
    except (ValueError, OSError) as error:
        return Verified(split, file, "cannot be opened", expected, found, str(error))
    count = expected.get("count", found["count"])
    if count != found["count"]:
        why = f"{file} holds {found['count']:,} systems, expected are {count:,}"
        return Verified(split, file, "wrong count", expected, found, why)
    return Verified(split, file, "ok", expected, found)


def _hash(file: Path, kind: str, label: str, progress: Progress | None) -> str:
    total, done = file.stat().st_size, 0
    digest = hashlib.new(kind, usedforsecurity=False)
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
            if progress is not None and (done % _SHOW_EVERY == 0 or done == total):
                progress(label, done, total)
    return digest.hexdigest()
