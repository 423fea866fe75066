"""Energies by sid in files: predictions of any program, and the targets to compare them with."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import math
import warnings
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from flt_mol.evaluation.splits import COLUMNS, SplitResult
from flt_mol.files import readable

__all__ = ["EnergyTable", "read_energies", "read_ids", "score_files", "some_sids"]

_PREDICTION = ("energy", "prediction", "pred", "y_relaxed")
_TARGET = ("target", "y_relaxed", "energy")
_UNPACK: dict[bytes, Any] = {b"\x1f\x8b": gzip, b"BZh": bz2, b"\xfd7zXZ": lzma}  # by first bytes

Key = tuple[str, str]  # split, empty where a file has none, and sid


@dataclass(frozen=True)
class EnergyTable:
    """Energies by split and sid.

    Args:
        path: the file.
        energies: {(split, sid): eV}, in the file's order; split is "" without such a column.
        lines: where each stands in the file, for messages.
        columns: {(split, sid): {name: text}} of the columns kept.
        has_splits: whether there is a column of splits.
    """

    path: Path
    energies: dict[Key, float] = field(default_factory=dict)
    lines: dict[Key, int] = field(default_factory=dict)
    columns: dict[Key, dict[str, str]] = field(default_factory=dict)
    has_splits: bool = False

    def only(self, splits: Sequence[str]) -> EnergyTable:
        """The systems of some splits.

        Raises:
            ValueError: a split that is not there, naming those that are.
        """
        known = list(dict.fromkeys(split for split, _ in self.energies))
        for split in splits:
            if split not in known:
                there = ", ".join(known) if self.has_splits else "none: there is no column split"
                raise ValueError(f"{self.path}: no split '{split}'; there are: {there}")
        kept = {
            k: energy for split in splits for k, energy in self.energies.items() if k[0] == split
        }
        return replace(self, energies=kept)


def read_energies(path: str | Path, names: Sequence[str] = _PREDICTION) -> EnergyTable:
    """Read a table with the columns sid, split (may be missing) and an energy, eV.

    CSV with commas, semicolons or tabs, JSON (a list of objects, or an object of lists), both
    compressed (gzip, bzip2, xz) or not; or `.npz` with `ids` and `energy`. An id that comes again
    with the same energy, as padded processes write it, is dropped.

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
    path = Path(path)
    return table_of(path, _rows(path), names)


def table_of(
    path: Path, rows: Iterable[tuple[int, Mapping[str, Any]]], names: Sequence[str] = _PREDICTION
) -> EnergyTable:
    """The table of (line, row) pairs; see :func:`read_energies`."""
    table, repeated, name = EnergyTable(path), 0, ""
    for line, row in rows:
        if not name:
            name = next((x for x in names if x in row), "")
            if not name or "sid" not in row:
                raise ValueError(
                    f"{path}: the columns are {', '.join(map(str, row))}; expected sid and "
                    f"{' or '.join(names)}; structures go with a checkpoint, as its --data"
                )
            table = replace(table, has_splits="split" in row)
        sid, split = _text(row.get("sid")), _text(row.get("split")) if table.has_splits else ""
        where = f"{path}, line {line}, {_named((split, sid))}"
        if not sid or (table.has_splits and not split):
            raise ValueError(f"{where}: the sid or the split is empty")
        energy = _energy(row.get(name), f"{where}: {name}")
        if table.energies.setdefault((split, sid), energy) != energy:
            raise ValueError(
                f"{where}: the energy is {energy!r}, and {table.energies[split, sid]!r} in line "
                f"{table.lines[split, sid]}; keep one of them"
            )
        repeated += (split, sid) in table.lines
        table.lines.setdefault((split, sid), line)
        kept = {x: _text(row.get(x)) for x in COLUMNS if _text(row.get(x))}
        table.columns.setdefault((split, sid), kept)
    if not table.energies:
        raise ValueError(f"{path} holds no energies: expected a heading and a line for each system")
    if repeated:
        text = f"{path}: dropped {repeated} lines that repeat an id with the same energy"
        warnings.warn(text, UserWarning, stacklevel=4)
    return table


