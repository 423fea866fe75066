"""All numbers of an evaluation as plain data: what the table, the JSON and the report show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flt_mol.evaluation.metrics import (
    DRAWS,
    EWT_THRESHOLD,
    LEVEL,
    bootstrap_intervals,
    mae,
    metrics_of,
)
from flt_mol.evaluation.splits import COLUMNS, SplitResult
from flt_mol.files import VERSION

__all__ = ["ALL", "WORST", "breakdowns", "constant_maes", "shown_splits", "summarise"]

ALL = "all"
"""The name of all splits together."""

WORST = 20
"""Systems with the largest errors that are listed."""

_SIZES = (10, 20, 30, 40, 50, 75, 100, 150, 200)  # atoms, the last of each bin

Results = Mapping[str, SplitResult]


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
        **further, "splits": {split: metrics}, "all": metrics, "baselines", "worst": […]}``.
        Metrics are ``{"count", "mae", "ewt", "rmse", "me", "median_ae", "intervals": {metric:
        [low, high]}, "path", "unseen", "unfixed", "further", "breakdowns", "ewt_curve":
        {"thresholds", "fractions"}}``; "all" is there where there are several splits. Energies are
        in eV, `ewt` is a fraction.

    Raises:
        ValueError: no splits, or several of which one is called "all".
    """
    if not results:
        raise ValueError("no split was evaluated")
    energies = dict.fromkeys(("mae", "rmse", "me", "median_ae"), "eV")
    distances = dict.fromkeys(("displacement", "displacement_unmoved"), "Å")
    content: dict[str, Any] = {
        "flt_mol": VERSION,
        "units": {**energies, "ewt": "fraction", **distances},
        "intervals": {
            "method": "percentile bootstrap over systems",
            "level": LEVEL,
            "draws": DRAWS,
            "seed": 0,
        },
        **further,
        "splits": {split: _metrics(result) for split, result in results.items()},
    }
    if len(results) > 1:
        if ALL in results:
            raise ValueError(f"a split is called '{ALL}', the name of all splits together")
        content[ALL] = _metrics(_joined(results))
    content["baselines"] = {name: dict(values) for name, values in (baselines or {}).items()}
    content["worst"] = _worst(results)
    return content


def shown_splits(summary: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """{split: metrics} of a summary, all splits together last where there are several."""
    together = {ALL: summary[ALL]} if ALL in summary else {}
    return {**summary["splits"], **together}


def constant_maes(results: Results, value: float | None = None) -> dict[str, float]:
    """{split: MAE in eV} of predicting `value` (eV); of each split's own median if it is None.

    The median is what no constant can beat.
    """
    maes = {}
    for split, result in results.items():
        constant = np.median(result.target) if value is None else value
        maes[split] = mae(np.full_like(result.target, constant), result.target)
    return maes


def breakdowns(result: SplitResult) -> dict[str, list[dict[str, Any]]]:
    """Metrics of groups of systems by "adsorbate", "element", "size" and "facet", where known.

    A system is in the group of each of its elements. Sizes ascend; of the others the group with
    the largest MAE is first.

    Returns:
        {kind: [{"group", "count", "mae" (eV), "mae_interval" [low, high], "ewt" (fraction)}, …]}.

    Example:
        >>> result = SplitResult((1, 2), np.array([0.0, 1.0]), np.array([0.5, 1.0]),
        ...     columns={"natoms": (9, 30)})
        >>> [(row["group"], row["mae"]) for row in breakdowns(result)["size"]]
        [('1–10', 0.5), ('21–30', 0.0)]
    """
    columns = result.columns
    names: dict[str, list[list[str]]] = {
        "adsorbate": [[x] if x else [] for x in columns.get("adsorbate", ())],
        "element": [(x or "").split() for x in columns.get("elements", ())],
        "size": [[_size_bin(x)] if x else [] for x in columns.get("natoms", ())],
        "facet": [[x] if x else [] for x in columns.get("facet", ())],
    }
    found = {}
    for kind, of_systems in names.items():
        groups: dict[str, list[int]] = {}
        for i, of_system in enumerate(of_systems):
            for name in of_system:
                groups.setdefault(name, []).append(i)
        rows = [_group(name, result, rows) for name, rows in sorted(groups.items())]
        if kind == "size":
            rows.sort(key=lambda row: int(row["group"].partition("–")[0].split()[0]))
        else:
            rows.sort(key=lambda row: -row["mae"])
        if rows:
            found[kind] = rows
    return found


def _size_bin(natoms: int) -> str:
    last = next((last for last in _SIZES if natoms <= last), None)
    if last is None:
        return f"{_SIZES[-1] + 1} or more"
    first = max((x for x in _SIZES if x < last), default=0) + 1
    return f"{first}–{last}"


def _group(name: str, result: SplitResult, rows: list[int]) -> dict[str, Any]:
    metrics = metrics_of(result.prediction[rows], result.target[rows])
    interval = bootstrap_intervals(result.error[rows], ["mae"])["mae"]
    return {
        "group": name,
        "count": metrics["count"],
        "mae": metrics["mae"],
        "mae_interval": list(interval),
        "ewt": metrics["ewt"],
    }


def _metrics(result: SplitResult) -> dict[str, Any]:
    grid = np.sort(np.append(10.0 ** np.linspace(-3, 1, 81), EWT_THRESHOLD))
    size = np.sort(np.abs(result.error))
    below = np.searchsorted(size, grid, side="left") / len(size)
    intervals = bootstrap_intervals(result.error)
    return {
        **result.metrics,
        "intervals": {name: list(ends) for name, ends in intervals.items()},
        "path": result.path,
        "unseen": list(result.unseen),
        "unfixed": result.unfixed,
        "further": dict(result.further),
        "breakdowns": breakdowns(result),
        "ewt_curve": {"thresholds": grid.tolist(), "fractions": below.tolist()},
    }


def _joined(results: Results) -> SplitResult:
    """All splits as one."""
    parts = list(results.values())
    names = [name for name in COLUMNS if any(name in part.columns for part in parts)]
    return SplitResult(
        sid=tuple(sid for part in parts for sid in part.sid),
        prediction=np.concatenate([part.prediction for part in parts]),
        target=np.concatenate([part.target for part in parts]),
        unseen=tuple(sorted({symbol for part in parts for symbol in part.unseen})),
        columns={
            name: tuple(x for p in parts for x in p.columns.get(name, (None,) * len(p.sid)))
            for name in names
        },
    )


def _worst(results: Results) -> list[dict[str, Any]]:
    """The systems with the largest |error| of all splits, that first."""
    ranked = sorted(
        (-abs(error), place, str(result.sid[i]), split, i)
        for place, (split, result) in enumerate(results.items())
        for i, error in enumerate(result.error.tolist())
    )
    rows = []
    for *_, split, i in ranked[:WORST]:
        result = results[split]
        row: dict[str, Any] = {"split": split, "sid": result.sid[i]}
        row |= {x: float(getattr(result, x)[i]) for x in ("prediction", "target", "error")}
        rows.append({**row, **{name: values[i] for name, values in result.columns.items()}})
    return rows
