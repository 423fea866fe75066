"""From records to Markdown: training steps, parts of a block, one large system."""

from __future__ import annotations

from statistics import median
from typing import Any

from flt_mol.analysis.speed.one_system import WHAT, exponent
from flt_mol.analysis.speed.parts import PARTS
from flt_mol.analysis.speed.records import Record
from flt_mol.analysis.speed.tables import NOTHING, by_setting, conditions, shown_rates
from flt_mol.analysis.speed.training_step import MODELS, OURS
from flt_mol.analysis.tables import markdown_table
from flt_mol.analysis.timing import Ratio, Timings

__all__ = ["one_system_tables", "parts_tables", "series", "training_step_tables"]


def training_step_tables(records: list[Record]) -> tuple[str, str]:
    """The table file and the section of the page."""
    head = ("model", "weights", "slabs", "s a step", "atoms/s", f"{OURS}, times as fast",
            "MB at once", "kB an atom", "memory over ours")  # fmt: skip
    texts: dict[bool, list[str]] = {True: [], False: []}
    for setting, some in by_setting(records).items():
        result = next((record.result for record in reversed(some) if record.result), None)
        for whole, text in texts.items():
            rows = [] if result is None else [_model(result, n, whole) for n in MODELS]
            text += [f"**{setting.threads} thread(s).** {conditions(some)}",
                     markdown_table(head, filter(None, rows))]  # fmt: skip
    return "# A training step\n\n" + "\n\n".join(texts[True]), "\n\n".join(texts[False])


def _model(result: dict[str, Any], name: str, quartiles: bool) -> list[str] | None:
    if name in result["left_out"] or name not in result["atoms"]:
        return None
    atoms, row = result["atoms"], [name, f"{result['weights'][name]:,}", str(result["slabs"][name])]
    if name in result["stopped"]:
        return [*row, "no memory", *[NOTHING] * 5]
    seconds, held = result["seconds"], result["bytes"]
    step = median(seconds[name])
    faster = share = NOTHING
    if OURS in seconds:
        ratio = _speedup(seconds, atoms, name)
        faster = str(ratio) if quartiles else f"{ratio.median:.2f}"
        share = f"{held[name] / atoms[name] / (held[OURS] / atoms[OURS]):.2f}"
    return [*row, f"{step:.3g}", f"{atoms[name] / step:,.0f}", faster, f"{held[name] / 1e6:,.0f}",
            f"{held[name] / atoms[name] / 1e3:,.1f}", share]  # fmt: skip


def _speedup(seconds: dict[str, list[float]], atoms: dict[str, int], name: str) -> Ratio:
    """Our atoms per second over another's, formed round by round."""
    scale = atoms[OURS] / atoms[name]
    return Ratio(*(value * scale for value in Timings(seconds).ratio(name, over=OURS)))


def parts_tables(records: list[Record]) -> tuple[str, str]:
    """The table file and the section of the page: they are the same but for the title."""
    head = ("part", "pass", "ms", "MB at once", "GEMM floor (ms)", "byte floor (ms)", "reached")
    text = []
    for setting, some in by_setting(records).items():
        measured = [(r.point["passes"], r.result) for r in some if r.result]
        rows = [_part(result, passes, name) for passes, result in measured for name in PARTS]
        text += [f"**{setting.threads} thread(s).** {conditions(some)} {shown_rates(some)}",
                 markdown_table(head, rows)]  # fmt: skip
    return "# Parts of a block on slabs\n\n" + "\n\n".join(text), "\n\n".join(text)


def _part(result: dict[str, Any], passes: str, name: str) -> list[str]:
    time, floors = median(result["seconds"][name]), result["floors"][name]
    shown = [f"{1e3 * value:.2f}" for value in (floors["gemm"], floors["bytes"])]
    reached = f"{floors['roofline'] / time:.2f}"
    memory = f"{result['bytes'][name] / 1e6:.1f}"
    return [name, passes, f"{1e3 * time:.2f}", memory, *shown, reached]


def one_system_tables(records: list[Record]) -> tuple[str, str]:
    """The table file and the section of the page."""
    head = ("atoms", "pairs", "waves", "s", "µs an atom", "pairs found in (s)", "GB of tensors",
            "GB of the process")  # fmt: skip
    whole, section = ["# One periodic system"], []
    for setting, some in by_setting(records).items():
        told = f"**{setting.threads} thread(s).** {conditions(some)}"
        whole += [told, _exponents(some)]
        section += [told, _exponents(some)]
        for (what, passes), points in series(some).items():
            rows = [_point(record) for record in points]
            whole += [f"## {what}, {passes}", markdown_table(head, rows)]
            if what == WHAT[0]:
                section += [f"The model, {passes}:", markdown_table(head, rows)]
    return "\n\n".join(whole), "\n\n".join(section)


def series(records: list[Record]) -> dict[tuple[str, str], list[Record]]:
    """Records of each model and pass, by atoms."""
    found: dict[tuple[str, str], list[Record]] = {}
    for record in sorted(records, key=lambda r: r.point["atoms"]):
        found.setdefault((record.point["what"], record.point["passes"]), []).append(record)
    order = {what: index for index, what in enumerate(WHAT)}
    return dict(sorted(found.items(), key=lambda item: (order[item[0][0]], item[0][1])))


def _exponents(records: list[Record]) -> str:
    rows = []
    for (what, passes), points in series(records).items():
        results = [record.result for record in points if record.result]
        atoms = [result["atoms"] for result in results]
        costs = [
            [median(result["seconds"]) for result in results],
            [result["bytes"] for result in results],
            [_grown(result) for result in results],
        ]
        found = [exponent(atoms, cost) for cost in costs]
        largest = f"{max(atoms):,}" if atoms else NOTHING
        shown = [NOTHING if p is None else f"{p:.3f}" for p in found]
        rows.append([f"{what}, {passes}", largest, *shown])
    head = ("", "largest (atoms)", "time", "tensors", "process")
    return "Exponents from 4,000 atoms on:\n\n" + markdown_table(head, rows)


def _grown(result: dict[str, Any]) -> int:
    """Bytes that the process has grown by; 1 where nothing is known or it has not."""
    after, before = result["rss"], result["rss_before"]
    return 1 if after is None or before is None else max(1, after - before)


def _point(record: Record) -> list[str]:
    result = record.result
    if result is None:
        return [f"{record.point['atoms']:,}", *[NOTHING] * 2, record.stopped or "", *[NOTHING] * 4]
    time, searched, rss = median(result["seconds"]), result["pair_seconds"], result["rss"]
    return [
        f"{result['atoms']:,}",
        f"{result['pairs']:,}",
        f"{result['vectors']:,}",
        f"{time:.3g}",
        f"{1e6 * time / result['atoms']:.1f}",
        NOTHING if searched is None else f"{searched:.2f}",
        f"{result['bytes'] / 1e9:.3f}",
        NOTHING if rss is None else f"{rss / 1e9:.2f}",
    ]
