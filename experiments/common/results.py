"""Results files (JSON lines) and Markdown tables."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any


class Results:
    """A file of JSON lines that several processes may append to; a torn line is skipped."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def read(self, **values: Any) -> list[dict[str, Any]]:
        """Lines whose fields have these values, in order."""
        if not self.path.exists():
            return []
        found = []
        for line in self.path.read_bytes().split(b"\n"):
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and all(record.get(k) == v for k, v in values.items()):
                found.append(record)
        return found

    def latest(self, key: str = "seed", **values: Any) -> list[dict[str, Any]]:
        """As `read`, but the last line of each value of `key` only, sorted by it."""
        found = {record[key]: record for record in self.read(**values)}
        return [found[k] for k in sorted(found)]

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a line; ValueError for numbers that are not finite."""
        line = json.dumps(dict(record), allow_nan=False).encode() + b"\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            if file.tell() and (file.seek(-1, os.SEEK_END), file.read())[1] != b"\n":
                line = b"\n" + line
            file.write(line)


def mean_sd(values: Iterable[float], digits: int = 4) -> str:
    """Mean ± sample standard deviation as text; a dash where there is nothing.

    Examples:
        >>> mean_sd([1.0, 3.0], 2), mean_sd([2.0], 1), mean_sd([])
        ('2.00 ± 1.41', '2.0', '–')
    """
    found = list(values)
    if not found:
        return "–"
    text = f"{fmean(found):.{digits}f}"
    return text if len(found) == 1 else f"{text} ± {stdev(found):.{digits}f}"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table with aligned columns, the first to the left and the others to the right.

    Examples:
        >>> print(markdown_table(["σ (Å)", "R"], [(1, 4921), (2, 995)]))
        | σ (Å) |    R |
        | ----- | ---: |
        | 1     | 4921 |
        | 2     |  995 |
    """
    cells = [list(head), *([str(cell) for cell in row] for row in rows)]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        " | ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    lines.insert(
        1, " | ".join(["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    )
    return "\n".join(f"| {line} |" for line in lines)
