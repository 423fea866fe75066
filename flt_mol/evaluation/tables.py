"""Energies by sid in files: predictions of any program, and the targets to compare them with."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flt_mol.data import open_dataset
from flt_mol.data.recipes import find_recipe
from flt_mol.evaluation.splits import SplitResult
from flt_mol.files import some
from flt_mol.prediction.energies import energies_of

_PREDICTION = ("energy", "prediction", "pred", "y_relaxed")
_TARGET = ("target", "y_relaxed", "energy")
_TABLES = (".csv", ".tsv", ".txt", ".json", ".npz", ".gz")

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


def read_energies(path: str | Path, names: Sequence[str] = _PREDICTION) -> EnergyTable:
    """Read a table with the columns sid, split (may be missing) and an energy, eV.

    CSV with commas, semicolons or tabs, or JSON (a list of objects), both gzipped or not; or
    `.npz` with `ids` and `energy`. An id that comes again with the same energy, as padded processes
    write it, is dropped.

    Args:
        path: the file.
        names: of the column of energies; the first that is there is taken.

    Raises:
        ValueError: no such file, no table, a missing column, no systems; an energy that is not a
            finite number, a line of another length, an empty sid, an id with two different
            energies, naming file, line and sid.

    Warns:
        UserWarning: repeated lines, with their number.
    """
    path, energies, lines = Path(path), dict[Key, float](), dict[Key, int]()
    rows = _rows(path)
    for line, row in rows:
        name = next((x for x in names if x in row), "")
        if not name or "sid" not in row:
            wanted = f"expected sid and {' or '.join(names)}"
            raise ValueError(f"{path}: the columns are {', '.join(map(str, row))}; {wanted}")
        key = _key(row, f"{path}, line {line}")
        where = f"{path}, line {line}, sid {_named(key)}: {name} is"
        try:
            energy = float(row[name])
        except (TypeError, ValueError):
            energy = math.nan
        if not math.isfinite(energy):
            raise ValueError(f"{where} {row[name]!r}, expected a finite number")
        if energies.setdefault(key, energy) != energy:
            raise ValueError(f"{where} {energy!r}, in line {lines[key]} {energies[key]!r}")
        lines.setdefault(key, line)
    if not energies:
        raise ValueError(f"{path} holds no energies: expected a heading and a line for each system")
    if repeated := len(rows) - len(energies):
        text = f"{path}: dropped {repeated} lines that repeat an id with the same energy"
        warnings.warn(text, UserWarning, stacklevel=2)
    return EnergyTable(path, energies)


def read_ids(path: str | Path) -> dict[str, list[str]]:
    """{split: its sids} of a table with the columns sid and split.

    Raises:
        ValueError: as :func:`read_energies`; an id that comes twice.
    """
    path, ids = Path(path), dict[str, list[str]]()
    for line, row in _rows(path):
        split, sid = _key({"split": "", **row}, f"{path}, line {line}")
        ids.setdefault(split, []).append(sid)
    if not ids or any(len(set(sids)) < len(sids) for sids in ids.values()):
        raise ValueError(f"{path} holds {'a split with a repeated sid' if ids else 'no ids'}")
    return ids


def score_files(
    predictions: str | Path,
    targets: str | Path | None = None,
    splits: Sequence[str] | None = None,
) -> dict[str, SplitResult]:
    """Compare the predictions in one file with the targets in another, without any model.

    Systems are matched by sid, and by split where both files have it.

    Args:
        predictions: table of sid and energy (eV), with a column split or not; see
            :func:`read_energies`.
        targets: table of sid and target, y_relaxed or energy (the first of these that is there);
            or structures that hold them, as :func:`flt_mol.open_dataset` takes them; or a data
            set, of which the splits that are named here or in `predictions` are taken. None takes
            the column target of `predictions`, as `flt-mol evaluate` writes it.
        splits: only these.

    Returns:
        {split: result}, systems in the order of `targets`; without a column split in either, the
        one split is called after the file of targets.

    Raises:
        ValueError: a file that cannot be read, missing or surplus ids, or an id in two splits of
            which only one file tells them apart, naming file and sid.

    Warns:
        UserWarning: repeated lines that were dropped, with their number.
    """
    predicted = read_energies(predictions)
    if targets is None:
        wanted = read_energies(predictions, ("target",))
    elif Path(targets).suffix.lower() in _TABLES:
        wanted = read_energies(targets, _TARGET)
    else:
        wanted = _stored_targets(targets, splits or predicted.splits)
    known = dict.fromkeys([*predicted.splits, *wanted.splits])
    for split in splits or ():
        if split not in known:
            there = ", ".join(known) or "none, without a column split"
            raise ValueError(f"{predicted.path}: no split '{split}'; there are: {there}")
    both = bool(predicted.splits and wanted.splits)
    ours, theirs = (_by_id(table, both, splits or ()) for table in (predicted, wanted))
    missing = [_named(theirs[key]) for key in theirs if key not in ours]
    surplus = [_named(ours[key]) for key in ours if key not in theirs]
    for found, what in ((missing, "no prediction"), (surplus, "no target")):
        if found:
            where = f"{predicted.path} against {wanted.path}"
            raise ValueError(f"{where}: {what} for sid {some(found)}; choose splits with --split")
    ids: dict[str, list[Key]] = {}
    for key in theirs:
        name = theirs[key][0] or ours[key][0] or wanted.path.name.partition(".")[0]
        ids.setdefault(name, []).append(key)
    return {
        split: SplitResult(
            sid=tuple(sid for _, sid in keys),
            prediction=np.array([predicted.energies[ours[key]] for key in keys]),
            target=np.array([wanted.energies[theirs[key]] for key in keys]),
            path=str(predicted.path),
        )
        for split, keys in ids.items()
    }


def _stored_targets(source: str | Path, splits: Sequence[str]) -> EnergyTable:
    found = find_recipe(source)
    if found is not None and not splits:
        raise ValueError(f"{source}: choose its splits with --split: {', '.join(found.splits)}")
    options: Any = {"require_energy": True}
    named = {split: found.open(split, **options) for split in splits} if found else {}
    energies: dict[Key, float] = {}
    for split, dataset in (named or {"": open_dataset(source, **options)}).items():
        for i, system in enumerate(dataset):
            key = split, str(system.sid[0])
            energy = float(energies_of(system.energy, system)[0])
            if energies.setdefault(key, energy) != energy:
                where = f"{dataset.where(i)}, sid {_named(key)}"
                raise ValueError(f"{where}: the target is {energy!r}, and {energies[key]!r} above")
    return EnergyTable(Path(source), energies)


def _by_id(table: EnergyTable, with_split: bool, splits: Sequence[str]) -> dict[Key, Key]:
    """{id: key} of some splits, ids with or without split; no two keys are the same id."""
    keys = [key for key in table.energies if not (splits and key[0]) or key[0] in splits]
    found = {key if with_split else ("", key[1]): key for key in keys}
    if len(found) < len(keys):
        ((sid, _),) = Counter(sid for _, sid in keys).most_common(1)
        text = f"{table.path}: sid {sid} is in several splits"
        raise ValueError(f"{text}, and the other file has no column split")
    return found


def _named(key: Key) -> str:
    split, sid = key
    return f"{sid} of {split}" if split else sid


def _key(row: Mapping[str, Any], where: str) -> Key:
    split, sid = (str(row.get(name, "")).strip() for name in ("split", "sid"))
    if not sid or ("split" in row and not split):
        raise ValueError(f"{where}: the sid or the split is empty")
    return split, sid


def _rows(path: Path) -> list[Row]:
    try:
        data = path.read_bytes()
        if data.startswith(b"PK\x03\x04"):
            with np.load(io.BytesIO(data), allow_pickle=False) as file:
                ids = np.reshape(file["ids"], -1).astype(np.str_).tolist()
                values = np.reshape(file["energy"], -1).tolist()
            pairs = zip(ids, values, strict=True)
            return list(enumerate(({"sid": sid, "energy": value} for sid, value in pairs), start=1))
        if data.startswith(b"\x1f\x8b"):
            data = gzip.decompress(data)
        text = data.decode("utf-8-sig").lstrip()
        if not text.startswith(("[", "{")):
            return _of_csv(text)
        rows = json.loads(text)
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError("expected a list of objects with sid and energy")
        return list(enumerate(rows, start=1))
    except (
        *(OSError, EOFError, KeyError, ValueError),
        *(csv.Error, zlib.error, zipfile.BadZipFile),
    ) as error:
        raise ValueError(f"{path} cannot be read as a table: {error}") from error


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
