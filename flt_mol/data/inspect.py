"""What a data set holds: counts, fields, energies, elements, and what looks wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from ase.data import chemical_symbols
from numpy.typing import NDArray

from flt_mol.data.dataset import StructuresDataset
from flt_mol.data.kinds import disk_bytes, kind_of
from flt_mol.data.options import ReadOptions
from flt_mol.data.tally import KEPT, LARGEST_ENERGY, Tally, targets_apart
from flt_mol.structures import Structures

__all__ = ["render", "summarise"]

_EXPECTED = ("sid", "natoms", "atomic_numbers", "pos", "cell", "tags", "fixed")
_TOGETHER = 64  # records held in memory at a time
_DECODED = 16  # records whose dtypes are looked up
_SHOWN = 20  # messages and outliers in the text


def summarise(
    dataset: Any,
    *,
    limit: int | None = None,
    progress: Callable[[int, int | None], None] | None = None,
) -> dict[str, Any]:
    """Everything worth knowing about a data set, as plain values that JSON can hold.

    Records are read one after the other, and some bytes kept of each. Bad ones are listed, not
    raised.

    Args:
        dataset: of :func:`flt_mol.data.open_dataset`, or any sequence of single systems.
        limit: how many records to look at, spread evenly; None looks at all.
        progress: called with how many of how many have been looked at.

    Returns:
        path, kind, bytes (on disk; None in memory), bytes_per_record, count (records, bad ones
        included), looked_at (how many of them), fields (name → records that hold it), dtypes
        (name → those met in the first 16 records), missing (OC20 field → records without it),
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
    chosen = range(total) if limit is None or limit >= total else _spread(total, limit)
    tally = Tally()
    for start in range(0, len(chosen), _TOGETHER):
        part = chosen[start : start + _TOGETHER]
        for systems in _systems(dataset, part, tally):
            tally.add(systems)
        if progress is not None:
            progress(start + len(part), len(chosen))
    return _summary(dataset, tally, len(chosen))


