"""Tables and files of evaluated splits: plain text, rich, JSON and CSV."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flt_mol.evaluation.collecting import SplitResult
from flt_mol.evaluation.summary import ALL
from flt_mol.evaluation.systems import COLUMNS
from flt_mol.files import temporary_path
from flt_mol.outputs import counted

if TYPE_CHECKING:
    from rich.table import Table

__all__ = [
    "held_out_lines",
    "maes",
    "rich_table",
    "table",
    "table_rows",
    "trained_on_lines",
    "write_csv",
    "write_json",
]

Results = Mapping[str, SplitResult]
Summary = Mapping[str, Any]


def maes(results: Results) -> dict[str, float]:
    """{split: MAE in eV}: what a summary takes for each baseline."""
    return {split: result.metrics["mae"] for split, result in results.items()}


def table_rows(summary: Summary) -> list[list[str]]:
    """Heading, one row a split, and one for all splits where there are several.

    Columns: split, systems, MAE (eV) and EwT (%) with their 95 % intervals, RMSE (eV), median of
    |error| (eV), then each baseline's MAE (eV); "-" where a split lacks it.

    Args:
        summary: of :func:`~flt_mol.evaluation.summary.summarise`.
    """
    level = f"{100 * summary['intervals']['level']:g} %"
    baselines = summary["baselines"]
    rows = [["split", "systems", f"MAE (eV, {level})", f"EwT (%, {level})", "RMSE", "median"]]
    rows[0] += list(baselines)
    for split, m in shown_splits(summary).items():
        (low, high), (least, most) = m["intervals"]["mae"], m["intervals"]["ewt"]
        row = [split, f"{m['count']:d}", f"{m['mae']:.4f} [{low:.4f}, {high:.4f}]"]
        row.append(f"{100 * m['ewt']:.2f} [{100 * least:.2f}, {100 * most:.2f}]")
        row += [f"{m['rmse']:.4f}", f"{m['median_ae']:.4f}"]
        row += [f"{of[split]:.4f}" if split in of else "-" for of in baselines.values()]
        rows.append(row)
    return rows


def shown_splits(summary: Summary) -> dict[str, Mapping[str, Any]]:
    """{split: metrics}, all splits together last where a summary has that."""
    together = {ALL: summary[ALL]} if ALL in summary else {}
    return {**summary["splits"], **together}


def table(summary: Summary) -> str:
    """:func:`table_rows` as aligned plain text, without a newline at its end."""
    rows = table_rows(summary)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells[1:]]))
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def held_out_lines(summary: Summary) -> list[str]:
    """Of splits that a run held out of its training split: what they are, one line each."""
    return [
        f"{split}: the {counted(summary['splits'][split]['count'], 'system')} of {path} that "
        "training held out"
        for split, path in summary.get("held_out", {}).items()
    ]


def trained_on_lines(summary: Summary) -> list[str]:
    """Of splits with systems that the model was trained on: how many, one line each."""
    return [
        f"{split}: {count:,} of its {counted(summary['splits'][split]['count'], 'system')} were "
        "trained on; their errors say nothing of new ones"
        for split, count in summary.get("trained_on", {}).items()
    ]


def rich_table(summary: Summary) -> Table:
    """:func:`table_rows` for a rich console."""
    from rich.table import Table
    from rich.text import Text

    heading, *rows = table_rows(summary)
    made = Table()
    for column in heading:
        made.add_column(column, justify="left" if column == "split" else "right")
    for row in rows:
        made.add_row(*map(Text, row))  # what is in brackets is no markup
    return made


def write_json(summary: Summary, path: str | Path) -> Path:
    """Write a summary of :func:`~flt_mol.evaluation.summary.summarise`; give the path back."""
    text = json.dumps(summary, indent=1, allow_nan=False) + "\n"
    with temporary_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
    return Path(path)


def write_csv(results: Results, path: str | Path) -> Path:
    """Write every prediction; give the path back.

    Columns are split, sid, energy, target (eV), and those of natoms, adsorbate, elements, facet,
    trained_on and held_out (yes or no) that some split has. Numbers are written so that reading
    gives the same float64 back.
    """
    names = [c for c in COLUMNS if any(c in result.columns for result in results.values())]
    with (
        temporary_path(path) as temporary,
        temporary.open("w", newline="", encoding="utf-8", errors="backslashreplace") as f,
    ):
        writer = csv.writer(f, lineterminator="\n")
        writer.writerow(["split", "sid", "energy", "target", *names])
        for split, result in results.items():
            nothing = (None,) * len(result.sid)
            further = [result.columns.get(name, nothing) for name in names]
            energies = (map(repr, result.prediction.tolist()), map(repr, result.target.tolist()))
            for sid, energy, target, *rest in zip(result.sid, *energies, *further, strict=True):
                writer.writerow([split, sid, energy, target, *rest])
    return Path(path)
