"""Splits a data set into files for training, validation and test, and writes their recipe."""

from __future__ import annotations

import hashlib
import json
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flt_mol.data.conversion import ConvertResult, Progress, convert
from flt_mol.data.conversion.plan import check_place, source_plan
from flt_mol.data.conversion.recipe import recipe_text
from flt_mol.data.conversion.shares import Share, assign, good_records, groups_of, numbers
from flt_mol.data.conversion.work import WorkFolder, sync, write_whole
from flt_mol.data.conversion.write import KINDS
from flt_mol.data.dataset import StructuresDataset
from flt_mol.data.options import OnError

__all__ = ["SplitResult", "split"]

_OFF = 0.5  # of a share: more than that is told


@dataclass(frozen=True)
class SplitResult:
    """What splitting did.

    Args:
        folder: with the files and `dataset.yaml`.
        splits: what was written of each.
        seconds: of this run.
        bad: one message for each record that was left out before shares were drawn.
    """

    folder: Path
    splits: Mapping[str, ConvertResult]
    seconds: float
    bad: tuple[str, ...] = ()

    @property
    def skipped(self) -> tuple[str, ...]:
        """One message for each record that was left out."""
        written = (text for result in self.splits.values() for text in result.skipped)
        return tuple(dict.fromkeys((*self.bad, *written)))


def split(
    source: StructuresDataset,
    output: str | Path,
    fractions: Mapping[str, Share],
    *,
    seed: int = 0,
    group_by: str | None = None,
    kind: str = "lmdb",
    name: str | None = None,
    workers: int | None = None,
    on_error: OnError = "raise",
    forces: bool = False,
    progress: Progress | None = None,
) -> SplitResult:
    """Puts every system of `source` into one of several files, at random.

    The files and a `dataset.yaml` come into a new folder, which is a data set that
    `flt_mol.data.catalog.recipe` opens and `flt-mol train` takes. Its `normalizer` has mean and
    standard deviation of the targets that there are in the first split. The folder is there when
    all is complete; killed and run again, it goes on. Which system goes where depends on the number
    of systems, the groups, the shares and the seed, and on nothing else; inside a file they keep
    their order.

    Args:
        source: the records.
        output: the folder, new or empty.
        fractions: split → fraction of all systems (a float; together 1), or split → number of
            systems (an int; together all); None for one that takes the rest.
        seed: of the order.
        group_by: a stored field, or one of "composition", "adsorbate" and "slab", which are worked
            out from elements and tags where they are not stored; systems of the same value stay
            together. The numbers are then met as well as whole groups can.
        kind: of the files: "lmdb" (compact), "aselmdb" or "extxyz".
        name: of the data set; that of the folder if None.
        workers: as of :func:`flt_mol.data.conversion.convert`.
        on_error: "raise": a bad record ends it. "skip": bad records are left out before the shares
            are drawn, for which all are read once more, unless `source` left them out when it was
            opened.
        forces: the same.
        progress: the same, over all splits.

    Raises:
        ValueError: shares that are no shares or do not sum up, a split that would be empty, a
            record without the field `group_by`, a folder that is not empty; and all that
            :func:`flt_mol.data.conversion.convert` raises.
    """
    begun, output = time.perf_counter(), Path(output)
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}, expected one of {', '.join(KINDS)}")
    check_place(source, output)
    places, bad = _places(source, fractions, group_by, on_error, seed)
    about = {"seed": seed, "group_by": group_by, "fractions": dict(fractions)}
    work = WorkFolder(output.with_name(f".{output.name}.split"))
    work.plan = {
        "source": source_plan(source),
        "places": hashlib.sha256(json.dumps(places).encode()).hexdigest(),
        "name": name or output.name,
        "kind": kind,
        "forces": forces,
        **about,
    }
    staged = work.path / output.name
    with work.locked():
        done = work.done()
        if done is None or staged.exists():
            _refuse_full(output)
        if done is None:
            work.begin()
            staged.mkdir(exist_ok=True)
            writer = _Writer(source, staged, work, kind, workers, on_error, forces, progress)
            done = writer.all(places)
            recipe = recipe_text(work.plan["name"], source, staged, kind, done, about)
            write_whole(work.path / "dataset.yaml", recipe.encode())
            os.replace(work.path / "dataset.yaml", staged / "dataset.yaml")
            sync(staged / "dataset.yaml")
            sync(staged)
            work.set_done(done)
        if staged.exists():
            if output.is_dir():
                output.rmdir()
            os.replace(staged, output)
            sync(output.parent)
        work.remove()
    results = {split: _result(entry, output) for split, entry in done.items()}
    return SplitResult(output, results, time.perf_counter() - begun, tuple(bad))


