"""Results as Markdown: means and spreads over seeds, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

from flt_mol.analysis.accuracy.times import Clock
from flt_mol.analysis.tables import markdown_table

__all__ = ["NOTES", "Entry", "Spread", "cost_table", "energy_table", "moves_table",
           "targets_table"]  # fmt: skip

NAMES = {"energy": "relaxed energy", "energy_initial": "energy before relaxation"}
DASH = "–"

NOTES = """\
MAE in eV, mean ± standard deviation over n seeds; in brackets EwT, % of systems below 0.02 eV.
One loop for all rows: AdamW, the same batches in the same order, no model chosen by validation, the
final weights evaluated. Weights are parameters without tables of elements. Seconds per epoch are
CPU time of training on one thread, pairs found beforehand (but again wherever a model moves atoms):
the median training step, of rows that took turns on the same batches in one process, times steps
per epoch; beside it the ratio to SchNet, median and quartiles over these rounds. A * marks seconds
taken while a row was trained, maybe beside others that shared memory and caches: they are good to
10 % at best, and stand without a ratio. Numbers below 1e-38 are flushed to 0 for all rows:
PyG's Gaussians would otherwise make SchNet about four times slower."""


class Spread(NamedTuple):
    """Of a number over seeds.

    Attributes:
        mean: over seeds.
        deviation: sample standard deviation; None for one seed.
        seeds: n.
    """

    mean: float
    deviation: float | None
    seeds: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """Of these values; None if there are none.

        Example:
            >>> Spread.of([1.0, 3.0]).show(2)
            '2.00 ± 1.41'
        """
        found = list(values)
        if not found:
            return None
        return cls(fmean(found), stdev(found) if len(found) > 1 else None, len(found))

    def show(self, digits: int) -> str:
        """Mean ± deviation, to so many digits."""
        text = f"{self.mean:.{digits}f}"
        return text if self.deviation is None else f"{text} ± {self.deviation:.{digits}f}"


class Entry(NamedTuple):
    """All results of one row.

    Attributes:
        name: in the table of rows.
        label: what tables call it.
        records: one for each seed, as `runs.measure` made them; empty if none is done.
    """

    name: str
    label: str
    records: Sequence[Mapping[str, Any]]

    def over_seeds(self, pick: Callable[[Mapping[str, Any]], float]) -> Spread | None:
        """A number of each record, over seeds."""
        return Spread.of(pick(record) for record in self.records)

    def error(self, split: str, target: str, what: str = "mae") -> Spread | None:
        """MAE (eV), or another number of a target on a split; None where there is none."""
        found = [record["splits"].get(split, {}).get(target) for record in self.records]
        return Spread.of(part[what] for part in found if part is not None)

    def seconds(self) -> Spread | None:
        """CPU seconds per epoch while it was trained; see `times` for what can be compared."""
        return self.over_seeds(lambda record: record["seconds_per_epoch"])

    def weights(self) -> int | None:
        """Parameters without tables of elements."""
        return self.records[0]["weights"] if self.records else None


def energy_table(entries: Sequence[Entry], target: str, splits: Sequence[str]) -> str:
    """MAE and EwT of every row on every split; rows without results say so."""
    head = [NAMES.get(target, target), "n", *splits]
    return markdown_table(head, ([e.label, *_cells(e, target, splits)] for e in entries))


def _cells(entry: Entry, target: str, splits: Sequence[str]) -> list[str]:
    cells, counts = [], set()
    for split in splits:
        error, within = entry.error(split, target), entry.error(split, target, "ewt")
        if error is None or within is None:
            cells.append(DASH)
            continue
        counts.add(error.seeds)
        cells.append(f"{error.show(4)} ({100 * within.mean:.0f})")
    return [str(max(counts, default=0)), *cells]


