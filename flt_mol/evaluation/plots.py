"""Plots as PNG (or any format matplotlib knows by its suffix), without touching pyplot."""

from __future__ import annotations

import io
import math
import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flt_mol.evaluation.metrics import EWT_THRESHOLD
from flt_mol.evaluation.splits import Results, SplitResult
from flt_mol.files import temporary_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BLUE, _ORANGE, _GREY = "#2a6f9e", "#d1622b", "#6b6b6b"
_MANY = 3000  # systems above which single points would hide how many lie on each other


def learning_curve(history: Iterable[Mapping[str, Any]], path: str | Path) -> Path:
    """Plot training and validation MAE (eV, logarithmic) against the epoch; return the path.

    Args:
        history: rows, in order, with `epoch`, and `train/mae` and `val/mae` where known and finite.
        path: where to write; the suffix gives the format.

    Raises:
        ValueError: no row has a finite `train/mae` or `val/mae`.
    """
    figure, rows = _figure(6.4, 4.2), list(history)
    axis = figure.subplots()
    for name, key, color in (("training", "train/mae", _GREY), ("validation", "val/mae", _BLUE)):
        points = [(row["epoch"], row[key]) for row in rows if math.isfinite(row.get(key, math.nan))]
        if points:
            axis.plot(*zip(*points, strict=True), ".-", color=color, label=name)
        if points and name == "validation":
            epoch, best = min(points, key=lambda point: point[1])
            text = f"best: {best:.4g} eV at epoch {epoch:g}"
            axis.plot(epoch, best, "*", markersize=13, color=_ORANGE, label=text)
    if not axis.lines:
        raise ValueError("no row has a finite 'train/mae' or 'val/mae'")
    axis.set(xlabel="epoch", ylabel="MAE (eV)", yscale="log")
    axis.locator_params(axis="x", integer=True)
    axis.legend(frameon=False)
    axis.grid(alpha=0.3)
    return _save(figure, path)


def parity(results: Results, path: str | Path) -> Path:
    """Plot predictions against targets, one panel a split; return the path.

    All panels share equal axes: the targets' range, and predictions up to a quarter of it
    beyond; those further out are drawn at the rim, and counted.

    Args:
        results: {split: result}, as given by `evaluate_splits`; not empty.
        path: as of `learning_curve`.
    """
    return _save(parity_figure(results), path)


def parity_figure(results: Results) -> Figure:
    """The figure of `parity`."""
    columns = math.ceil(math.sqrt(len(results)))
    lines = math.ceil(len(results) / columns)
    figure = _figure(0.6 + 3.6 * columns, 0.4 + 4.1 * lines)
    axes = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flat
    for axis in axes[len(results) :]:
        axis.set_axis_off()
    every = SplitResult.cat(results.values())
    target = every.target
    reach = 0.25 * max(np.ptp(target), 1.0)
    shown = np.clip(every.prediction, target.min() - reach, target.max() + reach)
    low = min(target.min(), shown.min()) - 0.1 * reach
    high = max(target.max(), shown.max()) + 0.1 * reach
    for axis, (split, result) in zip(axes, results.items(), strict=False):
        shown = np.clip(result.prediction, low, high)
        axis.plot([low, high], [low, high], color=_GREY, linewidth=1, zorder=1)
        if len(shown) > _MANY:
            axis.hexbin(result.target, shown, gridsize=70, bins="log", mincnt=1, linewidths=0.1)
        else:
            axis.scatter(result.target, shown, s=10, color=_BLUE, alpha=0.5, linewidths=0)
        outside = shown != result.prediction
        if outside.any():
            axis.scatter(result.target[outside], shown[outside], marker="x", color=_ORANGE)
            text = f"{outside.sum()} beyond the axes"
            axis.text(0.97, 0.03, text, transform=axis.transAxes, ha="right", color=_ORANGE)
        axis.set(xlim=(low, high), ylim=(low, high), aspect="equal")
        axis.set(xlabel="target (eV)", ylabel="prediction (eV)")
        count, mae = result.metrics["count"], result.metrics["mae"]
        axis.set_title(f"{split}\n{count:,d} systems, MAE {mae:.3f} eV", fontsize=11)
        axis.tick_params(labelbottom=True)
        axis.grid(alpha=0.3)
    return figure


def ewt_figure(results: Results) -> Figure:
    """Fraction of systems within a threshold against the threshold, a line a split."""
    figure = _figure(6.0, 3.6)
    axis = figure.subplots()
    for split, result in results.items():
        axis.ecdf(np.abs(result.error), label=split)
    axis.axvline(EWT_THRESHOLD, color=_GREY, linewidth=1)
    axis.set(xscale="log", xlim=(1e-3, 10), xlabel="threshold (eV)")
    axis.set_ylabel("fraction of systems with a smaller error")
    axis.legend(frameon=False)
    axis.grid(alpha=0.3)
    return figure


def png(figure: Figure) -> bytes:
    """A figure as a PNG."""
    written = io.BytesIO()
    figure.savefig(written, format="png", dpi=110, metadata={"Software": None})
    return written.getvalue()


def import_matplotlib() -> None:
    """Import it also where MPLBACKEND, of a notebook, names a package that is not installed."""
    if "matplotlib" not in sys.modules and (backend := os.environ.pop("MPLBACKEND", None)):
        import matplotlib

        os.environ["MPLBACKEND"] = backend
        with suppress(ValueError):  # as matplotlib itself does, which fails
            matplotlib.rcParams["backend"] = backend


def _figure(width: float, height: float) -> Figure:
    import_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Figure, path: str | Path) -> Path:
    with temporary_path(path) as temporary:
        figure.savefig(temporary, dpi=150)
    return Path(path)
