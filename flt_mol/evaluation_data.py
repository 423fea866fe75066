"""What `flt-mol evaluate` runs a checkpoint's model on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flt_mol.data.catalog import Recipe
from flt_mol.data.chosen import Chosen
from flt_mol.data.open import open_dataset
from flt_mol.data.options import OnError
from flt_mol.data.splits import Baselines, find_recipe, open_splits, skipped_message
from flt_mol.outputs import counted, say
from flt_mol.structures import Structures
from flt_mol.training.seen import SystemsSeen, fingerprints, named_fingerprints, read_systems

__all__ = ["Evaluated", "Wanted", "open_evaluated"]

HELD_OUT = "held_out"
"""Name of the systems held out of training where that of the validation split is taken."""

_AT_ONCE = 256
_SHOWN = 5


@dataclass(frozen=True)
class Wanted:
    """What the command line asks for; see its help.

    Args:
        data: name, folder or file; None takes what the checkpoint was trained on.
        splits: their names, None for those of the checkpoint's run.
        energy: name of the stored target.
        on_error: what to do with bad records.
        check: of systems, as of :func:`flt_mol.data.open_dataset`.
    """

    data: str | None
    splits: Sequence[str] | None
    energy: str | None
    on_error: OnError
    check: Callable[[Structures], None] | None = None


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
    run = _Run(checkpoint, data, seen, int(content.get("trained_on", {}).get("systems", 0)))
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


@dataclass(frozen=True)
class _Run:
    """The run of a checkpoint: its file, the `data` part of its settings, its systems."""

    checkpoint: Path
    data: Mapping[str, Any]
    seen: SystemsSeen
    systems: int

    @property
    def known(self) -> list[str]:
        """Splits that there are files of."""
        found = self.recipe()
        return [*(self.data.get("paths") or {}), *(found.splits if found else ())]

    @property
    def label(self) -> str:
        """What the systems held out go by."""
        name = str(self.data.get("validation") or HELD_OUT)
        return HELD_OUT if name in self.known else name

    def recipe(self) -> Recipe | None:
        name = self.data.get("name")
        return None if name is None else find_recipe(name)

    def names(self, asked: Sequence[str] | None) -> list[str]:
        """Splits to evaluate."""
        known, train = self.known, self.data.get("train")
        if not asked:
            further = self.data.get("evaluation") or ()
            return [self.label, *(x for x in further if x in known and x != train)]
        for name in asked:
            if name not in (self.label, *known):
                raise ValueError(f"no split '{name}'; there are: {', '.join([self.label, *known])}")
        return list(dict.fromkeys(asked))

    def trained_file(self) -> Path:
        """The file of the training split.

        Raises:
            ValueError: there is none.
        """
        split, found = str(self.data.get("train") or "train"), self.recipe()
        paths = self.data.get("paths") or {}
        if split not in paths and found is None:
            raise ValueError(f"{self.checkpoint} does not say what it was trained on: give --data")
        return Path(paths[split]) if split in paths else found.path(split)  # type: ignore[union-attr]

    def held_out(self, wanted: Wanted) -> Chosen:
        """The systems that were held out of the training split."""
        file = self.trained_file()
        if not self.seen.held_out:
            raise ValueError(
                f"{self.checkpoint} does not say which systems of {file} were held out of "
                "training, and the others were trained on: give --data FILE"
            )
        if not file.exists():
            raise ValueError(
                f"{file} does not exist, of which a part was held out of training: put it back, "
                "or give --data FILE"
            )
        source = open_dataset(
            file,
            require_energy=True,
            on_error="skip" if self.data.get("skip_bad") else wanted.on_error,
            energy=wanted.energy or self.data.get("energy") or "y_relaxed",
            check=wanted.check,
        )
        numbers, missing = self._find(source)
        change = self._change(len(source), missing)
        if not numbers:
            raise ValueError(f"{file} {change}; put the file back, or give --data FILE")
        if change:
            say(f"flt-mol: warning: {file} {change}", sys.stderr)
        source.skipped.clear()  # whatever was bad was not held out
        return Chosen(source, numbers)

    def _find(self, source: Any) -> tuple[list[int], list[str]]:
        """Numbers of the systems held out, in their file, and sids of those that are not there."""
        numbers, missing = [], set(self.seen.held_out)
        for start in range(0, len(source), _AT_ONCE):
            batch = source.batch(range(start, min(start + _AT_ONCE, len(source))))
            for number, one in enumerate(named_fingerprints(batch), start):
                if one in self.seen.held_out:
                    numbers.append(number)
                    missing.discard(one)
        return numbers, sorted(sid for sid, _ in missing)

    def _change(self, there: int, missing: Sequence[str]) -> str:
        """How the file of the training split is not what it was, so far as that shows."""
        held = len(self.seen.held_out)
        if missing:
            more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
            return (
                f"has changed since the training: of {counted(held, 'system')} held out "
                f"{len(missing)} cannot be found in it as they were (sid "
                f"{', '.join(missing[:_SHOWN])}{more})"
            )
        if there != self.systems + held and not self.data.get("skip_bad"):
            return (
                f"has changed since the training: {counted(there, 'system')}, "
                f"{self.systems + held:,} then; evaluated are the {held:,} that were held out then"
            )
        return ""


class _Watched:
    """A split that counts, as its systems are read once, those that were trained on."""

    def __init__(self, source: Any, run: _Run) -> None:
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


def _of_same_file(source: Any, run: _Run) -> int:
    """How many were trained on, where only the file of the training split is known."""
    with suppress(ValueError, OSError):
        if run.trained_file().samefile(source.path):
            return max(0, len(source) - len(run.seen.held_out))
    return 0
