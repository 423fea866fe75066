"""What `flt-mol evaluate` runs a checkpoint's model on."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flt_mol.data.chosen import Chosen
from flt_mol.data.splits import Baselines, open_splits, skipped_message
from flt_mol.evaluation_runs import TrainedRun, Wanted
from flt_mol.outputs import say
from flt_mol.structures import Structures
from flt_mol.training.seen import fingerprints, read_systems

__all__ = ["Evaluated", "open_evaluated"]


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
            systems}}, each where there are any.
        """
        counts = {split: data.trained_on for split, data in self.splits.items()}
        found: dict[str, dict[str, Any]] = {
            "left_out": self.left_out,
            "held_out": self.held_out,
            "trained_on": {split: count for split, count in counts.items() if count},
        }
        return {name: of_splits for name, of_splits in found.items() if of_splits}


def open_evaluated(checkpoint: Path, content: Mapping[str, Any], wanted: Wanted) -> Evaluated:
    """The splits to evaluate a checkpoint on.

    Of a run that held out a part of its training split these are the systems held out, under the
    name of the run's validation split (or "held_out", where the data set has a split of that
    name), and the run's splits for evaluation that there are.

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
    opened = Evaluated({}, {})
    names = wanted.splits
    if wanted.data is None and data.get("validation_fraction"):
        names = run.names(wanted.splits)
        if run.label in names:
            opened.splits[run.label] = run.held_out(wanted)
            opened.held_out[run.label] = str(opened.splits[run.label].path)
            names = [name for name in names if name != run.label]
    if names or not opened.splits:
        others, opened.baselines = open_splits(
            wanted.data, names, data, wanted.on_error, wanted.energy, wanted.check
        )
        opened.splits |= others
    for split, source in opened.splits.items():
        if source.skipped:
            opened.left_out[split] = len(source.skipped)
            say(f"flt-mol: {skipped_message(source)}", sys.stderr)
    for split, source in opened.splits.items():
        if split not in opened.held_out:
            source.read_through()
        opened.splits[split] = _Watched(source, run)
    return opened


class _Watched:
    """A split that counts, as its systems are read once, those that were trained on."""

    def __init__(self, source: Any, run: TrainedRun) -> None:
        self.source = source
        self.path = source.path
        whole: Any = source.dataset if isinstance(source, Chosen) else source
        self.energy = whole.options.energy
        self.trained_on = 0
        self._fingerprints = run.seen.trained_on
        if self._fingerprints is None and not isinstance(source, Chosen):
            self.trained_on = _of_same_file(source, run)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Structures:
        system: Structures = self.source[index]
        if self._fingerprints is not None:
            self.trained_on += fingerprints(system)[0] in self._fingerprints
        return system


def _of_same_file(source: Any, run: TrainedRun) -> int:
    """How many were trained on, where only the file of the training split is known."""
    with suppress(ValueError, OSError):
        if run.trained_file().samefile(source.path):
            return max(0, len(source) - len(run.seen.held_out))
    return 0
