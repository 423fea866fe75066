"""The bytes of a torch tensor's storage, read without torch.load."""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flt_mol.data.pickles.scan import scan

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
    "UntypedStorage": torch.uint8,  # bytes of newer types, which the tensor names
}

_NUMPY: dict[str, np.dtype[Any]] = {
    "DoubleStorage": np.dtype("<f8"),
    "FloatStorage": np.dtype("<f4"),
    "HalfStorage": np.dtype("<f2"),
    "LongStorage": np.dtype("<i8"),
    "IntStorage": np.dtype("<i4"),
    "ShortStorage": np.dtype("<i2"),
    "CharStorage": np.dtype("<i1"),
    "ByteStorage": np.dtype("<u1"),
}
_BYTES = (bytes, memoryview)

# What all versions of torch write before the numbers of a storage on a little-endian machine.
_LEGACY_HEAD = re.compile(
    rb"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19\.\x80\x02M\xe9\x03\."
    rb"\x80\x02}q\x00\(X\x10\0\0\0protocol_versionq\x01M\xe9\x03X\r\0\0\0little_endianq\x02\x88"
    rb"X\n\0\0\0type_sizesq\x03}q\x04\(X\x05\0\0\0shortq\x05K\x02"
    rb"X\x03\0\0\0intq\x06K\x04X\x04\0\0\0longq\x07K\x04uu\."
    rb"\x80\x02\(X\x07\0\0\0storageq\x00ctorch\n(\w+)\nq\x01X(.)\0\0\0(\d+)q\x02"
    rb"X\x03\0\0\0cpuq\x03(?:K(.)|M(..)|J(....))N?tq\x04Q\."
    rb"\x80\x02\]q\x00X\2\0\0\0\3q\x01a\.(.{8})",
    re.DOTALL,
).match


class Frozen:
    """Base of the stand-ins: a pickle's BUILD opcode reaches `__setstate__` only."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError(f"a pickle may not change a {type(self).__name__}")


class StoredStorage(Frozen):
    """The bytes of a torch storage, in torch's legacy or zip format."""

    __slots__ = ("data",)

    def __init__(self, data: bytes | memoryview) -> None:
        self.data = data

    def decode(self) -> Tensor:
        """The storage as a tensor (numel,)."""
        if not isinstance(self.data, _BYTES):
            raise ValueError("a stored tensor is no byte string")
        return _zipped(bytes(self.data)) if self.data[:2] == b"PK" else _legacy(self.data)

    def numbers(self) -> tuple[np.dtype[Any], memoryview] | None:
        """Type and bytes of the numbers where they lie, None if they have to be decoded."""
        if not isinstance(self.data, _BYTES):
            return None
        head = _quick_head(self.data)
        if head is None:
            return None
        kind, start, numel = head
        dtype = _NUMPY.get(kind)
        if dtype is None or (stop := start + numel * dtype.itemsize) > len(self.data):
            return None
        return dtype, memoryview(self.data)[start:stop]


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


def _quick_head(data: bytes | memoryview) -> tuple[str, int, int] | None:
    """Kind of a storage in torch's legacy format, where its numbers begin, and how many there are.

    None where only :func:`_legacy` can say.
    """
    head = _LEGACY_HEAD(data)
    if head is None:
        return None
    kind, width, key, one, two, four, length = head.groups()
    count = int.from_bytes(one or two or four, "little")
    if width[0] != len(key) or count != int.from_bytes(length, "little"):
        return None
    return kind.decode(), head.end(), count


def _legacy(data: bytes | memoryview) -> Tensor:
    """Five stacked pickles (magic number, protocol, system, storage, keys), numel, raw numbers."""
    head = _quick_head(data)
    if head is not None and head[0] in _STORAGES:
        return _numbers(data, head[1], _STORAGES[head[0]], head[2])
    data, end = bytes(data), 0
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


def _numbers(data: bytes | memoryview, start: int, dtype: torch.dtype, numel: int) -> Tensor:
    stop = start + numel * dtype.itemsize
    if not start <= stop <= len(data):
        raise ValueError("a stored tensor is truncated")
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(memoryview(data)[start:stop]), dtype=dtype)
