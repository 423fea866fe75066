"""The run of a checkpoint that is evaluated: its splits, and the systems that it held out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flt_mol.data.recipes import Recipe
from flt_mol.data.loader import Chosen
from flt_mol.data.open import open_dataset
from flt_mol.data.options import OnError
from flt_mol.data.recipes import find_recipe
from flt_mol.outputs import counted, say
from flt_mol.structures import Structures
from flt_mol.training.seen import SystemsSeen, TrainedFile, find_held_out

__all__ = ["HELD_OUT", "TrainedRun", "Wanted"]

HELD_OUT = "held_out"
"""Name of the systems held out of training where that of the validation split is taken."""

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
        held_out: whether only systems that training held out are meant.
    """

    data: str | None
    splits: Sequence[str] | None
    energy: str | None
    on_error: OnError
    check: Callable[[Structures], None] | None = None
    held_out: bool = False


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
        found = _file_of(self.data)
        if found is None:
            raise ValueError(f"{self.checkpoint} does not say what it was trained on: give --data")
        return found

    def trained_files(self, path: Path) -> tuple[TrainedFile, ...]:
        """Of the trainings known by their file, those on the file `path`."""
        return tuple(one for one in self.seen.files if _is_file(one.data, path))

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
                "or give --data FILE --held-out, wherever these systems are"
            )
        source = open_dataset(
            file,
            require_energy=True,
            on_error="skip" if self.data.get("skip_bad") else wanted.on_error,
            energy=wanted.energy or self.data.get("energy") or "y_relaxed",
            check=wanted.check,
        )
        numbers, gone = find_held_out(source, self.seen.held_out)
        change = self._change(len(source), [sid for sid, _ in gone])
        if not numbers:
            raise ValueError(
                f"{file} {change}; put the file back, or give --data FILE --held-out, wherever "
                "these systems are"
            )
        if change:
            say(f"flt-mol: warning: {file} {change}", sys.stderr)
        source.skipped.clear()  # whatever was bad was not held out
        return Chosen(source, numbers)

    def only_held_out(self, sources: Mapping[str, Any]) -> dict[str, Chosen]:
        """Of each data set the systems that training held out, whatever they are called there.

        Those of which some are in none of the data sets are told of.

        Args:
            sources: by split; a split without such a system is left out.

        Raises:
            ValueError: there are none anywhere, or the checkpoint does not know them.
        """
        if not self.seen.held_out:
            raise ValueError(
                f"{self.checkpoint} knows no systems that its training held out: leave --held-out "
                "away"
            )
        chosen, missing = {}, set(self.seen.held_out)
        for split, source in sources.items():
            numbers, gone = find_held_out(source, self.seen.held_out)
            missing &= set(gone)
            if numbers:
                source.skipped.clear()  # whatever was bad was not held out
                chosen[split] = Chosen(source, numbers)
        places = ", ".join(str(source.path) for source in sources.values())
        held = counted(len(self.seen.held_out), "system")
        if not chosen:
            raise ValueError(f"of {held} that training held out there is none in {places}")
        if missing:
            sids = _some(sorted(sid for sid, _ in missing))
            text = f"of {held} held out {len(missing)} cannot be found in {places} (sid {sids})"
            say(f"flt-mol: warning: {text}", sys.stderr)
        return chosen

    def _change(self, there: int, missing: Sequence[str]) -> str:
        """How the file of the training split is not what it was, so far as that shows."""
        held = len(self.seen.held_out)
        if missing:
            return (
                f"has changed since the training: of {counted(held, 'system')} held out "
                f"{len(missing)} cannot be found in it as they were (sid {_some(missing)})"
            )
        if there != self.systems + held and not self.data.get("skip_bad"):
            return (
                f"has changed since the training: {counted(there, 'system')}, "
                f"{self.systems + held:,} then; evaluated are the {held:,} that were held out then"
            )
        return ""


def _some(sids: Sequence[str]) -> str:
    more = f" and {len(sids) - _SHOWN} more" if len(sids) > _SHOWN else ""
    return f"{', '.join(sids[:_SHOWN])}{more}"


def _file_of(data: Mapping[str, Any]) -> Path | None:
    """The file of the training split of a run with these settings, where they say it."""
    split, paths = str(data.get("train") or "train"), data.get("paths") or {}
    if split in paths:
        return Path(paths[split])
    name = data.get("name")
    found = None if name is None else find_recipe(name)
    return None if found is None else found.path(split)


def _is_file(data: Mapping[str, Any], path: Path) -> bool:
    with suppress(ValueError, OSError):  # that file is gone, or its data set is
        file = _file_of(data)
        return file is not None and file.samefile(path)
    return False
