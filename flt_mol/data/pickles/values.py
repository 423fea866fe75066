"""Tensors and arrays as a pickle stores them, decoded when they are asked for."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flt_mol.data.pickles.torch_storage import Frozen, StoredStorage

__all__ = [
    "StoredArray",
    "StoredDtype",
    "StoredScalar",
    "StoredTensor",
    "decode",
    "shape_of",
]

_DEPTH = 32  # nesting of lists and dicts in one value
_NODES = 1_000_000  # values in one field
_REPEATED = 100_000  # of them, in lists that occur several times: each level may double them
_EXPANDED = 1_000_000  # elements that a tensor may have beyond those stored (stride 0)
_BYTES = 1 << 28  # of the tensors and arrays of one field; those of a record that repeat count once


class StoredTensor(Frozen):
    """Arguments of `torch._utils._rebuild_tensor_v2`."""

    __slots__ = ("offset", "size", "storage", "stride")

    def __init__(self, storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> None:
        if not isinstance(storage, StoredStorage):
            raise pickle.UnpicklingError("a tensor without storage")
        self.storage = storage
        self.offset = int(offset)
        self.size = tuple(map(int, size))
        self.stride = tuple(map(int, stride))

    def decode(self, storage: Tensor | None = None) -> Tensor:
        """The tensor, contiguous; sizes are checked against the stored numbers.

        Args:
            storage: the decoded storage, where it is at hand.
        """
        storage = self.storage.decode() if storage is None else storage
        numel = math.prod(self.size)
        if len(self.size) != len(self.stride) or min((*self.size, *self.stride, self.offset)) < 0:
            raise ValueError(f"a stored tensor of shape {self.size} and strides {self.stride}")
        last = self.offset + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))
        if numel and (last >= len(storage) or numel > len(storage) + _EXPANDED):
            raise ValueError(f"a stored tensor of shape {self.size} with {len(storage)} numbers")
        if numel == 0:
            return torch.empty(self.size, dtype=storage.dtype)
        return storage.as_strided(self.size, self.stride, self.offset).contiguous()


class StoredDtype(Frozen):
    """`numpy.dtype` of numbers, booleans and text; objects and records are refused."""

    __slots__ = ("code",)

    def __init__(self, code: Any, *_: Any) -> None:
        if not isinstance(code, str) or code[:1] not in "biufcSU" or not code[1:].isdigit():
            raise pickle.UnpicklingError(f"a numpy array of type {code!r}")
        self.code = code

    def __setstate__(self, state: Any) -> None:
        order = state[1]
        if order not in ("<", ">", "|", "=") or any(part is not None for part in state[2:5]):
            raise pickle.UnpicklingError("a numpy array of records")
        self.code = order + self.code.lstrip("<>|=")

    def decode(self) -> np.dtype[Any]:
        """The numpy dtype."""
        return np.dtype(self.code)


class StoredArray(Frozen):
    """A numpy array: what `_reconstruct` makes and `__setstate__` fills."""

    __slots__ = ("data", "dtype", "order", "shape")

    def __init__(self, *_: Any) -> None:
        self.shape: tuple[int, ...] = ()
        self.dtype: Any = None
        self.order = "C"
        self.data: Any = b""

    def __setstate__(self, state: Any) -> None:
        shape, self.dtype, fortran, self.data = state[-4:]
        self.shape = tuple(int(n) for n in shape)
        self.order = "F" if fortran else "C"

    @staticmethod
    def from_buffer(data: Any, dtype: Any, shape: Any, order: Any, *_: Any) -> StoredArray:
        """An array of pickle protocol 5."""
        array = StoredArray()
        array.__setstate__((shape, dtype, order == "F", data))
        return array

    def decode(self) -> NDArray[Any]:
        """The array, a copy in native byte order."""
        kinds = bytes | bytearray | memoryview
        if not isinstance(self.dtype, StoredDtype) or not isinstance(self.data, kinds):
            raise ValueError("a numpy array of Python objects; store numbers")
        dtype = self.dtype.decode()
        flat = np.frombuffer(self.data, dtype=dtype).astype(dtype.newbyteorder("="))
        return flat.reshape(self.shape, order="F" if self.order == "F" else "C")


class StoredScalar(Frozen):
    """A numpy scalar."""

    __slots__ = ("data", "dtype")

    def __init__(self, dtype: Any, data: Any = b"") -> None:
        self.dtype = dtype
        self.data = data

    def decode(self) -> Any:
        """The value as a Python number or text."""
        if not isinstance(self.dtype, StoredDtype) or not isinstance(self.data, bytes | memoryview):
            raise ValueError("a numpy scalar of Python objects; store numbers")
        return np.frombuffer(self.data, dtype=self.dtype.decode(), count=1)[0].item()


_STORED = (StoredTensor, StoredArray, StoredScalar, StoredDtype, StoredStorage)
_PLAIN = (str, bytes, bytearray, int, float, complex, type(None))


def decode(value: Any) -> Any:
    """`value` with all stored tensors, arrays and scalars in it decoded, each once.

    Raises:
        ValueError: contents that do not fit their description, unknown objects, lists and dicts
            nested without end, or more than 256 MiB of numbers.
    """
    return _Decoder().walk(value, _DEPTH)


class _Decoder:
    """Decodes one field: what is stored once and named many times is decoded once."""

    def __init__(self) -> None:
        self.nodes = _NODES
        self.bytes = _BYTES
        self.done: dict[int, Any] = {}
        self.repeated = _REPEATED
        self.floor = _DEPTH  # the deepest level that was reached
        self.lists: dict[int, tuple[Any, int, int]] = {}  # decoded, how many values, how deep

    def walk(self, value: Any, depth: int) -> Any:
        """`value` decoded, at `depth` levels above the deepest that is allowed."""
        self.nodes -= 1
        self.floor = min(self.floor, depth)
        if depth == 0 or self.nodes <= 0:
            raise ValueError("values nested too deeply")
        if isinstance(value, _STORED):
            return self.stored(value)
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, memoryview):  # bytes that are not copied before they are asked for
            return bytes(value)
        if isinstance(value, dict | list | tuple | set | frozenset):
            return self.several(value, depth)
        raise ValueError(f"neither tensor, array nor plain value, but a {type(value).__name__}")

    def several(self, value: Any, depth: int) -> Any:
        """The values of a list or dict; what occurs several times is decoded once, counted each."""
        if id(value) in self.lists:
            result, size, height = self.lists[id(value)]
            self.repeated -= size
            self.nodes -= size
            self.floor = min(self.floor, depth - height)
            if self.repeated < 0 or self.nodes <= 0 or depth <= height:
                raise ValueError("values nested too deeply: the same lists occur again and again")
            return result
        before, above, self.floor = self.nodes, self.floor, depth
        if isinstance(value, dict):
            inside = {self.walk(k, depth - 1): self.walk(v, depth - 1) for k, v in value.items()}
        else:
            inside = type(value)(self.walk(v, depth - 1) for v in value)
        self.lists[id(value)] = inside, before - self.nodes, depth - self.floor
        self.floor = min(above, self.floor)
        return inside

    def stored(self, value: Any) -> Any:
        """A stand-in decoded, or as it was decoded before; the whole value keeps ids from reuse."""
        if id(value) not in self.done:
            if isinstance(value, StoredTensor):
                result = self.spend(value.decode(self.storage(value.storage)))
            elif isinstance(value, StoredStorage):
                result = self.storage(value)
            else:
                result = self.spend(value.decode())
            self.done[id(value)] = result
        return self.done[id(value)]

    def storage(self, value: StoredStorage) -> Tensor:
        """The numbers of a storage; storages of the same bytes are one."""
        key = id(value.data)
        if key not in self.done:
            self.done[key] = self.spend(value.decode())
        result: Tensor = self.done[key]
        return result

    def spend(self, value: Any) -> Any:
        """`value`, its bytes taken off what a field may hold."""
        if isinstance(value, Tensor | np.ndarray):
            self.bytes -= value.nbytes
        if self.bytes < 0:
            raise ValueError(f"tensors and arrays of more than {_BYTES} bytes")
        return value


def shape_of(value: Any) -> tuple[str, tuple[int, ...] | None]:
    """Type and shape of a stored value, without decoding its numbers."""
    if isinstance(value, StoredTensor):
        return "tensor", value.size
    if isinstance(value, StoredArray):
        return "array", value.shape
    return type(value).__name__, None
