"""Figures without pyplot: colours, axes, small PNG files; and a short fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