def _spread(total: int, limit: int) -> Sequence[int]:
    """`limit` of the numbers below `total`, from the first on, at equal distances."""
    return [i * total // limit for i in range(limit)]


def _systems(dataset: Any, indices: Sequence[int], tally: Tally) -> Iterator[Structures]:
    """The good records of `indices`, together where they can be; the bad ones are noted."""
    records: dict[int, Mapping[str, Any] | None] = dict.fromkeys(indices)
    good = True
    if isinstance(dataset, StructuresDataset):
        good = _note_fields(dataset, records, tally)
    if good and hasattr(dataset, "batch"):
        try:
            together = list(targets_apart(dataset, indices, partial(_has_target, dataset, records)))
        except ValueError:
            pass  # found out below, record by record
        else:
            yield from together
            return
    for index, record in records.items():
        try:
            yield dataset[index] if record is None else dataset.convert(index, record)
        except ValueError as error:
            tally.problems.add(str(error))


def _has_target(dataset: Any, records: Mapping[int, Mapping[str, Any] | None], index: int) -> bool:
    """Whether a good system has a target; where its fields are known, without making it anew."""
    record = records[index]
    if record is None:
        return dataset[index].energy is not None
    options: ReadOptions = dataset.options
    return not options.ignore_energy and record.get(options.energy) is not None


def _note_fields(
    dataset: StructuresDataset, records: dict[int, Mapping[str, Any] | None], tally: Tally
) -> bool:
    """Read records and count their fields; whether all could be read."""
    for index in records:
        try:
            record = dataset.record(index)
            tally.add_record(record, decode=tally.records < _DECODED)
            records[index] = record
        except ValueError:
            continue  # noted when it is read again
    return None not in records.values()


def _summary(dataset: Any, tally: Tally, looked_at: int) -> dict[str, Any]:
    size, skipped = disk_bytes(dataset), list(getattr(dataset, "skipped", []))
    repeated = tally.repeated()
    summary = {
        "path": str(getattr(dataset, "path", type(dataset).__name__)),
        "kind": kind_of(dataset),
        "bytes": size,
        "bytes_per_record": None if size is None else round(size / max(len(dataset), 1)),
        "count": len(dataset),
        "looked_at": looked_at,
        "fields": dict(sorted(tally.fields.items())),
        "dtypes": {name: sorted(kinds) for name, kinds in sorted(tally.dtypes.items())},
        "missing": {
            name: tally.records - tally.fields[name]
            for name in _expected(dataset)
            if tally.fields[name] < tally.records
        },
        "energy": _statistics(np.array(tally.energies, dtype=np.float64)),
        "outliers": tally.outliers.items,
        "elements": {chemical_symbols[z]: n for z, n in enumerate(tally.elements.tolist()) if n},
        "atoms": _statistics(np.array(tally.natoms, dtype=np.float64)),
        "fixed": tally.fixed / max(sum(tally.natoms), 1),
        "pbc": dict(sorted(tally.pbc.items(), reverse=True)),
        "tags": {str(tag): n for tag, n in sorted(tally.tags.items())},
        "repeated_sids": repeated.items,
        "skipped": skipped[:KEPT],
        "problems": tally.problems.items,
        "counts": {
            "outliers": tally.outliers.count,
            "repeated_sids": repeated.count,
            "skipped": len(skipped),
            "problems": tally.problems.count,
        },
    }
    return {name: _finite(value) for name, value in summary.items()}


def _expected(dataset: Any) -> tuple[str, ...]:
    """Fields of the OC20 schema, the targets under the names that the data set was told."""
    options = getattr(dataset, "options", ReadOptions())
    targets = (options.energy, options.energy_initial, options.positions_relaxed)
    return (*_EXPECTED, *(name for name in targets if name != "calculator"))


def _finite(value: Any) -> Any:
    """`value` with None for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _statistics(values: NDArray[np.float64]) -> dict[str, float | int] | None:
    if not len(values):
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        return {
            "count": len(values),
            "min": float(values.min()),
            "median": float(np.median(values)),
            "mean": float(values.mean()),
            "max": float(values.max()),
            "std": float(values.std()),
        }


def render(summary: Mapping[str, Any]) -> str:
    """A summary as text to read."""
    lines = [f"{summary['path']}: {summary['count']} systems"]
    if summary["looked_at"] < summary["count"]:
        lines.append(f"looked at         {summary['looked_at']} of {summary['count']}")
    lines.append(f"kind              {summary['kind']}{_size(summary)}")
    if summary["atoms"]:
        lines.append("atoms per system  " + _range(summary["atoms"], ".6g"))
    if summary["energy"]:
        lines.append("energy (eV)       " + _range(summary["energy"], ".4f"))
    else:
        lines.append("energy (eV)       no targets (y_relaxed)")
    for title, name in (("elements", "elements"), ("tags (atoms)", "tags"), ("pbc", "pbc")):
        counts = ", ".join(f"{key} {n}" for key, n in summary[name].items())
        lines.append(f"{title:<18}{counts}")
    lines.append(f"{'fixed':<18}{summary['fixed']:.1%} of the atoms")
    for name, count in summary["fields"].items():
        kinds = ", ".join(summary["dtypes"].get(name, []))
        lines.append(f"  field {name:<18} in {count} records  {kinds}")
    for name, count in summary["missing"].items():
        lines.append(f"  field {name:<18} missing in {count} records")
    outliers = [f"sid {row['sid']}: {row['energy']:.6g} eV" for row in summary["outliers"]]
    far = f"energies beyond {LARGEST_ENERGY:g} eV, total energies perhaps"
    counts = summary["counts"]
    lines += _listed("repeated sids", summary["repeated_sids"], counts["repeated_sids"])
    lines += _listed(far, outliers, counts["outliers"])
    lines += _listed("skipped records", summary["skipped"], counts["skipped"])
    lines += _listed("bad records", summary["problems"], counts["problems"])
    return "\n".join(map(_printable, lines))


def _size(summary: Mapping[str, Any]) -> str:
    if summary["bytes"] is None:
        return ""
    return f", {summary['bytes']:,} bytes ({summary['bytes_per_record']:,} a record)"


def _printable(line: str) -> str:
    """Names and sids come from the file: control characters must not reach a terminal."""
    return line if line.isprintable() else "".join(map(_escaped, line))


def _escaped(character: str) -> str:
    return character if character.isprintable() else ascii(character)[1:-1]


def _range(values: Mapping[str, float | None], form: str) -> str:
    names = ("min", "median", "mean", "max", "std")
    shown = ((name, values[name]) for name in names)
    return ", ".join(
        f"{name} {'beyond float64' if v is None else f'{v:{form}}'}" for name, v in shown
    )


def _listed(title: str, items: list[Any], count: int) -> list[str]:
    if not items:
        return []
    more = [f"  … and {count - _SHOWN} more"] if count > _SHOWN else []
    return [f"{count} {title}:", *(f"  {item}" for item in items[:_SHOWN]), *more]
