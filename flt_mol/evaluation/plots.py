"""Plots as PNG (or any format matplotlib knows by its suffix), without touching pyplot."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from flt_mol.evaluation.collecting import SplitResult
from flt_mol.files import temporary_path
from flt_mol.outputs import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "BLUE",
    "GREY",
    "ORANGE",
    "clean",
    "draw_points",
    "label",
    "learning_curve",
    "limits",
    "new_figure",
    "parity",
]

BLUE, ORANGE, GREY = "#2a6f9e", "#d1622b", "#6b6b6b"
_MANY = 3000
"""Systems above which single points would hide how many lie on each other."""


def learning_curve(
    history: Iterable[Mapping[str, Any]],
    path: str | Path,
    *,
    loss: str = "train/mae",
    validation: str = "val/mae",
    loss_unit: str = "eV",
) -> Path:
    """Plot training loss and validation MAE against the epoch; give the path back.

    The axis is logarithmic where the values span more than a decade; the epoch of the lowest
    validation MAE is marked.

    Args:
        history: rows with `epoch`, and `loss` and `validation` where known, as numbers or texts,
            such as the rows of a CSV log. Missing, empty and NaN entries are left out; of several
            rows of an epoch the last one counts.
        path: where to write; the suffix tells the format.
        loss: name of the training loss in the rows.
        validation: name of the validation MAE in the rows.
        loss_unit: unit of the loss. In eV both share one panel; otherwise each has its own.

    Raises:
        ValueError: no row has `epoch` and a finite `loss` or `validation`.
    """
    rows = list(history)
    curves = [
        (
            "training MAE" if loss.lower().endswith("mae") else "training loss",
            loss_unit,
            GREY,
            *_curve(rows, loss),
        ),
        ("validation MAE", "eV", BLUE, *_curve(rows, validation)),
    ]
    curves = [curve for curve in curves if len(curve[3])]
    if not curves:
        raise ValueError(
            f"nothing to plot: no row of the history has 'epoch' and a finite {loss!r} "
            f"or {validation!r}"
        )
    panels = [curves] if len({unit for _, unit, *_ in curves}) == 1 else [[c] for c in curves]
    figure = new_figure(6.4, 1.0 + 3.2 * len(panels))
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axis, panel in zip(axes, panels, strict=True):
        _draw_curves(axis, panel)
    axes[-1].set_xlabel("epoch")
    return _save(figure, path)


def _curve(rows: list[Mapping[str, Any]], key: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Epochs and values of `key`, ascending, only where finite."""
    points = {}
    for row in rows:
        epoch, value = row.get("epoch"), row.get(key)
        if epoch not in (None, "") and value not in (None, "") and math.isfinite(float(value)):
            points[float(epoch)] = float(value)
    epochs = sorted(points)
    return np.array(epochs), np.array([points[epoch] for epoch in epochs])


def _draw_curves(axis: Axes, curves: list[Any]) -> None:
    from matplotlib.ticker import MaxNLocator

    for label, _, colour, epochs, values in curves:
        marker = "o" if len(epochs) <= 30 else None
        axis.plot(epochs, values, color=colour, marker=marker, markersize=3.5, label=label)
        if label == "validation MAE":
            best = int(np.argmin(values))
            axis.plot(
                epochs[best],
                values[best],
                linestyle="none",
                marker="*",
                markersize=13,
                color=ORANGE,
                label=f"best: {values[best]:.4g} eV at epoch {epochs[best]:g}",
            )
    kinds = dict.fromkeys(label.split()[-1] for label, *_ in curves)
    axis.set_ylabel(f"{', '.join(kinds)} ({curves[0][1]})")
    _scale(axis, np.concatenate([values for *_, values in curves]))
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    first, last = axis.get_xlim()
    if last - first < 1:  # a single epoch
        axis.set_xlim(first - 0.5, last + 0.5)
    axis.legend(frameon=False)
    clean(axis)


