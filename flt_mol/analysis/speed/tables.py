"""From records to Markdown: what all benchmarks share, and the table over lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

from flt_mol.analysis.speed.layers import LAYERS, OURS
from flt_mol.analysis.speed.lengths import FLOOR, PARTS, PASSES
from flt_mol.analysis.speed.points import EXPLAINED, Setting
from flt_mol.analysis.speed.records import Record
from flt_mol.analysis.tables import markdown_table
from flt_mol.analysis.timing import Timings

__all__ = ["by_setting", "conditions", "lengths_tables", "quotient", "shown_rates"]

NOTHING = "–"
CHECKS = (  # above, below, and whether of the core alone
    ("FLT, Gaussian RPE", OURS, "block"),
    ("FLT, local RPE", OURS, "block"),
    (OURS, "performer-pytorch", "block"),
    (OURS, "PyG PerformerAttention", "block"),
    (OURS, "performer-pytorch", "core"),
    ("log-linear Performer", OURS, "block"),
    ("softmax, dense bias", OURS, "block"),
    (FLOOR, OURS, "block"),
)
MEMORY_CHECKS = tuple(check for check in CHECKS if FLOOR not in check)


def by_setting(records: Iterable[Record]) -> dict[Setting, list[Record]]:
    """Records of each setting, in order."""
    found: dict[Setting, list[Record]] = {}
    for record in records:
        found.setdefault(record.setting, []).append(record)
    return found


def conditions(records: Sequence[Record]) -> str:
    """Under what these records, of one setting, were measured."""
    setting = records[0].setting
    machine = next((record.machine for record in records if record.machine), {})
    where = (
        f"{machine.get('processor')}, {machine.get('cores')} cores, torch {machine.get('torch')}"
    )
    several = setting.threads > 1
    clock = "seconds of the wall clock" if several else "CPU seconds"
    variables = records[0].environment.items()
    set_to = " ".join(f"{name}={value}" for name, value in variables) or "no variable set"
    limit = "" if setting.limit_gb is None else f"; at most {setting.limit_gb:g} GB a process"
    threads = f"{setting.threads} thread{'s' if several else ''}"
    return (
        f"{where if machine else 'No point was measured'}; {threads}, {clock}; allocator: "
        f"{_allocator(setting.allocator, machine)}, the same for all ({set_to}){limit}."
    )


def _allocator(name: str, machine: Mapping[str, Any]) -> str:
    """Its name and, but for the default, what it does."""
    if name == "default":
        return name
    told = f"{name} ({EXPLAINED[name]})"
    return f"{told}, which are given: {machine.get('huge_pages')}" if name == "huge" else told


def shown_rates(records: Iterable[Record]) -> str:
    """What the machine did meanwhile: medians over records."""
    rates = [record.result["rates"] for record in records if record.result]
    if not rates:
        return ""
    flops, moved = (median(rate[name] for rate in rates) for name in ("flops", "bytes"))
    return f"Meanwhile sgemm ran at {flops / 1e9:.0f} GFLOP/s, copies at {moved / 1e9:.1f} GB/s."


def quotient(result: dict[str, Any] | None, name: str, over: str, quartiles: bool = False) -> str:
    """Time of one over that of another, round by round; a dash where one was not timed."""
    seconds = {} if result is None else result["seconds"]
    if name not in seconds or over not in seconds:
        return NOTHING
    ratio = Timings(seconds).ratio(name, over)
    return str(ratio) if quartiles else f"{ratio.median:.2f}"


def lengths_tables(records: list[Record]) -> tuple[str, str]:
    """The whole table file, and the section of the page."""
    whole, section = ["# One layer over lengths"], []
    for setting, some in by_setting(records).items():
        title = f"{setting.threads} thread(s), allocator {setting.allocator}"
        whole += [f"## {title}", conditions(some), shown_rates(some)]
        section += [f"**{title}.** {conditions(some)}"]
        for passes in PASSES:
            ours = [record for record in some if record.point["passes"] == passes]
            if ours:
                section += [f"{_TITLES[passes]}, ratios of times:", _checks(ours, False)]
                section += [f"{_TITLES[passes]}, ratios of memory:", _memory_checks(ours)]
                whole += [f"### {_TITLES[passes]}", "Ratios of times:", _checks(ours, True)]
                whole += ["Ratios of memory:", _memory_checks(ours)]
                whole += [text for part in PARTS for text in _details(ours, part)]
    return "\n\n".join(filter(None, whole)), "\n\n".join(section)


_TITLES = {"forward": "Forward", "training": "Forward and backward"}
_WHOLE = {"block": "Whole layers", "core": "Attention alone"}


def _checks(records: list[Record], quartiles: bool) -> str:
    return _ratios(records, CHECKS, partial(quotient, quartiles=quartiles))


def _memory_checks(records: list[Record]) -> str:
    return _ratios(records, MEMORY_CHECKS, _memory_quotient)


def _ratios(
    records: list[Record],
    checks: Sequence[tuple[str, str, str]],
    ratio: Callable[[dict[str, Any] | None, str, str], str],
) -> str:
    """A row for each length, a column for each check."""
    by_place = {(r.point["tokens"], r.point["part"]): r.result for r in records}
    rows = []
    for tokens in sorted({tokens for tokens, _ in by_place}):
        results = [by_place.get((tokens, part)) for _, _, part in checks]
        cells = [
            ratio(result, name, over)
            for result, (name, over, _) in zip(results, checks, strict=True)
        ]
        rows.append([f"{tokens:,}", *cells])
    return markdown_table(["tokens", *(_label(*check) for check in checks)], rows)


def _memory_quotient(result: dict[str, Any] | None, name: str, over: str) -> str:
    held = {} if result is None else result["bytes"]
    return f"{held[name] / held[over]:.2f}" if name in held and over in held else NOTHING


def _label(name: str, over: str, part: str) -> str:
    return f"{name} / {over}" + (", core" if part == "core" else "")


def _details(records: list[Record], part: str) -> list[str]:
    """Milliseconds, megabytes, and the share of each floor that is reached."""
    some = sorted((r for r in records if r.point["part"] == part), key=lambda r: r.point["tokens"])
    names = [name for name in LAYERS if any(name in _timed(r) for r in some)]
    if not names:
        return []
    kinds: dict[str, Callable[[Record, str], str]] = {
        "milliseconds": _milliseconds,
        "MB of tensors at once": _megabytes,
        "counted floor over time": _fraction,
    }
    texts = []
    for kind, cell in kinds.items():
        rows = [[f"{r.point['tokens']:,}", *(cell(r, name) for name in names)] for r in some]
        texts += [f"{_WHOLE[part]}, {kind}:", markdown_table(["tokens", *names], rows)]
    return texts


def _timed(record: Record) -> dict[str, list[float]]:
    return {} if record.result is None else record.result["seconds"]


def _milliseconds(record: Record, name: str) -> str:
    if record.result is None or name in record.result["stopped"]:
        return "no memory"
    seconds = _timed(record).get(name)
    return NOTHING if seconds is None else f"{1e3 * median(seconds):.3g}"


def _megabytes(record: Record, name: str) -> str:
    held = {} if record.result is None else record.result["bytes"]
    return f"{held[name] / 1e6:.1f}" if name in held else NOTHING


def _fraction(record: Record, name: str) -> str:
    seconds = _timed(record).get(name)
    if seconds is None or record.result is None:
        return NOTHING
    return f"{record.result['floors'][name]['roofline'] / median(seconds):.2f}"
