"""The accuracy table as a page: errors, costs, passes, notes, verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from flt_mol.analysis.accuracy.loop import TARGETS
from flt_mol.analysis.accuracy.results import Results
from flt_mol.analysis.accuracy.runs import Experiment
from flt_mol.analysis.accuracy.table import (
    NOTES,
    Entry,
    cost_table,
    energy_table,
    moves_table,
    targets_table,
)
from flt_mol.analysis.accuracy.times import Clock
from flt_mol.analysis.accuracy.verdict import Claim, findings, show
from flt_mol.outputs import counted

__all__ = ["entries", "page", "report", "told"]

BESIDE = {"schnet": "SchNet", "exact_images": "exact with images"}
AIMS = (
    "What was aimed at before anything was trained, point by point; names in quotes are those of "
    "`scripts/accuracy_table.py --rows`."
)
TITLES = {
    "joint": "Both energies by one model",
    "relaxed": "Relaxed energies alone",
    "initial": "Energies before relaxation alone",
}


def entries(experiment: Experiment, results: Results, names: Sequence[str]) -> list[Entry]:
    """Results of these rows, of this experiment's settings alone."""
    return [
        Entry(name, experiment.rows[name].label, results.find(**experiment.key(name)))
        for name in names
    ]


def page(experiment: Experiment, results: Results, names: Sequence[str]) -> str:
    """Everything that is known of these rows, as Markdown.

    Args:
        experiment: whose settings; lines of others are left out, and counted.
        results: where lines are.
        names: of rows, in order.
    """
    rows = entries(experiment, results, names)
    splits = experiment.corpus.splits[1:]
    targets = TARGETS[experiment.settings.targets]
    parts = [energy_table(rows, target, splits) for target in targets]
    clock = Clock(experiment, results, names)
    parts.append(cost_table(rows, targets, splits[0], BESIDE, clock))
    moves = moves_table(rows, splits[0])
    parts += [] if moves is None else [moves]
    parts.append(f"{NOTES} {_conditions(experiment, results, rows)}")
    if "ours" in names:
        bounds = {target: Claim().at_most[target] for target in targets}
        parts.append(AIMS)
        parts.append(show(findings(rows, Claim(at_most=bounds), clock)))
    return "\n\n".join(parts)


def report(experiment: Experiment, results: Results, names: Sequence[str]) -> str:
    """Pages of all targets and numbers of epochs that the file has results of, for reading.

    A page has the rows that were trained so, and none of the others. Where rows were trained on
    both energies at once as well as on one alone, for as long, a table has them side by side.

    Args:
        experiment: whose settings; all targets and epochs are shown, whichever it has.
        results: where lines are.
        names: of rows, in order.
    """
    parts: list[str] = []
    every = {line["epochs"] for line in results.read() if "row" in line}
    for epochs in sorted(every, reverse=True):
        parts += _of_epochs(experiment, results, names, epochs)
    return "\n\n".join(parts) if parts else page(experiment, results, names)


def _of_epochs(
    experiment: Experiment, results: Results, names: Sequence[str], epochs: int
) -> list[str]:
    by_targets = {
        targets: experiment._replace(
            settings=replace(experiment.settings, targets=targets, epochs=epochs)
        )
        for targets in TARGETS
    }
    found = {targets: entries(each, results, names) for targets, each in by_targets.items()}
    parts = []
    for targets, rows in found.items():
        if trained := [row.name for row in rows if row.records]:
            parts += [f"## {TITLES[targets]}, {counted(epochs, 'epoch')}"]
            parts += [page(by_targets[targets], results, trained)]
    joint = found.pop("joint")
    alone = {TARGETS[targets][0]: rows for targets, rows in found.items()}
    beside = targets_table(joint, alone, experiment.corpus.splits[1])
    if beside is not None and any(row.records for row in joint):
        parts += [f"## Together and alone, {counted(epochs, 'epoch')}", beside]
    return parts


def _conditions(experiment: Experiment, results: Results, rows: Sequence[Entry]) -> str:
    settings = experiment.settings
    text = f"Targets: {settings.targets}, {counted(settings.epochs, 'epoch')}."
    models = sum("row" in record for record in results.read())
    others = models - sum(len(row.records) for row in rows)
    if others:
        text += (
            f" The file holds {counted(others, 'line')} of other rows, seeds, targets or settings."
        )
    return text


def told(found: Mapping[str, Any] | Exception) -> str:
    """One line about a model that was trained, or about what kept it from being trained.

    Example:
        >>> told(ValueError("the loss of epoch 1 is nan"))
        'failed: the loss of epoch 1 is nan'
    """
    if isinstance(found, Exception):
        return f"failed: {found}"
    split, errors = next(iter(found["splits"].items()))
    energies = [f"{name} {part['mae']:.4f}" for name, part in errors.items() if "mae" in part]
    return f"{split} {', '.join(energies)} eV, {found['seconds_per_epoch']:.1f} s/epoch"
