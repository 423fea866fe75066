"""LMDB files of records, pickles or rows of ASE: checked before they are opened, and shared."""

from __future__ import annotations

import json
import os
import re
import weakref
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

from flt_mol.data.ase import row_record
from flt_mol.data.dataset import StructuresDataset
from flt_mol.data.pyg import fields_of
from flt_mol.data.schema import Record, decoded
from flt_mol.data.unpickle import inflated, saved
from flt_mol.files import foreign, readable, some, temporary_path

_MAGIC = b"\xde\xc0\xef\xbe"  # at byte 16 of a file
_DIGITS = 18  # of a key that still is an int64
_is_about = re.compile(  # no record
    rb"__.*__|len(gth)?|num_samples|keys|meta(data)?|nextid|deleted_ids|schema|format|index|version"
).fullmatch
_CHUNK = 1000  # records in one commit
_LARGEST_FILE = 1 << 40  # bytes, of which only those written count
_is_json = re.compile(rb"\s*[\[{\d]").match  # no pickle begins so

_Stamp = tuple[int, int, int, int]


def data_file(path: Path) -> Path:
    """The file itself: `data.mdb` of LMDB's folder form, and where a link leads."""
    inside = path / "data.mdb"
    return Path(os.path.realpath(inside if os.path.isfile(inside) else path))


def is_lmdb(path: Path) -> bool:
    """Whether the file begins as an LMDB file does."""
    with readable(path), path.open("rb") as file:
        return file.read(20)[16:] == _MAGIC


def _stamp(path: Path) -> _Stamp:
    status = os.stat(path)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class _Environment:
    """A file opened read-only in this process: no lock file, nothing is written."""

    def __init__(self, path: Path, stamp: _Stamp) -> None:
        if not is_lmdb(path):
            found = foreign(path) or "it does not begin like one"
            raise ValueError(f"{path} is not an LMDB file: {found}")
        try:
            self.lmdb = lmdb.open(
                str(path), subdir=False, readonly=True, lock=False, readahead=False, meminit=False
            )
        except lmdb.InvalidError as error:
            raise ValueError(f"{path} is truncated or damaged ({error})") from error
        except lmdb.Error as error:
            raise ValueError(f"{path} cannot be opened: {error}") from error
        # Reading beyond the end would be a SIGBUS.
        needed = (self.lmdb.info()["last_pgno"] + 1) * self.lmdb.stat()["psize"]
        if stamp[2] < needed:
            self.lmdb.close()
            raise ValueError(f"{path} is truncated: {stamp[2]} bytes of at least {needed}")
        self.state = (os.getpid(), stamp)


_OPEN: weakref.WeakValueDictionary[tuple[int, ...], _Environment] = weakref.WeakValueDictionary()


def _opened(path: Path, stamp: _Stamp) -> _Environment:
    """The environment of a file, which all data sets of a process share: lmdb allows only one."""
    environment = _OPEN.get(stamp[:2])
    if environment is not None and environment.state != (os.getpid(), stamp):
        environment.lmdb.close()  # inherited by a fork, or of contents that were overwritten
        environment = None
    if environment is None:
        environment = _OPEN[stamp[:2]] = _Environment(path, stamp)
    return environment


