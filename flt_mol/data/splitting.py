"""A data set divided into flat files for training, validation and test, with their recipe."""

from __future__ import annotations

import hashlib
import math
import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from ase.data import chemical_symbols

from flt_mol.data.checks import Unusual
from flt_mol.data.conversion import ConvertResult, Progress, convert
from flt_mol.data.dataset import StructuresDataset
from flt_mol.data.recipes import recipe
from flt_mol.files import temporary_path

Share = float | int | None
"""A fraction of all systems, a number of them, or None for the rest."""

_COMPUTED = ("composition", "adsorbate", "slab")
_ADSORBATE = 2  # the tag
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_ROUNDING = 1e-9


@dataclass(frozen=True)
class SplitResult:
    """Result of a split.

    Args:
        folder: with the files and `dataset.yaml`.
        splits: what was written of each.
        skipped: those of the source.
    """

    folder: Path
    splits: Mapping[str, ConvertResult]
    skipped: tuple[str, ...]


def split(
    source: StructuresDataset,
    output: str | Path,
    fractions: Mapping[str, Share],
    *,
    seed: int = 0,
    group_by: str | None = None,
    progress: Progress | None = None,
) -> SplitResult:
    """Put every system of `source` into one of several flat files, at random.

    The files and a `dataset.yaml` come into a new folder, a data set for `flt-mol train` and
    `flt_mol.data.recipes.recipe`, when all are complete. Which system goes where depends on the
    number of systems, groups, shares and seed alone; inside a file they keep their order.

    Args:
        source: the records.
        output: the folder, new or empty.
        fractions: split → fraction of all systems (a float; together 1), or split → number of
            systems (an int; together all); None for one that takes the rest.
        seed: of the order.
        group_by: a stored field, or one of "composition", "adsorbate" and "slab", which are
            computed from elements and tags where they are not stored; systems of the same value
            stay together. The numbers are then met as well as whole groups can.
        progress: called with records done and all.

    Raises:
        ValueError: invalid shares, an empty split, a record without the field `group_by`, a folder
            that is not empty; and as `flt_mol.data.conversion.convert`.
    """
    output = Path(output)
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise ValueError(f"{output} exists; choose a new or empty folder")
    parts = _assign(_groups(source, group_by), _numbers(fractions, len(source)), seed)
    results: dict[str, ConvertResult] = {}
    unusual = Unusual()

    def report(converted: int, total: int | None) -> None:
        if progress is not None:
            done = sum(part.systems for part in results.values())
            progress(2 * done + converted, 2 * len(source))

    with temporary_path(output, durable=True) as folder:
        folder.mkdir()
        try:
            for key, rows in parts.items():
                file = folder / f"{key}.safetensors"
                results[key] = convert(source, file, indices=rows, progress=report, unusual=unusual)
            about = {"seed": seed, "group_by": group_by, "fractions": dict(fractions)}
            content = _description(output.name, source, results, about)
            text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=100)
            (folder / "dataset.yaml").write_text(text, encoding="utf-8")
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    unusual.warn()
    moved = {key: replace(one, output=output / one.output.name) for key, one in results.items()}
    return SplitResult(output, moved, tuple(source.skipped))


def _numbers(fractions: Mapping[str, Share], count: int) -> dict[str, int]:
    """How many of `count` systems each split is to have."""
    for name, share in fractions.items():
        if not _NAME.fullmatch(name):
            raise ValueError(f"split {name!r}: a name has letters, digits, _ and -")
        if share is not None and (isinstance(share, bool) or not 0 < share < math.inf):
            raise ValueError(f"split {name} has share {share!r}, expected a positive number")
    given = [share for share in fractions.values() if share is not None]
    lacking = len(fractions) - len(given)
    whole = 1.0 if given and isinstance(given[0], float) else count
    rest = whole - math.fsum(given)
    fits = abs(rest) < _ROUNDING or (rest > 0 and lacking)
    if not fits or lacking > 1 or len({type(share) for share in given}) > 1:
        raise ValueError(
            f"shares are {dict(fractions)}: give fractions (together 1) or counts (together "
            f"{count}); one may be the rest, as in train=rest"
        )
    parts = [rest if share is None else share for share in fractions.values()]
    ends = np.rint(np.cumsum([0, *parts]) / whole * count).astype(int)
    return dict(zip(fractions, np.diff(ends).tolist(), strict=True))


