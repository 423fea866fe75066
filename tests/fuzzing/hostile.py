"""Records and files that were written to do harm: to run something, to take all memory, to hang.

Each gets a path, the canary: were the attack to succeed, that file would be there.
"""

from __future__ import annotations

import collections
import io
import json
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fuzzing.sound import record, row

__all__ = ["JSON", "PICKLES"]


def _calls(function: Any, *args: Any) -> Any:
    """An object that pickles as a call."""

    class Call:
        def __reduce__(self) -> Any:
            return function, args

    return Call()


def _writes(canary: str) -> str:
    return f"open({canary!r}, 'w').write('1')"


def _text(module: str, name: str, argument: str) -> bytes:
    """Protocol 0: module.name(argument)."""
    return f"c{module}\n{name}\n(V{argument}\ntR.".encode()


def _short(text: str) -> bytes:
    data = text.encode()
    return b"\x8c" + bytes([len(data)]) + data


def _stacked(module: str, name: str, argument: str) -> bytes:
    """Protocol 4: STACK_GLOBAL, TUPLE1, REDUCE."""
    return b"\x80\x04" + _short(module) + _short(name) + b"\x93" + _short(argument) + b"\x85R."


def _tensor(data: bytes, size: tuple[int, ...] = (3,), stride: tuple[int, ...] = (1,)) -> Any:
    """A tensor whose storage is `data`."""
    storage = _calls(torch.storage._load_from_bytes, data)
    return _calls(
        torch._utils._rebuild_tensor_v2,
        storage,
        0,
        size,
        stride,
        False,
        collections.OrderedDict(),
    )


def _with(**fields: Any) -> bytes:
    """A sound record, some fields replaced."""
    return pickle.dumps({**record(0), **fields}, 4)


def _saved(value: Any, *, zipped: bool) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, _use_new_zipfile_serialization=zipped)
    return stream.getvalue()


def _archive(content: bytes, numel: int, *, compressed: bool) -> bytes:
    """A storage in torch's zip format."""
    pid = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuJ"
    stream = io.BytesIO()
    method = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
    with zipfile.ZipFile(stream, "w", method) as archive:
        archive.writestr("a/data.pkl", b"\x80\x02" + pid + struct.pack("<i", numel) + b"tQ.")
        archive.writestr("a/data/0", content)
    return stream.getvalue()


def _overlapping() -> bytes:
    """A zip archive whose directory names a member of 4 GB."""
    data = bytearray(_archive(bytes(12), 3, compressed=False))
    entry = data.rindex(b"PK\x01\x02")
    data[entry + 20 : entry + 28] = b"\xfe\xff\xff\xff" * 2
    return bytes(data)


def _laughs(levels: int = 40) -> bytes:
    """Lists of ten times the list before."""
    code = b"\x80\x04]\x94"
    for level in range(levels):
        code += b"]\x94(" + b"h" + bytes([level]) + (b"h" + bytes([level])) * 9 + b"e"
    return code + b"."


def _nested(opening: bytes, closing: bytes, depth: int) -> bytes:
    return b"\x80\x04" + opening * depth + b"N" + closing * depth + b"."


def _as_key(depth: int) -> bytes:
    """A dict whose key is a tuple in a tuple in …: its hash is taken."""
    return b"\x80\x04}N" + b"\x85" * depth + b"Ns."


def _state(code: bytes) -> Callable[[str], bytes]:
    return lambda canary: code


def _of(value: Callable[[str], Any]) -> Callable[[str], bytes]:
    return lambda canary: pickle.dumps(value(canary), 4)


