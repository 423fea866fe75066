"""Who goes into which split: shares as numbers of systems, groups that stay together."""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from flt_mol.data.dataset import StructuresDataset
from flt_mol.data.options import OnError

__all__ = ["Share", "assign", "good_records", "groups_of", "numbers"]

Share = float | int | None
"""A fraction of all systems, a number of them, or None for the rest."""

_DIGITS = re.compile(r"0|-?[1-9][0-9]{0,17}")
_TOGETHER = 64  # records read at a time
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


def numbers(fractions: Mapping[str, Share], count: int) -> dict[str, int]:
    """How many of `count` systems each split is to have.

    Raises:
        ValueError: shares that are no shares, or do not sum up to all.

    Example:
        >>> numbers({"train": 0.8, "val": 0.1, "test": 0.1}, 12)
        {'train': 10, 'val': 1, 'test': 1}
        >>> numbers({"train": None, "val": 5}, 12)
        {'train': 7, 'val': 5}
    """
    for name, share in fractions.items():
        if not _NAME.fullmatch(name):
            raise ValueError(f"split {name!r}: a name has letters, digits, _ and -")
        number = share is None or (isinstance(share, int | float) and not isinstance(share, bool))
        if not number or (share is not None and not 0 < share < math.inf):
            raise ValueError(f"split {name} has share {share!r}, expected a positive number")
    given = [share for share in fractions.values() if share is not None]
    if len(given) < len(fractions) - 1 or not fractions:
        raise ValueError(f"fractions are {dict(fractions)}; one split at most takes the rest")
    if len({type(share) for share in given}) > 1:
        raise ValueError(f"fractions are {dict(fractions)}: give fractions or counts, not both")
    whole = 1 if given and isinstance(given[0], float) else count
    exact = {n: None if s is None else Fraction(str(s)) for n, s in fractions.items()}
    rest = whole - sum((s for s in exact.values() if s is not None), Fraction(0))
    if abs(rest) > Fraction(1, 10**9) and (rest < 0 or None not in exact.values()):
        raise ValueError(
            f"fractions are {dict(fractions)}: they sum to {float(whole - rest):g}, not to {whole}"
        )
    scale = Fraction(count, whole)
    ends, result = Fraction(0), {}
    for name, exact_share in exact.items():
        start, ends = ends, ends + (rest if exact_share is None else exact_share) * scale
        result[name] = round(ends) - round(start)
    return result


def assign(groups: Sequence[str], counts: Mapping[str, int], seed: int) -> dict[str, list[int]]:
    """Which systems each split gets, in ascending order.

    The groups are ordered by a hash of seed and name, the same on every machine; one after the
    other goes to the split that lacks most.

    Args:
        groups: the group of each system.
        counts: split → wanted number of systems, all together len(groups).
        seed: of the order.

    Raises:
        ValueError: a split that gets none.

    Example:
        >>> assign(["a", "a", "b", "c"], {"train": 3, "test": 1}, seed=0)
        {'train': [0, 1, 3], 'test': [2]}
    """
    members: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    order = sorted(members, key=lambda g: hashlib.sha256(f"{seed}:{g}".encode()).digest())
    lacking, result = dict(counts), {name: list[int]() for name in counts}
    for group in order:
        name = max(lacking, key=lacking.__getitem__)
        lacking[name] -= len(members[group])
        result[name] += members[group]
    empty = [name for name, indices in result.items() if not indices]
    if empty:
        raise ValueError(
            f"split {empty[0]} gets no systems: there are {len(groups)} in {len(members)} groups, "
            "and a group stays whole: give it a larger share, make fewer splits, or group by what "
            "has more values"
        )
    return {name: sorted(indices) for name, indices in result.items()}


def good_records(source: StructuresDataset) -> tuple[list[int], list[str]]:
    """Indices of the records that can be read, and one message for each that cannot.

    Records that were opened with on_error="skip" are not read once more.
    """
    if source.options.on_error == "skip":
        return list(range(len(source))), []
    good: list[int] = []
    bad: list[str] = []
    for start in range(0, len(source), _TOGETHER):
        part = range(start, min(start + _TOGETHER, len(source)))
        try:
            source.batch(part)
        except ValueError:
            for index in part:
                try:
                    source[index]
                except ValueError as error:
                    bad.append(str(error))
                else:
                    good.append(index)
        else:
            good += part
    return good, bad


def groups_of(
    source: StructuresDataset, field: str | None, indices: Sequence[int], on_error: OnError
) -> list[str]:
    """A name for the group of each system: itself alone, the value of a field, or what it is of.

    Args:
        source: the records.
        field: stored name, or "composition" for the numbers of atoms of each element; None for each
            system by itself.
        indices: of the systems.
        on_error: "raise", or "skip": an unreadable record is a group of its own.

    Raises:
        ValueError: a record without the field.
    """
    if field is None:
        return [str(index) for index in indices]
    return [_group(source, index, field, on_error) for index in indices]


def _group(source: StructuresDataset, index: int, field: str, on_error: OnError) -> str:
    try:
        record = source.record(index)
        value = record.get(field)
    except ValueError:
        if on_error == "raise":
            raise
        return f"unreadable {index}"  # left out later
    if value is None and field == "composition":
        return _composition(record)
    if value is None:
        raise ValueError(
            f"{source.where(index)}: no field {field} to group by; stored: {', '.join(record)}"
        )
    value = _canonical(value)
    return f"{type(value).__name__} {value!r}"


def _canonical(value: Any) -> Any:
    """One form for what means the same: a group that is met in two forms must stay one group.

    Sequences of any kind are tuples, those of one item that item; numbers that are whole are int,
    and so are texts of their digits; flags are 0 and 1, bytes are text.

    Example:
        >>> _canonical([np.float32(1), "1", True]), _canonical(np.array([[7]])), _canonical("007")
        ((1, 1, 1), 7, '007')
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, bytes | bytearray):
        value = value.decode(errors="replace")
    if isinstance(value, list | tuple):
        items = tuple(map(_canonical, value))
        return items[0] if len(items) == 1 else items
    if isinstance(value, set | frozenset):
        return tuple(sorted(map(_canonical, value), key=repr))
    if isinstance(value, dict):
        return tuple(sorted((map(_canonical, value.items())), key=repr))
    if isinstance(value, bool) or (isinstance(value, float) and value.is_integer()):
        return int(value)
    if isinstance(value, str):
        text = value.strip()
        return int(text) if _DIGITS.fullmatch(text) else text
    return value


def _composition(record: Mapping[str, Any]) -> str:
    """As in C1O1Pt12."""
    from ase.data import chemical_symbols

    numbers = np.asarray(record["atomic_numbers"]).reshape(-1).astype(np.int64).tolist()
    counts = Counter(chemical_symbols[z] for z in numbers)
    return "".join(f"{symbol}{count}" for symbol, count in sorted(counts.items()))