def _assign(groups: Sequence[str], counts: Mapping[str, int], seed: int) -> dict[str, list[int]]:
    """Which systems each split gets, in ascending order.

    The groups are ordered by a hash of seed and name, the same on every machine; one after the
    other goes to the split that lacks most.
    """
    members: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    lacking, result = dict(counts), {name: list[int]() for name in counts}
    for group in sorted(members, key=lambda g: hashlib.sha256(f"{seed}:{g}".encode()).digest()):
        name = max(lacking, key=lacking.__getitem__)
        lacking[name] -= len(members[group])
        result[name] += members[group]
    for name, indices in result.items():
        if not indices:
            raise ValueError(
                f"split {name} gets none of {len(groups)} systems in {len(members)} groups: take "
                "other shares (--shares train=0.8 val_id=rest) or another seed"
            )
    return {name: sorted(indices) for name, indices in result.items()}


def _groups(source: StructuresDataset, field: str | None) -> list[str]:
    """A name for the group of each system: itself alone, the value of a field, or what it is of."""
    if field is None:
        return [str(index) for index in range(len(source))]
    groups, stored = list[str](), set[bool]()
    for index in range(len(source)):
        record, where = source.record(index), source.where(index)
        value = record.get(field)
        stored.add(value is not None)
        if len(stored) > 1 or (value is None and field not in _COMPUTED):
            text = f"stored: {', '.join(record)}; computed: {', '.join(_COMPUTED)}"
            raise ValueError(f"{where}: no field {field} to group by, here or before; {text}")
        if value is None:
            groups.append(_of_atoms(record, field, where))
        else:  # what is stored as 7, [7] and "7" is one group
            groups.append(str(np.asarray(value).squeeze().tolist()))
    return groups


def _of_atoms(record: Mapping[str, Any], field: str, where: str) -> str:
    """As in C1O1Pt12: all atoms, the adsorbate's, or the slab's."""
    numbers = np.asarray(record["atomic_numbers"]).reshape(-1).astype(np.int64)
    if field != "composition":
        tags = np.asarray(0 if (stored := record.get("tags")) is None else stored).reshape(-1)
        if not tags.any():
            raise ValueError(f"{where}: no tags to group by {field}: see flt_mol.data.tag_slab")
        numbers = numbers[(tags == _ADSORBATE) == (field == "adsorbate")]
    counts = Counter(chemical_symbols[z] for z in numbers.tolist())
    return "".join(f"{symbol}{count}" for symbol, count in sorted(counts.items()))


def _description(
    name: str,
    source: StructuresDataset,
    results: Mapping[str, ConvertResult],
    about: Mapping[str, Any],
) -> dict[str, Any]:
    content: dict[str, Any] = {
        "name": name,
        "source": source.path.name,
        "split": {**about, "by": "flt_mol.data.splitting.split"},
        "units": {"length": "Å", "energy": "eV"},
        "splits": {
            key: {
                "file": result.output.name,
                "count": result.systems,
                "bytes": result.bytes,
                "sha256": hashlib.sha256(result.output.read_bytes()).hexdigest(),
            }
            for key, result in results.items()
        },
    }
    if not source.path.exists():  # in memory
        return content
    with suppress(ValueError):  # no data set there
        rule = recipe(source.path.resolve().parent).metadata.get("tag_rule")
        content |= {} if rule is None else {"tag_rule": rule}
    return content