def read_ids(path: str | Path) -> dict[str, list[str]]:
    """{split: its sids} of a table with the columns sid and split.

    Raises:
        ValueError: as :func:`read_energies`; an id that comes twice.
    """
    path, ids = Path(path), dict[str, dict[str, int]]()
    for line, row in _rows(path):
        sid, split = _text(row.get("sid")), _text(row.get("split"))
        if not sid or not split:
            raise ValueError(f"{path}, line {line}: expected the columns sid and split, both set")
        if ids.setdefault(split, {}).setdefault(sid, line) != line:
            raise ValueError(f"{path}, line {line}: sid {sid} is in line {ids[split][sid]}, too")
    if not ids:
        raise ValueError(f"{path} holds no ids")
    return {split: list(sids) for split, sids in ids.items()}


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
        targets: table of sid and target, y_relaxed or energy (the first of these that is there).
            None takes the column target of `predictions`, as `flt-mol evaluate` writes it.
        splits: only these.

    Returns:
        {split: result}, systems in the order of `targets`; without a column split in either, the
        one split is called after the file of targets.

    Raises:
        ValueError: a file that cannot be read, missing or surplus ids, or an id in two splits of
            which only one file tells them apart, naming file, line and sid.

    Warns:
        UserWarning: repeated lines that were dropped, with their number.
    """
    predicted = read_energies(predictions)
    with warnings.catch_warnings():
        if targets is None:  # whose repeated lines were reported already
            warnings.simplefilter("ignore")
        wanted = read_energies(targets or predictions, ("target",) if targets is None else _TARGET)
    if splits:
        if not (predicted.has_splits or wanted.has_splits):
            wanted.only(splits)  # raises: there is no column split
        predicted = predicted.only(splits) if predicted.has_splits else predicted
        wanted = wanted.only(splits) if wanted.has_splits else wanted
    both = predicted.has_splits and wanted.has_splits
    of_id, wanted_ids = _by_id(predicted, both), _by_id(wanted, both)
    _refuse_difference(predicted, wanted, of_id, wanted_ids)
    pairs: dict[str, list[tuple[Key, Key]]] = {}
    for identity, key in wanted_ids.items():
        own = of_id[identity]
        name = key[0] or own[0] or wanted.path.name.partition(".")[0] or wanted.path.name
        pairs.setdefault(name, []).append((own, key))
    return {split: _result(predicted, wanted, keys) for split, keys in pairs.items()}


def some_sids(sids: Sequence[Any], shown: int = 5) -> str:
    """`sid 1, 2, 3, 4, 5 and 7 more`."""
    more = f" and {len(sids) - shown} more" if len(sids) > shown else ""
    return f"sid {', '.join(map(str, sids[:shown]))}{more}"


def _by_id(table: EnergyTable, with_split: bool) -> dict[Key, Key]:
    """{id: key}, ids with or without split; no two keys are the same id."""
    found: dict[Key, Key] = {}
    for key in table.energies:
        other = found.setdefault(key if with_split else ("", key[1]), key)
        if other != key:
            raise ValueError(
                f"{table.path}, line {table.lines[key]}, {_named(key)}: the sid is also in "
                f"{other[0]}, line {table.lines[other]}, and the other file has no column split"
            )
    return found


def _refuse_difference(
    predicted: EnergyTable, wanted: EnergyTable, of_id: dict[Key, Key], wanted_ids: dict[Key, Key]
) -> None:
    missing = [_named(key)[4:] for identity, key in wanted_ids.items() if identity not in of_id]
    surplus = [key for identity, key in of_id.items() if identity not in wanted_ids]
    parts = []
    if missing:
        parts.append(f"has no prediction for {some_sids(missing)} in {wanted.path}")
        splits = dict.fromkeys(split for split, _ in of_id if split)
        if splits and {split for split, _ in wanted_ids} - set(splits):
            parts[-1] += f" (choose splits: {' '.join(f'--split {x}' for x in splits)})"
    if surplus:
        named = some_sids([_named(key)[4:] for key in surplus])
        line = predicted.lines[surplus[0]]
        parts.append(f"has predictions without a target, {named} (first in line {line})")
    if parts:
        raise ValueError(f"{predicted.path} {', and '.join(parts)}")


def _result(
    predicted: EnergyTable, wanted: EnergyTable, pairs: list[tuple[Key, Key]]
) -> SplitResult:
    rows = [{**predicted.columns[own], **wanted.columns[key]} for own, key in pairs]
    columns: dict[str, tuple[Any, ...]] = {
        name: tuple(row.get(name) for row in rows)
        for name in COLUMNS
        if any(name in row for row in rows)
    }
    if "natoms" in columns:
        columns["natoms"] = tuple(
            int(x) if x is not None and x.isdecimal() else None for x in columns["natoms"]
        )
    return SplitResult(
        sid=tuple(key[1] for _, key in pairs),
        prediction=np.array([predicted.energies[own] for own, _ in pairs]),
        target=np.array([wanted.energies[key] for _, key in pairs]),
        path=str(predicted.path),
        columns=columns,
    )


def _named(key: Key) -> str:
    split, sid = key
    return f"sid {sid} of {split}" if split else f"sid {sid}"


def _text(value: Any) -> str:
    return "" if value is None else str(value).strip()


def _energy(value: Any, what: str) -> float:
    try:
        energy = math.nan if isinstance(value, bool) or "_" in str(value) else float(value)
    except (TypeError, ValueError):
        energy = math.nan
    if not math.isfinite(energy):
        raise ValueError(f"{what} is {value!r}, expected a finite number")
    return energy


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Each row with its line, or its number from 1 on."""
    with readable(path):
        data = path.read_bytes()
    if data.startswith(b"PK\x03\x04"):
        yield from _of_npz(path, data)
        return
    module = next((m for start, m in _UNPACK.items() if data.startswith(start)), None)
    try:
        text = (data if module is None else module.decompress(data)).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8 (byte {error.start})") from error
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
        raise ValueError(f"{path} is truncated or damaged: {error}") from error
    yield from (_of_json if text.lstrip()[:1] in ("[", "{") else _of_csv)(path, text)


