"""What the scripts share: options, progress, and writing tables, pictures and the page."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flt_mol.analysis.accuracy.results import Results
from flt_mol.analysis.drawing import save
from flt_mol.analysis.speed.points import ALLOCATORS, EXPLAINED, Setting
from flt_mol.analysis.speed.records import Record, latest, measured
from flt_mol.files import temporary_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["add_options", "inserted", "run"]

Render = Callable[[list[Record]], tuple[str, str]]
Draw = Callable[[list[Record]], "Figure | None"]


def add_options(parser: argparse.ArgumentParser, bench: str) -> None:
    """Options of every benchmark; ``docs`` is the folder of this checkout."""
    add = parser.add_argument
    add("--threads", type=int, nargs="+", default=[1], help="all points are run for each number")
    allocators = "; ".join(f"{name}: {meant}" for name, meant in EXPLAINED.items())
    add("--allocator", nargs="+", choices=list(ALLOCATORS), default=["default"], help=allocators)
    add("--limit-gb", type=float, default=20.0, help="memory of a point; what needs more stops")
    add("--missing", action="store_true", help="leave out points that have a line")
    add("--docs", type=Path, default=Path(__file__).parents[3] / "docs")
    add("--results", type=Path, help=f"JSON lines (default: tables/bench_{bench}.jsonl of --docs)")
    written = "measure nothing; write the table, the picture and the page's section"
    add("--render", action="store_true", help=written)


def run(
    bench: str,
    given: argparse.Namespace,
    points: Iterable[Mapping[str, Any]],
    render: Render,
    draw: Draw,
    size: str | None = None,
) -> None:
    """Measure and print, or, with ``--render``, write what was measured before.

    Args:
        bench: a name in `BENCHES`.
        given: what `add_options` added.
        points: arguments of the bench's function.
        render: from records to the table file and the section of the page.
        draw: from records to a picture; None where there is nothing to draw.
        size: see `measured`.
    """
    results = Results(given.results or given.docs / f"tables/bench_{bench}.jsonl")
    settings = [Setting(threads, allocator, given.limit_gb)
                for allocator in given.allocator for threads in given.threads]  # fmt: skip
    todo = measured(bench, points, settings, results, missing=given.missing, size=size)
    for record in () if given.render else todo:
        told = record.stopped or "done"
        print(f"{_shown(record.point)}, {record.setting.threads} thread(s): {told}", flush=True)
    records = latest(results, bench)
    if not records:
        print(f"nothing measured in {results.path}")
        return
    table, section = render(records)
    print(f"\n{table}")
    if given.render:
        _write(bench, given.docs, table, section, draw, records)


def _shown(point: Mapping[str, Any]) -> str:
    """Arguments that tell points apart, mostly: no lists, no nested ones."""
    plain = {name: value for name, value in point.items() if isinstance(value, str | int | float)}
    return ", ".join(f"{name} {value}" for name, value in plain.items())


def _write(
    bench: str, docs: Path, table: str, section: str, draw: Draw, records: list[Record]
) -> None:
    target = docs / f"tables/bench_{bench}.md"
    with temporary_path(target) as path:
        path.write_text(table + "\n", encoding="utf-8")
    parts = [
        section,
        f"In full, with quartiles: [tables/bench_{bench}.md](tables/bench_{bench}.md).",
    ]
    figure = draw(records)
    if figure is not None:
        parts.insert(1, f"![Time and memory](images/bench_{bench}.png)")
        with temporary_path(docs / f"images/bench_{bench}.png") as path:
            save(figure, path)
    page = docs / "speed.md"
    text = inserted(page.read_text("utf-8"), bench, "\n\n".join(parts))
    with temporary_path(page) as path:
        path.write_text(text, encoding="utf-8")


def inserted(page: str, name: str, section: str) -> str:
    r"""The page with what stands between ``<!-- bench: NAME -->`` and ``<!-- end -->`` replaced.

    Raises:
        ValueError: the page has no such place.

    Example:
        >>> inserted("a\n<!-- bench: x -->\nold\n<!-- end -->\nb", "x", "new")
        'a\n<!-- bench: x -->\n\nnew\n\n<!-- end -->\nb'
    """
    begin, end = f"<!-- bench: {name} -->", "<!-- end -->"
    place = re.compile(f"({re.escape(begin)}\n).*?({re.escape(end)})", flags=re.DOTALL)
    if not place.search(page):
        raise ValueError(f"the page has no place for this table: expected {begin} … {end} in it")
    return place.sub(lambda match: f"{match[1]}\n{section}\n\n{match[2]}", page)
