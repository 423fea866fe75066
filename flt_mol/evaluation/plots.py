"""Plots as PNG (or any format matplotlib knows by its suffix), without touching pyplot."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flt_mol.evaluation.metrics import EWT_THRESHOLD
from flt_mol.evaluation.splits import SplitResult
from flt_mol.files import temporary_path
from flt_mol.structures import Structures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["errors_png", "ewt_png", "learning_curve", "parity", "parity_png", "system_png"]

_BLUE, _ORANGE, _GREY = "#2a6f9e", "#d1622b", "#6b6b6b"
_MANY = 3000  # systems above which single points would hide how many lie on each other

Results = Mapping[str, SplitResult]


def learning_curve(
    history: Iterable[Mapping[str, Any]],
    path: str | Path,
    *,
    loss: str = "train/mae",
    validation: str = "val/mae",
    loss_unit: str = "eV",
) -> Path:
    """Plot training loss and validation MAE against the epoch; return the path.

    The axis is logarithmic where positive values span more than a decade; the epoch of the lowest
    validation MAE is marked.

    Args:
        history: rows with `epoch`, and `loss` and `validation` where known, as numbers or texts,
            such as the rows of a CSV log. Missing, empty and NaN entries are skipped; of several
            rows of an epoch the last one counts.
        path: where to write; the suffix gives the format.
        loss: name of the training loss in the rows.
        validation: name of the validation MAE in the rows.
        loss_unit: unit of the loss. In eV both share one panel; otherwise each has its own.

    Raises:
        ValueError: no row has `epoch` and a finite `loss` or `validation`.
    """
    from matplotlib.ticker import MaxNLocator

    rows = list(history)
    curves = {
        "training MAE" if loss.lower().endswith("mae") else "training loss": _points(rows, loss),
        "validation MAE": _points(rows, validation),
    }
    curves = {name: points for name, points in curves.items() if points}
    if not curves:
        raise ValueError(f"no row has 'epoch' and a finite {loss!r} or {validation!r}")
    panels = [list(curves)] if loss_unit == "eV" else [[name] for name in curves]
    figure = _figure(6.4, 1.0 + 3.2 * len(panels))
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axis, names in zip(axes, panels, strict=True):
        values = [value for name in names for value in curves[name].values()]
        for name in names:
            points = curves[name]
            style: dict[str, Any] = {
                "marker": "o" if len(points) <= 30 else None,
                "markersize": 3.5,
            }
            style["color"] = _BLUE if name == "validation MAE" else _GREY
            axis.plot(list(points), list(points.values()), label=name, **style)
            if name == "validation MAE":
                best = min(points, key=lambda epoch: points[epoch])
                text = f"best: {points[best]:.4g} eV at epoch {best:g}"
                axis.plot(best, points[best], "*", markersize=13, color=_ORANGE, label=text)
        if min(values) > 0 and max(values) > 10 * min(values):
            axis.set_yscale("log")
        kinds = " and ".join(name.split()[-1] for name in names)
        axis.set_ylabel(f"{kinds} ({'eV' if 'validation MAE' in names else loss_unit})")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.legend(frameon=False)
        axis.grid(alpha=0.3)
    axes[-1].set_xlabel("epoch")
    return _save(figure, path)


def _points(rows: list[Mapping[str, Any]], key: str) -> dict[float, float]:
    """{epoch: finite value of `key`}, ascending."""
    points = {}
    for row in rows:
        epoch, value = row.get("epoch"), row.get(key)
        if epoch not in (None, "") and value not in (None, "") and math.isfinite(float(value)):
            points[float(epoch)] = float(value)
    return dict(sorted(points.items()))


def parity(results: Results, path: str | Path) -> Path:
    """Plot predictions against targets, one panel a split; return the path.

    All panels share equal axes: the targets' range, and predictions up to a quarter of it
    beyond; those further out are drawn at the rim, and counted.

    Args:
        results: {split: result}, as given by `evaluate_splits`.
        path: where to write; the suffix gives the format.

    Raises:
        ValueError: no results.
    """
    return _save(_parity(results), path)


def parity_png(results: Results) -> bytes:
    """:func:`parity` as a PNG."""
    return _png(_parity(results))


def _parity(results: Results) -> Figure:
    figure, axes = _panels(results, 4.1)
    target = np.concatenate([result.target for result in results.values()])
    prediction = np.concatenate([result.prediction for result in results.values()])
    low, high = float(target.min()), float(target.max())
    reach = 0.25 * max(high - low, 1.0)
    low = min(low, max(float(prediction.min()), low - reach)) - 0.1 * reach
    high = max(high, min(float(prediction.max()), high + reach)) + 0.1 * reach
    for axis, result in zip(axes, results.values(), strict=True):
        shown = np.clip(result.prediction, low, high)
        axis.plot([low, high], [low, high], color=_GREY, linewidth=1, zorder=1)
        if len(shown) > _MANY:
            axis.hexbin(result.target, shown, gridsize=70, bins="log", mincnt=1, linewidths=0.1)
        else:
            alpha = min(0.7, 12 / math.sqrt(len(shown)))
            axis.scatter(result.target, shown, s=10, color=_BLUE, alpha=alpha, linewidths=0)
        outside = shown != result.prediction
        if outside.any():
            axis.scatter(result.target[outside], shown[outside], marker="x", color=_ORANGE)
            text = f"{outside.sum()} beyond the axes"
            axis.text(0.97, 0.03, text, transform=axis.transAxes, ha="right", color=_ORANGE)
        axis.set(xlim=(low, high), ylim=(low, high), aspect="equal")
        axis.set(xlabel="target (eV)", ylabel="prediction (eV)")
    return figure


def errors_png(results: Results) -> bytes:
    """Histograms of prediction − target, one panel a split on one axis, as a PNG."""
    figure, axes = _panels(results, 3.2)
    reach = max(float(np.quantile(np.abs(r.error), 0.99)) for r in results.values()) or 1.0
    for axis, result in zip(axes, results.values(), strict=True):
        axis.hist(result.error, bins=60, range=(-reach, reach), color=_BLUE)
        axis.axvline(float(result.error.mean()), color=_ORANGE, linestyle="--")
        axis.set(xlabel="error (eV), dashed: mean", ylabel="systems", xlim=(-reach, reach))
        outside = int((np.abs(result.error) > reach).sum())
        axis.text(0.97, 0.9, f"{outside} beyond", transform=axis.transAxes, ha="right")
    return _png(figure)


def ewt_png(curves: Mapping[str, Mapping[str, Any]]) -> bytes:
    """Fraction of systems within a threshold against the threshold, a line a split, as a PNG.

    Args:
        curves: {split: {"thresholds": eV, "fractions"}}.
    """
    figure = _figure(6.0, 3.6)
    axis = figure.subplots()
    for split, curve in curves.items():
        axis.plot(curve["thresholds"], 100 * np.array(curve["fractions"]), label=_label(split))
    axis.axvline(EWT_THRESHOLD, color=_GREY, linewidth=1)
    axis.set(xscale="log", xlim=(1e-3, 10), ylim=(0, 100), xlabel="threshold (eV)")
    axis.set_ylabel("systems with a smaller error (%)")
    axis.legend(frameon=False)
    axis.grid(alpha=0.3)
    return _png(figure)


def system_png(system: Structures) -> bytes:
    """One system seen along −z and along y, its adsorbate outlined, as a PNG.

    Args:
        system: B = 1.
    """
    from ase.visualize.plot import Matplotlib

    from flt_mol.data import to_ase

    figure = _figure(3.8, 2.3)
    for axis, rotation in zip(figure.subplots(1, 2), ("", "-90x"), strict=True):
        drawn = Matplotlib(to_ase(system), axis, rotation=rotation, radii=0.9)
        drawn.write()
        for patch in axis.patches[: len(system.tags) if rotation == "" else 0]:
            patch.set_linewidth(0.5)
        axis.set_axis_off()
    return _png(figure)


def _panels(results: Results, height: float) -> tuple[Figure, list[Axes]]:
    """A titled panel for each split, in a grid of shared axes."""
    if not results:
        raise ValueError("nothing to plot: no split was evaluated")
    columns = math.ceil(math.sqrt(len(results)))
    lines = math.ceil(len(results) / columns)
    figure = _figure(0.6 + 3.6 * columns, 0.4 + height * lines)
    axes = list(figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flat)
    for axis in axes[len(results) :]:
        axis.set_axis_off()
    for axis, (split, result) in zip(axes, results.items(), strict=False):
        count, mae = result.metrics["count"], result.metrics["mae"]
        systems = "1 system" if count == 1 else f"{count:,d} systems"
        axis.set_title(f"{_label(split)}\nMAE {mae:.3f} eV, {systems}", fontsize=11)
        axis.tick_params(labelbottom=True)
        axis.grid(alpha=0.3)
    return figure, axes[: len(results)]


def _label(text: str) -> str:
    """A name as matplotlib shows it: without formulas, hidden labels, or unprintable characters."""
    shown = "".join(c if c.isprintable() else "?" for c in text).replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def _figure(width: float, height: float) -> Figure:
    """An empty figure, in inches, with a canvas of its own whatever backend is configured."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, path: str | Path) -> Path:
    with temporary_path(path) as temporary:
        figure.savefig(temporary, dpi=150)
    return Path(path)


def _png(figure: Figure) -> bytes:
    written = io.BytesIO()
    figure.savefig(written, format="png", dpi=110, metadata={"Software": None})
    return written.getvalue()
