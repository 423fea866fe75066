"""LMDB files of records, pickles or rows of ASE: checked before they are opened, and shared."""

from __future__ import annotations

import json
import math
import os
import stat
import struct
import weakref
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
from numpy.typing import NDArray

from flt_mol.data.ase import row_record
from flt_mol.data.dataset import Notes, StructuresDataset
from flt_mol.data.pyg import fields_of
from flt_mol.data.schema import ReadOptions, Record, Stored
from flt_mol.data.unpickle import unpickle
from flt_mol.files import readable, temporary_path

__all__ = [
    "AseLmdbDataset",
    "LmdbDataset",
    "data_file",
    "first_value",
    "is_lmdb",
    "is_row",
    "write_lmdb",
]

_MAGIC = struct.pack("<I", 0xBEEFC0DE)
_META = struct.Struct("<16x 4s I Q Q I 92x Q Q")  # one of the two first pages of a file, see lmdb.h
_DIGITS = 18  # of a key that still is an int64
_ABOUT = (b"length", b"metadata", b"nextid", b"deleted_ids", b"schema", b"format", b"index")
_CHUNK, _LARGEST_FILE = (
    1000,
    1 << 40,
)  # records in one commit; bytes, of which only those written count
_OTHER_KINDS = {
    b"\x1f\x8b": "a gzip archive; unpack it first",
    b"PK\x03\x04": "a zip archive; unpack it first",
    b"version https://git-lfs": "a git-lfs pointer; run `git lfs pull` to get the data",
    b"<": "a web page or XML; the download went wrong",
    b"\0" * 16: "zeros: an interrupted download",
}
_MARKERS = {"__ndarray__", "__complex__", "__ase_objtype__"}
_LARGEST_ROW = 1 << 26  # bytes of one decompressed row; parsed, it takes up to twenty times as many
_HELD_BY: dict[str, set[type]] = {"b": {bool}, "i": {int}, "u": {int}, "f": {float, int}}  # in JSON

_Stamp = tuple[int, int, int, int]


def data_file(path: Path) -> Path:
    """The file itself: `data.mdb` of LMDB's folder form, and where a link leads."""
    inside = path / "data.mdb"
    return Path(os.path.realpath(inside if inside.is_file() else path))


def is_lmdb(path: Path) -> bool:
    """Whether the file begins as an LMDB file does."""
    with readable(path), path.open("rb") as file:
        return file.read(20)[16:] == _MAGIC


def _check_size(path: Path) -> None:
    """Refuse what is no LMDB file, or shorter than it says: reading beyond its end is a SIGBUS."""
    with readable(path), path.open("rb") as file:
        status = os.stat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path} is not a regular file; copy its contents into one")
        if status.st_size == 0:
            raise ValueError(f"{path} is empty (0 bytes); download or write it again")
        head = file.read(_META.size)
        if head[16:20] != _MAGIC:
            other = f"something else, beginning with {head[:20]!r}"
            kind = next((k for start, k in _OTHER_KINDS.items() if head.startswith(start)), other)
            raise ValueError(f"{path} is not an LMDB file; it looks like {kind}")
        needed = 8192
        if len(head) == _META.size:
            page_size, last = _META.unpack(head)[4:6]
            file.seek(page_size)
            second = file.read(_META.size)
            if len(second) == _META.size and second[16:20] == _MAGIC:
                last = max(last, _META.unpack(second)[5])
            needed = max(2, last + 1) * page_size
        if status.st_size < needed:
            raise ValueError(
                f"{path} is truncated: {status.st_size} bytes of at least {needed}; "
                "download or write it again"
            )


def _stamp(path: Path) -> _Stamp:
    """Device, inode, size and time of change of a file: which one it is, in which state."""
    status = os.stat(path)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class _Environment:
    """A read-only LMDB file that is open in this process: no lock file, nothing is written.

    py-lmdb 3 refuses to open a file twice in a process, forked children included. So all data sets
    share one environment per file; a forked child closes what it inherited.
    """

    def __init__(self, path: Path) -> None:
        _check_size(path)
        try:
            self.lmdb = lmdb.open(
                str(path), subdir=False, readonly=True, lock=False, readahead=False, meminit=False
            )
        except lmdb.Error as error:
            raise ValueError(f"{path} cannot be opened: {error}") from error
        self.path = path
        self.stamp = _stamp(path)
        self.pid = os.getpid()
        self.close = weakref.finalize(self, self.lmdb.close)

    @contextmanager
    def reading(self) -> Iterator[Any]:
        """A transaction; LMDB's errors name the file."""
        try:
            with self.lmdb.begin() as transaction:
                yield transaction
        except lmdb.Error as error:
            raise ValueError(f"{self.path} is damaged: {error}; download it again") from error