def _places(
    source: StructuresDataset,
    fractions: Mapping[str, Share],
    group_by: str | None,
    on_error: OnError,
    seed: int,
) -> tuple[dict[str, list[int]], list[str]]:
    """Split → its systems; and what is wrong with the records that are left out of all."""
    good, bad = list(range(len(source))), list[str]()
    if on_error == "skip":
        good, bad = good_records(source)
    if bad and not good:
        raise ValueError(f"{source.path}: every record is bad; the first: {bad[0]}")
    groups = groups_of(source, group_by, good, on_error)
    try:
        wanted = numbers(fractions, len(good))
        places = assign(groups, wanted, seed)
    except ValueError as error:
        if not bad:
            raise
        left = f"{len(bad)} bad records of {len(source)} are left out; the first: {bad[0]}"
        raise ValueError(f"{error} ({left})") from error
    _warn_far_off(wanted, places)
    return {name: [good[place] for place in of] for name, of in places.items()}, bad


def _warn_far_off(wanted: Mapping[str, int], places: Mapping[str, Sequence[int]]) -> None:
    """Groups that stay whole may be too large for the shares asked for."""
    off = [
        f"{name} {len(places[name])} (asked for: {number})"
        for name, number in wanted.items()
        if abs(len(places[name]) - number) > _OFF * number
    ]
    if off:
        warnings.warn(
            f"whole groups do not fit the shares: systems of {', '.join(off)}; group by what has "
            "more values, or ask for shares that larger groups fit",
            UserWarning,
            stacklevel=4,
        )


@dataclass(frozen=True)
class _Writer:
    """Writes the splits one after the other, those that are not there yet."""

    source: StructuresDataset
    folder: Path
    work: WorkFolder
    kind: str
    workers: int | None
    on_error: OnError
    forces: bool
    progress: Progress | None

    def all(self, places: Mapping[str, Sequence[int]]) -> dict[str, dict[str, Any]]:
        """What was written of each split."""
        total, before, done = 2 * sum(map(len, places.values())), 0, {}
        for split, indices in places.items():
            done[split] = self._one(split, indices, before, total)
            before += 2 * len(indices)
        return done

    def _one(self, split: str, indices: Sequence[int], before: int, total: int) -> dict[str, Any]:
        note = self.work.path / f"{split}.json"
        if note.is_file():
            entry: dict[str, Any] = json.loads(note.read_bytes())
            return entry

        def progress(done: int, _: int | None) -> None:
            if self.progress is not None:
                self.progress(before + done, total)

        try:
            result = convert(
                self.source, self.folder / f"{split}{KINDS[self.kind].suffix}", kind=self.kind,
                indices=indices, workers=self.workers, on_error=self.on_error, forces=self.forces,
                overwrite=True, progress=progress,
            )  # fmt: skip
        except ValueError as error:
            raise ValueError(f"split {split}: {error}") from error
        entry = {**asdict(result), "output": result.output.name, "sha256": _sha256(result.output)}
        write_whole(note, json.dumps(entry).encode())
        return entry


def _result(entry: Mapping[str, Any], folder: Path) -> ConvertResult:
    values = {name: value for name, value in entry.items() if name != "sha256"}
    for name in ("skipped", "left_out"):
        values[name] = tuple(values[name])
    return ConvertResult(**{**values, "output": folder / entry["output"]})


def _refuse_full(output: Path) -> None:
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise ValueError(f"{output} exists already; choose a new or empty folder")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
