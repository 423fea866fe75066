"""Reading pickled records without executing anything that a pickle names.

Names of functions and classes are looked up in a table of stand-ins, others are refused. Tensors
and arrays stay bytes until they are used: 97 % of an OC20 record is its 6 Å graph.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import re
import threading
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flt_mol.data.schema import Stored
from flt_mol.files import foreign, readable

_LARGEST = 1 << 26  # bytes of one decompressed record
_EXPANSION = 50  # of a compressed archive
_CODE = 1 << 23  # bytes of opcodes, long strings apart: each may make an object of 200 bytes
_NESTED = 50_000  # opcodes that make tuples: hashing 10⁵ levels would overflow the stack
_STACK = 1 << 28  # bytes, of a thread for more of them: as many as _TUPLES in each other
_TUPLES = 1 << 21
_ITEMS = 10_000  # of a collection that is made out of another one
_EXPANDED = 1_000_000  # elements that a tensor may have beyond those stored (stride 0)

_STORAGES = {
    "DoubleStorage": "<f8",
    "FloatStorage": "<f4",
    "HalfStorage": "<f2",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "<i8",
    "IntStorage": "<i4",
    "ShortStorage": "<i2",
    "CharStorage": "<i1",
    "ByteStorage": "<u1",
    "BoolStorage": "?",
}

_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # the magic number of torch.save
# What torch writes before the numbers of a storage on a little-endian machine: magic number,
# protocol, system, the storage's description, its keys, and the count of numbers.
_LEGACY_HEAD = re.compile(
    rb"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19\.\x80\x02M\xe9\x03\..{,64}little_endianq\x02\x88"
    rb".{,99}\x80\x02\(X\x07\0\0\0storageq\x00ctorch\n(\w+)\nq\x01X.\0\0\0\d+q\x02"
    rb"X.\0\0\0[a-z:0-9]+q\x03(?:K.|M..|J....)N?tq\x04Q\."
    rb"\x80\x02\]q\x00X.\0\0\0\d+q\x01a\.(.{8})",
    re.DOTALL,
).match


def unpickle(data: bytes, storage: Callable[[Any], Any] | None = None) -> Any:
    """A pickle's content: plain values, and `Stored` or `PygObject` in them.

    Args:
        data: the pickle, of any protocol.
        storage: what a persistent id stands for.

    Raises:
        ValueError: a damaged pickle, or one that asks for a class or function outside the table,
            naming it.
    """
    try:
        end, tuples = _check(data)
        if end < len(data):
            raise ValueError(f"{len(data) - end} bytes follow: store all systems in one list")
        load = _Unpickler(data, storage).load
        return load() if tuples <= _NESTED else _loaded_deep(load)
    except Exception as error:  # stand-ins meet arguments of any kind
        reason = str(error) or type(error).__name__
        raise ValueError(f"unreadable record of {len(data)} bytes: {reason}") from error


def _loaded_deep(load: Callable[[], Any]) -> Any:
    """What `load` gives with a large stack, if no name in it is a tuple, which may be deep."""
    before = threading.stack_size(_STACK)
    try:
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(load).result()
    finally:
        threading.stack_size(before)
    rest, seen = [found], set[int]()
    while rest:
        item = rest.pop()
        item = vars(item) if isinstance(item, PygObject) else item
        if isinstance(item, dict | list | tuple) and id(item) not in seen:
            seen.add(id(item))
            if isinstance(item, dict) and any(isinstance(name, tuple) for name in item):
                raise ValueError("names of fields are tuples")
            rest += item.values() if isinstance(item, dict) else item
    return found


def read_saved(path: Path) -> Any:
    """What a file of `torch.save` or `pickle.dump` holds.

    Raises:
        ValueError: as `unpickle`, and an archive of something else; naming the file.
    """
    with readable(path):
        data = path.read_bytes()
    try:
        return saved(data)
    except ValueError as error:
        found = foreign(path) or error
        raise ValueError(f"{path}, as of torch.save or pickle: {found}") from error


def saved(data: bytes) -> Any:
    """What `torch.save`, in either of its formats, or `pickle.dumps` wrote; as `unpickle`."""
    try:
        if data.startswith(b"PK"):
            return _zipped(data)
        return _legacy(data) if data.startswith(_LEGACY) else unpickle(data)
    except (zipfile.BadZipFile, KeyError, TypeError, RuntimeError, NotImplementedError) as error:
        raise ValueError(f"damaged: {error}") from error


def _zipped(data: bytes) -> Any:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = dict.fromkeys(archive.namelist())
        root = next((name[:-8] for name in names if name.endswith("/data.pkl")), None)
        if root is None:
            raise ValueError(f"it holds {', '.join([*names][:3]) or 'nothing'}, and no data.pkl")
        if sum(e.file_size for e in archive.infolist()) > _EXPANSION * len(data) + _LARGEST:
            raise ValueError("its compressed entries are too large; save it again")

        def storage(pid: Any) -> _Storage:
            _, kind, key, *_ = pid
            if f"{root}data/{key}" not in names:
                raise ValueError(f"storage {key} is missing")
            return _Storage(archive.read(f"{root}data/{key}"), kind.name)

        return unpickle(archive.read(f"{root}data.pkl"), storage)


def _legacy(data: bytes) -> Any:
    """Pickles of magic number, protocol, system, object and keys; then the storages' numbers."""
    ends = [0]
    for _ in range(5):
        ends.append(_check(data, ends[-1])[0])
    storages: dict[Any, _Storage] = {}

    def storage(pid: Any) -> _Storage:
        _, kind, key, _, _, *view = pid
        if any(view):
            raise ValueError("it holds views of storages: save it again")
        return storages.setdefault(key, _Storage(b"", kind.name))

    found = unpickle(data[ends[3] : ends[4]], storage)
    start = ends[5]
    for key in unpickle(data[ends[4] : ends[5]]):
        size = np.dtype(_STORAGES.get(storages[key].kind or "", "u1").replace("bfloat16", "u2"))
        end = start + 8 + size.itemsize * int.from_bytes(data[start : start + 8], "little")
        if max(start + 8, end) > len(data):
            raise ValueError("truncated; save or copy it again")
        storages[key].data, start = data[start + 8 : end], end
    return found


