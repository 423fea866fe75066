"""Recipes: data sets by name, each described by a `dataset.yaml`; and where their files are.

Small data are beside their recipe, large ones in a data folder: ``$FLT_MOL_DATA``, then
``~/.cache/flt_mol/data`` (``$XDG_CACHE_HOME/flt_mol/data`` where that is set).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from flt_mol.data.dataset import StructuresDataset
from flt_mol.data.opening import open_dataset, split_index
from flt_mol.files import nearest, shipped_folder

_FILE = "dataset.yaml"
_VARIABLE = "FLT_MOL_DATA"
FLAT = "flat"  # folder of a data set's own folder, with converted splits
_DISTINCT = 3  # parts at the end of a path that identify a split: all/val_id/data.lmdb
_SHOWN = 5


@dataclass(frozen=True)
class Recipe:
    """A data set: where its splits are, and what its `dataset.yaml` contains.

    Args:
        name: of the data set.
        folder: that holds `dataset.yaml`.
        splits: split → `file`, a path in the folder, and what is known of it: count, bytes, md5 or
            sha256.
        metadata: all of `dataset.yaml`.
    """

    name: str
    folder: Path
    splits: Mapping[str, Mapping[str, Any]] = field(repr=False)
    metadata: Mapping[str, Any] = field(repr=False)

    def path(self, split: str) -> Path:
        """File or folder of a split, the first that exists.

        Searched are the recipe's folder, ``$FLT_MOL_DATA`` (and `NAME` in it), and the default data
        folder. In each, a converted ``flat/SPLIT.safetensors`` comes before the file itself, which
        may be under the end of its path: `all/val_id/data.lmdb` for `…/all/val_id/data.lmdb`.

        Raises:
            ValueError: an unknown split; a file that does not exist, with what gets it.
        """
        if (found := self.find(split)) is None:
            text = f"{self.expected(split)['file']} does not exist, split {split} of data set"
            raise ValueError(f"{text} {self.name}; {self.how_to_get([split])}")
        return found

    def find(self, split: str, folder: Path | None = None) -> Path | None:
        """As `path`, or only in `folder`; but None where no file exists."""
        parts = Path(self.expected(split)["file"]).parts
        ends = [Path(*parts[i:]) for i in range(max(len(parts) - _DISTINCT, 0) + 1)]
        for place, own in (self._places() if folder is None else {folder: True}).items():
            # A short name in a common folder may be of another data set.
            files = ends if own or len(parts) >= _DISTINCT else []
            for file in [Path(FLAT, f"{split}.safetensors"), *files] if own else files:
                if os.path.exists(place / file):
                    return place / file
        return None

    def _places(self) -> dict[Path, bool]:
        """Folder → whether it is the data set's own."""
        places = {self.folder: True}
        for data in data_folders():
            for own in (self.name, self.name.replace("_", "-")):
                places.setdefault(data / own, True)
            places.setdefault(data, False)
        return places

    def expected(self, split: str) -> Mapping[str, Any]:
        """The entry of `splits`; ValueError for an unknown split."""
        if split not in self.splits:
            hint = nearest(split, self.splits)
            raise ValueError(f"data set {self.name} has no split '{split}': {hint}")
        return self.splits[split]

    def open(self, split: str, **options: Any) -> StructuresDataset:
        """The systems of a split; options as of `flt_mol.data.open_dataset`.

        Raises:
            ValueError: an unknown split; a file that is missing or invalid.

        Warns:
            UserWarning: as `check_count`.
        """
        dataset = open_dataset(self.path(split), **options)
        self.check_count(split, dataset, stacklevel=3)
        return dataset

    def check_count(self, split: str, dataset: StructuresDataset, stacklevel: int = 2) -> None:
        """Warn where a split that was opened is not of the size that the recipe states."""
        found, count = len(dataset) + len(dataset.skipped), self.expected(split).get("count")
        if isinstance(count, int) and found != count:
            text = f"{split} of {self.name}: {dataset.path} holds {found:,} systems, expected "
            text += f"{count:,}: results cannot be compared with those of others"
            warnings.warn(text, stacklevel=stacklevel)

    def how_to_get(self, splits: Sequence[str]) -> str:
        """For splits that do not exist: where they were searched, and what gets them."""
        text = f"searched in {', '.join(map(str, self._places()))}"
        if isinstance(self.metadata.get("archive"), dict):
            chosen = [] if set(splits) == set(self.splits) else [f"--split {x}" for x in splits]
            words = ["flt-mol data download", self.name.replace("_", "-"), *chosen]
            text += f"; get them with: {' '.join(words)}, or set {_VARIABLE} to a folder"
        return text


