"""What `flt-mol evaluate` runs a checkpoint's model on."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from flt_mol.data.loader import Chosen
from flt_mol.data.recipes import find_recipe, skipped_message
from flt_mol.data.splits import Baselines, open_splits
from flt_mol.evaluation.collecting import SplitResult
from flt_mol.evaluation_runs import TrainedRun, Wanted
from flt_mol.outputs import say
from flt_mol.structures import Structures
from flt_mol.training.seen import fingerprints, read_systems

__all__ = ["Evaluated", "holds_data", "open_evaluated"]


@dataclass
class Evaluated:
    """Splits, opened and read through.

    Attributes:
        splits: data sets by name.
        baselines: of the data set's recipe.
        left_out: number of bad records that were left out, by split.
        held_out: file of which a split is the systems that were held out of training, by split.
    """

    splits: dict[str, Any]
    baselines: Baselines
    left_out: dict[str, int] = field(default_factory=dict)
    held_out: dict[str, str] = field(default_factory=dict)

    @property
    def energy(self) -> str:
        """Name of the stored target."""
        return str(next(iter(self.splits.values())).energy)

    def remarks(self) -> dict[str, dict[str, Any]]:
        """What there is to say of some splits, once a model has run over them: plain data.

        Returns:
            {"left_out": {split: bad records}, "held_out": {split: file}, "trained_on": {split:
            systems}, "evaluated": {split: {"file", "fingerprint" of its systems}}}, each where
            there are any.
        """
        counts = {split: data.trained_on.count(True) for split, data in self.splits.items()}
        found: dict[str, dict[str, Any]] = {
            "left_out": self.left_out,
            "held_out": self.held_out,
            "trained_on": {split: count for split, count in counts.items() if count},
            "evaluated": {
                split: {"file": str(data.path.resolve()), "fingerprint": data.fingerprint}
                for split, data in self.splits.items()
            },
        }
        return {name: of_splits for name, of_splits in found.items() if of_splits}

    def with_columns(self, results: Mapping[str, SplitResult]) -> dict[str, SplitResult]:
        """Results that tell of each system whether it was trained on, and held out."""
        return {
            split: replace(result, columns={**result.columns, **self.splits[split].columns()})
            for split, result in results.items()
        }


def open_evaluated(checkpoint: Path, content: Mapping[str, Any], wanted: Wanted) -> Evaluated:
    """The splits to evaluate a checkpoint on.

    Of a run that held out a part of its training split these are the systems held out, under the
    name of the run's validation split (or "held_out", where the data set has a split of that
    name), and the run's splits for evaluation that there are. Where only systems held out are
    wanted of other data, those of each of its splits.

    Args:
        checkpoint: its file.
        content: of it.
        wanted: the command line's wishes.

    Raises:
        ValueError: unknown data or split, records without targets or bad ones, or held-out systems
            that cannot be found again, with the mend.
    """
    data = content.get("config", {}).get("data", {})
    seen = read_systems(content)
    run = TrainedRun(checkpoint, data, seen, int(content.get("trained_on", {}).get("systems", 0)))
    opened = _open(run, wanted)
    for split, source in opened.splits.items():
        if source.skipped:
            opened.left_out[split] = len(source.skipped)
            say(f"flt-mol: {skipped_message(source)}", sys.stderr)
    for split, source in opened.splits.items():
        if split not in opened.held_out:
            source.read_through()
        opened.splits[split] = _Watched(source, run)
    return opened


def _open(run: TrainedRun, wanted: Wanted) -> Evaluated:
    opened = Evaluated({}, {})
    names, data = wanted.splits, run.data
    if wanted.data is None and wanted.held_out and names:
        raise ValueError("--held-out is the whole of it: leave --split away, or name other --data")
    if wanted.data is None and wanted.held_out and not data.get("validation_fraction"):
        run.only_held_out({})  # which says why not
    if wanted.data is None and data.get("validation_fraction"):
        names = [run.label] if wanted.held_out else run.names(wanted.splits)
        if run.label in names:
            opened.splits[run.label] = run.held_out(wanted)
            opened.held_out[run.label] = str(opened.splits[run.label].path)
            names = [name for name in names if name != run.label]
    elif wanted.data is not None and names and run.seen.held_out:
        _refuse_splits_of_file(wanted.data)
    if names or not opened.splits:
        others, opened.baselines = open_splits(
            wanted.data, names, data, wanted.on_error, wanted.energy, wanted.check
        )
        if wanted.held_out:  # the baselines are of whole splits
            others, opened.baselines = run.only_held_out(others), {}
            opened.held_out |= {split: str(source.path) for split, source in others.items()}
        opened.splits |= others
    return opened


def _refuse_splits_of_file(data: str) -> None:
    if find_recipe(data) is None:
        raise ValueError(
            f"{data} is a file or folder of records and has no splits; --held-out, without "
            "--split, takes the systems in it that training held out"
        )


class _Watched:
    """A split that notes, as its systems are read once, which of them the run has seen."""

    def __init__(self, source: Any, run: TrainedRun) -> None:
        self.source = source
        self.path = source.path
        whole: Any = source.dataset if isinstance(source, Chosen) else source
        self.energy = whole.options.energy
        self._seen, self._files = run.seen, run.trained_files(self.path)
        self._numbers: dict[int, int] = {}
        self._held_out = {number for _, number in run.seen.held_out}

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Structures:
        system: Structures = self.source[index]
        self._numbers[index] = fingerprints(system)[0]
        return system

    @property
    def trained_on(self) -> list[bool | None]:
        """Of each system, None where that is not known."""
        numbers = map(self._numbers.__getitem__, range(len(self)))
        return [self._seen.was_trained_on(number, self._files) for number in numbers]

    @property
    def fingerprint(self) -> str:
        """Of the systems in their order, hexadecimal."""
        numbers = [self._numbers[i] for i in range(len(self))]
        return hashlib.blake2b(np.array(numbers, np.int64).tobytes(), digest_size=8).hexdigest()

    def columns(self) -> dict[str, tuple[str | None, ...]]:
        """Yes, no, or None where it is not known, by name; none of those that are only None."""
        found: dict[str, list[bool | None]] = {"trained_on": self.trained_on}
        if self._held_out:
            found["held_out"] = [self._numbers[i] in self._held_out for i in range(len(self))]
        return {
            name: tuple(None if x is None else ("no", "yes")[x] for x in values)
            for name, values in found.items()
            if any(x is not None for x in values)
        }


def holds_data(name: str) -> bool:
    """Whether a file is one of structures, or a folder or name that of a data set."""
    from flt_mol.data.ase.files import holds_structures
    from flt_mol.data.lmdb.file import is_lmdb

    path = Path(name)
    with suppress(ValueError, OSError):
        if path.is_file():
            return is_lmdb(path) or holds_structures(path)
        return (path / "data.mdb").is_file() or find_recipe(name) is not None
    return False