def inflated(data: bytes) -> bytes:
    """A stored value without its compression by zlib, if any; ValueError where that is damaged."""
    if data[:1] != b"x":
        return data
    stream = zlib.decompressobj()
    try:
        found = stream.decompress(data, _LARGEST)
    except zlib.error as error:
        raise ValueError(f"damaged compressed data ({error})") from error
    if not stream.eof:
        raise ValueError(f"compressed data is truncated, or larger than {_LARGEST} bytes")
    return found


class _Unpickler(pickle.Unpickler):
    """Looks names up in the table; nothing is ever imported."""

    def __init__(self, data: bytes, storage: Callable[[Any], Any] | None) -> None:
        super().__init__(io.BytesIO(data))
        self._storage = storage

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _TABLE:
            what = "PyG Data, torch tensors, numpy arrays and plain values"
            raise ValueError(f"asks for {module}.{name}, which is never run: only {what} are read")
        return _TABLE[module, name]

    def persistent_load(self, pid: Any) -> Any:
        if self._storage is None:
            raise ValueError("it refers to data outside the record")
        return self._storage(pid)


_WIDTHS = {-2: 1, -3: 4, -4: 4, -5: 8}  # bytes of the length that is stored before a string
_COUNTED = {op.code.encode("latin1"): _WIDTHS.get(op.arg.n) for op in pickletools.opcodes if op.arg}


def _run() -> Callable[[bytes, int, int], re.Match[bytes] | None]:
    """One pattern of all opcodes but STOP and longer strings; memo indices are below 2²⁰."""
    lengths: dict[int, bytes] = defaultdict(bytes)
    for op in pickletools.opcodes:
        if op.name not in ("STOP", "LONG_BINPUT"):
            lengths[op.arg.n if op.arg else 0] += re.escape(op.code.encode("latin1"))
    parts = [b"[%b].{%d}" % (codes, n) for n, codes in lengths.items() if n >= 0]
    parts += [rb"r..[\0-\x0f]\0", rb"p\d{1,6}\n", rb"[IFLPSVg][^\n]{,99}\n"]
    parts += [rb"[ci][^\n]{,99}\n[^\n]{,99}\n"]
    for codes, zeros in ((b"X", rb"\0\0\0"), (b"[C\x8c]", b"")):
        each = (b"%b%b.{%d}" % (re.escape(bytes([n])), zeros, n) for n in range(32))
        parts += [b"%b(?:%b)" % (codes, b"|".join(each))]
    return re.compile(b"(?:%b)*+" % b"|".join(parts), re.DOTALL).match


