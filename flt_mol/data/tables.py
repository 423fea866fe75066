"""Energies by sid in files: predictions of any program, targets, reference energies."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flt_mol.files import some

PREDICTION = ("energy", "prediction", "pred", "y_relaxed")

Key = tuple[str, str]  # split, empty where a file has none, and sid
Row = tuple[int, Mapping[str, Any]]  # line, or number from 1 on, and the cells by column


@dataclass(frozen=True)
class EnergyTable:
    """Energies by split and sid.

    Args:
        path: the file.
        energies: {(split, sid): eV}, in the file's order; split is "" without such a column.
    """

    path: Path
    energies: dict[Key, float]

    @property
    def splits(self) -> list[str]:
        """Their names; empty without a column of splits."""
        return list(dict.fromkeys(split for split, _ in self.energies if split))


def read_energies(path: str | Path, names: Sequence[str] = PREDICTION) -> EnergyTable:
    """Read a table with the columns sid, split (may be missing) and an energy, eV.

    CSV with commas, semicolons or tabs, or JSON (a list of objects), both gzipped or not; or
    `.npz` with `ids` and `energy`. An id that comes again with the same energy, as padded processes
    write it, is dropped.

    Args:
        path: the file.
        names: of the column of energies; the first that is there is taken. Of `PREDICTION` there
            may be one only.

    Raises:
        ValueError: no table, a missing column, two of predictions, no systems; an energy that is
            not finite, a line of another length, an empty sid, an id with two energies; naming
            file, line and sid.

    Warns:
        UserWarning: repeated lines, with their number.
    """
    path, energies, lines = Path(path), dict[Key, float](), dict[Key, int]()
    rows = _rows(path)
    for line, row in rows:
        found = [x for x in names if x in row]
        if not found or "sid" not in row or (names == PREDICTION and len(found) > 1):
            wanted = f"expected sid and one of {', '.join(names)}"
            raise ValueError(f"{path}: the columns are {', '.join(map(str, row))}; {wanted}")
        name, key = found[0], _key(row, f"{path}, line {line}")
        where = f"{path}, line {line}, sid {named(key)}: {name}"
        energy = finite(row[name], where)
        if energies.setdefault(key, energy) != energy:
            raise ValueError(f"{where} is {energy!r}, in line {lines[key]} {energies[key]!r}")
        lines.setdefault(key, line)
    if not energies:
        raise ValueError(f"{path} holds no energies: expected a heading and a line for each system")
    if repeated := len(rows) - len(energies):
        text = f"{path}: dropped {repeated} lines that repeat an id with the same energy"
        warnings.warn(text, stacklevel=2)
    return EnergyTable(path, energies)


def finite(value: Any, what: str) -> float:
    """A number as stored or as text; ValueError where it is none, or not finite."""
    with suppress(TypeError, ValueError, OverflowError):
        plain = str(value).isascii() and "_" not in str(value)  # float reads 1_0, too
        if plain and not isinstance(value, bool) and math.isfinite(number := float(value)):
            return number
    raise ValueError(f"{what} is {value!r}, expected a finite energy in eV")


def read_ids(path: str | Path) -> dict[str, list[str]]:
    """{split: its sids} of a table with the columns sid and split.

    Raises:
        ValueError: as `read_energies`; an id that comes twice.
    """
    path, ids, lines = Path(path), dict[str, list[str]](), dict[Key, int]()
    for line, row in _rows(path):
        split, sid = key = _key({"split": "", **row}, f"{path}, line {line}")
        if lines.setdefault(key, line) != line:
            raise ValueError(f"{path}: sid {named(key)} is in lines {lines[key]} and {line}")
        ids.setdefault(split, []).append(sid)
    if not ids:
        raise ValueError(f"{path} holds no ids")
    return ids


def named(key: Key) -> str:
    """Sid and split, for messages."""
    split, sid = key
    return f"{sid} of {split}" if split else sid


def _key(row: Mapping[str, Any], where: str) -> Key:
    split, sid = (_text(row.get(name, "")) for name in ("split", "sid"))
    if not sid or ("split" in row and not split):
        raise ValueError(f"{where}: the sid or the split is empty")
    return split, sid


def _text(value: Any) -> str:
    """A sid, of which 7 may have become 7.0."""
    whole = isinstance(value, float) and value.is_integer()
    return "" if value is None else str(int(value) if whole else value).strip()


def _rows(path: Path) -> list[Row]:
    try:
        data = path.read_bytes()
        if data.startswith(b"PK\x03\x04"):
            return _of_arrays(data)
        if data.startswith(b"\x1f\x8b"):
            data = gzip.decompress(data)
        text = data.decode("utf-8-sig").lstrip()
        if not text.startswith(("[", "{")):
            return _of_csv(text)
        rows = json.loads(text)
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError("expected a list of objects with sid and energy")
        return list(enumerate(rows, start=1))
    except Exception as error:  # anything that foreign bytes come to
        hint = "; save ids.astype(str)" if "pickle" in str(error) else ""
        raise ValueError(f"{path} cannot be read as a table: {error}{hint}") from error


def _of_arrays(data: bytes) -> list[Row]:
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        if "id_ids" in file:
            raise ValueError("it is a submission: give the files it was made of, by split")
        if not {"ids", "energy"}.issubset(file):
            raise ValueError(f"it holds {some(list(file))}, expected ids and energy")
        ids, energy = file["ids"], file["energy"]
    n = ids.shape[:1]
    for name, shape in {"ids": ids.shape, "energy": energy.shape}.items():
        if shape not in (n, (*n, 1)):
            raise ValueError(f"{name} has shape {shape}, expected {n} or {(*n, 1)}")
    ids = ids.astype(np.str_) if ids.dtype.kind == "S" else ids
    pairs = enumerate(zip(ids.ravel().tolist(), energy.ravel().tolist(), strict=True), start=1)
    return [(line, {"sid": sid, "energy": value}) for line, (sid, value) in pairs]


def _of_csv(text: str) -> list[Row]:
    heading = text.partition("\n")[0]
    delimiter = max(",;\t", key=heading.count)
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    names = reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
    if len(set(names)) < len(names):
        raise ValueError(f"two columns have one name: {', '.join(names)}")
    rows: list[Row] = []
    for row in reader:
        if None in row or None in row.values():
            expected = f"expected {len(names)} columns ({', '.join(names)})"
            raise ValueError(f"line {reader.line_num}: {expected}")
        rows.append((reader.line_num, row))
    return rows
