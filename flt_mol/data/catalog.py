"""Recipes: data sets by name, each described by a `dataset.yaml`; and where their files lie.

Small data lie beside their recipe, large ones in a data folder (:mod:`flt_mol.data.data_folders`).
"""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from flt_mol.data.data_folders import candidates_in, data_folder, places, troubles
from flt_mol.data.dataset import StructuresDataset
from flt_mol.data.open import open_dataset
from flt_mol.files import shipped_folder as resource_folder

__all__ = ["Recipe", "data_folder", "known_name", "names", "recipe"]

_FILE = "dataset.yaml"


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
            text = f"{self.relative(split)} does not exist, the file of split {split} of data set "
            raise ValueError("; ".join(filter(None, (text + self.name, self.how_to_get([split])))))
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
            candidates = candidates_in({folder: True}, split, relative)
        elif relative.is_absolute():
            candidates = iter([relative])
        else:
            candidates = candidates_in(places(self.folder, self.name, relative), split, relative)
        # os.path's does not mind folders that may not be entered.
        return next((path for path in candidates if os.path.exists(path)), None)

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

        Warns:
            UserWarning: as :meth:`check_count`.
        """
        dataset = open_dataset(self.path(split), **options)
        self.check_count(split, dataset, stacklevel=3)
        return dataset

    def check_count(self, split: str, dataset: StructuresDataset, stacklevel: int = 2) -> None:
        """Warn of a part of a split, or another one, that is taken for the whole.

        Args:
            split: its name.
            dataset: its file, opened in full; records that were skipped count.
            stacklevel: as of :func:`warnings.warn`.

        Warns:
            UserWarning: the recipe gives another number of systems.

        Raises:
            ValueError: an unknown split.
        """
        found, count = len(dataset) + len(dataset.skipped), self.expected(split).get("count")
        if isinstance(count, int) and found != count:
            warnings.warn(
                f"{split} of {self.name}: {dataset.path} holds {found:,} systems, the recipe says "
                f"{count:,}: results cannot be compared with those of others",
                UserWarning,
                stacklevel=stacklevel,
            )

    def how_to_get(self, splits: Sequence[str]) -> str:
        """For splits that lie nowhere: what is in the way, where was looked, and what gets them.

        Raises:
            ValueError: an unknown split, with the known ones.
        """
        relative = [self.relative(split) for split in splits]
        below = [path for path in relative if not path.is_absolute()]
        looked = [place for path in below for place in places(self.folder, self.name, path)]
        shown = ", ".join(map(str, dict.fromkeys(looked)))
        sentences = [*troubles(self.name), f"looked in {shown}"] if looked else []
        if command := self.command(splits):
            them = "it" if len(splits) == 1 else "them"
            sentences.append(f"get {them} with: {command}{self._sizes(splits)}")
            sentences.append(f"or set FLT_MOL_DATA to the folder that has {them} unpacked")
        elif looked:
            sentences.append(f"what is to lie there is said by {self.folder / _FILE}")
        return "; ".join(sentences)

    def command(self, splits: Sequence[str]) -> str:
        """The command that fetches splits; empty for a data set that is not one to download."""
        if not isinstance(self.metadata.get("archive"), dict):
            return ""
        every = set(splits) == set(self.splits)
        chosen = "" if every else "".join(f" --split {split}" for split in splits)
        return f"flt-mol data download {self.name.replace('_', '-')}{chosen}"

    def _sizes(self, splits: Sequence[str]) -> str:
        """` (8 bytes to fetch, 9 bytes on disk)`, as far as it is known."""
        unpacked = [self.expected(split).get("bytes") for split in splits]
        known = [size for size in unpacked if isinstance(size, int)]
        sizes = {"to fetch": self.metadata["archive"].get("bytes")}
        sizes["on disk"] = sum(known) if len(known) == len(unpacked) else None
        shown = ", ".join(f"{n:,} bytes {to}" for to, n in sizes.items() if isinstance(n, int))
        return f" ({shown})" if shown else ""


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
    if path.exists():
        raise ValueError(f"{path} is a file; give the name of a data set, or a folder with {_FILE}")
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
