"""Reference energies of trajectories: what is taken off a total energy to get the target."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from flt_mol.compressed import plain_suffix, read_text

__all__ = ["References"]

_NAMES = ("sid", "file", "name")  # of the first column or key
_ENERGIES = ("energy", "reference", "reference_energy")
_TABLES = (".csv", ".tsv", ".json")
_DELIMITERS = ",;\t"
_LISTED = 5


class References:
    """Reference energies, eV, by sid or file, or by a name in each file.

    Args:
        given: one of

            - a mapping from sid, file name, or file name without suffix, to eV;
            - the path of a table of such: CSV (commas, semicolons or tabs) with the
              columns sid and energy, or JSON, an object or a list of objects with sid and energy;
            - the name in `atoms.info` (key-value pairs and data of database rows included) under
              which each trajectory keeps its own;
            - "none": the energies are adsorption energies already.

    Raises:
        ValueError: a table that cannot be read, or an energy that is no finite number.
    """

    def __init__(self, given: Mapping[Any, Any] | str | Path) -> None:
        self.key: str | None = None
        self.table: dict[str, float] = {}
        self.none = given == "none"
        self.source = "the mapping given"
        if isinstance(given, Mapping):
            self.table = _checked(given.items(), self.source)
        elif isinstance(given, Path) or plain_suffix(Path(given)) in _TABLES:
            self.source = str(given)
            self.table = _read(Path(given))
        elif not self.none:
            self.key = given

    def of(self, record: Mapping[str, Any], path: Path, name: str | None = None) -> float:
        """The reference energy of one trajectory, eV.

        Args:
            record: of a frame, with its sid.
            path: its file.
            name: what the trajectory is called, if not by its file.

        Raises:
            ValueError: none is known, naming the file and what is known.
        """
        if self.none:
            return 0.0
        if self.key is not None:
            return self._inside(record, path, self.key)
        names = [str(record["sid"]), *((path.name, path.stem) if name is None else (name,))]
        for candidate in names:
            if candidate in self.table:
                return self.table[candidate]
        near = get_close_matches(names[0], self.table, n=_LISTED, cutoff=0)
        raise ValueError(
            f"{path}, sid {record['sid']}: no reference energy in {self.source} under "
            f"{' or '.join(dict.fromkeys(names))}; there are: {', '.join(near) or 'none'}"
        )

    def _inside(self, record: Mapping[str, Any], path: Path, key: str) -> float:
        value = record.get(key)
        if value is None:
            stored = [name for name in record if record[name] is not None]
            near = ", ".join(get_close_matches(key, stored, n=len(stored), cutoff=0))
            raise ValueError(
                f"{path}, sid {record['sid']}: no reference energy {key}; stored are: {near}"
            )
        return _energy(value, f"{path}, sid {record['sid']}: {key}")


def _read(path: Path) -> dict[str, float]:
    try:
        text = read_text(path)
    except ValueError as error:
        raise ValueError(f"reference energies: {error}") from error
    try:
        rows = json.loads(text) if plain_suffix(path) == ".json" else _rows_of_csv(text)
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{path}: reference energies cannot be read: {error}") from error
    if isinstance(rows, Mapping):
        return _checked(rows.items(), str(path))
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise ValueError(f"{path}: expected sid and energy in each row, or sids with energies")
    return _checked((_pair(row, path) for row in rows), str(path))


def _rows_of_csv(text: str) -> list[dict[str, str]]:
    lines = text.splitlines()
    delimiter = max(_DELIMITERS, key=lines[0].count) if lines else ","
    return list(csv.DictReader(lines, delimiter=delimiter, skipinitialspace=True))


def _pair(row: Mapping[str, Any], path: Path) -> tuple[Any, Any]:
    found = [next((name for name in names if name in row), None) for names in (_NAMES, _ENERGIES)]
    name, energy = found
    if name is None or energy is None:
        raise ValueError(
            f"{path}: the columns are {', '.join(map(str, row))}; expected sid and energy"
        )
    return row[name], row[energy]


def _checked(pairs: Any, source: str) -> dict[str, float]:
    table: dict[str, float] = {}
    for name, value in pairs:
        energy = _energy(value, f"{source}: the reference energy of {name}")
        if table.setdefault(str(name), energy) != energy:
            raise ValueError(f"{source}: two reference energies of {name}: keep one")
    return table


def _energy(value: Any, what: str) -> float:
    try:
        energy = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        energy = math.nan
    if not math.isfinite(energy):
        point = " with a decimal point" if isinstance(value, str) and "," in value else ""
        raise ValueError(f"{what} is {value!r}, expected a finite energy in eV{point}")
    return energy