_DATA = b"ctorch_geometric.data.data\nData\n"
PICKLES: dict[str, Callable[[str], bytes]] = {
    "os.system": lambda c: _text("os", "system", f"touch {c}"),
    "posix.system": lambda c: _stacked("posix", "system", f"touch {c}"),
    "eval": lambda c: _text("builtins", "eval", _writes(c)),
    "python 2 eval": lambda c: _text("__builtin__", "eval", _writes(c)),
    "exec": lambda c: _stacked("builtins", "exec", _writes(c)),
    "subprocess": lambda c: b"csubprocess\ncheck_call\n((lVtouch\naV" + c.encode() + b"\natR.",
    "getattr chain": lambda c: (
        b"cbuiltins\ngetattr\n(cbuiltins\n__import__\n(Vos\ntRVsystem\ntR(Vtouch "
        + c.encode()
        + b"\ntR."
    ),
    "INST": lambda c: b"(Vtouch " + c.encode() + b"\nios\nsystem\n.",
    "OBJ": lambda c: b"(cos\nsystem\nVtouch " + c.encode() + b"\no.",
    "NEWOBJ": lambda c: b"csubprocess\nPopen\n(Vtouch " + c.encode() + b"\nt\x81.",
    "NEWOBJ_EX": lambda c: (
        b"\x80\x04csubprocess\nPopen\n)}(Vargs\n(lVtouch\naV" + c.encode() + b"\nau\x92."
    ),
    "dotted name": lambda c: _stacked("os", "path.os.system", f"touch {c}"),
    "name in the table, dotted": lambda c: _stacked(
        "torch.storage", "_load_from_bytes.__globals__", c
    ),
    "BUILD on a function": _state(b"ctorch.storage\n_load_from_bytes\n(N(dVfunction\nV1\nstb."),
    "BUILD on a class": _state(_DATA + b"(N(dV__init__\nV1\nstb."),
    "BUILD on Data": _state(_DATA + b")\x81(N(dV__class__\nV1\nstb."),
    "EXT1": _state(b"\x80\x04\x82\x01."),
    "EXT4": _state(b"\x80\x04\x84\xff\xff\xff\x7f."),
    "persistent id": _state(b"Pos.system\n."),
    "binary persistent id": _state(b"\x80\x04Vos.system\nQ."),
    "in a record": _of(lambda c: {**record(0), "tags": _calls(os.system, f"touch {c}")}),
    "as a key": _of(lambda c: {_calls(os.system, f"touch {c}"): 1}),
    "copyreg": lambda c: (
        b"ccopyreg\n_reconstructor\n(cos\nsystem\ncbuiltins\nstr\nVtouch " + c.encode() + b"\ntR."
    ),
    "numpy load": lambda c: _text("numpy", "load", c),
    "torch load": lambda c: _text("torch", "load", c),
    "in a legacy storage": lambda c: _with(
        pos=_tensor(_saved(_calls(os.system, f"touch {c}"), zipped=False))
    ),
    "in a zip storage": lambda c: _with(
        pos=_tensor(_saved(_calls(os.system, f"touch {c}"), zipped=True))
    ),
    "pickle in a storage": lambda c: _with(pos=_tensor(_text("os", "system", f"touch {c}"))),
    "compressed zip storage": lambda c: _with(
        pos=_tensor(_archive(bytes(1 << 24), 1 << 22, compressed=True), (6, 3), (3, 1))
    ),
    "4 GB zip storage": lambda c: _with(pos=_tensor(_overlapping())),
    "storage of 2³¹": lambda c: _with(
        pos=_tensor(_archive(bytes(72), (1 << 31) - 1, compressed=False), (6, 3), (3, 1))
    ),
    "negative storage": lambda c: _with(
        pos=_tensor(_archive(bytes(72), -18, compressed=False), (6, 3), (3, 1))
    ),
    "tensor of stride 0": lambda c: _with(
        pos=_tensor(_archive(bytes(72), 18, compressed=False), (10**9, 10**9), (0, 0))
    ),
    "tensor of 10¹² numbers": lambda c: _with(
        pos=_tensor(_archive(bytes(72), 18, compressed=False), (10**12,), (0,))
    ),
    "array of objects": lambda c: _with(pos=np.array([_calls(os.system, f"touch {c}")] * 2)),
    "dtype object": _state(b"cnumpy\ndtype\n(VO8\nI0\nI1\ntR."),
    "dtype with fields": lambda c: _with(tags=np.zeros(6, dtype=[("a", "O"), ("b", "f4")])),
    "dtype of huge text": _state(b"cnumpy\ndtype\n(VU999999999999\nI0\nI1\ntR."),
    "memo bomb": _state(b"\x80\x04Nr\xff\xff\xff\x7f."),
    "text memo bomb": _state(b"Np4294967296\n."),
    "memo of a negative index": _state(b"Np-1\n."),
    "huge BINBYTES8": _state(b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b"abc."),
    "huge BINUNICODE": _state(b"\x80\x04X\xff\xff\xff\x7fabc."),
    "huge BYTEARRAY8": _state(b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b"abc."),
    "huge FRAME": _state(b"\x80\x04\x95" + struct.pack("<Q", (1 << 63) - 1) + b"N."),
    "huge LONG4": _state(b"\x80\x02\x8b\xff\xff\xff\x7f\x01."),
    "negative LONG4": _state(b"\x80\x02\x8b\xff\xff\xff\xff\x01."),
    "long text number": _state(b"L" + b"9" * 1_000_000 + b"L\n."),
    "int of a million digits": _state(b"I" + b"9" * 1_000_000 + b"\n."),
    "nested lists": _state(_nested(b"]", b"a", 50_000)),
    "nested tuples": _state(_nested(b"", b"\x85", 100_000)),
    "nested dicts": _state(b"\x80\x04" + b"}K\x00" * 50_000 + b"N" + b"s" * 50_000 + b"."),
    "nested key": _state(_as_key(15_000)),
    "deeper nested key": _state(_as_key(1_000_000)),
    "marks": _state(b"(" * 500_000 + b"."),
    "billion laughs": _state(_laughs()),
    "record of laughs": lambda c: b"\x80\x04}\x8c\x04tags" + _laughs(30)[2:-1] + b"s.",
    "list that holds itself": _state(b"\x80\x04]\x94h\0a."),
    "field that holds itself": _state(b"\x80\x04}\x8c\x04tags]\x94h\0as."),
    "dict that holds itself": _state(b"\x80\x04}\x94\x8c\x04tagsh\0s."),
    "DUP": _state(b"\x80\x04N" + b"2" * 200_000 + b"."),
    "POP of nothing": _state(b"\x80\x04000000."),
    "no STOP": _state(b"\x80\x04N"),
    "protocol 255": _state(b"\x80\xffN."),
    "unhashable key": _state(b"\x80\x04}]Ns."),
    "zlib bomb": _state(zlib.compress(pickle.dumps({"pos": bytes(1 << 26)}, 4), 9)),
    "zlib in zlib": _state(zlib.compress(zlib.compress(pickle.dumps(record(0), 4)))),
    "zlib of nothing": _state(zlib.compress(b"")),
    "natoms of 10⁴⁰⁰": lambda c: _with(natoms=10**400),
    "sid of a million digits": lambda c: _with(sid=1 << 4_000_000),
    "sid of control characters": lambda c: _with(sid="\x1b[2J\n\0"),
    "surrogate sid": lambda c: _with(sid="\ud800"),
    "fields with odd names": lambda c: _with(**{"\ud800\0": 1, "": 2, "__class__": 3}),
    "energies of odd types": lambda c: _with(y_relaxed=[[-1.0, [2.0]]], y_init={"a": 1}),
}


