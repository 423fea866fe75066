"""The bytes of a torch tensor's storage, read without torch.load."""

from __future__ import annotations

import io
import pickle
import zipfile
from typing import Any

import torch
from torch import Tensor

from flt_mol.data.pickle_scan import scan

__all__ = ["Frozen", "StoredStorage"]

_MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001

_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}


class Frozen:
    """Base of the stand-ins: a pickle's BUILD opcode reaches `__setstate__` only."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError(f"a pickle may not change a {type(self).__name__}")


class StoredStorage(Frozen):
    """The bytes of a torch storage, in torch's legacy or zip format."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data

    def decode(self) -> Tensor:
        """The storage as a tensor (numel,)."""
        if not isinstance(self.data, bytes):
            raise ValueError("a stored tensor is no byte string")
        return _zipped(self.data) if self.data[:2] == b"PK" else _legacy(self.data)


class _StorageUnpickler(pickle.Unpickler):
    """Reads the five pickles of torch's legacy format; knows names of storages only."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return name
        raise pickle.UnpicklingError(f"a stored tensor asks for {module}.{name}")

    def persistent_load(self, pid: Any) -> tuple[torch.dtype, str, int]:
        kind, storage, key, _, numel, *view = pid
        if kind != "storage" or any(v is not None for v in view):
            raise pickle.UnpicklingError("a stored tensor is a view of another one")
        return _STORAGES[storage], str(key), int(numel)


def _legacy(data: bytes) -> Tensor:
    """Five stacked pickles (magic number, protocol, system, storage, keys), numel, raw numbers."""
    end = 0
    for _ in range(5):
        end = scan(data, end)
    stream = io.BytesIO(data)
    magic, protocol, system, storage, _ = (_StorageUnpickler(stream).load() for _ in range(5))
    if magic != _MAGIC or protocol != _PROTOCOL:
        raise ValueError("a stored tensor is not in torch's format")
    if not system["little_endian"]:
        raise ValueError("a stored tensor is big-endian; store it again on a common machine")
    dtype, _, numel = storage
    start = stream.tell() + 8
    if int.from_bytes(data[start - 8 : start], "little") != numel:
        raise ValueError("a stored tensor has a wrong length")
    return _numbers(data, start, dtype, numel)


def _zipped(data: bytes) -> Tensor:
    """Torch's zip format: data.pkl names the storage, data/KEY holds the raw numbers."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise ValueError("a stored tensor is compressed")
        root = next(n for n in archive.namelist() if n.endswith("/data.pkl"))[: -len("data.pkl")]
        description = archive.read(root + "data.pkl")
        scan(description)
        dtype, key, numel = _StorageUnpickler(io.BytesIO(description)).load()
        return _numbers(archive.read(f"{root}data/{key}"), 0, dtype, numel)


def _numbers(data: bytes, start: int, dtype: torch.dtype, numel: int) -> Tensor:
    stop = start + numel * dtype.itemsize
    if not start <= stop <= len(data):
        raise ValueError("a stored tensor is truncated")
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(memoryview(data)[start:stop]), dtype=dtype)