def _scale(axis: Axes, values: NDArray[Any]) -> None:
    """Logarithmic where all values are positive and span more than a decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = float(values.min()), float(values.max())
    if low <= 0 or high <= 10 * low:
        return
    axis.set_yscale("log")
    few = high < 1000 * low
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())


def parity(results: Mapping[str, SplitResult], path: str | Path) -> Path:
    """Plot predictions against targets, one panel a split; give the path back.

    All panels share equal axes: the targets' range, and predictions up to a quarter of it
    beyond. Those further out are drawn as triangles at the rim, and counted.

    Args:
        results: {split: result}, as given by `evaluate_splits`.
        path: where to write; the suffix tells the format.

    Raises:
        ValueError: no results.
    """
    if not results:
        raise ValueError("nothing to plot: no split was evaluated")
    columns = math.ceil(math.sqrt(len(results)))
    lines = math.ceil(len(results) / columns)
    figure = new_figure(0.6 + 3.6 * columns, 0.4 + 4.1 * lines, "compressed")
    axes = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    shared = limits(list(results.values()))
    for axis, (split, result) in zip(axes.flat, results.items(), strict=False):
        _draw_parity(axis, split, result, shared)
    for axis in axes.flat[len(results) :]:
        axis.set_axis_off()
    for column in range(columns):
        below = (len(results) - 1 - column) // columns
        axes[below, column].set_xlabel("target (eV)")
        axes[below, column].tick_params(labelbottom=True)
    for axis in axes[:, 0]:
        axis.set_ylabel("prediction (eV)")
    return _save(figure, path)


def limits(results: list[SplitResult]) -> tuple[float, float]:
    """Both axes of parity plots, eV: the targets' range, and predictions up to a quarter beyond."""
    target = np.concatenate([result.target for result in results])
    prediction = np.concatenate([result.prediction for result in results])
    low, high = float(target.min()), float(target.max())
    reach = 0.25 * max(high - low, 1.0)
    low = min(low, max(float(prediction.min()), low - reach))
    high = max(high, min(float(prediction.max()), high + reach))
    margin = 0.05 * max(high - low, 1.0)
    return low - margin, high + margin


def _draw_parity(axis: Axes, split: str, result: SplitResult, limits: tuple[float, float]) -> None:
    from matplotlib.ticker import MaxNLocator

    metrics = result.metrics
    systems = "1 system" if metrics["count"] == 1 else f"{metrics['count']:,d} systems"
    axis.set_title(f"{label(split)}\nMAE {metrics['mae']:.3f} eV, {systems}", fontsize=11)
    axis.plot(limits, limits, color=GREY, linewidth=1, zorder=1)
    draw_points(axis, result, limits)
    axis.set(xlim=limits, ylim=limits, aspect="equal")
    for direction in (axis.xaxis, axis.yaxis):
        direction.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 5, 10]))
    clean(axis)


def draw_points(
    axis: Axes, result: SplitResult, limits: tuple[float, float], rasterized: bool = False
) -> None:
    """One point a system, or a density where they are many; triangles for those beyond `limits`.

    Args:
        axis: to draw on.
        result: of a split.
        limits: of both axes, eV.
        rasterized: whether an SVG holds the points as a picture, which keeps it small.
    """
    low, high = limits
    target, prediction = result.target, result.prediction
    inside = (prediction >= low) & (prediction <= high)
    if len(target) > _MANY:
        axis.hexbin(
            target[inside],
            prediction[inside],
            gridsize=70,
            extent=(low, high, low, high),
            bins="log",
            mincnt=1,
            cmap="viridis",
            linewidths=0.1,
            rasterized=rasterized,
            zorder=2,
        )
        text = "brighter: more systems (log)"
        axis.text(0.03, 0.9, text, transform=axis.transAxes, color=GREY, fontsize=8)
    else:
        alpha = min(0.7, 12 / math.sqrt(len(target)))
        axis.scatter(
            target[inside],
            prediction[inside],
            s=10,
            color=BLUE,
            alpha=alpha,
            linewidths=0,
            rasterized=rasterized,
            zorder=2,
        )
    outside = int((~inside).sum())
    if outside:
        inset = 0.015 * (high - low)
        for beyond, marker, rim in (
            (prediction > high, "^", high - inset),
            (prediction < low, "v", low + inset),
        ):
            y = np.full(int(beyond.sum()), rim)
            axis.scatter(target[beyond], y, marker=marker, s=26, color=ORANGE, zorder=3)
        text = f"{outside} prediction{'s' * (outside > 1)} beyond the axes"
        axis.text(0.97, 0.03, text, transform=axis.transAxes, ha="right", color=ORANGE, fontsize=8)


def label(text: str) -> str:
    r"""A name as matplotlib shows it: no formulas between $, nothing that cannot be drawn.

    Example:
        >>> label("val$id$"), label("_mine")
        ('val\\$id\\$', ' _mine')
    """
    text = printable(text).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text  # left out of legends otherwise


def clean(axis: Axes) -> None:
    """A faint grid, and no frame above and to the right."""
    axis.grid(True, which="major", linewidth=0.5, alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)


def new_figure(
    width: float, height: float, layout: Literal["constrained", "compressed"] = "constrained"
) -> Figure:
    """An empty figure, in inches, that pyplot knows nothing of.

    Raises:
        ImportError: no matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install matplotlib") from error

    figure = Figure(figsize=(width, height), layout=layout)
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, path: str | Path) -> Path:
    with temporary_path(path) as temporary:
        figure.savefig(temporary, dpi=150)
    return Path(path)
