"""ASE's databases in one file, SQLite (`.db`) or JSON, read without making objects of ASE.

The files are only read: ase.db would create its tables in whatever is called `.db`, and would make
arrays as large as a JSON text says. The columns of SQLite's table `systems` are those of ASE's
version 9: numbers and tags int32, other arrays float64, `pbc` three bits, `data` JSON whose arrays
lie in the same blob before it.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from flt_mol.data.aselmdb.json_values import StoredJson, load
from flt_mol.data.aselmdb.rows import Broken, Row

__all__ = ["database_rows"]

_ARRAYS = {"numbers": np.int32, "tags": np.int32, "positions": np.float64, "cell": np.float64}
_ARRAYS |= {"forces": np.float64, "stress": np.float64, "dipole": np.float64}
_JOURNAL_HEAD = 28  # bytes; SQLite fills them with zeros where it keeps a finished journal
_NUMBERS = ("energy", "free_energy", "magmom")
_IN_ROWS = {"positions": 3, "cell": 3, "forces": 3}  # numbers in one row


def database_rows(path: Path, kind: str) -> Iterator[Row | Broken]:
    """The rows of a database by OC20's names, in the order of their ids.

    Args:
        path: the file.
        kind: "db" or "json".

    Raises:
        ValueError: no database of ASE, a damaged one, or one with an unfinished write beside it.
    """
    yield from _sqlite(path) if kind == "db" else _json(path)


def _json(path: Path) -> Iterator[Row | Broken]:
    content = load(path.read_bytes())
    ids = content.get("ids") if isinstance(content, dict) else None
    if not isinstance(ids, list):
        raise ValueError("it is JSON, but no database of ASE (which has ids)")
    for number in ids:
        yield _row(content.get(str(number)), f"{path}, row {number}")


def _row(content: Any, where: str) -> Row | Broken:
    if not isinstance(content, dict):
        return Broken(f"{where}: the row is missing")
    try:
        return Row(content, where)
    except ValueError as error:
        return Broken(str(error))


def _sqlite(path: Path) -> Iterator[Row | Broken]:
    with path.open("rb") as file:
        if file.read(16) != b"SQLite format 3\0":
            raise ValueError("it is no SQLite database")
    for end in ("-wal", "-journal"):
        beside = path.with_name(path.name + end)
        if beside.is_file() and _unfinished(beside):
            raise ValueError(f"{beside.name} holds an unfinished write; open it with its writer")
    # Immutable: nothing is written beside the file, not even a lock.
    where = f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1"
    with contextlib.closing(sqlite3.connect(where, uri=True)) as connection:
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.row_factory = sqlite3.Row
        found = connection.execute(
            "SELECT COUNT(*) FROM sqlite_master WHERE type = 'table' AND name = 'systems'"
        )
        if not found.fetchone()[0]:
            raise ValueError("it is an SQLite database, but none of ASE (no table systems)")
        for values in connection.execute("SELECT * FROM systems ORDER BY id"):
            columns = dict(values)
            place = f"{path}, row {columns.get('id')}"
            try:
                content = _content(columns)
            except (ValueError, TypeError) as error:
                yield Broken(f"{place}: {error}")
            else:
                yield _row(content, place)


def _unfinished(beside: Path) -> bool:
    """Whether a log or journal holds something: a head of zeros is one that was written back."""
    with beside.open("rb") as file:
        return any(file.read(_JOURNAL_HEAD))


def _content(columns: Mapping[str, Any]) -> dict[str, Any]:
    """One line of the table as the row that JSON would hold."""
    content: dict[str, Any] = {name: columns[name] for name in _NUMBERS if name in columns}
    for name, dtype in _ARRAYS.items():
        if columns.get(name) is not None:
            content[name] = _Blob(columns[name], dtype, _IN_ROWS.get(name))
    if columns.get("pbc") is not None:
        content["pbc"] = [bool(int(columns["pbc"]) >> axis & 1) for axis in range(3)]
    for name in ("constraints", "key_value_pairs", "data"):
        value = columns.get(name)
        if isinstance(value, str):
            value = load(value.encode())
        elif isinstance(value, bytes):
            value = _of_bytes(value)
        content[name] = value
    return {name: value for name, value in content.items() if value is not None}


class _Blob(StoredJson):
    """The bytes of an array."""

    __slots__ = ("columns", "data", "dtype")

    def __init__(self, data: Any, dtype: Any, columns: int | None) -> None:
        self.data = data
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.columns = columns

    @property
    def shape(self) -> tuple[int, ...] | None:
        n = len(self.data) // self.dtype.itemsize if isinstance(self.data, bytes) else 0
        return (n,) if self.columns is None else (n // self.columns, self.columns)

    def decode(self) -> NDArray[Any]:
        if not isinstance(self.data, bytes):
            raise ValueError(f"is a {type(self.data).__name__}, expected bytes")
        flat = np.frombuffer(self.data, self.dtype).astype(self.dtype.newbyteorder("="))
        return flat if self.columns is None else flat.reshape(-1, self.columns)


def _of_bytes(data: bytes) -> Any:
    """`data` of a row: the place of a JSON text, arrays, and the text, in which they are named."""
    place = int.from_bytes(data[:8], "little")
    if not 8 <= place <= len(data):
        raise ValueError("its data is damaged")
    return _placed(load(data[place:]), data[:place])


def _placed(value: Any, data: bytes) -> Any:
    if isinstance(value, StoredJson) and "__ndarray__" in value.content:
        shape, name, start = value.content["__ndarray__"]
        if name not in np.sctypeDict or any(type(n) is not int or n < 0 for n in (*shape, start)):
            return value
        dtype = np.dtype(name)
        if dtype.kind not in "biufc":
            return value
        part = data[start : start + dtype.itemsize * int(np.prod(shape, dtype=object))]
        return np.frombuffer(part, dtype).reshape(shape)
    if isinstance(value, dict):
        return {name: _placed(inner, data) for name, inner in value.items()}
    if isinstance(value, list):
        return [_placed(inner, data) for inner in value]
    return value