def cost_table(
    entries: Sequence[Entry],
    targets: Sequence[str],
    split: str,
    beside: Mapping[str, str],
    clock: Clock | None = None,
    over: str = "schnet",
) -> str:
    """Parameters, time, and MAE over that of other rows.

    Args:
        entries: rows.
        targets: whose MAE is compared.
        split: on which.
        beside: names of rows to divide by, and what the column calls them.
        clock: times of rows that took turns; without it, those while training, with a *.
        over: the row whose time others are divided by.
    """
    by_name = {entry.name: entry for entry in entries}
    others = {name: label for name, label in beside.items() if name in by_name}
    head = ["row", "parameters", "weights", "s/epoch", f"time / {beside.get(over, over)}"]
    head += [f"{NAMES.get(t, t)} / {label}" for t in targets for label in others.values()]
    rows = []
    for entry in entries:
        cells = [entry.label, DASH, DASH, *_times(entry, clock, over)]
        if entry.records:
            record = entry.records[0]
            cells[1:3] = [f"{record['parameters']:,}", f"{record['weights']:,}"]
        cells += [ratio(entry, by_name[name], split, t) for t in targets for name in others]
        rows.append(cells)
    return markdown_table(head, rows)


def _times(entry: Entry, clock: Clock | None, over: str) -> list[str]:
    timed = None if clock is None else clock.seconds(entry.name)
    if clock is None or timed is None:
        seconds = entry.seconds()
        return [DASH if seconds is None else f"{seconds.show(1)} *", DASH]
    found = clock.ratio(entry.name, over)
    return [f"{timed:.1f}", DASH if found is None else str(found)]


def targets_table(
    joint: Sequence[Entry], alone: Mapping[str, Sequence[Entry]], split: str
) -> str | None:
    """MAE of rows trained on both targets at once beside those trained on one alone.

    Args:
        joint: rows trained on both.
        alone: by target, the same rows trained on it.
        split: on which.

    Returns:
        None if no row was trained on one target alone.
    """
    head = [f"on {split}"]
    for target in alone:
        head += [f"{NAMES.get(target, target)}, joint", "alone", "n"]
    rows = []
    for index, entry in enumerate(joint):
        single = {target: found[index] for target, found in alone.items()}
        if not any(each.records for each in single.values()):
            continue
        cells = [entry.label]
        for target, each in single.items():
            errors = entry.error(split, target), each.error(split, target)
            cells += [DASH if error is None else error.show(4) for error in errors]
            cells.append(", ".join(str(error.seeds if error else 0) for error in errors))
        rows.append(cells)
    return markdown_table(head, rows) if rows else None


def ratio(entry: Entry, other: Entry, split: str, target: str) -> str:
    """The ratio of the means of two rows' MAE, as text."""
    ours, theirs = entry.error(split, target), other.error(split, target)
    return DASH if ours is None or theirs is None else f"{ours.mean / theirs.mean:.2f}"


def moves_table(entries: Sequence[Entry], split: str) -> str | None:
    """Errors by pass, and of displacements; None where no row has passes or displacements.

    Displacement errors are mean lengths over free atoms, Å; ``stay`` is that of not moving.
    """
    rows = []
    passes = 1
    for entry in entries:
        parts = _by_pass(entry, split)
        passes = max([passes, *(len(cells) for _, _, cells in parts)])
        rows += [[entry.label, what, stay, *cells] for what, stay, cells in parts]
    if not rows:
        return None
    head = [f"on {split}", "error of", "stay", *(f"pass {k + 1}" for k in range(passes))]
    filled = [row + [""] * (len(head) - len(row)) for row in rows]
    return markdown_table(head, filled)


def _by_pass(entry: Entry, split: str) -> list[tuple[str, str, list[str]]]:
    found = [record["splits"].get(split, {}) for record in entry.records]
    parts = []
    for target, label in NAMES.items():
        every = [
            part[target]["mae_by_pass"] for part in found if "mae_by_pass" in part.get(target, {})
        ]
        if every:
            parts.append((f"{label}, eV", "", _columns(every)))
    moved = [part["displacement"] for part in found if "displacement" in part]
    if moved:
        stay = Spread.of(part["stay"] for part in moved)
        every = [part.get("error_by_pass", [part["error"]]) for part in moved]
        parts.append(("displacement, Å", "" if stay is None else stay.show(4), _columns(every)))
    return parts


def _columns(every: Sequence[Sequence[float]]) -> list[str]:
    spreads = [Spread.of(values) for values in zip(*every, strict=True)]
    return [DASH if spread is None else spread.show(4) for spread in spreads]
