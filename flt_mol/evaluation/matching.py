"""Predictions and targets of two files, brought together by sid."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flt_mol.evaluation.collecting import SplitResult
from flt_mol.evaluation.energy_tables import (
    PREDICTION,
    TARGET,
    EnergyTable,
    Key,
    named,
    read_energies,
)
from flt_mol.evaluation.metrics import mae, metrics_of
from flt_mol.evaluation.systems import COLUMNS

__all__ = ["constant_baseline", "match", "median_baseline", "score_files"]

_SHOWN = 5


def score_files(
    predictions: str | Path,
    targets: str | Path | None = None,
    splits: Sequence[str] | None = None,
) -> dict[str, SplitResult]:
    """Compare the predictions in one file with the targets in another, without any model.

    Args:
        predictions: table of sid and energy (eV), with a column split or not; see
            :func:`~flt_mol.evaluation.energy_tables.read_energies`.
        targets: table of sid and target, y_relaxed or energy (the first of these that is there).
            None takes the column target of `predictions`, as `flt-mol evaluate` writes it.
        splits: only these.

    Returns:
        {split: result}, systems in the order of `targets`; without a column split in either, the
        one split is called after the file of targets.

    Raises:
        ValueError: a file that cannot be read, missing or surplus ids, or an id in two splits of
            which only one file tells them apart, naming file, line and sid.

    Warns:
        UserWarning: repeated lines that were dropped, with their number.
    """
    predicted = read_energies(predictions, PREDICTION, COLUMNS)
    wanted = read_energies(
        predictions if targets is None else targets,
        ("target",) if targets is None else TARGET,
        COLUMNS,
    )
    for table in (predicted, wanted) if targets is not None else (predicted,):
        if table.repeated:
            warnings.warn(
                f"{table.path}: dropped {table.repeated} lines that repeat an id with the same "
                "energy",
                UserWarning,
                stacklevel=2,
            )
    if splits:
        with_splits = [table.has_splits for table in (predicted, wanted)]
        if not any(with_splits):
            wanted.only(splits)  # says that there is no column split
        predicted = predicted.only(splits) if predicted.has_splits else predicted
        wanted = wanted.only(splits) if wanted.has_splits else wanted
    return match(predicted, wanted)


def match(predicted: EnergyTable, wanted: EnergyTable) -> dict[str, SplitResult]:
    """Results of each split: every target has one prediction, and the other way round.

    Ids are pairs of split and sid where both tables have splits, else sids alone.

    Raises, returns: as :func:`score_files`.
    """
    both = predicted.has_splits and wanted.has_splits
    of_id = {_id(key, both): key for key in _unique(predicted, both)}
    wanted_ids = [_id(key, both) for key in _unique(wanted, both)]
    _refuse_difference(predicted, wanted, of_id, wanted_ids)
    splits: dict[str, list[tuple[Key, Key]]] = {}
    for identity, key in zip(wanted_ids, wanted.energies, strict=True):
        own = of_id[identity]
        split = key[0] or own[0] or _name(wanted.path)
        splits.setdefault(split, []).append((own, key))
    return {split: _result(predicted, wanted, pairs) for split, pairs in splits.items()}


def median_baseline(results: Mapping[str, SplitResult]) -> dict[str, float]:
    """{split: MAE in eV} of predicting each split's own median: what no constant can beat."""
    return {
        split: mae(np.full(len(result.target), np.median(result.target)), result.target)
        for split, result in results.items()
    }


def constant_baseline(results: Mapping[str, SplitResult], value: float) -> dict[str, float]:
    """{split: MAE in eV} of predicting `value`, eV, such as the median of the training targets."""
    return {
        split: mae(np.full(len(result.target), value), result.target)
        for split, result in results.items()
    }


def _id(key: Key, with_split: bool) -> Key:
    return key if with_split else ("", key[1])


def _unique(table: EnergyTable, with_split: bool) -> list[Key]:
    """All keys, of which no two are the same id."""
    seen: dict[Key, Key] = {}
    for key in table.energies:
        other = seen.setdefault(_id(key, with_split), key)
        if other != key:
            raise ValueError(
                f"{table.where(key)}: the sid is also in {other[0]}, line {table.lines[other]}, "
                "and the other file has no column split that tells them apart; add it"
            )
    return list(table.energies)


def _refuse_difference(
    predicted: EnergyTable, wanted: EnergyTable, of_id: dict[Key, Key], wanted_ids: list[Key]
) -> None:
    pairs = zip(wanted_ids, wanted.energies, strict=True)
    missing = [key for identity, key in pairs if identity not in of_id]
    known = set(wanted_ids)
    surplus = [key for identity, key in of_id.items() if identity not in known]
    if not missing and not surplus:
        return
    parts = []
    if missing:
        parts.append(f"has no prediction for {_some(missing)} in {wanted.path}")
        splits = dict.fromkeys(split for split, _ in of_id)
        if predicted.has_splits and not {split for split, _ in missing} & set(splits):
            given = " ".join(f"--split {split}" for split in splits)
            parts[-1] += f" (to leave these splits out: {given})"
    if surplus:
        first = surplus[0]
        parts.append(
            f"has predictions without a target, {_some(surplus)} (first in line "
            f"{predicted.lines[first]})"
        )
        if first[1].endswith(".0") and (first[0], first[1][:-2]) in known | {("", first[1][:-2])}:
            parts[-1] += ": write sids as whole numbers"
    raise ValueError(f"{predicted.path} {', and '.join(parts)}")


def _some(keys: list[Key]) -> str:
    shown = ", ".join(named(key) for key in keys[:_SHOWN])
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return f"{len(keys)} systems: {shown}{more}" if len(keys) > 1 else shown


def _name(path: Path) -> str:
    return path.name.partition(".")[0] or path.name


def _result(
    predicted: EnergyTable, wanted: EnergyTable, pairs: list[tuple[Key, Key]]
) -> SplitResult:
    prediction = np.array([predicted.energies[own] for own, _ in pairs])
    target = np.array([wanted.energies[key] for _, key in pairs])
    columns: dict[str, tuple[Any, ...]] = {}
    for name in COLUMNS:
        ours, theirs = wanted.columns.get(name, {}), predicted.columns.get(name, {})
        values = [ours.get(key, theirs.get(own)) for own, key in pairs]
        if any(value is not None for value in values):
            columns[name] = _typed(name, values)
    return SplitResult(
        sid=tuple(key[1] for _, key in pairs),
        prediction=prediction,
        target=target,
        metrics=metrics_of(prediction, target),
        path=str(predicted.path),
        columns=columns,
    )


def _typed(name: str, values: list[str | None]) -> tuple[Any, ...]:
    """Numbers of atoms as such; None where they are none."""
    if name != "natoms":
        return tuple(values)
    return tuple(int(v) if v is not None and v.isdecimal() else None for v in values)
