"""JSON as ASE writes it, read without making any of ASE's objects.

ASE's databases hold arrays as ``{"__ndarray__": [shape, dtype, flat list]}``, complex numbers as
``{"__complex__": [re, im]}`` and objects as ``{"__ase_objtype__": kind, …}``. Arrays and complex
numbers are read; other objects stay unread, and refuse when they are asked for.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from flt_mol.data.tensors import numpy_of

__all__ = ["StoredJson", "decode_json", "dump", "head_of", "inflate", "load"]

LARGEST = 1 << 26  # bytes of one decompressed row; parsed, it takes up to twenty times as many
_NUMBERS = 1 << 24  # in one array, and bytes of a text array
_DEPTH = 32
_HELD_BY: dict[str, set[type]] = {  # what the numbers of a dtype's kind are in JSON
    "b": {bool},
    "i": {int, bool},
    "u": {int, bool},
    "f": {float, int},
    "c": {float, int},
    "U": {str},
}


class StoredJson:
    """An array or object in a JSON row, decoded when it is asked for.

    Args:
        content: the JSON object, with ``__ndarray__``, ``__complex__`` or another marker.
    """

    __slots__ = ("content",)

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content

    @property
    def shape(self) -> tuple[int, ...] | None:
        """As announced; None where it is no array."""
        try:
            return tuple(int(n) for n in self.content["__ndarray__"][0])
        except (KeyError, TypeError, ValueError, IndexError):
            return None

    def decode(self) -> Any:
        """The array or complex number.

        Raises:
            ValueError: sizes that do not agree, numbers that do not fit, or an object of ASE,
                naming its kind.
        """
        if "__ndarray__" in self.content:
            return _array(self.content["__ndarray__"])
        if "__complex__" in self.content:
            real, imaginary = self.content["__complex__"]
            return complex(float(real), float(imaginary))
        kind = self.content["__ase_objtype__"]
        if kind == "cell":  # an array under another name
            return decode_json(self.content.get("array"))
        raise ValueError(f"holds an object of ASE ({str(kind)[:40]!r}); store numbers")


_MARKERS = ("__ndarray__", "__complex__", "__ase_objtype__")


def _mark(content: dict[str, Any]) -> Any:
    return StoredJson(content) if any(marker in content for marker in _MARKERS) else content


def load(text: bytes) -> Any:
    """JSON with arrays and objects left as :class:`StoredJson`.

    Raises:
        ValueError: no JSON.

    Example:
        >>> decode_json(load(b'{"a": {"__ndarray__": [[2], "int64", [1, 2]]}}'))["a"]
        array([1, 2])
    """
    try:
        return json.loads(text.decode(), object_hook=_mark)
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None


def decode_json(value: Any, depth: int = _DEPTH) -> Any:
    """`value` with all arrays and complex numbers in it decoded.

    Raises:
        ValueError: as :meth:`StoredJson.decode`, and values nested too deeply.
    """
    if depth == 0:
        raise ValueError("values nested too deeply")
    if isinstance(value, StoredJson):
        return value.decode()
    if isinstance(value, dict):
        return {name: decode_json(inner, depth - 1) for name, inner in value.items()}
    if isinstance(value, list):
        return [decode_json(inner, depth - 1) for inner in value]
    return value


def _array(content: Any) -> NDArray[Any]:
    shape, name, flat = content
    dtype = _dtype(name)
    if not isinstance(flat, list) or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"an array of shape {shape!r}")
    size = math.prod(shape) * (2 if dtype.kind == "c" else 1)
    if size != len(flat) or size > _NUMBERS or size * dtype.itemsize > 16 * _NUMBERS:
        raise ValueError(f"an array of shape {shape} with {len(flat)} numbers of {dtype}")
    if not {type(value) for value in flat} <= _HELD_BY[dtype.kind]:
        raise ValueError(f"an array of {dtype} that holds other values")
    parts = dtype.type(0).real.dtype if dtype.kind == "c" else dtype
    try:
        with np.errstate(over="ignore"):  # beyond float32 is inf, told by whoever uses it
            array = np.array(flat, parts)
    except OverflowError:
        array = np.zeros(0)
    if dtype.kind in "iuU" and array.tolist() != flat:
        raise ValueError(f"an array of {dtype} that holds larger values")
    return array.view(dtype).reshape(shape)


def _dtype(name: Any) -> np.dtype[Any]:
    try:
        dtype = np.dtype(name) if isinstance(name, str) else None
    except (TypeError, ValueError, SyntaxError):
        dtype = None
    if dtype is None or not _known(dtype):
        raise ValueError(f"an array of type {name!r}; store numbers")
    return dtype.newbyteorder("=")


def _known(dtype: np.dtype[Any]) -> bool:
    """Numbers that Python has exactly, and text."""
    return (
        dtype.kind in _HELD_BY
        and dtype.type is not np.longdouble
        and dtype.type is not np.clongdouble
    )


def inflate(data: bytes, largest: int = LARGEST) -> bytes:
    """Text that zlib compressed, or `data` itself where it is plain.

    Raises:
        ValueError: truncated or damaged data, or more than `largest` bytes.
    """
    if data[:1] != b"x":
        return data
    stream = zlib.decompressobj()
    try:
        text = stream.decompress(data, largest)
    except zlib.error as error:
        raise ValueError(f"damaged: {error}") from None
    if stream.unconsumed_tail:
        raise ValueError(f"more than {largest} bytes when decompressed")
    if not stream.eof:
        raise ValueError("compressed data was truncated")
    return text


def head_of(data: bytes, size: int = 64) -> bytes:
    """The first bytes of a stored value, decompressed; none of a damaged one."""
    if data[:1] != b"x":
        return data[:size]
    try:
        return zlib.decompressobj().decompress(data, size)
    except zlib.error:
        return b""


def dump(value: Any) -> bytes:
    """`value` as JSON in ASE's spelling: the same bytes for the same value.

    Tensors are stored as arrays, tuples as lists.

    Raises:
        TypeError: a value that JSON does not have, such as bytes.

    Example:
        >>> dump({"sid": 7, "z": np.float32([1.5])})
        b'{"sid":7,"z":{"__ndarray__":[[1],"float32",[1.5]]}}'
    """
    return json.dumps(_spelled(value), separators=(",", ":")).encode()


def _spelled(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = numpy_of(value)
    if isinstance(value, np.ndarray):
        return _spelled_array(value)
    if isinstance(value, np.generic):
        return _spelled(value.item())
    if isinstance(value, complex):
        return {"__complex__": [value.real, value.imag]}
    if isinstance(value, Mapping):
        return {_name(name): _spelled(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_spelled(inner) for inner in value]
    if value is not None and not isinstance(value, str | bool | int | float):
        _refuse(value)
    return value


def _spelled_array(value: NDArray[Any]) -> dict[str, Any]:
    if not _known(value.dtype):
        _refuse(value)
    native = np.ascontiguousarray(value, value.dtype.newbyteorder("="))
    flat = native.reshape(-1)
    if flat.dtype.kind == "c":
        flat = flat.view(flat.dtype.type(0).real.dtype)
    return {"__ndarray__": [list(value.shape), str(native.dtype), flat.tolist()]}


def _name(name: Any) -> str:
    if not isinstance(name, str) or name in _MARKERS:
        raise TypeError(f"holds the name {name!r}, which JSON cannot keep; use another text")
    return name


def _refuse(value: Any) -> NoReturn:
    kind = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
    raise TypeError(f"holds {kind}, which JSON does not have; store numbers, text or lists")
