"""Tables and files of evaluated splits: plain text, rich, JSON and CSV."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flt_mol.evaluation.splits import SplitResult
from flt_mol.files import temporary_path

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["maes", "rich_table", "table", "table_rows", "write_csv", "write_json"]

Results = Mapping[str, SplitResult]
Baselines = Mapping[str, Mapping[str, float]]


def maes(results: Results) -> dict[str, float]:
    """{split: MAE in eV}: what the tables take for each baseline."""
    return {split: result.metrics["mae"] for split, result in results.items()}


def table_rows(results: Results, baselines: Baselines | None = None) -> list[list[str]]:
    """Heading and one row a split: split, systems, MAE (eV), EwT (%), then each baseline's MAE.

    Args:
        results: {split: result}, as given by `evaluate_splits`.
        baselines: {baseline: {split: MAE in eV}}, such as
            ``{"constant": maes(...), "composition": maes(...)}``. Each adds its MAE and the
            ratio MAE of the model / MAE of the baseline: below 1, the model is better. A split
            that a baseline lacks shows "-".
    """
    baselines = baselines or {}
    heading = ["split", "systems", "MAE (eV)", "EwT (%)"]
    for name in baselines:
        heading += [f"{name} (eV)", f"MAE/{name}"]
    rows = [heading]
    for split, result in results.items():
        m = result.metrics
        row = [split, f"{m['count']:d}", f"{m['mae']:.4f}", f"{100 * m['ewt']:.2f}"]
        for values in baselines.values():
            value = values.get(split)
            row.append("-" if value is None else f"{value:.4f}")
            row.append(f"{m['mae'] / value:.3f}" if value else "-")
        rows.append(row)
    return rows


def table(results: Results, baselines: Baselines | None = None) -> str:
    """:func:`table_rows` as aligned plain text, without a newline at its end."""
    rows = table_rows(results, baselines)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells[1:]]))
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def rich_table(results: Results, baselines: Baselines | None = None) -> Table:
    """:func:`table_rows` for a rich console."""
    from rich.table import Table

    heading, *rows = table_rows(results, baselines)
    made = Table()
    for column in heading:
        made.add_column(column, justify="left" if column == "split" else "right")
    for row in rows:
        made.add_row(*row)
    return made


def write_json(
    results: Results,
    path: str | Path,
    baselines: Baselines | None = None,
    **further: Any,
) -> Path:
    """Write metrics, paths and elements never trained on of each split; give the path back.

    The file holds ``{"units": …, **further, "splits": {split: {"count": …, "mae": …, "ewt": …,
    "rmse": …, "me": …, "path": …, "unseen": […]}}, "baselines": {baseline: {split: MAE}}}``.
    Energies are in eV, `ewt` is a fraction.

    Args:
        results: {split: result}, as given by `evaluate_splits`.
        path: where to write.
        baselines: {baseline: {split: MAE in eV}}, as for :func:`table_rows`.
        **further: more plain values, such as the checkpoint's name.
    """
    content = {
        "units": {"mae": "eV", "rmse": "eV", "me": "eV", "ewt": "fraction"},
        **further,
        "splits": {
            split: {**result.metrics, "path": result.path, "unseen": list(result.unseen)}
            for split, result in results.items()
        },
        "baselines": {name: dict(values) for name, values in (baselines or {}).items()},
    }
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    with temporary_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return Path(path)


def write_csv(results: Results, path: str | Path) -> Path:
    """Write every prediction, columns split,sid,energy,target (eV); give the path back.

    Numbers are written so that reading gives the same float64 back.
    """
    with temporary_path(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as f:
        writer = csv.writer(f, lineterminator="\n")
        writer.writerow(["split", "sid", "energy", "target"])
        for split, result in results.items():
            columns = (result.prediction.tolist(), result.target.tolist())
            for sid, energy, target in zip(result.sid, *columns, strict=True):
                writer.writerow([split, sid, repr(energy), repr(target)])
    return Path(path)