class LmdbDataset(StructuresDataset):
    """Records of one LMDB file: keys are whole numbers in ascii; values plain, or zlib.

    Values are pickles of OC20, or JSON as in ASE's `.aselmdb`, of which the fields are those of
    `flt_mol.data.ase.atoms_record`. Where no key is a number, all keys but `length` and the
    like are records. Each process that reads opens the file. Arguments are those of
    `StructuresDataset`; the path may be the folder with `data.mdb` in it.

    Raises:
        ValueError: a file that is not an LMDB file, is truncated, changes later, or holds no
            records; where targets are required, a file without them.

    Warns:
        UserWarning: another `length` than that of the records; keys ignored; defaults taken.
    """

    kind = "LMDB"

    def _open(self) -> int:
        self.file = data_file(self.path)
        self._environment: _Environment | None = None
        self._stamp = _stamp(self.file)
        self._keys = np.array(self._read_keys(), dtype=np.object_)  # bytes_ would cut zeros off
        return len(self._keys)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_environment": None}

    def _where(self, row: int) -> str:
        return f"{self.path}, key {self._key(row)}"

    def _key(self, row: int) -> str:
        return str(self._keys[row].decode(errors="backslashreplace"))

    def _default_sid(self, row: int) -> int | str:
        key = self._key(row)
        return f"{self.prefix}{key}" if self.prefix or not key.isdigit() else int(key)

    def _records(self, rows: Sequence[int]) -> list[Record]:
        records = []
        with self._begin() as transaction:
            for row in rows:
                try:
                    data = inflated(transaction.get(self._keys[row]) or b"")
                    is_row = _is_json(data)
                    fields = row_record(_value(data)) if is_row else fields_of(saved(data))
                    if fields is None:
                        raise ValueError("the record is neither PyG Data nor a dict")
                    records.append(fields)
                except (ValueError, lmdb.Error) as error:
                    raise ValueError(f"{self._where(row)}: {error}") from error
        return records

    def _begin(self) -> Any:
        if _stamp(self.file) != self._stamp:
            raise ValueError(f"{self.path} has changed since it was opened; open it again")
        self._environment = _opened(self.file, self._stamp)
        return self._environment.lmdb.begin()

    def _read_keys(self) -> list[bytes]:
        """Keys of the records in numeric order; their number is compared with `length`."""
        try:
            with self._begin() as transaction:
                every = list(transaction.cursor().iternext(keys=True, values=False))
                found = [k for k in every if not _is_about(k)]
                numbers = (k for k in found if k.isdigit() and len(k) <= _DIGITS)
                keys = sorted(numbers, key=int) or found
                first = transaction.get(keys[0]) if keys else b""
                length = transaction.get(b"length")
        except lmdb.Error as error:
            raise ValueError(f"{self.path} is damaged: {error}; download it again") from error
        if not (keys and keys[0].isdigit()) and not first.startswith((b"\x80", b"x", b"PK")):
            raise ValueError(f"no records in {self.path}: its keys are no numbers, {every[:3]}")
        try:
            announced: Any = len(keys) if length is None else int(decoded(_value(length)))
        except (ValueError, TypeError, OverflowError):
            announced = "not a number"
        if others := sorted(set(found).difference(keys)):
            self.notes.add({"keys": f"keys ignored, not numbers: {some(others)}"})
        if announced != len(keys):
            text = f"its length is {announced}, but {len(keys)} records are stored and read"
            self.notes.add({f"length {self.file}": f"{self.file.name}: {text}"})
        return keys


def _value(data: bytes) -> Any:
    data = inflated(data)
    if not _is_json(data):
        return saved(data)
    try:
        return json.loads(data.decode(), object_hook=_array)
    except (TypeError, KeyError, OverflowError, ValueError, RecursionError) as error:
        raise ValueError(f"damaged row of {len(data)} bytes ({error})") from error


def _array(content: dict[str, Any]) -> Any:
    """The array that an object of ASE's JSON stands for; other objects as they are."""
    if content.get("__ase_objtype__") == "cell":
        return content["array"]
    if "__ndarray__" not in content:
        return content
    shape, name, flat = content["__ndarray__"]
    if np.dtype(name).kind not in "biuf":
        raise ValueError(f"an array of {name}")
    with np.errstate(over="ignore"):  # beyond float32 is inf, refused by whoever uses it
        return np.array(flat, name).reshape(shape)


def write_lmdb(path: str | Path, items: Iterable[tuple[bytes, bytes]]) -> None:
    """Write keys and values into one LMDB file, which gets its name when it is complete.

    The same bytes for the same records; memory stays small.

    Args:
        path: the file; overwritten at the end.
        items: keys and values; of equal keys the last counts.

    Raises:
        ValueError: LMDB or the disk refuses, naming the file.
    """
    with temporary_path(path) as temporary:
        try:
            # Without a lock, no lock file is left beside; nobody else knows the file.
            with lmdb.open(
                str(temporary), subdir=False, lock=False, map_size=_LARGEST_FILE, map_async=True
            ) as environment:
                rest = iter(items)
                while chunk := list(islice(rest, _CHUNK)):
                    with environment.begin(write=True) as transaction:
                        transaction.cursor().putmulti(chunk)
                environment.sync(True)
        except lmdb.Error as error:
            raise ValueError(f"{path} cannot be written: {error}") from error
