"""Tables as plain text that is Markdown too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["markdown_table"]


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table with aligned columns, the first to the left and the others to the right.

    Args:
        head: names of the columns.
        rows: cells, as many in each row; shown by `str`.

    Raises:
        ValueError: a row of another length.

    Example:
        >>> print(markdown_table(["σ (Å)", "R"], [(1, 4921), (2, 995)]))
        | σ (Å) |    R |
        | ----- | ---: |
        | 1     | 4921 |
        | 2     |  995 |
    """
    cells = [list(head), *([str(cell) for cell in row] for row in rows)]
    if any(len(row) != len(head) for row in cells):
        raise ValueError(f"every row needs {len(head)} cells: {', '.join(head)}")
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        " | ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines.insert(1, " | ".join(rule))
    return "\n".join(f"| {line} |" for line in lines)
