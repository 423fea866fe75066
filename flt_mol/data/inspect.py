"""What a data set holds: counts, fields, energies, elements, and what looks wrong."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from ase.data import chemical_symbols
from numpy.typing import NDArray

from flt_mol.data.dataset import StructuresDataset
from flt_mol.data.unpickling import Record
from flt_mol.structures import Structures

__all__ = ["render", "summarise"]

_EXPECTED = (
    "sid",
    "natoms",
    "atomic_numbers",
    "pos",
    "cell",
    "tags",
    "fixed",
    "y_relaxed",
    "y_init",
    "pos_relaxed",
)
_DECODED = 16  # records whose dtypes are looked up
_LARGEST_ENERGY = 10.0  # eV; OC20's makers dropped systems beyond it
_SHOWN = 20  # messages and outliers listed


@dataclass
class _Tally:
    """What has been counted so far."""

    records: int = 0
    fields: Counter[str] = field(default_factory=Counter)
    dtypes: dict[str, set[str]] = field(default_factory=dict)
    elements: Counter[int] = field(default_factory=Counter)
    tags: Counter[int] = field(default_factory=Counter)
    pbc: Counter[str] = field(default_factory=Counter)
    natoms: list[int] = field(default_factory=list)
    fixed: int = 0
    energies: list[float] = field(default_factory=list)
    sids: list[int | str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    repeated: Counter[int | str] = field(default_factory=Counter)

    def add_record(self, record: Mapping[str, Any], decode: bool) -> None:
        """Count the fields; look up what they hold if `decode`."""
        self.records += 1
        names = [name for name in record if not _is_none(record, name)]
        self.fields.update(names)
        for name in names if decode else ():
            self.dtypes.setdefault(name, set()).add(_dtype(record[name]))

    def add(self, system: Structures) -> None:
        """Count what is in it."""
        self.repeated.update(system.sid)
        self.natoms += system.natoms.tolist()
        self.elements.update(system.atomic_numbers.unique().tolist())
        self.tags.update(system.tags.tolist())
        self.fixed += int(system.fixed.sum())
        self.pbc.update("".join("T" if p else "F" for p in row) for row in system.pbc.tolist())
        if system.energy is not None:
            self.energies += system.energy.tolist()
            self.sids += system.sid


def summarise(dataset: Any) -> dict[str, Any]:
    """Everything worth knowing about a data set, as plain values that JSON can hold.

    All records are read. Bad ones are listed, not raised.

    Args:
        dataset: of :func:`flt_mol.data.open_dataset`, or any sequence of single systems.

    Returns:
        path, count (records, bad ones included), fields (name → records that hold it), dtypes
        (name → those met in the first 16 records), missing (OC20 field → records without it),
        energy (count, min, max, mean, std, median in eV; None without targets, and for numbers
        beyond float64), outliers
        (sid and energy beyond 10 eV), elements (symbol → systems), atoms (per system), fixed
        (fraction of atoms), pbc ("TTF" → systems), tags (tag → atoms), repeated_sids, skipped and
        problems (messages).
    """
    tally = _Tally()
    for index in range(len(dataset)):
        try:
            if isinstance(dataset, StructuresDataset):
                record = dataset.record(index)
                tally.add_record(record, decode=index < _DECODED)
                tally.add(dataset.convert(index, record))
            else:
                tally.add(dataset[index])
        except ValueError as error:
            tally.problems.append(str(error))
    return _summary(dataset, tally)


def _summary(dataset: Any, tally: _Tally) -> dict[str, Any]:
    summary = {
        "path": str(getattr(dataset, "path", type(dataset).__name__)),
        "count": len(dataset),
        "fields": dict(sorted(tally.fields.items())),
        "dtypes": {name: sorted(kinds) for name, kinds in sorted(tally.dtypes.items())},
        "missing": {
            name: tally.records - tally.fields[name]
            for name in _EXPECTED
            if tally.fields[name] < tally.records
        },
        "energy": _statistics(np.array(tally.energies, dtype=np.float64)),
        "outliers": [
            {"sid": sid, "energy": energy}
            for sid, energy in zip(tally.sids, tally.energies, strict=True)
            if abs(energy) > _LARGEST_ENERGY
        ],
        "elements": {chemical_symbols[z]: n for z, n in sorted(tally.elements.items())},
        "atoms": _statistics(np.array(tally.natoms, dtype=np.float64)),
        "fixed": tally.fixed / max(sum(tally.natoms), 1),
        "pbc": dict(sorted(tally.pbc.items(), reverse=True)),
        "tags": {str(tag): n for tag, n in sorted(tally.tags.items())},
        "repeated_sids": [sid for sid, n in tally.repeated.items() if n > 1],
        "skipped": list(getattr(dataset, "skipped", [])),
        "problems": tally.problems,
    }
    return {name: _finite(value) for name, value in summary.items()}


def _finite(value: Any) -> Any:
    """`value` with None for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_none(record: Mapping[str, Any], name: str) -> bool:
    """Without decoding tensors that nobody looks at."""
    if isinstance(record, Record):
        return record.describe(name)[0] == "NoneType"
    return record[name] is None


def _dtype(value: Any) -> str:
    if isinstance(value, torch.Tensor | np.ndarray):
        kind = "tensor" if isinstance(value, torch.Tensor) else "array"
        return f"{kind} {str(value.dtype).removeprefix('torch.')}, {value.ndim} axes"
    return type(value).__name__


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
    lines += _listed("repeated sids", [str(sid) for sid in summary["repeated_sids"]])
    lines += _listed(
        f"energies beyond {_LARGEST_ENERGY:g} eV, total energies perhaps",
        [f"sid {row['sid']}: {row['energy']:.6g} eV" for row in summary["outliers"]],
    )
    lines += _listed("skipped records", summary["skipped"])
    lines += _listed("bad records", summary["problems"])
    return "\n".join(lines)


def _range(values: Mapping[str, float | None], form: str) -> str:
    names = ("min", "median", "mean", "max", "std")
    shown = ((name, values[name]) for name in names)
    return ", ".join(
        f"{name} {'beyond float64' if v is None else f'{v:{form}}'}" for name, v in shown
    )


def _listed(title: str, items: list[str]) -> list[str]:
    if not items:
        return []
    more = [f"  … and {len(items) - _SHOWN} more"] if len(items) > _SHOWN else []
    return [f"{len(items)} {title}:", *(f"  {item}" for item in items[:_SHOWN]), *more]