_RUN = _run()


def _check(data: bytes, at: int = 0) -> tuple[int, int]:
    """The end of a pickle, and how many tuples it makes at most.

    Lengths and memo indices beyond it, and values without end, are refused: Python's unpickler
    takes the memory that they ask for, a memo index of 2³² some 64 GB.
    """
    size = nested = 0
    while True:
        found = _RUN(data, at, at + _CODE + 1)
        run, at = (b"", at) if found is None else (found[0], found.end())
        size += len(run)
        nested += len(run) - len(run.translate(None, b"t\x85\x86\x87\x91io"))
        if size > _CODE or nested > _TUPLES:
            raise ValueError("too many values, tuples or calls; store arrays")
        code, width = data[at : at + 1], _COUNTED.get(data[at : at + 1])
        if code == b".":
            return at + 1, nested
        if code in (b"S", b"V"):
            at = data.find(b"\n", at) + 1 or len(data)
        elif width is not None:
            at += 1 + width + int.from_bytes(data[at + 1 : at + 1 + width], "little")
        else:
            raise ValueError(f"truncated, or invalid opcode or memo index {data[at : at + 6]!r}")


@dataclass
class _Call(Stored):
    """A function of ours under the name that the pickle knows; a pickle cannot change it."""

    function: Callable[..., Any]
    name: str = ""

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


class PygObject:
    """Any object of PyG: keeps the state that its class would have restored, as attributes."""

    def __init__(self, *args: Any) -> None:
        pass

    def __call__(self, *classes: Any) -> PygObject:
        """What a `DynamicInheritanceGetter` makes: a batch."""
        return PygObject()

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state)


@dataclass
class _Storage(Stored):
    """The bytes of a torch storage: in torch's legacy format, or its numbers alone."""

    data: Any
    kind: str | None = None

    def numpy(self) -> NDArray[Any]:
        data, kind, start, count = self.data, self.kind, 0, -1
        if kind is None:
            head = _LEGACY_HEAD(data)
            if head is None:
                raise ValueError("is a tensor stored in an unknown way; store it on CPU")
            kind, start = head[1].decode(), head.end()
            count = int.from_bytes(head[2], "little")
        code = _STORAGES.get(kind)
        if code is None:
            raise ValueError(f"is a tensor of a {kind}; store a common dtype such as float32")
        if code == "bfloat16":
            halves = np.frombuffer(data, "<u2", count, start).astype("<u4") << 16
            return halves.view(np.float32)
        return np.frombuffer(data, code, count, start) if count else np.empty(0, code)


