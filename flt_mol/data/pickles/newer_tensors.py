"""Tensors that torch stores in other ways than most: of newer types, and views with a flag."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch import Tensor

from flt_mol.data.pickles.torch_storage import Frozen
from flt_mol.data.pickles.values import StoredTensor

__all__ = ["DTYPES", "NewerTensor", "TorchDtype", "tensor_v2"]

# Types without a storage of their own that numpy has, too; others are refused by name.
_READ = {name: getattr(torch, name) for name in ("uint16", "uint32", "uint64")}
# Types of which a tensor may be rebuilt by name; those that are not read are refused by it.
DTYPES = (
    *("uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"),
    *("float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2", "complex32", "uint8", "int8"),
    *("int16", "int32", "int64", "bool", "float16", "bfloat16", "float32", "float64"),
    *("complex64", "complex128"),
)


class TorchDtype(Frozen):
    """A type of torch's numbers, by name."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class NewerTensor(StoredTensor):
    """Arguments of `torch._utils._rebuild_tensor_v3`: the bytes of a storage, and their type."""

    __slots__ = ("dtype",)

    def __init__(self, storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> None:
        super().__init__(storage, offset, size, stride)
        if len(rest) < 3 or not isinstance(rest[2], TorchDtype):
            raise pickle.UnpicklingError("a tensor without type")
        self.dtype = rest[2].name

    def decode(self, storage: Tensor | None = None) -> Tensor:
        """The tensor, contiguous; sizes are checked against the stored numbers."""
        if self.dtype not in _READ:
            raise ValueError(f"a stored tensor of torch.{self.dtype}; store a common type")
        storage = self.storage.decode() if storage is None else storage
        dtype = _READ[self.dtype]
        if storage.dtype != torch.uint8 or len(storage) % dtype.itemsize:
            raise ValueError(f"a stored tensor of {dtype} with {len(storage)} of {storage.dtype}")
        return super().decode(storage.view(dtype))


class FlaggedTensor(StoredTensor):
    """A view whose numbers are negative, or conjugate, to those stored."""

    __slots__ = ("flags",)

    def __init__(self, flags: frozenset[str], *arguments: Any) -> None:
        super().__init__(*arguments)
        self.flags = flags

    def decode(self, storage: Tensor | None = None) -> Tensor:
        """The tensor, contiguous, worked out."""
        tensor = super().decode(storage)
        if "conj" in self.flags:
            tensor = tensor.conj_physical()
        return torch.neg(tensor) if "neg" in self.flags else tensor


def tensor_v2(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> StoredTensor:
    """What `torch._utils._rebuild_tensor_v2` is called with; flags come seventh."""
    flags = rest[2] if len(rest) > 2 else None
    if not flags:
        return StoredTensor(storage, offset, size, stride)
    if not isinstance(flags, dict) or not flags.keys() <= {"neg", "conj"}:
        raise pickle.UnpicklingError("a tensor with flags other than neg and conj")
    held = frozenset(name for name, value in flags.items() if value)
    return FlaggedTensor(held, storage, offset, size, stride)
