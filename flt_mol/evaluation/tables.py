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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flt_mol.evaluation.splits import SplitResult
from flt_mol.files import readable

__all__ = ["EnergyTable", "read_energies", "read_ids", "score_files", "some_sids", "table_of"]

_PREDICTION = ("energy", "prediction", "pred", "y_relaxed")
_TARGET = ("target", "y_relaxed", "energy")

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
    energies: dict[Key, float] = field(default_factory=dict)

    @property
    def splits(self) -> list[str]:
        """Their names; empty without a column of splits."""
        return list(dict.fromkeys(split for split, _ in self.energies if split))

    def only(self, splits: Sequence[str]) -> EnergyTable:
        """The systems of some splits.

        Raises:
            ValueError: a split that is not there, naming those that are.
        """
        for split in splits:
            if split not in self.splits:
                there = ", ".join(self.splits) or "none, without a column split"
                raise ValueError(f"{self.path}: no split '{split}'; there are: {there}")
        kept = {key: x for key, x in self.energies.items() if key[0] in splits}
        return EnergyTable(self.path, kept)


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
    return table_of(Path(path), _rows(Path(path)), names)


def table_of(path: Path, rows: Iterable[Row], names: Sequence[str] = _PREDICTION) -> EnergyTable:
    """The table of (line, row) pairs; see :func:`read_energies`."""
    table, repeated = EnergyTable(path), 0
    for line, row in rows:
        name = next((x for x in names if x in row), "")
        if not name or "sid" not in row:
            wanted = f"expected sid and {' or '.join(names)}"
            raise ValueError(f"{path}: the columns are {', '.join(map(str, row))}; {wanted}")
        key = (_text(row.get("split", "")), _text(row["sid"]))
        where = f"{path}, line {line}, {_named(key)}"
        if not key[1] or ("split" in row and not key[0]):
            raise ValueError(f"{where}: the sid or the split is empty")
        energy = _energy(row[name], f"{where}: {name}")
        repeated += key in table.energies
        if table.energies.setdefault(key, energy) != energy:
            raise ValueError(f"{where}: {name} is {energy!r}, and {table.energies[key]!r} above")
    if not table.energies:
        raise ValueError(f"{path} holds no energies: expected a heading and a line for each system")
    if repeated:
        text = f"{path}: dropped {repeated} lines that repeat an id with the same energy"
        warnings.warn(text, UserWarning, stacklevel=3)
    return table


def read_ids(path: str | Path) -> dict[str, list[str]]:
    """{split: its sids} of a table with the columns sid and split.

    Raises:
        ValueError: as :func:`read_energies`; an id that comes twice.
    """
    path, ids = Path(path), dict[str, list[str]]()
    for line, row in _rows(path):
        sid, split = _text(row.get("sid")), _text(row.get("split"))
        if not sid or not split:
            raise ValueError(f"{path}, line {line}: expected the columns sid and split, both set")
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
        targets: table of sid and target, y_relaxed or energy (the first of these that is there).
            None takes the column target of `predictions`, as `flt-mol evaluate` writes it.
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
    wanted = read_energies(targets or predictions, ("target",) if targets is None else _TARGET)
    if splits:
        predicted = predicted.only(splits) if predicted.splits or not wanted.splits else predicted
        wanted = wanted.only(splits) if wanted.splits else wanted
    both = bool(predicted.splits and wanted.splits)
    ours, theirs = _by_id(predicted, both), _by_id(wanted, both)
    missing = [_named(theirs[key])[4:] for key in theirs if key not in ours]
    surplus = [_named(ours[key])[4:] for key in ours if key not in theirs]
    parts = [f"no prediction for {some_sids(missing)} in {wanted.path}"] if missing else []
    parts += [f"predictions without a target, {some_sids(surplus)}"] if surplus else []
    if parts:
        hint = "; choose splits with --split" if predicted.splits else ""
        raise ValueError(f"{predicted.path} has {', and '.join(parts)}{hint}")
    pairs: dict[str, list[tuple[Key, Key]]] = {}
    for identity, key in theirs.items():
        name = key[0] or ours[identity][0] or wanted.path.name.partition(".")[0] or str(wanted.path)
        pairs.setdefault(name, []).append((ours[identity], key))
    return {
        split: SplitResult(
            sid=tuple(key[1] for _, key in keys),
            prediction=np.array([predicted.energies[own] for own, _ in keys]),
            target=np.array([wanted.energies[key] for _, key in keys]),
            path=str(predicted.path),
        )
        for split, keys in pairs.items()
    }


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
                f"{table.path}: {_named(key)} is also in {other[0]}, and the other file has no "
                "column split"
            )
    return found


def _named(key: Key) -> str:
    split, sid = key
    return f"sid {sid} of {split}" if split else f"sid {sid}"


def _text(value: Any) -> str:
    return "" if value is None else str(value).strip()


def _energy(value: Any, what: str) -> float:
    try:  # Python's own "1_0" and true are typing errors here
        energy = math.nan if isinstance(value, bool) or "_" in str(value) else float(value)
    except (TypeError, ValueError):
        energy = math.nan
    if not math.isfinite(energy):
        raise ValueError(f"{what} is {value!r}, expected a finite number")
    return energy


def _rows(path: Path) -> Iterator[Row]:
    with readable(path):
        data = path.read_bytes()
    try:
        if data.startswith(b"PK\x03\x04"):
            with np.load(io.BytesIO(data), allow_pickle=False) as file:
                columns = [np.reshape(file[name], -1).tolist() for name in ("ids", "energy")]
            pairs = zip(*columns, strict=True)
            yield from enumerate(({"sid": sid, "energy": value} for sid, value in pairs), start=1)
            return
        if data.startswith(b"\x1f\x8b"):
            data = gzip.decompress(data)
        text = data.decode("utf-8-sig")
        if text.lstrip()[:1] not in ("[", "{"):
            yield from _of_csv(path, text)
            return
        rows = json.loads(text)
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError(f"{path}: expected a list of objects with sid and energy")
    except (OSError, EOFError, KeyError, ValueError, zlib.error, zipfile.BadZipFile) as error:
        text = str(error)
        raise ValueError(
            text if text.startswith(str(path)) else f"{path} is not a readable table: {text}"
        ) from error
    yield from enumerate(rows, start=1)


def _of_csv(path: Path, text: str) -> Iterator[Row]:
    first = text.lstrip().partition("\n")[0]
    delimiter = max(",;\t", key=first.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    heading: list[str] = []
    try:
        for cells in reader:
            cells = [cell.strip() for cell in cells]
            if heading and any(cells):
                if len(cells) != len(heading):
                    raise ValueError(
                        f"{path}, line {reader.line_num}: {len(cells)} columns, expected "
                        f"{len(heading)} ({', '.join(heading)})"
                    )
                yield reader.line_num, dict(zip(heading, cells, strict=True))
            elif any(cells):
                heading = cells
                if len(set(heading)) < len(heading):
                    raise ValueError(f"{path}: two columns have one name: {', '.join(heading)}")
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: {error}") from error
