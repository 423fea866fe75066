"""All numbers of an evaluation as plain data: what the table, the JSON and the report show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from flt_mol.data.recipes import Recipe
from flt_mol.evaluation.metrics import DRAWS, LEVEL, bootstrap_intervals, metrics_of
from flt_mol.evaluation.splits import Results, SplitResult
from flt_mol.files import VERSION

ALL = "all"
"""The name of all splits together."""

WORST = 20
"""Systems with the largest errors that are listed."""

_SIZES = (10, 20, 30, 40, 50, 75, 100, 150, 200)  # atoms, the last of each bin
_BINS = [f"{low + 1}–{high}" for low, high in pairwise((0, *_SIZES))] + [
    f"{_SIZES[-1] + 1} or more"
]
_ENERGIES = ("prediction", "target", "error")
_KINDS = {"adsorbate": "adsorbate", "element": "elements", "size": "natoms", "facet": "facet"}


def summarise(
    results: Results, baselines: Mapping[str, Mapping[str, float]] | None = None, **further: Any
) -> dict[str, Any]:
    """Metrics with intervals, breakdowns and worst systems of evaluated splits, as plain data.

    Args:
        results: {split: result}, as given by `evaluate_splits`.
        baselines: {baseline: {split: MAE in eV}}.
        **further: more plain values, such as the checkpoint's name.

    Returns:
        ``{"flt_mol": version, "units", "intervals": {"method", "level", "draws", "seed"},
        **further, "splits": {split: metrics}, "all": metrics (of several splits), "baselines",
        "worst": […]}``. Metrics are those of `metrics_of`, in eV, `ewt` a fraction, and
        "intervals", "path", "unseen", "further", "breakdowns".

    Raises:
        ValueError: no splits, or several of which one is called "all".
    """
    if not results:
        raise ValueError("no split was evaluated")
    units = dict.fromkeys(("mae", "rmse", "me", "median_ae"), "eV")
    units |= {"ewt": "fraction", "displacement": "Å", "displacement_unmoved": "Å"}
    units |= {"forces_mae": "eV/Å", "efwt": "fraction"}
    method = {"method": "percentile bootstrap over systems", "level": LEVEL, "draws": DRAWS}
    content: dict[str, Any] = {
        "flt_mol": VERSION,
        "units": units,
        "intervals": {**method, "seed": 0},
        **further,
        "splits": {split: _metrics(result) for split, result in results.items()},
    }
    if len(results) > 1:
        if ALL in results:
            raise ValueError(f"a split is called '{ALL}', the name of all splits together")
        content[ALL] = _metrics(SplitResult.cat(results.values()))
    content["baselines"] = {name: dict(values) for name, values in (baselines or {}).items()}
    content["worst"] = _worst(results)
    return content


def shown_splits(summary: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """{split: metrics} of a summary, all splits together last where there are several."""
    return {**summary["splits"], **({ALL: summary[ALL]} if ALL in summary else {})}


def constant_maes(results: Results, value: float | None = None) -> dict[str, float]:
    """{split: MAE in eV} of predicting `value` (eV); None takes each split's own median.

    The median is what no constant can beat.
    """
    maes = {}
    for split, result in results.items():
        constant = np.median(result.target) if value is None else value
        maes[split] = metrics_of(np.full_like(result.target, constant), result.target)["mae"]
    return maes


def stated_maes(recipe: Recipe | None, splits: Iterable[str]) -> dict[str, dict[str, float]]:
    """{baseline: {split: MAE in eV}} as a data set's recipe gives them, of whole splits."""
    stated = {} if recipe is None else recipe.metadata.get("baselines") or {}
    found: dict[str, dict[str, float]] = {}
    for split in splits:
        for method, metrics in stated.get(split, {}).items():
            found.setdefault(method, {})[split] = float(metrics["mae"])
    return found


def breakdowns(result: SplitResult) -> dict[str, list[dict[str, Any]]]:
    """Metrics of groups of systems by "adsorbate", "element", "size" and "facet", where known.

    A system is in the group of each of its elements. Sizes ascend; of the others the group with
    the largest MAE is first.

    Returns:
        {kind: [{"group", "count", "mae" (eV), "mae_interval" [low, high], "ewt" (fraction)}, …]}.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for kind, column in _KINDS.items():
        groups: dict[str, list[int]] = {}
        for i, value in enumerate(result.columns.get(column, ())):
            names = [] if value is None else [value]
            if kind == "element" and value:
                names = value.split()
            elif kind == "size" and value:
                names = [_BINS[np.searchsorted(_SIZES, value)]]
            for name in names:
                groups.setdefault(name, []).append(i)
        if groups:
            rows = list[dict[str, Any]]()
            for name, members in sorted(groups.items()):
                metrics = metrics_of(result.prediction[members], result.target[members])
                interval = bootstrap_intervals(result.error[members], ["mae"])["mae"]
                kept = {key: metrics[key] for key in ("count", "mae", "ewt")}
                rows.append({"group": name, "mae_interval": list(interval), **kept})
            rows.sort(key=lambda row: -row["mae"])
            if kind == "size":
                rows.sort(key=lambda row: _BINS.index(row["group"]))
            found[kind] = rows
    return found


def _metrics(result: SplitResult) -> dict[str, Any]:
    intervals = bootstrap_intervals(result.error)
    return {
        **result.metrics,
        "intervals": {name: list(ends) for name, ends in intervals.items()},
        "path": result.path,
        "unseen": list(result.unseen),
        "further": dict(result.further),
        "breakdowns": breakdowns(result),
    }


def _worst(results: Results) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for split, result in results.items():
        columns = {"sid": result.sid, **{x: getattr(result, x).tolist() for x in _ENERGIES}}
        columns |= result.columns
        for values in zip(*columns.values(), strict=True):
            rows.append({"split": split, **dict(zip(columns, values, strict=True))})
    return sorted(rows, key=lambda row: (-abs(row["error"]), str(row["sid"])))[:WORST]
