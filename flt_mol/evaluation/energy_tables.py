"""Energies by sid in files: what other programs predicted, and the targets to compare it with."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flt_mol.compressed import plain_suffix, read_text
from flt_mol.targets import LARGEST_ENERGY

__all__ = ["EnergyTable", "named", "read_energies", "read_ids", "table_of"]

PREDICTION = ("energy", "prediction", "y_relaxed")
TARGET = ("target", "y_relaxed", "energy")

_DELIMITERS = ",;\t"

Key = tuple[str, str]  # split, empty where a file has none, and sid
Row = tuple[int, Mapping[str, Any]]


@dataclass
class EnergyTable:
    """Energies by split and sid.

    Args:
        path: the file.
        energies: {(split, sid): eV}, in the file's order; split is "" without such a column.
        lines: where each stands in the file, for messages.
        columns: further columns by name, {(split, sid): text}.
        repeated: how many lines repeated an id with the same energy, and were dropped.
        has_splits: whether there is a column of splits.
    """

    path: Path
    energies: dict[Key, float] = field(default_factory=dict)
    lines: dict[Key, int] = field(default_factory=dict)
    columns: dict[str, dict[Key, str]] = field(default_factory=dict)
    repeated: int = 0
    has_splits: bool = False

    def where(self, key: Key) -> str:
        """How errors name a system, e.g. ``p.csv, line 3, sid 12``."""
        return f"{self.path}, line {self.lines[key]}, {named(key)}"

    def only(self, splits: Sequence[str]) -> EnergyTable:
        """The systems of some splits.

        Raises:
            ValueError: a split that is not there, naming those that are.
        """
        known = dict.fromkeys(split for split, _ in self.energies)
        for split in splits:
            if split not in known:
                there = ", ".join(known) if self.has_splits else "none: there is no column split"
                raise ValueError(f"{self.path}: no split '{split}'; there are: {there}")
        kept = [key for split in splits for key in self.energies if key[0] == split]
        return EnergyTable(
            self.path,
            {key: self.energies[key] for key in kept},
            {key: self.lines[key] for key in kept},
            self.columns,
            self.repeated,
            self.has_splits,
        )


def named(key: Key) -> str:
    """``sid 12`` or ``sid 12 of val_id``."""
    split, sid = key
    return f"sid {sid} of {split}" if split else f"sid {sid}"


def read_energies(
    path: str | Path, names: Sequence[str] = PREDICTION, keep: Iterable[str] = ()
) -> EnergyTable:
    """Read a table with the columns sid, split (may be missing) and an energy, eV.

    CSV with commas, semicolons or tabs, or JSON, a list of objects; both may be compressed (gzip,
    bzip2, xz), whatever they are called.
    An id that comes again with the same energy, as it does when several processes wrote their
    padded shares, is dropped and counted.

    Args:
        path: `.csv`, `.tsv`, `.json`, or one of these with `.gz` behind it.
        names: of the column of energies; the first that is there is taken.
        keep: names of further columns to keep where they are there.

    Raises:
        ValueError: no such file, no table, a missing column, no systems; an energy that is no
            finite number, a line of another length, an empty sid, an id with two different
            energies, naming file, line and sid.
    """
    path = Path(path)
    return table_of(path, _rows(path), names, keep)


def table_of(
    path: Path,
    rows: Iterable[Row],
    names: Sequence[str] = PREDICTION,
    keep: Iterable[str] = (),
) -> EnergyTable:
    """The table of rows, each with its line; see :func:`read_energies`."""
    table = EnergyTable(path)
    energy_name = ""
    for line, row in rows:
        if not energy_name:
            energy_name = _energy_name(path, row, names)
            table.has_splits = "split" in row
            table.columns = {name: {} for name in keep if name in row}
        _add(table, line, row, energy_name)
    if not table.energies:
        raise ValueError(f"{path} holds no energies: expected a heading and a line for each system")
    return table


def read_ids(path: str | Path) -> dict[str, list[str]]:
    """{split: its sids} of a table with the columns sid and split, each id once.

    Raises:
        ValueError: as :func:`read_energies`; an id that comes twice.
    """
    path = Path(path)
    ids: dict[str, dict[str, int]] = {}
    for line, row in _rows(path):
        if "sid" not in row or "split" not in row:
            raise ValueError(f"{path}: the columns are {', '.join(row)}; expected sid and split")
        sid, split = _text(row["sid"]), _text(row["split"])
        if not sid or not split:
            raise ValueError(f"{path}, line {line}: sid '{sid}' or split '{split}' is empty")
        if ids.setdefault(split, {}).setdefault(sid, line) != line:
            raise ValueError(f"{path}, line {line}: sid {sid} is in line {ids[split][sid]}, too")
    if not ids:
        raise ValueError(f"{path} holds no ids")
    return {split: list(sids) for split, sids in ids.items()}


def _energy_name(path: Path, row: Mapping[str, Any], names: Sequence[str]) -> str:
    found = next((name for name in names if name in row), None)
    if found is None and "sid" not in row and len(row) == 1:
        raise ValueError(
            f"{path} is no table: it begins with '{next(iter(row))}', expected a heading with sid "
            f"and {' or '.join(names)}; structures go with a checkpoint, as its --data"
        )
    if found is None or "sid" not in row:
        raise ValueError(
            f"{path}: the columns are {', '.join(map(str, row))}; expected sid and "
            f"{' or '.join(names)}"
        )
    return found


def _add(table: EnergyTable, line: int, row: Mapping[str, Any], energy_name: str) -> None:
    sid = _text(row.get("sid"))
    split = _text(row.get("split")) if table.has_splits else ""
    key = (split, sid)
    where = f"{table.path}, line {line}, {named(key)}"
    if not sid:
        raise ValueError(f"{table.path}, line {line}: the sid is empty")
    if table.has_splits and not split:
        raise ValueError(f"{where}: the split is empty")
    energy = _energy(row.get(energy_name), f"{where}: {energy_name}")
    if key in table.energies:
        if table.energies[key] != energy:
            raise ValueError(
                f"{where}: the energy is {energy!r}, and {table.energies[key]!r} in line "
                f"{table.lines[key]}; keep one of them"
            )
        table.repeated += 1
        return
    table.energies[key], table.lines[key] = energy, line
    for name, column in table.columns.items():
        if (text := _text(row.get(name))) != "":
            column[key] = text


def _text(value: Any) -> str:
    return "" if value is None else str(value).strip()


def _energy(value: Any, what: str) -> float:
    try:
        odd = isinstance(value, bool) or "_" in str(value)
        energy = math.nan if odd else float(value)
    except (TypeError, ValueError, OverflowError):
        energy = math.nan
    if not math.isfinite(energy):
        raise ValueError(f"{what} is {value!r}, expected a finite number in eV")
    if abs(energy) > LARGEST_ENERGY:
        raise ValueError(f"{what} is {value!r} eV, which is no energy of a structure")
    return energy


def _rows(path: Path) -> Iterator[Row]:
    """Rows with their line, or number in a JSON list; the reading of the whole file is checked."""
    text = read_text(path)
    return _of_json(path, text) if plain_suffix(path) == ".json" else _of_csv(path, text)


def _of_json(path: Path, text: str) -> Iterator[Row]:
    try:
        rows = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path}: expected a list of objects with sid and energy")
    yield from enumerate(rows, start=1)


def _of_csv(path: Path, text: str) -> Iterator[Row]:
    first = text.lstrip().partition("\n")[0]
    delimiter = max(_DELIMITERS, key=first.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    heading: list[str] = []
    try:
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            if not heading:
                heading = _heading(path, cells)
            elif len(cells) != len(heading):
                raise ValueError(
                    f"{path}, line {reader.line_num}: {len(cells)} columns ({', '.join(cells)}), "
                    f"expected {len(heading)} ({', '.join(heading)})"
                )
            else:
                yield reader.line_num, dict(zip(heading, cells, strict=True))
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: {error}") from error


def _heading(path: Path, cells: list[str]) -> list[str]:
    heading = [cell.strip() for cell in cells]
    twice = next((name for name in heading if heading.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"{path}: two columns are called '{twice}'")
    return heading