_OPEN: weakref.WeakValueDictionary[Path, _Environment] = weakref.WeakValueDictionary()


def _opened(path: Path) -> _Environment:
    """The environment of a file, shared by everyone in this process who reads it."""
    environment = _OPEN.get(path)
    if environment is not None:
        here = environment.pid == os.getpid() and environment.close.alive
        if here and environment.stamp == _stamp(path):
            return environment
        environment.close()  # inherited by a fork, or of contents that were overwritten
    environment = _OPEN[path] = _Environment(path)
    return environment


def first_value(path: Path) -> bytes:
    """The value of the first key that is a whole number, empty where there is none.

    Raises:
        ValueError: no LMDB file, or a truncated one; naming it.
    """
    with _opened(path).reading() as transaction:
        keys = transaction.cursor().iternext(keys=True, values=False)
        key = next((key for key in keys if key.isdigit()), None)
        return b"" if key is None else bytes(transaction.get(key))


class LmdbDataset(StructuresDataset):
    """Records of one LMDB file: keys are whole numbers in ascii, values pickles, zlib or plain.

    Where no key is a number, all keys but `length` and the like are records. The file is opened
    by whoever reads, once per process, and not written to; the data set can be pickled and forked.

    Args:
        path: the file, or the folder with `data.mdb` in it.
        options: how records are read.
        notes: shared by the parts of a larger data set.
        prefix: put before the key, where a record without sid is named by it.

    Raises:
        ValueError: a file that is not an LMDB file, is truncated, or holds no records; where
            targets are required, a file without them.

    Warns:
        UserWarning: `length` or gaps between keys disagree with the records found; defaults taken
            for missing fields; each once.
    """

    content = "pickles"

    def __init__(
        self,
        path: str | Path,
        options: ReadOptions | None = None,
        *,
        notes: Notes | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__(path, options, notes=notes)
        self.file = data_file(self.path)
        self.prefix = prefix
        self._environment: _Environment | None = None
        self._stamp = _stamp(self.file)
        self._keys = np.array(self._read_keys(), dtype=np.bytes_)
        self.kind = f"LMDB of {self.content}"
        self._finish(len(self._keys))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_environment": None}

    def _where(self, row: int) -> str:
        return f"{self.path}, key {self._keys[row].decode(errors='replace')}"

    def _default_sid(self, row: int) -> int | str:
        key = self._keys[row].decode(errors="replace")
        return f"{self.prefix}{key}" if self.prefix or not key.isdigit() else int(key)

    def _records(self, rows: Sequence[int]) -> list[Record]:
        records = []
        with self._open().reading() as transaction:
            for row in rows:
                data = transaction.get(bytes(self._keys[row])) or b""
                try:
                    records.append(self._record(data))
                except ValueError as error:
                    raise ValueError(f"{self._where(row)}: {error}") from error
        return records

    def _record(self, data: bytes) -> Record:
        fields = fields_of(unpickle(data))
        if fields is None:
            raise ValueError("the record is neither PyG Data nor a dict")
        return fields

    def _open(self) -> _Environment:
        environment = self._environment
        if environment is None or environment.pid != os.getpid() or not environment.close.alive:
            environment = self._environment = _opened(self.file)
        try:
            now = _stamp(self.file)
        except OSError:  # a file that was removed or replaced is read on as it was
            now = environment.stamp
        overwritten = now[:2] == self._stamp[:2] and now != self._stamp
        if overwritten or environment.stamp != self._stamp:
            raise ValueError(f"{self.path} has changed since it was opened; open it again")
        return environment

    def _read_keys(self) -> list[bytes]:
        """Keys of the records in numeric order; what the file says of their number is compared."""
        with self._open().reading() as transaction:
            every = list(transaction.cursor().iternext(keys=True, values=False))
            about = {key: transaction.get(key) for key in _ABOUT}
            keys = sorted((k for k in every if k.isdigit() and len(k) <= _DIGITS), key=int)
            if not keys:
                keys = [k for k in every if k not in _ABOUT]
                if not (keys and transaction.get(keys[0]).startswith((b"\x80", b"x"))):
                    raise ValueError(
                        f"no records in {self.path}: keys are whole numbers; found: {every[:3]}"
                    )
        announced, count, kinds = self._announced(about), len(keys), {}
        if announced not in (None, count):
            kinds[f"length {self.file}"] = (
                f"{self.file.name} says that it holds {announced} records, {count} are stored "
                f"({count} are read)"
            )
        absent = int(keys[-1]) - int(keys[0]) + 1 - count if keys[0].isdigit() else 0
        # Keys that are mostly absent are not numbered one by one, but are names.
        if 0 < absent <= count:
            kinds[f"gaps {self.file}"] = f"{absent} keys of {self.file.name} are missing"
        self.notes.add(kinds)
        return keys

    def _announced(self, about: dict[bytes, bytes | None]) -> int | str | None:
        """What `length` says: a pickled int, or digits."""
        data = about[b"length"]
        if data is None:
            return None
        try:
            return int(data[:_DIGITS] if data.strip().isdigit() else unpickle(data))
        except (ValueError, TypeError):
            return "an unreadable number of"


class AseLmdbDataset(LmdbDataset):
    """Rows of one `.aselmdb` file: ASE's database in an LMDB, as records of the OC20 schema.

    Keys are ``1``, ``2``, …; values JSON, plain or compressed by zlib, in which arrays are
    ``{"__ndarray__": [shape, dtype, flat list]}``. ``nextid`` holds the next key, ``deleted_ids``
    those that are gone. Fixed are the atoms that constraints hold; sid, y_relaxed, y_init,
    pos_relaxed and other targets are looked up in the row's `data`, then in its `key_value_pairs`;
    a field of which the two hold different values cannot be read. The calculator's energy and
    forces are there as "calculator" and "forces".
    """

    content = "ASE rows (aselmdb)"

    def _record(self, data: bytes) -> Record:
        row = _load(data)
        if not isinstance(row, dict):
            raise ValueError(f"the row is a {type(row).__name__}, expected a JSON object")
        if isinstance(row.get("constraints"), str):
            row["constraints"] = json.loads(row["constraints"], object_hook=_marked)
        return row_record(row)

    def _announced(self, about: dict[bytes, bytes | None]) -> int | str | None:
        """Rows that there are by `nextid` and `deleted_ids`."""
        following, deleted = about[b"nextid"], about[b"deleted_ids"]
        if following is None:
            return super()._announced(about)
        try:
            return int(_load(following)) - 1 - len(set(_load(deleted) if deleted else ()))
        except (ValueError, TypeError):
            return "an unreadable number of"


def is_row(data: bytes) -> bool:
    """Whether a stored value is JSON, plain or compressed."""
    try:
        head = zlib.decompressobj().decompress(data, 16) if data[:1] == b"x" else data[:16]
    except zlib.error:
        return False
    return head.lstrip()[:1] == b"{"


def _load(data: bytes) -> Any:
    """JSON with arrays and objects left as :class:`Stored`."""
    try:
        if data[:1] == b"x":
            stream = zlib.decompressobj()
            data = stream.decompress(data, _LARGEST_ROW)
            if stream.unconsumed_tail or not stream.eof:
                raise ValueError(f"truncated, or more than {_LARGEST_ROW} bytes")
        return json.loads(data.decode(), object_hook=_marked)
    except (zlib.error, ValueError, RecursionError) as error:
        raise ValueError(f"damaged row of {len(data)} bytes ({error})") from error


def _marked(content: dict[str, Any]) -> Any:
    if content.get("__ase_objtype__") == "cell":  # an array under another name
        return content.get("array")
    return _Json(content) if _MARKERS & content.keys() else content


class _Json(Stored):
    """An array or object in a JSON row."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content

    def numpy(self) -> NDArray[Any]:
        """The array; sizes and values are checked against what is announced."""
        try:
            shape, name, flat = self.content["__ndarray__"]
            dtype = np.dtype(name)
            kinds = _HELD_BY[dtype.kind]
            good = dtype.itemsize <= 8 and all(type(n) is int and n >= 0 for n in shape)
            if not good or math.prod(shape) != len(flat) or not set(map(type, flat)) <= kinds:
                raise ValueError(f"is an array of {name} {shape} with {len(flat)} values")
            with np.errstate(over="ignore"):  # beyond float32 is inf, refused by whoever uses it
                return np.array(flat, dtype).reshape(shape)
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError("is neither an array of numbers nor a plain value") from error


def write_lmdb(path: str | Path, items: Iterable[tuple[bytes, bytes]]) -> None:
    """Write keys and values into one LMDB file, which has its name only when it is whole.

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
