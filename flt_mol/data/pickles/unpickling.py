"""Reading pickled records without running anything that a pickle asks for.

A pickle names functions and classes to call. Here every such name is looked up in one fixed table
of stand-ins that only keep what they are given; a name outside the table is refused. Tensors and
arrays stay bytes until they are asked for, so that a record's 6 Å graph (97 % of an OC20 record)
costs nothing.
"""

from __future__ import annotations

import io
import pickle
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flt_mol.data.pickles.scan import scan, split
from flt_mol.data.pickles.stand_ins import STAND_INS, Data
from flt_mol.data.pickles.values import decode, shape_of

__all__ = ["Record", "raw_fields", "unpickle"]

_LARGEST = 1 << 30  # bytes of one decompressed record
_IN_RECORD = "a stored record may hold PyG Data, torch tensors, numpy arrays and plain values only"


class _RefusedError(pickle.UnpicklingError):
    """The record is whole, but not of a kind that is read here."""


class _Unpickler(pickle.Unpickler):
    """Looks names up in the table; nothing is ever imported.

    Args:
        data: a pickle that was found to be harmless.
        strings: what `data` names by index, where it was split.
    """

    def __init__(self, data: bytes, strings: Sequence[Any] | None = None) -> None:
        super().__init__(io.BytesIO(data))
        self.strings = strings

    def find_class(self, module: str, name: str) -> Any:
        try:
            return STAND_INS[module, name]
        except KeyError:
            raise _RefusedError(
                f"asks for {module}.{name}, which is never run: {_IN_RECORD}"
            ) from None

    def persistent_load(self, pid: Any) -> Any:
        if self.strings is None:
            raise pickle.UnpicklingError("refers to data outside the record")
        return self.strings[pid]


class Record(Mapping[str, Any]):
    """The fields of one stored record by name; a field is decoded each time it is asked for.

    Values are torch tensors, numpy arrays, or plain Python values.

    Args:
        fields: name → value as it came out of the pickle.
        where: what to call the record in errors, e.g. ``data.lmdb, key 3``.

    Raises:
        ValueError: on access, a value that cannot be decoded, naming `where` and the field.
    """

    def __init__(self, fields: Mapping[str, Any], where: str) -> None:
        self._fields = fields
        self.where = where

    def __getitem__(self, name: str) -> Any:
        value = self._fields[name]
        try:
            return decode(value)
        except Exception as error:
            raise ValueError(f"{self.where}: field {name}: {error}") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def describe(self, name: str) -> tuple[str, tuple[int, ...] | None]:
        """Type and shape of a field, without decoding it; the shape of plain values is None."""
        return shape_of(self._fields[name])


def unpickle(data: bytes, where: str) -> Any:
    """A pickle's content: a :class:`Record`, or a plain value.

    Args:
        data: the pickle, plain or compressed by zlib.
        where: what to call it in errors, e.g. ``data.lmdb, key 3``.

    Raises:
        ValueError: anything that is no pickle, a damaged one, or one that asks for a class or
            function outside the table, naming it.

    Example:
        >>> unpickle(pickle.dumps({"sid": 7}), "example")["sid"]
        7
    """
    try:
        value = _load(data)
        if isinstance(value, dict):
            return Record({k: v for k, v in value.items() if isinstance(k, str)}, where)
        return decode(value)
    except Exception as error:
        raise ValueError(f"{where}: {_reason(data, error)}") from error


def raw_fields(data: bytes | memoryview) -> dict[str, Any]:
    """The fields of a record by name, as they come out of the pickle: long byte strings are views.

    Args:
        data: the pickle or a view of it, plain or compressed by zlib. It has to outlive the fields.

    Raises:
        Exception: of any kind, where the record is not of the usual kind or is damaged; what is
            wrong with it, :func:`unpickle` says.
    """
    value = _load(data)
    if not isinstance(value, dict):
        raise TypeError(f"{type(value).__name__} is no record")
    return value


def _load(data: bytes | memoryview) -> Any:
    """What a pickle holds, stand-ins for objects; of PyG objects their fields."""
    content = _decompressed(data)
    parts = split(content)
    if parts is not None:
        value = _Unpickler(*parts).load()
    else:
        content = bytes(content)
        scan(content)
        value = _Unpickler(content).load()
    return value.fields() if isinstance(value, Data) else value


def _decompressed(data: bytes | memoryview) -> bytes | memoryview:
    if data[:1] == b"x":
        stream = zlib.decompressobj()
        data = stream.decompress(data, _LARGEST)
        if stream.unconsumed_tail:
            raise pickle.UnpicklingError(f"is larger than {_LARGEST} bytes when decompressed")
        if not stream.eof:
            raise pickle.UnpicklingError("compressed data was truncated")
    if data[:1] in (b"{", b"["):
        raise _RefusedError("holds JSON, as .aselmdb files do, not a pickle")
    return data


def _reason(data: bytes, error: Exception) -> str:
    if isinstance(error, _RefusedError):
        return f"the record {error}"
    return f"damaged record of {len(data)} bytes ({str(error) or type(error).__name__})"
