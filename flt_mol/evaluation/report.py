"""Tables and files of evaluated splits: plain text, rich, JSON, CSV and HTML."""

from __future__ import annotations

import base64
import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flt_mol.evaluation import plots
from flt_mol.evaluation.splits import COLUMNS, SplitResult, unfixed_message
from flt_mol.evaluation.summary import shown_splits
from flt_mol.files import temporary_path
from flt_mol.prediction.energies import unseen_message

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["notes", "rich_table", "table", "write_csv", "write_html", "write_json"]

Results = Mapping[str, SplitResult]
Summary = Mapping[str, Any]


def _table_rows(summary: Summary) -> list[list[str]]:
    """Heading, one row a split, and one for all splits where there are several."""
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


def table(summary: Summary) -> str:
    """A summary as aligned plain text: a row a split, and one for all where there are several.

    Columns: split, systems, MAE (eV) and EwT (%) with their 95 % intervals, RMSE (eV), median of
    |error| (eV), then each baseline's MAE (eV); "-" where a split lacks it.

    Args:
        summary: of :func:`~flt_mol.evaluation.summary.summarise`.
    """
    rows = _table_rows(summary)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells[1:]]))
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def rich_table(summary: Summary) -> Table:
    """:func:`table` for a rich console."""
    from rich.table import Table
    from rich.text import Text

    heading, *rows = _table_rows(summary)
    made = Table()
    for column in heading:
        made.add_column(column, justify="left" if column == "split" else "right")
    for row in rows:
        made.add_row(*map(Text, row))  # what is in brackets is not markup
    return made


def notes(summary: Summary) -> dict[str, list[str]]:
    """What there is to say of some splits, by kind: "held_out", "trained_on", "skipped"."""
    counts = {split: f"{m['count']:,} systems" for split, m in summary["splits"].items()}
    return {
        "held_out": [
            f"{split}: the {counts[split]} of {path} that training held out"
            for split, path in summary.get("held_out", {}).items()
        ],
        "trained_on": [
            f"{split}: {count:,} of its {counts[split]} have sids that the model was trained on; "
            "the errors of these systems say nothing of new ones"
            for split, count in summary.get("trained_on", {}).items()
        ],
        "skipped": [
            f"{split}: {count:,} invalid records were skipped"
            for split, count in summary.get("skipped", {}).items()
        ],
    }


def write_json(summary: Summary, path: str | Path) -> Path:
    """Write a summary of :func:`~flt_mol.evaluation.summary.summarise`; return the path."""
    return _write(json.dumps(summary, indent=1, allow_nan=False) + "\n", path)


def write_csv(results: Results, path: str | Path) -> Path:
    """Write every prediction; return the path.

    Columns are split, sid, energy, target (eV), and those of
    :data:`~flt_mol.evaluation.splits.COLUMNS` that some split has. Numbers read back as the same
    float64.
    """
    names = [c for c in COLUMNS if any(c in result.columns for result in results.values())]
    with (
        temporary_path(path) as temporary,
        temporary.open("w", newline="", encoding="utf-8", errors="backslashreplace") as f,
    ):
        writer = csv.writer(f, lineterminator="\n")
        writer.writerow(["split", "sid", "energy", "target", *names])
        for split, result in results.items():
            further = [result.columns.get(name, (None,) * len(result.sid)) for name in names]
            energies = (result.prediction.tolist(), result.target.tolist())
            for row in zip(result.sid, *energies, *further, strict=True):
                writer.writerow([split, *row])
    return Path(path)


def write_html(summary: Summary, results: Results, path: str | Path) -> Path:
    """Write the report: one file that opens from disk, without scripts or network; return the path.

    Args:
        summary: of :func:`~flt_mol.evaluation.summary.summarise`.
        results: what it is of; worst systems whose structures they hold are drawn.
        path: of the file.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    shown = shown_splits(summary)
    lines = [line for of_kind in notes(summary).values() for line in of_kind]
    if unseen := sorted({symbol for r in results.values() for symbol in r.unseen}):
        lines.append(unseen_message(unseen))
    if unfixed := [split for split, r in results.items() if r.unfixed]:
        lines.append(unfixed_message(unfixed))
    drawn = {
        (split, str(system.sid[0])): plots.system_png(system)
        for split, result in results.items()
        for system in result.worst
        if any(x["split"] == split and x["sid"] == system.sid[0] for x in summary["worst"])
    }
    environment = Environment(
        loader=PackageLoader("flt_mol.evaluation", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["png"] = lambda data: base64.b64encode(data).decode("ascii")
    text = environment.get_template("report.html.jinja").render(
        summary=summary,
        title=f"Evaluation of {summary.get('checkpoint', summary.get('predictions', 'splits'))}",
        shown=shown,
        last=list(shown)[-1],
        notes=lines,
        figures=[
            ("Predictions and targets; line: equal", plots.parity_png(results)),
            ("Errors, prediction − target", plots.errors_png(results)),
            (
                "Energies within threshold",
                plots.ewt_png({split: m["ewt_curve"] for split, m in shown.items()}),
            ),
        ],
        drawn=drawn,
    )
    return _write("".join(c if c.isprintable() or c in "\n\t" else "?" for c in text), path)


def _write(text: str, path: str | Path) -> Path:
    with temporary_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
    return Path(path)
