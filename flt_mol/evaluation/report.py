"""Tables and files of evaluated splits: plain text, JSON, CSV and HTML."""

from __future__ import annotations

import base64
import json
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, count, repeat
from pathlib import Path
from typing import Any

from flt_mol.evaluation import plots
from flt_mol.evaluation.splits import COLUMNS, Results, unseen_messages
from flt_mol.evaluation.summary import shown_splits
from flt_mol.files import some, temporary_path, write_rows

Summary = Mapping[str, Any]

_FORCES = {"forces_mae": "forces (eV/Å)", "forces_cosine": "cosine", "efwt": "EFwT (%)"}
_NOTES = {
    "held_out": "{split}: the {count:,} systems of {value} that training held out",
    "trained_on": "{split}: {value:,} of its {count:,} systems have sids that the model was "
    "trained on: if they are the same, errors on new systems are larger",
    "skipped": "{split}: {value:,} invalid records were skipped",
}

_ABOVE = "{split}: the MAE, {mae:.4f} eV, is not below that of a constant, {constant:.4f} eV"
_WORSE = (
    "{split}: predicted displacements are worse than none, {displacement:.3f} Å from the relaxed "
    "positions (unmoved {displacement_unmoved:.3f} Å)"
)


def table(summary: Summary) -> str:
    """A summary, as of `summarise`, as plain text: a row a split, and one for all of several.

    Columns: split, systems, MAE (eV) and EwT (%) with their 95 % intervals, RMSE (eV), median of
    |error| (eV); of forces MAE (eV/Å), cosine and EFwT (%), if any split has them; then each
    baseline's MAE (eV); "-" where a split lacks it.
    """
    level = f"{100 * summary['intervals']['level']:g} %"
    baselines = summary["baselines"]
    rows = [["split", "systems", f"MAE (eV, {level})", f"EwT (%, {level})", "RMSE", "median"]]
    forces = any("forces_mae" in m["further"] for m in summary["splits"].values())
    rows[0] += [*(_FORCES.values() if forces else ()), *baselines]
    for split, m in shown_splits(summary).items():
        (low, high), (least, most) = m["intervals"]["mae"], m["intervals"]["ewt"]
        row = [split, f"{m['count']:d}", f"{m['mae']:.4f} [{low:.4f}, {high:.4f}]"]
        row.append(f"{100 * m['ewt']:.2f} [{100 * least:.2f}, {100 * most:.2f}]")
        row += [f"{m['rmse']:.4f}", f"{m['median_ae']:.4f}"]
        for name in _FORCES if forces else ():
            value = m["further"].get(name)
            shown = "{:.2%}" if name == "efwt" else "{:.4f}"
            row.append("-" if value is None else shown.format(value).rstrip("%"))
        row += [f"{of[split]:.4f}" if split in of else "-" for of in baselines.values()]
        rows.append(row)
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    form = "  ".join([f"{{:<{first}}}", *(f"{{:>{width}}}" for width in others)])
    rows.insert(1, ["-" * width for width in (first, *others)])
    return "\n".join(form.format(*row) for row in rows)


def notes(summary: Summary) -> dict[str, list[str]]:
    """What there is to report of some splits, by kind, as "held_out"."""
    splits, baselines = summary["splits"], summary["baselines"]
    found = {
        kind: [
            text.format(split=split, count=splits[split]["count"], value=value)
            for split, value in summary.get(kind, {}).items()
        ]
        for kind, text in _NOTES.items()
    }
    found["displacement"] = [
        _WORSE.format(split=split, **m["further"])
        for split, m in splits.items()
        if m["further"].get("displacement", 0) > m["further"].get("displacement_unmoved", 0)
    ]
    found["constant"] = [
        _ABOVE.format(split=split, mae=splits[split]["mae"], constant=value)
        for split, value in (baselines.get("own median") or baselines.get("constant", {})).items()
        if split in splits and splits[split]["mae"] >= value
    ]
    return found


def write_json(summary: Summary, path: str | Path) -> Path:
    """Write a summary of `summarise`; return the path."""
    return _write(json.dumps(summary, indent=1, allow_nan=False) + "\n", path)


def write_csv(results: Results, path: str | Path) -> Path:
    """Write every prediction; return the path.

    Columns are split, sid, energy, target (eV), and those of `COLUMNS` that some split has. Numbers
    read back as the same float64.

    Warns:
        UserWarning: sids that a split has several times, which are written as SID#0, SID#1, …
    """
    names = [c for c in COLUMNS if any(c in result.columns for result in results.values())]
    rows: list[Sequence[Any]] = [["split", "sid", "energy", "target", *names]]
    for split, result in results.items():
        further = [result.columns.get(name, (None,) * len(result.sid)) for name in names]
        energies = (result.prediction.tolist(), result.target.tolist())
        times = Counter(result.sid)
        if repeated := [sid for sid in times if times[sid] > 1]:
            text = f"{split}: sids that repeat are written as SID#0, SID#1, … ({some(repeated)})"
            warnings.warn(text, stacklevel=2)
        place = defaultdict[Any, Iterator[int]](count)
        sids = [f"{sid}#{next(place[sid])}" if times[sid] > 1 else sid for sid in result.sid]
        rows += zip(repeat(split), sids, *energies, *further, strict=False)
    return write_rows(path, rows)


def write_html(summary: Summary, results: Results, path: str | Path) -> Path:
    """Write the report: one file that opens from disk, without scripts or network; return the path.

    `summary` is that of `results`, as of `summarise`.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("flt_mol.evaluation", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["png"] = lambda figure: base64.b64encode(plots.png(figure)).decode("ascii")
    text = environment.get_template("report.html.jinja").render(
        summary=summary,
        title=f"Evaluation of {summary.get('checkpoint', summary.get('predictions', 'splits'))}",
        shown=shown_splits(summary),
        notes=[*chain(*notes(summary).values()), *unseen_messages(results)],
        figures={
            "Predictions and targets; line: equal": plots.parity_figure(results),
            "Energies within threshold": plots.ewt_figure(results),
        },
    )
    return _write("".join(c if c.isprintable() or c in "\n\t" else "?" for c in text), path)


def _write(text: str, path: str | Path) -> Path:
    with temporary_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
    return Path(path)
