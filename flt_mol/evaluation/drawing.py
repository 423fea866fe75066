"""Pictures of single systems, from above and from the side."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flt_mol.evaluation import plots
from flt_mol.structures import Structures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["system_png"]

_HIGHLIGHT = "#e6007e"
_OUTLINE = "#808080"  # seen on white and on black
_VIEWS = (("from above", (0, 1), 2, 1.0), ("from the side", (0, 2), 1, -1.0))
_EDGES = [(a, a ^ bit) for a in range(8) for bit in (1, 2, 4) if not a & bit]

Array = NDArray[np.float64]


def system_png(system: Structures) -> bytes:
    """One system seen along −z and along y, its adsorbate outlined, its cell drawn; a PNG.

    Atoms have the colours of Jmol and 0.9 of their covalent radii, nearer ones cover those behind;
    the background is transparent, so that it suits light and dark pages.

    Args:
        system: B = 1.
    """
    positions = system.positions.double().cpu().numpy()
    cell = system.cell[0].double().cpu().numpy()
    corners = np.array([[(a >> i) & 1 for i in range(3)] for a in range(8)]) @ cell
    figure = plots.new_figure(3.8, 2.3)
    axes = figure.subplots(1, 2)
    for axis, (title, plane, depth, towards) in zip(axes, _VIEWS, strict=True):
        order = np.argsort(towards * positions[:, depth], kind="stable")
        _draw_cell(axis, corners[:, plane])
        _draw_atoms(axis, system, positions[:, plane], order)
        axis.set_title(title, fontsize=9, color=_OUTLINE)
    _name_elements(figure, system)
    written = io.BytesIO()
    figure.savefig(written, format="png", dpi=150, transparent=True, metadata={"Software": None})
    return written.getvalue()


def _draw_atoms(axis: Axes, system: Structures, at: Array, order: NDArray[np.int64]) -> None:
    from ase.data import covalent_radii
    from matplotlib.collections import EllipseCollection

    numbers = system.atomic_numbers.cpu().numpy()[order]
    adsorbate = system.tags.cpu().numpy()[order] == 2
    width = 1.8 * covalent_radii[numbers]
    atoms = EllipseCollection(
        width,
        width,
        np.zeros(len(width)),
        units="xy",
        offsets=at[order],
        transOffset=axis.transData,
        facecolors=_colours(numbers),
        edgecolors=[_HIGHLIGHT if a else "#303030" for a in adsorbate],
        linewidths=np.where(adsorbate, 2.0, 0.5),
    )
    axis.add_collection(atoms)
    edge = float(width.max(initial=1.0)) / 2
    axis.update_datalim([at.min(0) - edge, at.max(0) + edge] if len(at) else [(0, 0), (1, 1)])
    axis.set_aspect("equal")
    axis.autoscale_view()
    axis.set_axis_off()


def _draw_cell(axis: Axes, corners: Array) -> None:
    from matplotlib.collections import LineCollection

    lines = [corners[[a, b]] for a, b in _EDGES]
    axis.add_collection(LineCollection(lines, colors=_OUTLINE, linewidths=0.8, zorder=0))
    axis.update_datalim(corners)


def _name_elements(figure: Figure, system: Structures) -> None:
    from ase.data import chemical_symbols
    from matplotlib.lines import Line2D

    numbers = np.unique(system.atomic_numbers.cpu().numpy())
    marks: list[Any] = [
        Line2D([], [], marker="o", linestyle="", color=colour, markeredgecolor="#303030")
        for colour in _colours(numbers)
    ]
    names = [chemical_symbols[z] for z in numbers]
    if bool((system.tags == 2).any()):
        ring: dict[str, Any] = {
            "markerfacecolor": "none",
            "markeredgecolor": _HIGHLIGHT,
            "markeredgewidth": 2,
        }
        marks.append(Line2D([], [], marker="o", linestyle="", **ring))
        names.append("adsorbate")
    figure.legend(
        marks,
        names,
        loc="outside lower center",
        ncols=len(names),
        frameon=False,
        fontsize=8,
        labelcolor=_OUTLINE,
        handletextpad=0.1,
        columnspacing=1.0,
    )


def _colours(numbers: NDArray[Any]) -> Array:
    from ase.data.colors import jmol_colors

    colours: Array = np.asarray(jmol_colors[numbers], dtype=np.float64)
    return colours
