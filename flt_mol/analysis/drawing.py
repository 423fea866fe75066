"""What all pictures share: colours, figures without pyplot, small files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["BLUE", "GREEN", "GREY", "ORANGE", "clean", "new_figure", "save"]

BLUE, ORANGE, GREEN, GREY = "#2a6f9e", "#d1622b", "#3d8c5c", "#6b6b6b"


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches.

    Raises:
        ImportError: no matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def clean(axis: Axes) -> None:
    """A faint grid, and no frame above and to the right."""
    axis.grid(True, which="major", linewidth=0.5, alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)


def save(figure: Figure, path: str | Path, colours: int = 256) -> Path:
    """Write a PNG of at most so many colours, which keeps it small; give the path back."""
    from PIL import Image

    canvas: Any = figure.canvas
    canvas.draw()
    image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    image.quantize(colours, dither=Image.Dither.NONE).save(path, optimize=True)
    return Path(path)