def _of_npz(path: Path, data: bytes) -> Iterator[tuple[int, Mapping[str, Any]]]:
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            ids, energy = (np.asarray(file[name]).reshape(-1) for name in ("ids", "energy"))
    except (KeyError, ValueError, OSError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} is not an .npz with ids and energy: {error}") from error
    if len(ids) != len(energy):
        raise ValueError(f"{path} has {len(ids)} ids for {len(energy)} energies")
    rows = zip(ids.tolist(), energy.tolist(), strict=True)
    yield from enumerate(({"sid": sid, "energy": value} for sid, value in rows), start=1)


def _of_json(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    try:
        rows = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if isinstance(rows, dict):
        columns = {x: v for x, v in rows.items() if isinstance(v, list)}
        lengths = set(map(len, columns.values()))
        if len(lengths) != 1:
            raise ValueError(f"{path}: expected lists of one length for sid and energy")
        rows = [{x: v[i] for x, v in columns.items()} for i in range(lengths.pop())]
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path}: expected a list of objects with sid and energy")
    yield from enumerate(rows, start=1)


def _of_csv(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    first = text.lstrip().partition("\n")[0]
    reader = csv.reader(
        io.StringIO(text, newline=""), delimiter=max(",;\t", key=first.count), strict=True
    )
    heading: list[str] = []
    try:
        for cells in reader:
            cells = [cell.strip() for cell in cells]
            if not any(cells):
                continue
            if not heading:
                heading = cells
                if len(set(heading)) < len(heading):
                    raise ValueError(f"{path}: two columns have one name: {', '.join(heading)}")
            elif len(cells) != len(heading):
                raise ValueError(
                    f"{path}, line {reader.line_num}: {len(cells)} columns, expected "
                    f"{len(heading)} ({', '.join(heading)})"
                )
            else:
                yield reader.line_num, dict(zip(heading, cells, strict=True))
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: {error}") from error
