"""Energies of structures in files."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flt_mol.arguments import whole_number
from flt_mol.data.recipes import skipped_message
from flt_mol.prediction.energies import member_energies
from flt_mol.prediction.members import EnsembleEnergies, Members, load_members
from flt_mol.prediction.notes import SUMMED_UP
from flt_mol.prediction.table import Prediction
from flt_mol.structures import Structures

if TYPE_CHECKING:
    from flt_mol.data import StructuresDataset
    from flt_mol.data.options import OnError

__all__ = ["StructureFiles", "predict_files"]

_SHOWN = 5


class StructureFiles:
    """The structures of several files, in order: LMDB, and whatever ASE reads.

    Targets, if there are any, are not looked at.

    Args:
        files: one path or several; a file may hold many frames.
        skip_bad: leave bad records out, with a warning that counts and names them.
        prepare: done to each structure when it is read, such as tagging a slab. What it raises
            ValueError for is a bad record.
        layer_numbers: tags that are `ase.build`'s numbers of layers are read as none, for `prepare`
            to set them.
        check: of one structure or many, such as :meth:`Members.check`: too.

    Raises:
        ValueError: files that cannot be read, naming each of them with the reason.

    Warns:
        UserWarning: records left out, and what reading the files warns of.
    """

    def __init__(
        self,
        files: str | Path | Sequence[str | Path],
        *,
        skip_bad: bool = False,
        prepare: Callable[[Structures], Structures] | None = None,
        check: Callable[[Structures], None] | None = None,
        layer_numbers: bool = False,
    ) -> None:
        self.paths = [files] if isinstance(files, str | Path) else list(files)
        self.datasets = _open_all(self.paths, skip_bad, check, layer_numbers)
        self.skip_bad = skip_bad
        self.prepare = prepare
        self.unprepared: dict[str, None] = {}
        for dataset in self.datasets:
            if dataset.skipped:
                warnings.warn(skipped_message(dataset), UserWarning, stacklevel=3)

    def __len__(self) -> int:
        return sum(len(dataset) for dataset in self.datasets)

    def read_through(self) -> None:
        """Read all structures once, so that a bad one is told of before anything is predicted.

        Raises:
            ValueError: the first bad record, unless they are left out.
        """
        for dataset in self.datasets:
            dataset.read_through()

    def structures(self, at_once: int) -> Iterator[tuple[str, Structures]]:
        """Each file's path, as given, with one structure of it; so many are read at once."""
        for path, dataset in zip(self.paths, self.datasets, strict=True):
            for start in range(0, len(dataset), at_once):
                for one in dataset.batch(range(start, min(start + at_once, len(dataset)))):
                    yield from ((str(path), found) for found in self._prepared(one))

    def records(self) -> Iterator[tuple[Mapping[str, Any], Structures, str]]:
        """Each structure as it is stored, as it is predicted, and how errors name it."""
        for dataset in self.datasets:
            for index in range(len(dataset)):
                for found in self._prepared(dataset[index]):
                    yield dataset.record(index), found, dataset.where(index)

    def left_out(self) -> Iterator[str]:
        """What to say of structures that could not be prepared."""
        if self.unprepared:
            told = "\n".join(f"  {text}" for text in list(self.unprepared)[:_SHOWN])
            more = len(self.unprepared) - _SHOWN
            rest = f"\n  and {more} more" if more > 0 else ""
            yield f"left out {len(self.unprepared)} structures:\n{told}{rest}"

    def _prepared(self, one: Structures) -> list[Structures]:
        if self.prepare is None:
            return [one]
        try:
            return [self.prepare(one)]
        except ValueError as error:
            if not self.skip_bad:
                raise
            self.unprepared[str(error)] = None
            return []


def predict_files(
    model: Any,
    files: str | Path | Sequence[str | Path] | StructureFiles,
    batch_size: int = 32,
    *,
    skip_bad: bool = False,
    progress: Callable[[int, int | None], None] | None = None,
) -> list[Prediction]:
    """Energies of all structures of `files`, in order: LMDB, and whatever ASE reads.

    Targets, if there are any, are not looked at.

    Args:
        model: a module, file of a checkpoint, or name of a shipped model; a list or tuple of them
            for an ensemble, whose predictions are the mean and have a `spread`.
        files: one path or several; a file may hold many frames. Or what they were opened as.
        batch_size: structures per call of the model, across files.
        skip_bad: leave bad records out, with a warning that counts and names them.
        progress: called with (structures done, structures in all) after each batch.

    Raises:
        ValueError: a `batch_size` that is no whole number from 1 on; files that cannot be read,
            naming each of them with the reason, and bad records in them, such as one too large for
            the model, before anything is predicted; an energy that is not finite.

    Warns:
        UserWarning: as :func:`flt_mol.predict.predict`.
    """
    batch_size = whole_number("batch_size", batch_size, 1)
    opened = files
    members = model if isinstance(model, Members) else load_members(model)
    if not isinstance(opened, StructureFiles):
        opened = StructureFiles(opened, skip_bad=skip_bad, check=members.check)
    opened.read_through()
    names: list[tuple[str, str]] = []

    def structures() -> Iterator[Structures]:
        for path, one in opened.structures(batch_size):
            names.append((str(one.sid[0]), path))
            yield one

    energies, messages = member_energies(
        members,
        structures(),
        batch_size,
        progress=None if progress is None else lambda done: progress(done, len(opened)),
    )
    for text in (*opened.left_out(), *messages.values()):
        warnings.warn(text, UserWarning, stacklevel=2)
    found = EnsembleEnergies(energies)
    spread = found.spread.tolist() if members.ensemble else [None] * len(names)
    return [
        Prediction(name, energy, path, spread=apart)
        for (name, path), energy, apart in zip(names, found.mean.tolist(), spread, strict=True)
    ]


def _open_all(
    paths: Sequence[str | Path],
    skip_bad: bool,
    check: Callable[[Structures], None] | None,
    layer_numbers: bool,
) -> list[StructuresDataset]:
    datasets, failures = [], []
    for path in paths:
        try:
            datasets.append(_open(path, skip_bad, check, layer_numbers))
        except (OSError, ValueError) as error:
            text = str(error)
            failures.append(f"  {text}" if str(path) in text else f"  {path}: {text}")
    if failures:
        heading = f"cannot use {len(failures)} of {len(paths)} files:"
        raise ValueError("\n".join([heading, *failures]))
    return datasets


def _open(
    path: str | Path,
    skip_bad: bool,
    check: Callable[[Structures], None] | None,
    layer_numbers: bool,
) -> StructuresDataset:
    """The data set, its warnings about tags and cells left to `Seen`: once for all files."""
    from flt_mol.data import open_dataset

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        on_error: OnError = "skip" if skip_bad else "raise"
        dataset = open_dataset(
            path,
            ignore_energy=True,
            on_error=on_error,
            check=check,
            layer_numbers=layer_numbers,
        )
    ours = bool(dataset.notes.seen) and dataset.notes.seen <= SUMMED_UP
    for warning in caught:
        if not (ours and str(warning.message).startswith(f"{Path(path)}: ")):
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
    dataset.notes.seen.update(SUMMED_UP)
    return dataset
