"""Plots for the HTML report, as inline SVG that takes the page's colour of text."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from flt_mol.evaluation import plots
from flt_mol.evaluation.collecting import SplitResult
from flt_mol.evaluation.metrics import EWT_THRESHOLD
from flt_mol.evaluation.page import safe

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["ewt_svg", "histogram_svg", "parity_svg"]

_TEXT = "#010203"  # stands for the page's own colour of text until the SVG is written
_WIDTH, _HEIGHT = 4.0, 3.6  # inches: of a panel, that phones show at about its size
_BINS = 60
_DASHES = ("-", "--", "-.", ":", (0, (3, 1, 1, 1, 1, 1)))
_COLOURS = ("#2a8fce", "#d1622b", "#3d9c5c", "#a869c9", "#8a8a8a")

Results = Mapping[str, SplitResult]


def parity_svg(results: Results, split: str) -> str:
    """Predictions of one split against its targets, within the axes that all splits share."""
    figure, axis = _panel()
    limits = plots.limits(list(results.values()))
    axis.plot(limits, limits, color=plots.GREY, linewidth=1, zorder=1)
    plots.draw_points(axis, results[split], limits, rasterized=True)
    axis.set(xlim=limits, ylim=limits, aspect="equal")
    axis.set(xlabel="target (eV)", ylabel="prediction (eV)")
    return _svg(
        figure, f"parity-{list(results).index(split)}", f"Predictions against targets of {split}."
    )


def histogram_svg(results: Results, split: str) -> str:
    """How many systems have which error, prediction − target; the same axis for all splits."""
    figure, axis = _panel()
    reach = max(float(np.quantile(np.abs(r.error), 0.99)) for r in results.values()) or 1.0
    error = results[split].error
    inside = np.abs(error) <= reach
    axis.hist(error[inside], bins=_BINS, range=(-reach, reach), color=plots.BLUE)
    axis.locator_params(axis="x", nbins=5)
    axis.axvline(0, color=plots.GREY, linewidth=1)
    axis.axvline(float(error.mean()), color=plots.ORANGE, linewidth=1.5, linestyle="--")
    axis.set(xlabel="error: prediction − target (eV)", ylabel="systems", xlim=(-reach, reach))
    axis.set_title("dashed: mean error", fontsize=9, color=plots.ORANGE, loc="left")
    outside = int((~inside).sum())
    if outside:
        axis.set_title(f"{outside} beyond the axis", fontsize=9, color=_TEXT, loc="right")
    return _svg(
        figure, f"histogram-{list(results).index(split)}", f"Histogram of the errors of {split}."
    )


def ewt_svg(curves: Mapping[str, Mapping[str, Any]]) -> str:
    """Fraction of systems within a threshold, against the threshold, a line for each split.

    Args:
        curves: {split: {"thresholds": eV, "fractions"}}.
    """
    figure, axis = _panel(5.0)
    for i, (split, curve) in enumerate(curves.items()):
        style: dict[str, Any] = {"color": _COLOURS[i % 5], "linestyle": _DASHES[i % 5]}
        percent = 100 * np.array(curve["fractions"])
        axis.plot(curve["thresholds"], percent, label=plots.label(split), linewidth=1.8, **style)
    axis.axvline(EWT_THRESHOLD, color=plots.GREY, linewidth=1)
    axis.text(EWT_THRESHOLD, 101, f"{EWT_THRESHOLD:g} eV", ha="center", fontsize=9, color=_TEXT)
    axis.set(xscale="log", xlim=(1e-3, 10), ylim=(0, 100))
    axis.set(xlabel="threshold (eV)", ylabel="systems with a smaller error (%)")
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.legend(frameon=False, labelcolor=_TEXT, fontsize=9)
    names = ", ".join(curves)
    return _svg(figure, "ewt", f"Energies within threshold against the threshold: {names}.")


def _panel(width: float = _WIDTH) -> tuple[Figure, Axes]:
    figure = plots.new_figure(width, _HEIGHT)
    axis = figure.subplots()
    plots.clean(axis)
    return figure, axis


def _svg(figure: Figure, name: str, description: str) -> str:
    """The figure as an `<svg>` element: no fixed size, text as text, names of its own."""
    import matplotlib as mpl

    for axis in figure.axes:
        axis.tick_params(which="both", color=_TEXT, labelcolor=_TEXT)
        for label in (axis.xaxis.label, axis.yaxis.label):
            label.set_color(_TEXT)
        for spine in axis.spines.values():
            spine.set_color(_TEXT)
    written = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(written, format="svg", metadata=nothing, transparent=True, dpi=130)
    return _inline(written.getvalue(), name, description)


def _inline(svg: str, prefix: str, description: str) -> str:
    """Without the head of a file, with names that no other figure of the page has."""
    svg = svg[svg.index("<svg") :].strip().replace(_TEXT, "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", svg)
    for size in ("width", "height"):
        svg = re.sub(rf'^<svg([^>]*?) {size}="[^"]*"', r"<svg\1", svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{safe(description)}"', 1)
