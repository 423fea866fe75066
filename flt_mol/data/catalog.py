"""Recipes: data sets by name, each described by a `dataset.yaml` beside its files."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from flt_mol.data.dataset import StructuresDataset
from flt_mol.data.open import open_dataset
from flt_mol.resources import folder as resource_folder

__all__ = ["Recipe", "names", "recipe"]

_FILE = "dataset.yaml"


@dataclass(frozen=True)
class Recipe:
    """A data set: where its splits lie, and what its `dataset.yaml` says.

    Args:
        name: of the data set.
        folder: that holds `dataset.yaml`; paths of files are relative to it.
        splits: split → file or folder.
        metadata: all of `dataset.yaml`.
    """

    name: str
    folder: Path
    splits: Mapping[str, Path]
    metadata: Mapping[str, Any] = field(repr=False)

    def path(self, split: str) -> Path:
        """File or folder of a split.

        Raises:
            ValueError: an unknown split, with the known ones.
        """
        if split not in self.splits:
            raise ValueError(f"data set {self.name} has no split {_unknown(split, self.splits)}")
        return self.splits[split]

    def open(self, split: str, **options: Any) -> StructuresDataset:
        """The systems of a split; options as of :func:`flt_mol.data.open_dataset`.

        Raises:
            ValueError: an unknown split; a file that is missing or bad.
        """
        return open_dataset(self.path(split), **options)


def names() -> list[str]:
    """Names of the data sets that have a recipe."""
    return sorted(path.parent.name for path in resource_folder("datasets").glob(f"*/{_FILE}"))


def recipe(name_or_folder: str | Path) -> Recipe:
    """The data set of that name, or the one described in a folder (or `dataset.yaml`) of one's own.

    A known name wins over a folder of the same name in the working directory.

    Raises:
        ValueError: neither a known name nor a folder with `dataset.yaml`; a file that is no such
            description.
    """
    name = str(name_or_folder)
    if isinstance(name_or_folder, str) and name in names():
        return _read(resource_folder("datasets") / name / _FILE)
    path = Path(name_or_folder)
    for candidate in (path, path / _FILE):
        if candidate.name == _FILE and candidate.is_file():
            return _read(candidate)
    if path.is_dir():
        raise ValueError(f"no {_FILE} in the folder {path}")
    raise ValueError(f"no data set {_unknown(name, names())}, and no such folder")


def _read(file: Path) -> Recipe:
    try:
        metadata = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is no readable yaml: {error}") from error
    splits = metadata.get("splits") if isinstance(metadata, dict) else None
    if not isinstance(splits, dict) or not splits:
        raise ValueError(f"{file} has no mapping `splits:` of split to file")
    folder = file.parent.resolve()
    files: dict[str, Path] = {}
    for split, entry in splits.items():
        relative = entry.get("file") if isinstance(entry, dict) else entry
        if not isinstance(relative, str) or not relative:
            raise ValueError(f"{file}: split {split} names no file")
        files[str(split)] = folder / relative
    return Recipe(str(metadata.get("name", folder.name)), folder, files, metadata)


def _unknown(name: str, known: Any) -> str:
    """`'nam' (did you mean name?); there are: name, other`."""
    known = [str(item) for item in known]
    near = difflib.get_close_matches(name, known, n=1)
    guess = f" (did you mean {near[0]}?)" if near else ""
    return f"'{name}'{guess}; there are: {', '.join(known) or 'none'}"
