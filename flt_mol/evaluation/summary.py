"""All numbers of an evaluation as plain data: what the table, the JSON and the HTML report show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import flt_mol
from flt_mol.evaluation import intervals
from flt_mol.evaluation.breakdowns import breakdowns
from flt_mol.evaluation.collecting import SplitResult
from flt_mol.evaluation.metrics import EWT_THRESHOLD, metrics_of
from flt_mol.evaluation.systems import COLUMNS

__all__ = ["ALL", "WORST", "join_results", "rank_worst", "summarise"]

ALL = "all"
"""What all splits together are called."""

WORST = 20
"""Systems with the largest errors that are listed."""

_UNITS = {"mae": "eV", "rmse": "eV", "me": "eV", "median_ae": "eV", "ewt": "fraction"}
_UNITS |= {"displacement": "Å", "displacement_unmoved": "Å"}

Results = Mapping[str, SplitResult]
Baselines = Mapping[str, Mapping[str, float]]


def summarise(
    results: Results, baselines: Baselines | None = None, **further: Any
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
    content: dict[str, Any] = {
        "flt_mol": flt_mol.__version__,
        "units": _UNITS,
        "intervals": {
            "method": "percentile bootstrap over systems",
            "level": intervals.LEVEL,
            "draws": intervals.DRAWS,
            "seed": 0,
        },
        **further,
        "splits": {split: _metrics(result) for split, result in results.items()},
    }
    if len(results) > 1:
        if ALL in results:
            raise ValueError(
                f"a split is called '{ALL}', which stands for all splits together: rename it"
            )
        content[ALL] = _metrics(join_results(results))
    content["baselines"] = {name: dict(values) for name, values in (baselines or {}).items()}
    content["worst"] = [
        _system(split, results[split], index) for split, index in rank_worst(results)
    ]
    return content


def join_results(results: Results) -> SplitResult:
    """All splits as one; columns that a split lacks are None for its systems."""
    parts = list(results.values())
    prediction = np.concatenate([part.prediction for part in parts])
    target = np.concatenate([part.target for part in parts])
    names = [name for name in COLUMNS if any(name in part.columns for part in parts)]
    return SplitResult(
        sid=tuple(sid for part in parts for sid in part.sid),
        prediction=prediction,
        target=target,
        metrics=metrics_of(prediction, target),
        unseen=tuple(sorted({symbol for part in parts for symbol in part.unseen})),
        columns={
            name: tuple(
                value for part in parts for value in part.columns.get(name, (None,) * len(part.sid))
            )
            for name in names
        },
    )


def rank_worst(results: Results, most: int = WORST) -> list[tuple[str, int]]:
    """(split, index) of the systems with the largest |error| of all splits, that first."""
    ranked = []
    for place, (split, result) in enumerate(results.items()):
        size = np.abs(result.error)
        cut = np.partition(size, -most)[-most] if len(size) > most else -1.0
        for i in np.flatnonzero(size >= cut).tolist():
            ranked.append((-float(size[i]), place, str(result.sid[i]), split, i))
    return [(split, i) for *_, split, i in sorted(ranked)[:most]]


def ewt_curve(result: SplitResult) -> dict[str, list[float]]:
    """Fractions of systems with |error| strictly below thresholds from 0.001 to 10 eV."""
    grid = np.sort(np.append(10.0 ** np.linspace(-3, 1, 81), EWT_THRESHOLD))
    size = np.sort(np.abs(result.error))
    fractions = np.searchsorted(size, grid, side="left") / len(size)
    return {"thresholds": grid.tolist(), "fractions": fractions.tolist()}


def _metrics(result: SplitResult) -> dict[str, Any]:
    spread = intervals.bootstrap_intervals(result.error)
    return {
        **result.metrics,
        "intervals": {name: list(ends) for name, ends in spread.items()},
        "path": result.path,
        "unseen": list(result.unseen),
        "unfixed": result.unfixed,
        "further": dict(result.further),
        "breakdowns": breakdowns(result),
        "ewt_curve": ewt_curve(result),
    }


def _system(split: str, result: SplitResult, index: int) -> dict[str, Any]:
    return {
        "split": split,
        "sid": result.sid[index],
        "prediction": float(result.prediction[index]),
        "target": float(result.target[index]),
        "error": float(result.error[index]),
        **{name: values[index] for name, values in result.columns.items()},
    }