def data_folders() -> list[Path]:
    """Folders of large data sets, the first of which is written to; they need not exist."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folders = [Path(os.path.expanduser(cache)) / "flt_mol" / "data"]
    if own := os.environ.get(_VARIABLE):
        folders.insert(0, Path(own).expanduser().absolute())
    return folders


def names() -> list[str]:
    """Names of the data sets that have a recipe."""
    return sorted(path.parent.name for path in shipped_folder("datasets").glob(f"*/{_FILE}"))


def recipe(name_or_folder: Recipe | str | Path) -> Recipe:
    """The data set of that name, or the one described in your own folder (or `dataset.yaml`).

    A known name wins over a folder of the same name in the working directory. In names, dashes
    and underscores are the same. A recipe is returned as it is.

    Raises:
        ValueError: neither of them, or an invalid `dataset.yaml`.
    """
    if isinstance(name_or_folder, Recipe):
        return name_or_folder
    name, known = str(name_or_folder).replace("-", "_"), names()
    if isinstance(name_or_folder, str) and name in known:
        return _read(shipped_folder("datasets") / name / _FILE)
    path = Path(name_or_folder)
    file = path if path.name == _FILE else path / _FILE
    if file.is_file():
        return _read(file)
    if path.exists():
        raise ValueError(f"{path} is not a data set: it has no {_FILE}")
    where = f"{path} does not exist (looked in {path.absolute().parent})"
    raise ValueError(f"{where}, and is not a data set: {nearest(str(path), known)}")


def _read(file: Path) -> Recipe:
    try:
        metadata = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read as yaml: {error}") from error
    splits = metadata.get("splits") if isinstance(metadata, dict) else None
    if not isinstance(splits, dict) or not splits:
        raise ValueError(f"{file} has no mapping `splits:` of split to file")
    files: dict[str, Mapping[str, Any]] = {}
    for split, given in splits.items():
        entry = given if isinstance(given, dict) else {"file": given}
        if not isinstance(entry.get("file"), str) or not entry["file"]:
            raise ValueError(f"{file}: split {split} names no file")
        files[str(split)] = entry
    folder = file.parent.resolve()
    return Recipe(str(metadata.get("name", folder.name)), folder, files, metadata)


def find_recipe(name_or_path: str | Path) -> Recipe | None:
    """The data set of that name or folder; None for a plain file or folder of records.

    Raises:
        ValueError: nothing of that name.
    """
    path, _ = split_index(Path(name_or_path))
    if path.exists() and not (path / _FILE).is_file():
        return None
    return recipe(name_or_path)


def open_source(
    name_or_path: str | Path, split: str | None = None, **options: Any
) -> StructuresDataset:
    """One data set of records: a file, a folder of records, or a split of a data set.

    Raises:
        ValueError: no such data set, or one whose `split` was not named.
    """
    found = find_recipe(name_or_path)
    if found is None:
        if split is not None:
            raise ValueError(f"{name_or_path} is a file or folder of records and has no splits")
        return open_dataset(name_or_path, **options)
    if split is None:
        raise ValueError(
            f"{name_or_path} has several splits; choose one with --split: {', '.join(found.splits)}"
        )
    return found.open(split, **options)


def skipped_message(dataset: Any) -> str:
    """How many records of a data set were skipped, and the first five with the reason."""
    count, shown = len(dataset.skipped), dataset.skipped[:_SHOWN]
    head = f"{dataset.path}: skipped {count} of {count + len(dataset)} records:"
    more = [f"and {count - _SHOWN} more"] if count > _SHOWN else []
    return "\n  ".join([head, *shown, *more])
