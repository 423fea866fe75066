"""Figures without pyplot: colours, axes, small PNG files, curves of runs; and a short fit."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor, nn

BLUE, ORANGE, GREEN, GREY = "#2a6f9e", "#d1622b", "#3d8c5c", "#6b6b6b"


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def clean(axis: Any) -> None:
    """Draw a faint grid; no frame above and to the right."""
    axis.grid(True, which="major", linewidth=0.5, alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)


def save(figure: Figure, path: str | Path, colours: int = 256) -> Path:
    """Write a PNG of at most `colours` colours, which keeps it small."""
    from PIL import Image

    canvas: Any = figure.canvas
    canvas.draw()
    image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    image.quantize(colours, dither=Image.Dither.NONE).save(path, optimize=True)
    return Path(path)


def fit(
    parameters: Iterable[nn.Parameter], loss: Callable[[], Tensor], steps: int, rate: float
) -> None:
    """Minimise a loss by Adam, with a cosine decay of the learning rate from `rate` to 0."""
    optimizer = torch.optim.Adam(parameters, lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.enable_grad():
            loss().backward()
        optimizer.step()
        schedule.step()


def curves(runs: Mapping[str, Path]) -> Figure:
    """MAE in training (dotted) and validation by step, from the logs of runs.

    Args:
        runs: folders of `flt-mol train` by label.

    Raises:
        FileNotFoundError: a run without logs.
    """
    figure = new_figure(5.2, 3.4)
    axis = figure.subplots()
    for (label, folder), colour in zip(runs.items(), cycle((GREY, ORANGE, BLUE, GREEN))):
        rows = read_log(folder)
        steps = [row["step"] + 1 for row in rows]
        axis.plot(steps, [row["train/mae"] for row in rows], ":", color=colour)
        axis.plot(steps, [row["val/mae"] for row in rows], ".-", color=colour, label=label)
    axis.set(xlabel="step", ylabel="MAE (eV)", yscale="log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("{x:g}")
    axis.legend(frameon=False, title="validation (dotted: training)")
    clean(axis)
    return figure


def read_log(folder: Path) -> list[dict[str, float]]:
    """Rows of a run's `logs/csv/metrics.csv`, an epoch each; empty cells are skipped."""
    with (folder / "logs" / "csv" / "metrics.csv").open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        return [{k: float(v) for k, v in row.items() if v} for row in rows]
