"""What a step of training costs, of rows that take turns on the same batches in one process.

Rows that are trained at different times meet a machine that is busy in different ways: their
seconds per epoch are not to be compared to the percent. Here they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import torch

from flt_mol.analysis.accuracy.loop import (
    Training,
    fit_normalizers,
    relabelled,
    seeded,
    steps_per_epoch,
    without_denormals,
)
from flt_mol.analysis.accuracy.results import Results
from flt_mol.analysis.accuracy.rows import build, resolved
from flt_mol.analysis.accuracy.runs import Experiment
from flt_mol.analysis.timing import Ratio, Timings, interleaved
from flt_mol.structures import Structures

__all__ = ["Clock", "measure_times"]

Batches = Sequence[Sequence[Structures]]


def measure_times(experiment: Experiment, names: Iterable[str], rounds: int = 7) -> dict[str, Any]:
    """CPU seconds of a training step of each row, as a line of results of its own.

    In each round every row takes one step, all on the same batch, on one thread; the next round has
    another batch. One step of each before that is not counted. Pairs are found beforehand.

    Args:
        experiment: see there; how many epochs it has makes no difference.
        names: of rows, at least one.
        rounds: how many are counted.

    Returns:
        ``times``, by row its ``hash`` and ``seconds`` of each round; ``steps_per_epoch``,
        ``targets``, ``rounds``, ``torch``. It has no "row": lines of trained models are others.
    """
    settings, corpus = experiment.settings, experiment.corpus
    every = corpus.load(corpus.splits[0])
    batches = _batches([relabelled(system, settings.targets) for system in every], experiment,
                       rounds + 1)  # fmt: skip
    chosen = list(names)
    with without_denormals(), seeded(0):
        by_cutoff: dict[float | None, Batches] = {None: batches}
        steps = {name: _stepping(experiment, name, by_cutoff) for name in chosen}
        timings = interleaved(steps, rounds)
    return {
        "times": {
            name: {
                "hash": _hash(experiment, name),
                "seconds": [round(seconds, 5) for seconds in timings.seconds[name]],
            }
            for name in chosen
        },
        "targets": settings.targets,
        "rounds": rounds,
        "steps_per_epoch": steps_per_epoch(len(every), settings),
        "torch": torch.__version__,
    }


class Clock:
    """Looks up times that `measure_times` took; of several lines the last counts.

    Args:
        experiment: whose rows and settings; times under others are not found.
        results: where lines are.
        names: of rows to look up.
    """

    def __init__(self, experiment: Experiment, results: Results, names: Iterable[str]) -> None:
        self.hashes = {name: _hash(experiment, name) for name in names}
        lines = (record for record in results.read() if isinstance(record.get("times"), dict))
        self.lines = list(lines)[::-1]

    def seconds(self, name: str) -> float | None:
        """CPU seconds per epoch, median of steps times steps; None where no time was taken."""
        line = self._line(name)
        if line is None:
            return None
        return Timings({name: line["times"][name]["seconds"]}).median(name) * float(
            line["steps_per_epoch"]
        )

    def ratio(self, name: str, over: str) -> Ratio | None:
        """Time of one row over that of another, round by round; None if never taken in turns."""
        line = self._line(name, over)
        if line is None:
            return None
        times = {row: line["times"][row]["seconds"] for row in (name, over)}
        return Timings(times).ratio(name, over)

    def _line(self, *names: str) -> dict[str, Any] | None:
        for line in self.lines:
            hashes = {name: found.get("hash") for name, found in line["times"].items()}
            if all(name in self.hashes and hashes.get(name) == self.hashes[name] for name in names):
                return line
        return None


def _hash(experiment: Experiment, name: str) -> str:
    settings = replace(experiment.settings, epochs=1)
    return str(experiment._replace(settings=settings).key(name)["hash"])


def _batches(systems: Sequence[Structures], experiment: Experiment, number: int) -> Batches:
    """The first ones of an epoch, from its beginning again if there are not as many."""
    size, most = experiment.settings.batch_size, steps_per_epoch(len(systems), experiment.settings)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(systems), generator=generator).tolist()
    starts = [k % most * size for k in range(number)]
    return [[systems[row] for row in order[start : start + size]] for start in starts]


def _stepping(
    experiment: Experiment, name: str, by_cutoff: dict[float | None, Batches]
) -> Callable[[], object]:
    """A function that takes one step at each call, with the next batch."""
    row, settings = experiment.rows[name], experiment.settings
    model: Any = build(row, resolved(row, settings.targets, experiment.rows))
    cutoff: float | None = model.cutoff
    if cutoff not in by_cutoff:
        plain = by_cutoff[None]
        by_cutoff[cutoff] = [[system.with_pairs(cutoff) for system in part] for part in plain]  # type: ignore[arg-type]
    batches = by_cutoff[cutoff]
    fit_normalizers(model, [system for part in batches for system in part], settings)
    training = Training(model, settings, row.loss, len(batches))
    calls = count()
    return lambda: training.step(batches[next(calls) % len(batches)])