def _row(**changes: Any) -> dict[str, Any]:
    return {**row(0), **changes}


def _array(shape: list[int], dtype: str, data: Any) -> dict[str, Any]:
    return {"__ndarray__": [shape, dtype, data]}


def _cell_of_objects(objtype: str, **fields: Any) -> dict[str, Any]:
    return {"__ase_objtype__": objtype, **fields}


def _constraint(name: str, /, **kwargs: Any) -> list[Any]:
    return [{"name": name, "kwargs": kwargs}]


JSON: dict[str, Callable[[], bytes]] = {
    name: (lambda value=value: json.dumps(value).encode())
    for name, value in {
        "array of 10¹²": _row(positions=_array([10**6, 10**6], "float64", [0.0])),
        "array of 4 GB": _row(positions=_array([1 << 29], "float64", [0.0])),
        "array of negative shape": _row(positions=_array([-1, 3], "float64", [0.0] * 18)),
        "array of objects": _row(positions=_array([6, 3], "object", [{}] * 18)),
        "array of records": _row(positions=_array([6, 3], "f8,O", [0.0] * 18)),
        "array of text": _row(positions=_array([6, 3], "U999999999", ["a"] * 18)),
        "array of no list": _row(positions={"__ndarray__": 7}),
        "array in an array": _row(positions=_array([6, 3], "float64", [_array([1], "i8", [1])])),
        "array of an odd type": _row(numbers=_array([6], "__import__('os')", [1] * 6)),
        "not numbers": _row(positions="abc", cell=None, pbc=[1, 2]),
        "not finite": _row(
            positions=_array([6, 3], "float64", [float("nan")] * 17 + [float("inf")])
        ),
        "y_relaxed nan": _row(key_value_pairs={"y_relaxed": float("nan")}),
        "objtype cell": _row(cell=_cell_of_objects("cell", array=[[1, 0, 0]])),
        "objtype atoms": _row(data=_cell_of_objects("atoms", numbers=[1])),
        "objtype of a module": _row(data=_cell_of_objects("os.system", command="true")),
        "constraint of a module": _row(constraints=_constraint("os.system", command="true")),
        "constraint by import": _row(constraints=_constraint("import_module", name="os")),
        "constraint of 10⁹ atoms": _row(constraints=_constraint("FixAtoms", indices=[10**9])),
        "constraint of a huge mask": _row(
            constraints=_constraint("FixAtoms", indices=_array([1 << 28], "int64", [1]))
        ),
        "huge numbers": _row(numbers=_array([6], "int64", [10**400] * 6)),
        "deep data": None,
        "long key": _row(key_value_pairs={"a" * 1_000_000: 1}),
        "a list": [1, 2, 3],
        "a number": 7,
        "a text": "text",
        "nothing": None,
        "no numbers": {"positions": [[0, 0, 0]]},
        "dict of rows": {"1": row(0), "ids": [1, 2], "nextid": 3},
        "many ids": {"1": row(0), "ids": list(range(50_000)), "nextid": 2},
    }.items()
}
JSON["deep data"] = lambda: b'{"data":' * 100_000 + b"1" + b"}" * 100_000
JSON["deep list"] = lambda: b"[" * 500_000 + b"]" * 500_000
JSON["int of a million digits"] = lambda: b'{"numbers": [' + b"9" * 1_000_000 + b"]}"
JSON["twice the same key"] = lambda: json.dumps(row(0)).encode()[:-1] + b', "numbers": 3}'
JSON["bad utf-8"] = lambda: json.dumps(row(0)).encode()[:-1] + b', "\xff": 3}'
JSON["bomb of blanks"] = lambda: b'{"a":' + b" " * (5 << 24) + b"1}"
JSON["bomb of zeros"] = lambda: b"[" + b"0," * (1 << 21) + b"0]"
