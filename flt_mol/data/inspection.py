"""What a data set holds: counts, fields, energies, elements, and what looks wrong."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ase.data import chemical_symbols

from flt_mol.data.conversion import readable_batches
from flt_mol.data.dataset import StructuresDataset
from flt_mol.structures import Structures

__all__ = ["inspect", "render"]

_EXPECTED = ("sid", "natoms", "atomic_numbers", "pos", "cell", "tags", "fixed")
_LARGEST_ENERGY = 10.0  # eV; OC20's makers dropped systems beyond it
_KEPT = 1000  # messages, outliers and repeated sids that are given; all are counted
_STATISTICS = ("min", "median", "mean", "max", "std")
_SHOWN = 20  # of those in the text


class _Tally:
    """What has been counted so far; a few bytes for each record."""

    def __init__(self) -> None:
        self.fields: Counter[str] = Counter()
        self.dtypes: dict[str, set[str]] = {}
        self.elements: Counter[int] = Counter()
        self.tags: Counter[int] = Counter()
        self.pbc: Counter[str] = Counter()
        self.sids: Counter[int | str] = Counter()
        self.natoms: list[int] = []
        self.energies: list[float] = []
        self.outliers: list[dict[str, Any]] = []
        self.problems: list[str] = []
        self.fixed = 0

    def add_record(self, record: Mapping[str, Any]) -> None:
        for name, value in record.items():
            if value is not None:
                self.fields[name] += 1
                self.dtypes.setdefault(name, set()).add(_kind_of_value(value))

    def add(self, batch: Structures) -> None:
        numbers, system = batch.atomic_numbers.tolist(), batch.system.tolist()
        self.elements.update(z for _, z in set(zip(system, numbers, strict=True)))
        self.tags.update(batch.tags.tolist())
        self.pbc.update("".join("FT"[p] for p in row) for row in batch.pbc.tolist())
        self.sids.update(batch.sid)
        self.natoms += batch.natoms.tolist()
        self.fixed += int(batch.fixed.sum())
        energies = [] if batch.energy is None else batch.energy.tolist()
        self.energies += energies
        for sid, energy in zip(batch.sid, energies, strict=False):
            if abs(energy) > _LARGEST_ENERGY:
                self.outliers.append({"sid": sid, "energy": energy})


def _kind_of_value(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"array {value.dtype}, {value.ndim} axes"
    return type(value).__name__


def inspect(
    dataset: StructuresDataset,
    *,
    limit: int | None = None,
    progress: Callable[[int, int | None], None] | None = None,
) -> dict[str, Any]:
    """Everything worth knowing about a data set, as plain values that JSON can hold.

    Invalid records are listed, not raised.

    Args:
        dataset: the records.
        limit: how many records to look at, spread evenly; None looks at all.
        progress: called with how many of how many have been looked at.

    Returns:
        path, kind, bytes (on disk; None in memory), bytes_per_record, count (records, invalid ones
        included), looked_at (how many of them), fields (name → records that hold it), dtypes
        (name → those met), missing (OC20 field → records without it),
        energy (count, min, max, mean, std, median in eV; None without targets, and for numbers
        beyond float64), outliers (sid and energy beyond 10 eV), elements (symbol → systems), atoms
        (per system), fixed (fraction of atoms), pbc ("TTF" → systems), tags (tag → atoms),
        repeated_sids, skipped and problems (messages). Of outliers, repeated_sids, skipped and
        problems the first 1000 are given; `counts` has all of them.

    Raises:
        ValueError: a limit below one.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}, expected at least one record")
    total = len(dataset)
    looked_at = total if limit is None else min(limit, total)
    chosen = [i * total // looked_at for i in range(looked_at)]
    tally = _Tally()
    done = 0
    for rows, batch in readable_batches(dataset, chosen, tally.problems.append):
        tally.add(batch)
        for row in rows:
            tally.add_record(dataset.record(row))
        done += len(rows)
        if progress is not None:
            progress(done, looked_at)
    return _summary(dataset, tally, looked_at)


def _summary(dataset: StructuresDataset, tally: _Tally, looked_at: int) -> dict[str, Any]:
    size, options, valid = _disk_bytes(dataset), dataset.options, len(tally.natoms)
    names = (options.energy, options.energy_initial, options.positions_relaxed)
    lacking = {
        name: valid - tally.fields[name] for name in (*_EXPECTED, *names) if name != "calculator"
    }
    listed: dict[str, list[Any]] = {
        "outliers": tally.outliers,
        "repeated_sids": [sid for sid, count in tally.sids.items() if count > 1],
        "skipped": dataset.skipped,
        "problems": tally.problems,
    }
    summary = {
        "path": str(dataset.path),
        "kind": dataset.kind,
        "bytes": size,
        "bytes_per_record": None if size is None else round(size / max(len(dataset), 1)),
        "count": len(dataset),
        "looked_at": looked_at,
        "fields": dict(sorted(tally.fields.items())),
        "dtypes": {name: sorted(kinds) for name, kinds in sorted(tally.dtypes.items())},
        "missing": {name: count for name, count in lacking.items() if count},
        "energy": _statistics(tally.energies),
        "elements": {chemical_symbols[z]: n for z, n in sorted(tally.elements.items())},
        "atoms": _statistics(tally.natoms),
        "fixed": tally.fixed / max(sum(tally.natoms), 1),
        "pbc": dict(sorted(tally.pbc.items(), reverse=True)),
        "tags": {str(tag): n for tag, n in sorted(tally.tags.items())},
        **{name: items[:_KEPT] for name, items in listed.items()},
        "counts": {name: len(items) for name, items in listed.items()},
    }
    return {name: _finite(value) for name, value in summary.items()}


def _finite(value: Any) -> Any:
    """`value` with None for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _disk_bytes(dataset: StructuresDataset) -> int | None:
    """Bytes of the files of a data set, None where it is in memory or they are gone."""
    parts = getattr(dataset, "parts", [dataset])
    files = [Path(getattr(part, "file", part.path)) for part in parts]
    present = all(file.is_file() for file in files)
    return sum(file.stat().st_size for file in files) if present else None


def _statistics(values: Sequence[float]) -> dict[str, float | int] | None:
    if not values:
        return None
    array = np.array(values, np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        found = {name: float(getattr(np, name)(array)) for name in _STATISTICS}
    return {"count": len(array), **found}


def render(summary: Mapping[str, Any]) -> str:
    """A summary as text to read."""
    lines = [f"{summary['path']}: {summary['count']} systems"]
    if summary["looked_at"] < summary["count"]:
        lines.append(f"looked at         {summary['looked_at']} of {summary['count']}")
    size, energy = summary["bytes"], summary["energy"]
    each = "" if size is None else f", {size:,} bytes ({summary['bytes_per_record']:,} a record)"
    rows = {
        "kind": f"{summary['kind']}{each}",
        "atoms per system": _range(summary["atoms"], ".6g") if summary["atoms"] else "",
        "energy (eV)": _range(energy, ".4f") if energy else "no targets (y_relaxed)",
        **{name: _counts(summary[name]) for name in ("elements", "tags", "pbc")},
        "fixed": f"{summary['fixed']:.1%} of the atoms",
    }
    lines += [f"{title:<18}{text}" for title, text in rows.items()]
    for name, count in summary["fields"].items():
        kinds = ", ".join(summary["dtypes"][name])
        lines.append(f"  field {name:<18} in {count} records  {kinds}")
    for name, count in summary["missing"].items():
        lines.append(f"  field {name:<18} missing in {count} records")
    far = [f"sid {row['sid']}: {row['energy']:.6g} eV" for row in summary["outliers"]]
    for title, name, items in (
        ("repeated sids", "repeated_sids", summary["repeated_sids"]),
        (f"energies beyond {_LARGEST_ENERGY:g} eV, total energies perhaps", "outliers", far),
        ("skipped records", "skipped", summary["skipped"]),
        ("invalid records", "problems", summary["problems"]),
    ):
        if count := summary["counts"][name]:
            lines += [f"{count} {title}:", *(f"  {item}" for item in items[:_SHOWN])]
            lines += [f"  … and {count - _SHOWN} more"] if count > _SHOWN else []
    return "\n".join(map(_printable, lines))


def _printable(line: str) -> str:
    """Names and sids come from the file: control characters must not reach a terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)


def _counts(values: Mapping[str, int]) -> str:
    return ", ".join(f"{key} {n}" for key, n in values.items())


def _range(values: Mapping[str, float | None], form: str) -> str:
    shown = {name: values[name] for name in _STATISTICS}
    return ", ".join(
        f"{name} {'beyond float64' if v is None else f'{v:{form}}'}" for name, v in shown.items()
    )
