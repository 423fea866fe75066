"""What stands in for the classes and functions that a stored record may name.

A pickle can call these and give them a state: they keep what they are given and do nothing else.
Each has a `__setstate__`, since a pickle sets attributes freely on whatever has none.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, NoReturn

from flt_mol.data.pickles.newer_tensors import DTYPES, NewerTensor, TorchDtype, tensor_v2
from flt_mol.data.pickles.torch_storage import StoredStorage
from flt_mol.data.pickles.values import StoredArray, StoredDtype, StoredScalar, StoredTensor

__all__ = ["STAND_INS", "Data"]


class _Call:
    """A function of ours under the name that the pickle knows."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __setstate__(self, state: object) -> NoReturn:
        raise pickle.UnpicklingError("a pickle may not change a function")

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


class _Instance:
    """Any object of PyG: keeps the state that its class would have restored."""

    __slots__ = ("state",)
    state: dict[str, Any]

    def __new__(cls, *args: Any) -> _Instance:
        self = object.__new__(cls)
        self.state = {}
        return self

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, dict):
            raise pickle.UnpicklingError(f"state of a PyG object is a {type(state).__name__}")
        self.state = state


class Data(_Instance):
    """`Data` and `Batch`: PyG 1.x state is the fields, PyG 2.x keeps them in `_store`."""

    __slots__ = ()

    def fields(self) -> dict[str, Any]:
        """Name → value as stored."""
        store = self.state.get("_store")
        if not isinstance(store, _Instance):
            return self.state
        mapping = store.state.get("_mapping", {})
        if not isinstance(mapping, dict):
            raise pickle.UnpicklingError("the store of a PyG object holds no mapping")
        return mapping


class _BatchMaker(_Instance):
    """`DynamicInheritanceGetter`: called with (Batch, Data), gives an empty batch."""

    __slots__ = ()

    def __call__(self, *classes: Any) -> Data:
        return Data()


def _dict(*args: Any) -> dict[Any, Any]:
    """`OrderedDict(items)`; of `defaultdict(factory)` the factory is dropped."""
    return dict(args[0]) if args and isinstance(args[0], list | dict) else {}


def _encode(text: str, encoding: str = "latin1") -> bytes:
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"encoding {encoding!r} in a pickle")
    return text.encode("latin1")


def _bytes(data: bytes | memoryview = b"") -> bytes:
    if not isinstance(data, bytes | memoryview):
        raise pickle.UnpicklingError("bytes of something else in a pickle")
    return bytes(data)


def _collection(kind: type) -> _Call:
    def make(items: Any = ()) -> Any:
        if not isinstance(items, list | tuple | set | frozenset):
            raise pickle.UnpicklingError(f"{kind.__name__} of a {type(items).__name__}")
        return kind(items)

    return _Call(make)


def _complex(real: float, imaginary: float) -> complex:
    return complex(float(real), float(imaginary))


def _size(sizes: Any = ()) -> tuple[int, ...]:
    return tuple(int(n) for n in sizes)


def _parameter(data: Any = None, *_: Any) -> StoredTensor:
    if not isinstance(data, StoredTensor):
        raise pickle.UnpicklingError("a parameter without tensor")
    return data


def _table() -> dict[tuple[str, str], Any]:
    """Every name that a record may use, with what stands in for it."""
    table: dict[tuple[str, str], Any] = {
        ("torch_geometric.data.data", "Data"): Data,
        ("torch_geometric.data.batch", "Batch"): Data,
        ("torch_geometric.data.batch", "DataBatch"): Data,
        ("torch_geometric.data.batch", "DynamicInheritanceGetter"): _BatchMaker,
        ("torch_geometric.data.data", "DataEdgeAttr"): _Instance,
        ("torch_geometric.data.data", "DataTensorAttr"): _Instance,
        ("torch_geometric.data.storage", "GlobalStorage"): _Instance,
        ("collections", "OrderedDict"): _Call(_dict),
        ("collections", "defaultdict"): _Call(_dict),
        ("torch._utils", "_rebuild_tensor"): _Call(StoredTensor),
        ("torch._utils", "_rebuild_tensor_v2"): _Call(tensor_v2),
        ("torch._utils", "_rebuild_tensor_v3"): _Call(NewerTensor),
        ("torch._utils", "_rebuild_parameter"): _Call(_parameter),
        ("torch.storage", "_load_from_bytes"): _Call(StoredStorage),
        ("torch", "Size"): _Call(_size),
        ("numpy", "ndarray"): _Instance,
        ("numpy", "dtype"): _Call(StoredDtype),
        ("_codecs", "encode"): _Call(_encode),
    }
    for core in ("numpy.core", "numpy._core"):
        table[f"{core}.multiarray", "_reconstruct"] = _Call(StoredArray)
        table[f"{core}.multiarray", "scalar"] = _Call(StoredScalar)
        table[f"{core}.numeric", "_frombuffer"] = _Call(StoredArray.from_buffer)
    for name in DTYPES:
        table["torch", name] = TorchDtype(name)
    for builtins in ("builtins", "__builtin__"):
        table[builtins, "set"] = _collection(set)
        table[builtins, "frozenset"] = _collection(frozenset)
        table[builtins, "list"] = _collection(list)
        table[builtins, "tuple"] = _collection(tuple)
        table[builtins, "dict"] = _Call(_dict)
        table[builtins, "complex"] = _Call(_complex)
        table[builtins, "bytes"] = _Call(_bytes)
        table[builtins, "bytearray"] = _Call(_encode_or_bytes)
    return table


def _encode_or_bytes(data: Any = b"", encoding: str = "latin1") -> bytes:
    return _encode(data, encoding) if isinstance(data, str) else _bytes(data)


STAND_INS = _table()