class _Tensor(Stored):
    """Arguments of `torch._utils._rebuild_tensor_v2`."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def numpy(self) -> NDArray[Any]:
        storage, offset, shape, stride, *others = self.args
        if not isinstance(storage, _Storage) or any(others[2:]):  # requires_grad, hooks, flags
            raise ValueError("is a tensor without storage, or with flags")
        flat = storage.numpy()
        size = tuple(map(int, shape))
        # Of an empty buffer numpy would make numbers that nobody stored.
        if math.prod(size) > len(flat) + _EXPANDED * (len(flat) > 0):
            raise ValueError(f"is a tensor of shape {size} with {len(flat)} numbers")
        strides = tuple(int(step) * flat.itemsize for step in stride)
        # numpy refuses what lies outside the buffer.
        return np.ndarray(size, flat.dtype, flat, int(offset) * flat.itemsize, strides)


_is_code = re.compile("[biufcSU][0-9]{1,6}").fullmatch


class _Dtype(Stored):
    """`numpy.dtype` of numbers, booleans or text; objects and records are refused when used."""

    dtype: np.dtype[Any] | None = None

    def __init__(self, code: Any, *_: Any) -> None:
        self.code = code

    def __setstate__(self, state: Any) -> None:
        order = state[1]
        if order in ("<", ">", "=", "|") and _is_code(str(self.code)):
            self.dtype = np.dtype(f"{order}{self.code}")


@dataclass
class _Array(Stored):
    """A numpy array: what `_reconstruct` makes and `__setstate__` fills, in native byte order."""

    kind: Any = None
    empty: Any = None
    letter: Any = None

    def __setstate__(self, state: Any) -> None:
        shape, dtype, fortran, data = state[-4:]
        if dtype.dtype is not None:
            flat = np.frombuffer(data, dtype.dtype) if len(data) else np.empty(0, dtype.dtype)
            if not flat.dtype.isnative:
                flat = flat.astype(flat.dtype.newbyteorder("="))
            self.array = flat.reshape(shape, order="F" if fortran else "C")

    def numpy(self) -> NDArray[Any]:
        if self.array is None:
            raise ValueError("is a numpy array of Python objects; store numbers")
        return self.array


def _from_buffer(data: Any, dtype: Any, shape: Any, order: Any, *_: Any) -> _Array:
    array = _Array()
    array.__setstate__((shape, dtype, order == "F", data))
    return array


def _scalar(dtype: _Dtype, data: bytes = b"") -> Any:
    return np.frombuffer(data, dtype.dtype, 1)[0].item()


class _Dict(dict[Any, Any]):
    def __setstate__(self, state: Any) -> None:
        """Leave out attributes, which the weights of a model have."""


def _dict(*args: Any) -> _Dict:
    return _Dict(args[0] if args and isinstance(args[0], list | dict) else ())


def _encode(text: Any = b"", encoding: str = "latin1") -> Any:
    if encoding not in ("latin1", "latin-1"):
        raise ValueError(f"encoding {encoding!r} in a pickle")
    return text if isinstance(text, bytes) else text.encode("latin1")


def _collection(kind: Callable[[Any], Any]) -> _Call:
    def make(items: Any = ()) -> Any:
        if not isinstance(items, list | tuple | set | frozenset) or len(items) > _ITEMS:
            raise ValueError(f"a collection of a {type(items).__name__}, or too large")
        return kind(items)

    return _Call(make)


def _table() -> dict[tuple[str, str], Any]:
    """Every name that a record may use, with what stands in for it."""
    pyg = {
        "data": ("Data", "DataEdgeAttr", "DataTensorAttr"),
        "batch": ("Batch", "DataBatch", "DynamicInheritanceGetter"),
        "storage": ("GlobalStorage",),
    }
    table: dict[tuple[str, str], Any] = {
        **{(f"torch_geometric.data.{x}", name): PygObject for x in pyg for name in pyg[x]},
        ("collections", "OrderedDict"): _Call(_dict),
        ("collections", "defaultdict"): _Call(_dict),
        ("torch._utils", "_rebuild_tensor"): _Tensor,
        ("torch._utils", "_rebuild_tensor_v2"): _Tensor,
        ("torch._utils", "_rebuild_parameter"): _Call(lambda data, *_: data),
        ("torch.storage", "_load_from_bytes"): _Storage,
        ("torch", "Size"): _collection(tuple),
        ("numpy", "ndarray"): PygObject,
        ("numpy", "dtype"): _Dtype,
        ("_codecs", "encode"): _Call(_encode),
    }
    table |= {("torch", name): _Call(_Storage, name) for name in _STORAGES}
    for core in ("numpy.core", "numpy._core"):
        table[f"{core}.multiarray", "_reconstruct"] = _Array
        table[f"{core}.multiarray", "scalar"] = _Call(_scalar)
        table[f"{core}.numeric", "_frombuffer"] = _Call(_from_buffer)
    for builtins, registry in (("builtins", "copyreg"), ("__builtin__", "copy_reg")):
        table[registry, "_reconstructor"] = _Call(PygObject)
        table[builtins, "object"] = PygObject
        table[builtins, "dict"] = _Call(_dict)
        table[builtins, "complex"] = _Call(complex)
        table[builtins, "bytes"] = table[builtins, "bytearray"] = _Call(_encode)
        for collection in (set, frozenset, list, tuple):
            table[builtins, collection.__name__] = _collection(collection)
    return table


_TABLE = _table()
