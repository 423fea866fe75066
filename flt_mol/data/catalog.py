"""Recipes: data sets by name, each described by a `dataset.yaml`; and where their files lie.

Small data lie beside their recipe. Large ones lie in a data folder: ``$FLT_MOL_DATA``, or
``~/.cache/flt_mol/data`` (``$XDG_CACHE_HOME/flt_mol/data`` where that is set).
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from flt_mol.data.dataset import StructuresDataset
from flt_mol.data.open import open_dataset
from flt_mol.resources import folder as resource_folder

__all__ = ["Recipe", "data_folder", "known_name", "names", "recipe"]

_FILE = "dataset.yaml"
_TELLING = 3  # parts at the end of a path that say which data set it is: all/val_id/data.lmdb


@dataclass(frozen=True)
class Recipe:
    """A data set: where its splits lie, and what its `dataset.yaml` says.

    Args:
        name: of the data set.
        folder: that holds `dataset.yaml`; paths of files are relative to it.
        splits: split → file or folder, as it would lie beside `dataset.yaml`.
        metadata: all of `dataset.yaml`.
    """

    name: str
    folder: Path
    splits: Mapping[str, Path]
    metadata: Mapping[str, Any] = field(repr=False)

    def path(self, split: str) -> Path:
        """File or folder of a split, the first that exists.

        Looked for beside the recipe, then in ``$FLT_MOL_DATA`` (in the data set's folder `NAME`, or
        unpacked there by someone else), then in the default data folder. In each, a compact
        version ``compact/SPLIT.lmdb`` comes before the file itself, and the file may lie under the
        end of its path: for `…/data/is2re/all/val_id/data.lmdb`, `all/val_id/data.lmdb` will do.

        Raises:
            ValueError: an unknown split, with the known ones; one that lies nowhere, with the
                places and the command that gets it.
        """
        found = self.find(split)
        if found is None:
            raise ValueError(self._absent(split))
        return found

    def find(self, split: str, folder: Path | None = None) -> Path | None:
        """As :meth:`path`, but None for a split that lies nowhere.

        Args:
            split: its name.
            folder: look for it there only.

        Raises:
            ValueError: an unknown split, with the known ones.
        """
        relative = self.relative(split)
        if folder is not None:
            candidates = _inside(folder, split, relative)
        elif relative.is_absolute():
            candidates = iter([relative])
        else:
            candidates = self._candidates(split, relative)
        return next((path for path in candidates if path.exists()), None)

    def relative(self, split: str) -> Path:
        """Path of a split's file in the folder of its data set, as `dataset.yaml` gives it.

        Raises:
            ValueError: an unknown split, with the known ones.
        """
        if split not in self.splits:
            raise ValueError(f"data set {self.name} has no split {_unknown(split, self.splits)}")
        file = self.splits[split]
        return file.relative_to(self.folder) if file.is_relative_to(self.folder) else file

    def expected(self, split: str) -> Mapping[str, Any]:
        """What `dataset.yaml` says of a split: count, bytes, md5 or sha256, …, as far as it does.

        Raises:
            ValueError: an unknown split, with the known ones.
        """
        self.relative(split)
        entry = self.metadata.get("splits", {}).get(split)
        return entry if isinstance(entry, dict) else {}

    def is_compact(self, path: Path) -> bool:
        """Whether a path of :meth:`path` is a compact version, not the file that was published."""
        return path.parent.name == "compact" and path not in self.splits.values()

    def open(self, split: str, **options: Any) -> StructuresDataset:
        """The systems of a split; options as of :func:`flt_mol.data.open_dataset`.

        Raises:
            ValueError: an unknown split; a file that is missing or bad.
        """
        return open_dataset(self.path(split), **options)

    def _candidates(self, split: str, relative: Path) -> Iterator[Path]:
        yield from _inside(self.folder, split, relative)
        for data in _data_folders():
            for name in dict.fromkeys((self.name, self.name.replace("_", "-"))):
                yield from _inside(data / name, split, relative)
            # Directly in a folder for all data sets only what cannot be of another one.
            if len(relative.parts) >= _TELLING:
                yield from _ends(data, relative)

    def _absent(self, split: str) -> str:
        folders = [self.folder, *(data / self.name for data in _data_folders())]
        text = (
            f"{self.relative(split)} does not exist, the file of split {split} of data set "
            f"{self.name} (looked in {', '.join(str(folder) for folder in folders)})"
        )
        archive = self.metadata.get("archive")
        if not isinstance(archive, dict):
            return text
        sizes = [(archive.get("bytes"), "to fetch"), (self.expected(split).get("bytes"), "on disk")]
        shown = ", ".join(f"{n:,} bytes {what}" for n, what in sizes if isinstance(n, int))
        return (
            f"{text}; get it with: flt-mol data download {self.name.replace('_', '-')} "
            f"--split {split}{f' ({shown})' if shown else ''}, or set FLT_MOL_DATA to the folder "
            "that has it unpacked"
        )


def data_folder() -> Path:
    """Where large data sets are put: ``$FLT_MOL_DATA``, else a folder of the user's cache.

    Raises:
        ValueError: no ``$FLT_MOL_DATA`` and no home.
    """
    folders = _data_folders()
    if not folders:
        raise ValueError("there is no home folder to put data in: set FLT_MOL_DATA to a folder")
    return folders[0]


def _data_folders() -> list[Path]:
    folders = []
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    with suppress(RuntimeError):  # no home
        if own := os.environ.get("FLT_MOL_DATA"):
            folders.append(Path(own).expanduser().absolute())
        home = cache if cache.is_absolute() else Path("~/.cache").expanduser()
        folders.append(home / "flt_mol" / "data")
    return folders


def _inside(folder: Path, split: str, relative: Path) -> Iterator[Path]:
    """Where a split may lie in the folder of its data set, the best first."""
    yield folder / "compact" / f"{split}.lmdb"
    yield from _ends(folder, relative)


def _ends(folder: Path, relative: Path) -> Iterator[Path]:
    """`relative` in `folder`, then its ends: of archives that were unpacked or moved otherwise."""
    parts = relative.parts
    for cut in range(max(len(parts) - _TELLING, 0) + 1):
        yield folder.joinpath(*parts[cut:])


def names() -> list[str]:
    """Names of the data sets that have a recipe."""
    return sorted(path.parent.name for path in resource_folder("datasets").glob(f"*/{_FILE}"))


def recipe(name_or_folder: str | Path) -> Recipe:
    """The data set of that name, or the one described in a folder (or `dataset.yaml`) of one's own.

    A known name wins over a folder of the same name in the working directory. In names, dashes
    and underscores are the same.

    Raises:
        ValueError: neither a known name nor a folder with `dataset.yaml`; a file that is no such
            description.
    """
    name = str(name_or_folder)
    known = known_name(name) if isinstance(name_or_folder, str) else None
    if known is not None:
        return _read(resource_folder("datasets") / known / _FILE)
    path = Path(name_or_folder)
    for candidate in (path, path / _FILE):
        if candidate.name == _FILE and candidate.is_file():
            return _read(candidate)
    if path.is_dir():
        raise ValueError(f"no {_FILE} in the folder {path}")
    raise ValueError(f"no data set {_unknown(name, names())}, and no such folder")


def known_name(name: str) -> str | None:
    """The data set that is meant, dashes and underscores being the same; None if there is none.

    Example:
        >>> known_name("oc20-is2re"), known_name("oc21")
        ('oc20_is2re', None)
    """
    return next((known for known in names() if _plain(known) == _plain(name)), None)


def _plain(name: str) -> str:
    return name.replace("-", "_")


def _read(file: Path) -> Recipe:
    try:
        metadata = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is no readable yaml: {error}") from error
    splits = metadata.get("splits") if isinstance(metadata, dict) else None
    if not isinstance(splits, dict) or not splits:
        raise ValueError(f"{file} has no mapping `splits:` of split to file")
    # So that `splits: {1: …}` has names, too.
    metadata["splits"] = splits = {str(split): entry for split, entry in splits.items()}
    folder = file.parent.resolve()
    files: dict[str, Path] = {}
    for split in splits:
        entry = splits[split]
        relative = entry.get("file") if isinstance(entry, dict) else entry
        if not isinstance(relative, str) or not relative:
            raise ValueError(f"{file}: split {split} names no file")
        files[split] = folder / relative
    return Recipe(str(metadata.get("name", folder.name)), folder, files, metadata)


def _unknown(name: str, known: Iterable[Any]) -> str:
    """`'nam' (did you mean name?); there are: name, other`."""
    known = [str(item) for item in known]
    near = difflib.get_close_matches(name, known, n=1)
    guess = f" (did you mean {near[0]}?)" if near else ""
    return f"'{name}'{guess}; there are: {', '.join(known) or 'none'}"
