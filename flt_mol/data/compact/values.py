"""Plain values as JSON and back, with their types: the further fields of a compact record.

Texts, booleans, whole and finite numbers, None, lists, and dicts with texts as names are JSON's
own. Everything else is a dict with one name that begins with "$":

    $tuple, $set, $frozenset   list of the items; those of sets sorted by their JSON
    $bytes, $bytearray         base64
    $float                     NaN or ±inf: the 8 bytes of the float64, big-endian, as hex digits
    $complex                   real and imaginary part
    $dict                      list of [name, value]: names that are no texts, or begin with "$"
    $array, $tensor            [type, shape, base64 of the numbers]; numpy's type string, "<f4"
    $scalar                    [type, base64]: one number of numpy
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["from_json", "to_json"]

_NUMPY_TYPE = re.compile(r"[<|][biufcSU]\d{1,4}")
_DEPTH = 64
_AS_STORED = (str, bool, int, type(None))
_OTHERS = "numbers, texts, bytes, arrays, and lists, tuples, sets and dicts of those are kept"


def to_json(value: Any) -> str:
    """`value` as compact JSON; :func:`from_json` gives it back with all types in it.

    Raises:
        ValueError: an object of another kind, naming it; values nested too deeply, or numbers of
            thousands of digits.

    Example:
        >>> to_json({"facet": (1, 1, 1), "file": b"POSCAR"})
        '{"facet":{"$tuple":[1,1,1]},"file":{"$bytes":"UE9TQ0FS"}}'
    """
    return _dumps(_marked(value))


def from_json(text: str | bytes) -> Any:
    """What :func:`to_json` was given.

    Raises:
        ValueError: text that :func:`to_json` did not make.
    """
    try:
        return json.loads(text, object_hook=_unmarked)
    except (RecursionError, TypeError, AttributeError, OverflowError, struct.error) as error:
        raise ValueError(f"no values of a compact record ({type(error).__name__})") from error


def _dumps(marked: Any) -> str:
    return json.dumps(marked, separators=(",", ":"), allow_nan=False)


def _marked(value: Any, depth: int = _DEPTH) -> Any:
    """`value` in JSON's own types, at `depth` levels above the deepest that is allowed."""
    if depth == 0:
        raise ValueError("is nested too deeply, or holds itself")
    kind = type(value)
    if kind in _AS_STORED:
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
    if kind in (bytes, bytearray):
        return {f"${kind.__name__}": _base64(value)}
    if kind is complex:
        return {"$complex": [_marked(value.real), _marked(value.imag)]}
    if kind in (list, tuple, set, frozenset):
        return _marked_items(value, depth)
    if kind is dict:
        return _marked_dict(value, depth)
    return _marked_numbers(value)


def _marked_items(value: Iterable[Any], depth: int) -> Any:
    items = [_marked(item, depth - 1) for item in value]
    if isinstance(value, list):
        return items
    if isinstance(value, set | frozenset):
        items.sort(key=_dumps)
    return {f"${type(value).__name__}": items}


def _marked_dict(value: dict[Any, Any], depth: int) -> Any:
    pairs = [[_marked(name, depth - 1), _marked(inner, depth - 1)] for name, inner in value.items()]
    if all(type(name) is str and not name.startswith("$") for name in value):
        return dict(pairs)
    return {"$dict": pairs}


def _marked_numbers(value: Any) -> Any:
    """Tensors, arrays and numbers of numpy."""
    if isinstance(value, np.generic):
        array = _little(np.asarray(value))
        return {"$scalar": [array.dtype.str, _base64(array.tobytes())]}
    if type(value) is Tensor and value.layout == torch.strided and value.dtype != torch.bfloat16:
        kind, array = "$tensor", _little(value.detach().cpu().resolve_conj().resolve_neg().numpy())
    elif type(value) is np.ndarray:
        kind, array = "$array", _little(value)
    else:
        raise ValueError(f"holds a {type(value).__name__}, which is not kept; {_OTHERS}")
    return {kind: [array.dtype.str, list(array.shape), _base64(array.tobytes())]}


def _little(array: NDArray[Any]) -> NDArray[Any]:
    little = array.dtype.newbyteorder("<")
    if not _NUMPY_TYPE.fullmatch(little.str):
        raise ValueError(f"holds numpy's {array.dtype}, which is not kept; {_OTHERS}")
    return array.astype(little)


def _base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


def _unmarked(value: dict[str, Any]) -> Any:
    """A dict of JSON, or the value that it stands for."""
    if len(value) != 1:
        return value
    ((name, inner),) = value.items()
    if not name.startswith("$"):
        return value
    make = _MAKERS.get(name)
    return _unknown(name) if make is None else make(inner)


def _unknown(name: str) -> NoReturn:
    raise ValueError(f"a value of unknown kind {name!r}")


def _float(digits: str) -> float:
    value: float = struct.unpack(">d", bytes.fromhex(digits))[0]
    return value


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _array(parts: list[Any]) -> NDArray[Any]:
    code, shape, text = parts
    data = _bytes(text)
    if not _NUMPY_TYPE.fullmatch(code):
        raise ValueError(f"an array of type {code!r}")
    dtype = np.dtype(code)
    if math.prod(shape) * dtype.itemsize != len(data) or min(shape, default=0) < 0:
        raise ValueError(f"an array of shape {shape} with {len(data)} bytes")
    flat = np.frombuffer(data, dtype=dtype) if data else np.empty(0, dtype=dtype)
    return flat.astype(dtype.newbyteorder("=")).reshape(shape)


def _scalar(parts: list[Any]) -> Any:
    code, text = parts
    return _array([code, [], text])[()]


_MAKERS: dict[str, Callable[[Any], Any]] = {
    "$tuple": tuple,
    "$set": set,
    "$frozenset": frozenset,
    "$bytes": _bytes,
    "$bytearray": lambda text: bytearray(_bytes(text)),
    "$float": _float,
    "$complex": lambda parts: complex(*parts),
    "$dict": lambda pairs: {name: inner for name, inner in pairs},  # noqa: C416
    "$array": _array,
    "$tensor": lambda parts: torch.from_numpy(_array(parts)),
    "$scalar": _scalar,
}
