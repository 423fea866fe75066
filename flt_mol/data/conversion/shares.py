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
from flt_mol.outputs import counted

__all__ = ["Share", "assign", "good_records", "groups_of", "numbers"]

Share = float | int | None
"""A fraction of all systems, a number of them, or None for the rest."""

_DIGITS = re.compile(r"0|-?[1-9][0-9]{0,17}")
_TOGETHER = 64  # records read at a time
_WORKED_OUT = ("composition", "adsorbate", "slab")
_ADSORBATE = 2  # the tag
_ROUNDS = 8  # in search of shares that come out as they are
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
        unit = "" if whole == 1 and isinstance(given[0], float) else " systems"
        mend = "take smaller ones" if rest < 0 else "let one take the rest, as in train=rest"
        raise ValueError(
            f"fractions are {dict(fractions)}: they sum to {float(whole - rest):g}, not to "
            f"{whole}{unit}; {mend}"
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
    sizes = [len(members[group]) for group in order]
    names = _in_turn(sizes, counts)
    result = {name: list[int]() for name in counts}
    for group, name in zip(order, names, strict=True):
        result[name] += members[group]
    empty = [name for name, indices in result.items() if not indices]
    if empty:
        raise ValueError(f"split {empty[0]} gets none {_what_works(sizes, counts)}")
    return {name: sorted(indices) for name, indices in result.items()}


def _in_turn(sizes: Sequence[int], counts: Mapping[str, int]) -> list[str]:
    """The split of each group: the one that lacks most then."""
    lacking, names = dict(counts), list[str]()
    for size in sizes:
        names.append(max(lacking, key=lacking.__getitem__))
        lacking[names[-1]] -= size
    return names


def _made(sizes: Sequence[int], counts: Mapping[str, int]) -> dict[str, int]:
    """How many systems each split really gets."""
    made = dict.fromkeys(counts, 0)
    for name, size in zip(_in_turn(sizes, counts), sizes, strict=True):
        made[name] += size
    return made


def _told(sizes: Sequence[int], shares: Mapping[str, int]) -> str:
    """Shares for a command: such as come out as they are asked for, else with what comes out."""
    first = made = _made(sizes, shares)
    for _ in range(_ROUNDS):
        again = _made(sizes, made)
        if again == made:
            return " ".join(f"{name}={count}" for name, count in made.items())
        if not all(again.values()):
            break
        made = again
    shown = " ".join(f"{name}={count}" for name, count in shares.items())
    result = ", ".join(f"{name} {count}" for name, count in first.items())
    return f"{shown} (which makes {result}, as groups stay whole)"


def _what_works(sizes: Sequence[int], counts: Mapping[str, int]) -> str:
    """What there is to divide, and shares near those asked for that give every split some."""
    total, grouped = sum(sizes), len(sizes) < sum(sizes)
    there = f"of {counted(total, 'system')}"
    if grouped:
        there += f" in {counted(len(sizes), 'group')}, up to {max(sizes)} in one, which stays whole"
    if len(sizes) < len(counts):
        other = ", or group by what has more values (or by nothing)" if grouped else ""
        return f"{there}: too few for {len(counts)} splits; make fewer{other}"
    least = 1
    while least <= total // len(counts):
        raised = {name: max(count, least) for name, count in counts.items()}
        most = max(raised, key=raised.__getitem__)
        raised[most] -= sum(raised.values()) - total
        if raised[most] >= least and all(_made(sizes, raised).values()):
            return f"{there}: shares that work: --shares {_told(sizes, raised)}"
        least += max(1, least // 4)
    return f"{there}: make fewer splits, group by what has more values, or take another --seed"


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
        field: stored name; "composition", the numbers of atoms of each element; "adsorbate" or
            "slab", where no such field is stored those of the atoms of tag 2, or of the others;
            None for each system by itself.
        indices: of the systems.
        on_error: "raise", or "skip": an unreadable record is a group of its own.

    Raises:
        ValueError: a record without the field, or without the tags to work it out from.
    """
    if field is None:
        return [str(index) for index in indices]
    groups, worked_out = list[str](), set[bool]()
    for index in indices:
        try:
            record = source.record(index)
            value = record.get(field)
        except ValueError:
            if on_error == "raise":
                raise
            groups.append(f"unreadable {index}")  # left out later
            continue
        worked_out.add(value is None and field in _WORKED_OUT)
        if value is None and worked_out != {True}:  # stored in others: no two kinds of names
            raise ValueError(_no_field(source.where(index), field, record))
        if value is None:
            groups.append(_of_atoms(record, field, source.where(index)))
        else:
            value = _canonical(value)
            groups.append(f"{type(value).__name__} {value!r}")
    if len(worked_out) > 1:
        raise ValueError(
            f"{source.path}: only some records have a field {field} to group by; store it in all, "
            "or in none"
        )
    return groups


def _no_field(where: str, field: str, record: Mapping[str, Any]) -> str:
    return (
        f"{where}: no field {field} to group by; stored: {', '.join(record)}. Store it, in ASE as "
        f"atoms.info['{field}'], or group by one of these that need not be stored: "
        f"{', '.join(_WORKED_OUT)}"
    )


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


def _of_atoms(record: Mapping[str, Any], field: str, where: str) -> str:
    """As in C1O1Pt12: all atoms, the adsorbate's, or the slab's."""
    from ase.data import chemical_symbols

    numbers = np.asarray(record["atomic_numbers"]).reshape(-1).astype(np.int64)
    if field != "composition":
        tags = np.asarray(0 if (stored := record.get("tags")) is None else stored).reshape(-1)
        if not tags.any():
            raise ValueError(
                f"{where}: no field {field} to group by, and no tags to tell slab and adsorbate "
                "by: tag the slabs with flt_mol.data.tag_slab(atoms) and write them to .extxyz or "
                f".traj; or store atoms.info['{field}'], or group by composition"
            )
        numbers = numbers[(tags == _ADSORBATE) == (field == "adsorbate")]
    counts = Counter(chemical_symbols[z] for z in numbers.tolist())
    return "".join(f"{symbol}{count}" for symbol, count in sorted(counts.items()))
