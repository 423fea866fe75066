"""The run of a checkpoint that is evaluated: its splits, and the systems that it held out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flt_mol.data.catalog import Recipe
from flt_mol.data.chosen import Chosen
from flt_mol.data.open import open_dataset
from flt_mol.data.options import OnError
from flt_mol.data.splits import find_recipe
from flt_mol.outputs import counted, say
from flt_mol.structures import Structures
from flt_mol.training.seen import SystemsSeen, named_fingerprints

__all__ = ["HELD_OUT", "TrainedRun", "Wanted"]

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


@dataclass(frozen=True)
class TrainedRun:
    """The run of a checkpoint.

    Args:
        checkpoint: its file.
        data: part of its settings.
        seen: what it says of systems.
        systems: how many it was trained on.
    """

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
        """The data set of the run, where it has a name."""
        name = self.data.get("name")
        return None if name is None else find_recipe(name)

    def names(self, asked: Sequence[str] | None) -> list[str]:
        """Splits to evaluate: `asked`, or what was held out and the run's own for evaluation.

        Raises:
            ValueError: one that there is not, with those that there are.
        """
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
        """The systems that were held out of the training split; a file that changed is told of.

        Raises:
            ValueError: the checkpoint does not know them, or none of them is there any more.
        """
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
