"""What a data set holds: counts, fields, energies, elements, and what looks wrong."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ase.data import chemical_symbols

from flt_mol.data.checks import LARGEST_ENERGY, Unusual
from flt_mol.data.conversion import readable_batches
from flt_mol.data.dataset import StructuresDataset
from flt_mol.data.schema import Record
from flt_mol.files import listed
from flt_mol.structures import Structures

_EXPECTED = ("sid", "natoms", "atomic_numbers", "pos", "cell", "tags", "fixed")
_KEPT = 1000  # messages, outliers and repeated sids that are given; all are counted
_STATISTICS = ("min", "median", "mean", "max", "std")


def inspect(
    dataset: StructuresDataset,
    *,
    limit: int | None = None,
    progress: Callable[[int, int | None], None] | None = None,
) -> dict[str, Any]:
    """A summary of a data set, as plain values for JSON.

    Invalid records are listed, not raised.

    Args:
        dataset: the records.
        limit: how many records to look at, at even distances; None looks at all.
        progress: called with how many of how many have been looked at.

    Returns:
        path, kind, bytes (on disk; None in memory), bytes_per_record, count (of all records),
        looked_at (how many of them), fields (name → records that hold it), dtypes (name → those
        met), missing (OC20 field → records without it), energy (count, min, max, mean, std, median
        in eV; None without targets), elements (symbol → systems), atoms (per system), fixed
        (fraction of atoms), pbc ("TTF" → systems), tags (tag → atoms); and of outliers (sid and
        energy beyond 10 eV), repeated_sids, skipped and problems (messages) the first 1000, and
        their `counts`.

    Raises:
        ValueError: a limit below one.

    Warns:
        UserWarning: what looks wrong, `flt_mol.data.checks.Unusual`.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}, expected at least one record")
    total = len(dataset)
    looked_at = total if limit is None else min(limit, total)
    chosen = [i * total // looked_at for i in range(looked_at)]
    counts: dict[str, Counter[Any]] = defaultdict(Counter)
    natoms, energies, fixed, unusual = list[int](), list[float](), 0, Unusual()
    listed: dict[str, list[Any]] = {
        name: [] for name in ("outliers", "repeated_sids", "skipped", "problems")
    }
    for rows, batch in readable_batches(dataset, chosen, listed["problems"].append):
        _count(counts, map(dataset.record, rows), batch)
        unusual.add(batch)
        unusual.add_energies(batch)
        natoms += batch.natoms.tolist()
        fixed += int(batch.fixed.sum())
        energies += [] if batch.energy is None else batch.energy.tolist()
        if progress is not None:
            progress(unusual.systems, looked_at)
    unusual.warn()
    listed["outliers"] = [{"sid": sid, "energy": energy} for sid, energy in unusual.far()]
    listed["repeated_sids"] += [sid for sid, count in counts["sids"].items() if count > 1]
    listed["skipped"] += dataset.skipped
    size, fields, options = _disk_bytes(dataset), counts["fields"], dataset.options
    names = {*_EXPECTED, options.energy, options.energy_initial, options.positions_relaxed}
    missing = {name: len(natoms) - fields[name] for name in sorted(names - {"calculator"})}
    return {
        "path": str(dataset.path),
        "kind": dataset.kind,
        "bytes": size,
        "bytes_per_record": None if size is None else round(size / max(total, 1)),
        "count": total,
        "looked_at": looked_at,
        "fields": dict(sorted(fields.items())),
        "dtypes": {name: sorted(k for n, k in counts["dtypes"] if n == name) for name in fields},
        "missing": {name: count for name, count in missing.items() if count},
        "energy": _statistics(energies),
        "elements": {chemical_symbols[z]: n for z, n in sorted(counts["elements"].items())},
        "atoms": _statistics(natoms),
        "fixed": fixed / max(sum(natoms), 1),
        "pbc": dict(sorted(counts["pbc"].items(), reverse=True)),
        "tags": {str(tag): n for tag, n in sorted(counts["tags"].items())},
        **{name: items[:_KEPT] for name, items in listed.items()},
        "counts": {name: len(items) for name, items in listed.items()},
    }


def _count(counts: dict[str, Counter[Any]], records: Iterable[Record], batch: Structures) -> None:
    for record in records:
        held = {name: value for name, value in record.items() if value is not None}
        counts["fields"].update(held.keys())
        for name, value in held.items():
            counts["dtypes"][name, str(getattr(value, "dtype", type(value).__name__))] += 1
    numbers = zip(batch.system.tolist(), batch.atomic_numbers.tolist(), strict=True)
    counts["elements"].update(z for _, z in set(numbers))
    counts["tags"].update(batch.tags.tolist())
    counts["pbc"].update("".join("FT"[p] for p in row) for row in batch.pbc.tolist())
    counts["sids"].update(batch.sid)


def _disk_bytes(dataset: StructuresDataset) -> int | None:
    """Bytes of the files of a data set, None where it is in memory or they are gone."""
    files = [Path(getattr(part, "file", part.path)) for part in dataset.files()]
    present = all(file.is_file() for file in files)
    return sum(file.stat().st_size for file in files) if present else None


def _statistics(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    array = np.array(values, np.float64)
    return {"count": len(array), **{n: float(getattr(np, n)(array)) for n in _STATISTICS}}


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
        **{
            name: ", ".join(f"{key} {n}" for key, n in summary[name].items())
            for name in ("elements", "tags", "pbc")
        },
        "fixed": f"{summary['fixed']:.1%} of the atoms",
    }
    lines += [f"{title:<18}{text}" for title, text in rows.items()]
    for name, count in summary["fields"].items():
        kinds = ", ".join(summary["dtypes"][name])
        lines.append(f"  field {name:<18} in {count} records  {kinds}")
    for name, count in summary["missing"].items():
        lines.append(f"  field {name:<18} missing in {count} records")
    far = [f"sid {row['sid']}: {row['energy']:.6g} eV" for row in summary["outliers"]]
    for name, title in {
        "repeated_sids": "repeated sids",
        "outliers": f"energies beyond ±{LARGEST_ENERGY:g} eV",
        "skipped": "skipped records",
        "problems": "invalid records",
    }.items():
        if items := far if name == "outliers" else summary[name]:
            lines.append(listed(title, items, count=summary["counts"][name]))
    return "\n".join(lines)


def _range(values: Mapping[str, float], form: str) -> str:
    return ", ".join(f"{name} {values[name]:{form}}" for name in _STATISTICS)
