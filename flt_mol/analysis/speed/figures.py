"""Pictures of benchmarks: time and memory over sizes, and bars of models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from flt_mol.analysis.drawing import BLUE, GREEN, GREY, ORANGE, clean, new_figure
from flt_mol.analysis.speed.layers import LAYERS
from flt_mol.analysis.speed.model_tables import series
from flt_mol.analysis.speed.records import Record
from flt_mol.analysis.speed.tables import by_setting
from flt_mol.analysis.speed.training_step import MODELS, OURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_lengths", "draw_nothing", "draw_one_system", "draw_training_step"]

_COLOURS = (BLUE, GREEN, "#7fb069", GREY, ORANGE, "#8e5aa8", "#b89b2e")
Line = tuple[Sequence[float], Sequence[float]]


def draw_nothing(records: list[Record]) -> None:
    """No picture of this benchmark."""


def draw_lengths(records: list[Record]) -> Figure | None:
    """Time and memory of whole layers over lengths, forward, under the first setting."""
    first = next(iter(by_setting(records).values()))
    points = sorted(
        (r for r in first if (r.point["part"], r.point["passes"]) == ("block", "forward")),
        key=lambda record: int(record.point["tokens"]),
    )
    results = [(r.point["tokens"], r.result) for r in points if r.result]
    times = {name: _line(results, "seconds", name) for name in LAYERS}
    memory = {name: _line(results, "bytes", name, 1e-6) for name in LAYERS}
    return _two_panels(times, memory, "tokens", "ms", "MB") if results else None


def _line(
    results: list[tuple[int, dict[str, Any]]], kind: str, name: str, scale: float = 1e3
) -> Line:
    found = [(n, result[kind][name]) for n, result in results if name in result[kind]]
    costs = [median(cost) if isinstance(cost, list) else cost for _, cost in found]
    return [n for n, _ in found], [scale * cost for cost in costs]


def draw_one_system(records: list[Record]) -> Figure | None:
    """Time and memory over atoms, under the first setting."""
    times: dict[str, Line] = {}
    memory: dict[str, Line] = {}
    for (what, passes), points in series(next(iter(by_setting(records).values()))).items():
        results = [record.result for record in points if record.result]
        atoms = [result["atoms"] for result in results]
        name = f"{what}, {passes}"
        times[name] = atoms, [median(result["seconds"]) for result in results]
        memory[name] = atoms, [result["bytes"] / 1e9 for result in results]
    return _two_panels(times, memory, "atoms", "s", "GB") if times else None


def _two_panels(
    times: Mapping[str, Line],
    memory: Mapping[str, Line],
    size: str,
    seconds: str,
    bytes_: str,
) -> Figure:
    figure = new_figure(9.0, 3.6)
    left, right = figure.subplots(1, 2)
    for axis, lines, unit in ((left, times, seconds), (right, memory, bytes_)):
        for index, (name, (sizes, costs)) in enumerate(lines.items()):
            colour = _COLOURS[index % len(_COLOURS)]
            style = "-" if index < len(_COLOURS) else "--"
            axis.plot(sizes, costs, style, marker="o", markersize=3, color=colour, label=name)
        axis.set(xscale="log", yscale="log", xlabel=size, ylabel=unit)
        every = sorted({n for sizes, _ in lines.values() for n in sizes})
        axis.set_xticks(every, [_short(n) for n in every], fontsize=8)
        axis.minorticks_off()
        clean(axis)
    left.set_title("time", fontsize=10)
    right.set_title("memory", fontsize=10)
    lines_drawn = left.get_lines()
    names = [str(line.get_label()) for line in lines_drawn]
    figure.legend(lines_drawn, names, loc="outside right center", frameon=False, fontsize=8)
    return figure


def _short(number: float) -> str:
    """Sizes as ticks.

    Example:
        >>> _short(512), _short(8192), _short(1_000_188)
        ('512', '8k', '1M')
    """
    for unit, name in ((1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.0f}{name}"
    return f"{number:.0f}"


def draw_training_step(records: list[Record]) -> Figure | None:
    """Atoms per second and memory per atom of each model, under the first setting."""
    first = next(iter(by_setting(records).values()))
    result = next((record.result for record in reversed(first) if record.result), None)
    if result is None:
        return None
    names = [name for name in MODELS if name in result["seconds"]][::-1]
    atoms = result["atoms"]
    speed = [atoms[name] / median(result["seconds"][name]) for name in names]
    memory = [result["bytes"][name] / atoms[name] / 1e3 for name in names]
    figure = new_figure(9.0, 2.8)
    left, right = figure.subplots(1, 2, sharey=True)
    _bars(left, names, speed, "atoms/s, forward and backward")
    _bars(right, names, memory, "kB an atom, at once")
    return figure


def _bars(axis: Axes, names: Sequence[str], values: Sequence[float], label: str) -> None:
    colours = [BLUE if name in (OURS, "flt-small", "flt-base") else GREY for name in names]
    axis.barh(names, values, color=colours)
    axis.set_xlabel(label)
    clean(axis)
