"""Records that were written to do harm: to run something, to take all memory, to hang.

Each gets a path, the canary: were the attack to succeed, that file would be there.
"""

import os
import pickle
import struct
import zlib

import numpy as np
import torch


class Calls:
    """An object that pickles as a call."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def writes(canary):
    return f"open({canary!r}, 'w').write('1')"


def text(module, name, argument):
    """Protocol 0: module.name(argument)."""
    return f"c{module}\n{name}\n(V{argument}\ntR.".encode()


def stacked(module, name, argument):
    """Protocol 4: STACK_GLOBAL, TUPLE1, REDUCE."""
    parts = (b"\x8c" + bytes([len(t)]) + t.encode() for t in (module, name, argument))
    module, name, argument = parts
    return b"\x80\x04" + module + name + b"\x93" + argument + b"\x85R."


def record(**fields):
    """A sound record, some fields replaced."""
    sound = {
        "pos": torch.rand(4, 3),
        "atomic_numbers": torch.tensor([29.0, 29, 6, 8]),
        "cell": torch.diag(torch.tensor([5.0, 5, 20])),
        "tags": torch.tensor([0, 1, 2, 2]),
        "fixed": torch.tensor([1.0, 0, 0, 0]),
        "natoms": 4,
        "sid": 7,
        "y_relaxed": -1.5,
    }
    return {**sound, **fields}


def dumped(**fields):
    return pickle.dumps(record(**fields), 4)


def tensor(data, size, stride):
    storage = Calls(torch.storage._load_from_bytes, data)
    return Calls(torch._utils._rebuild_tensor_v2, storage, 0, size, stride, False, {})


def legacy(count):
    """The bytes of a float storage, as they lie in a record."""
    return torch.zeros(count).__reduce_ex__(2)[1][0].__reduce__()[1][0]


def laughs(levels=40):
    """Lists of ten times the list before."""
    code = b"\x80\x04]\x94"
    for level in range(levels):
        code += b"]\x94(" + (b"h" + bytes([level])) * 10 + b"e"
    return code + b"."


def nested(opening, closing, depth):
    return b"\x80\x04" + opening * depth + b"N" + closing * depth + b"."


DATA = b"ctorch_geometric.data.data\nData\n"
PICKLES = {
    "os.system": lambda c: text("os", "system", f"touch {c}"),
    "posix.system": lambda c: stacked("posix", "system", f"touch {c}"),
    "eval": lambda c: text("builtins", "eval", writes(c)),
    "python 2 eval": lambda c: text("__builtin__", "eval", writes(c)),
    "exec": lambda c: stacked("builtins", "exec", writes(c)),
    "subprocess": lambda c: f"csubprocess\ncheck_call\n((lVtouch\naV{c}\natR.".encode(),
    "getattr": lambda c: f"cbuiltins\ngetattr\n(cos\nsystem\nVx\ntR(Vtouch {c}\ntR.".encode(),
    "INST": lambda c: f"(Vtouch {c}\nios\nsystem\n.".encode(),
    "OBJ": lambda c: f"(cos\nsystem\nVtouch {c}\no.".encode(),
    "NEWOBJ": lambda c: f"csubprocess\nPopen\n(Vtouch {c}\nt".encode() + b"\x81.",
    "NEWOBJ_EX": lambda c: (
        b"\x80\x04csubprocess\nPopen\n)}(Vargs\n" + f"V{c}\n".encode() + b"u\x92."
    ),
    "dotted name": lambda c: stacked("os", "path.os.system", f"touch {c}"),
    "dotted in the table": lambda c: stacked("torch.storage", "_load_from_bytes.__globals__", c),
    "BUILD on a function": lambda c: b"ccollections\nOrderedDict\n(N(dVfunction\nV1\nstb.",
    "BUILD on a class": lambda c: DATA + b"(N(dV__init__\nV1\nstb.",
    "BUILD on a stand-in class": lambda c: b"cnumpy\ndtype\n(N(dV__init__\nV1\nstb.",
    "BUILD on Data": lambda c: DATA + b")\x81(dV__class__\nV1\nsb.",
    "EXT1": lambda c: b"\x80\x04\x82\x01.",
    "EXT4": lambda c: b"\x80\x04\x84\xff\xff\xff\x7f.",
    "persistent id": lambda c: b"Pos.system\n.",
    "binary persistent id": lambda c: b"\x80\x04Vos.system\nQ.",
    "in a record": lambda c: dumped(tags=Calls(os.system, f"touch {c}")),
    "as a key": lambda c: pickle.dumps({Calls(os.system, f"touch {c}"): 1}, 4),
    "copyreg": lambda c: f"ccopyreg\n_reconstructor\n(cos\nsystem\nNVtouch {c}\ntR.".encode(),
    "numpy load": lambda c: text("numpy", "load", c),
    "torch load": lambda c: text("torch", "load", c),
    "pickle in a storage": lambda c: dumped(
        pos=tensor(text("os", "system", f"touch {c}"), (4, 3), (3, 1))
    ),
    "tensor of stride 0": lambda c: dumped(pos=tensor(legacy(12), (10**9, 10**9), (0, 0))),
    "tensor of 10¹² numbers": lambda c: dumped(pos=tensor(legacy(12), (10**12,), (0,))),
    "tensor beyond its storage": lambda c: dumped(pos=tensor(legacy(12), (4, 3), (30, 1))),
    "tensor of negative stride": lambda c: dumped(pos=tensor(legacy(12), (4, 3), (-3, 1))),
    "tensor of odd sizes": lambda c: dumped(pos=tensor(legacy(12), "abc", None)),
    "array of objects": lambda c: dumped(pos=np.array([Calls(os.system, f"touch {c}")] * 2)),
    "dtype object": lambda c: b"cnumpy\ndtype\n(VO8\nI0\nI1\ntR.",
    "dtype with fields": lambda c: dumped(tags=np.zeros(4, dtype=[("a", "O"), ("b", "f4")])),
    "dtype of huge text": lambda c: b"cnumpy\ndtype\n(VU999999999999\nI0\nI1\ntR.",
    "dtype in a byte order": lambda c: (
        b"cnumpy\ndtype\n(Vf8\nI0\nI1\ntR(I3\nV(9,)O,\nNNNI-1\nI-1\nI0\ntb."
    ),
    "memo bomb": lambda c: b"\x80\x04Nr\xff\xff\xff\x7f.",
    "text memo bomb": lambda c: b"Np4294967296\n.",
    "memo of a negative index": lambda c: b"Np-1\n.",
    "huge BINBYTES8": lambda c: b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b"abc.",
    "huge BINUNICODE": lambda c: b"\x80\x04X\xff\xff\xff\x7fabc.",
    "huge BYTEARRAY8": lambda c: b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b"abc.",
    "huge FRAME": lambda c: b"\x80\x04\x95" + struct.pack("<Q", (1 << 63) - 1) + b"N.",
    "huge LONG4": lambda c: b"\x80\x02\x8b\xff\xff\xff\x7f\x01.",
    "negative LONG4": lambda c: b"\x80\x02\x8b\xff\xff\xff\xff\x01.",
    "long text number": lambda c: b"L" + b"9" * 1_000_000 + b"L\n.",
    "int of a million digits": lambda c: b"I" + b"9" * 1_000_000 + b"\n.",
    "bytes of a large size": lambda c: b"c__builtin__\nbytes\n(I10000000000\ntR.",
    "nested lists": lambda c: nested(b"]", b"a", 50_000),
    "nested tuples": lambda c: nested(b"", b"\x85", 100_000),
    "nested dicts": lambda c: b"\x80\x04" + b"}K\x00" * 50_000 + b"N" + b"s" * 50_000 + b".",
    "nested key": lambda c: b"\x80\x04}N" + b"\x85" * 1_000_000 + b"Ns.",
    "less nested key": lambda c: b"\x80\x04}N" + b"\x85" * 15_000 + b"Ns.",
    "nested frozensets": lambda c: b"\x80\x04}N" + b"(\x91" * 1_000_000 + b"Ns.",
    "marks": lambda c: b"(" * 500_000 + b".",
    "billion laughs": lambda c: laughs(),
    "record of laughs": lambda c: b"\x80\x04}\x8c\x04tags" + laughs(30)[2:-1] + b"s.",
    "list that holds itself": lambda c: b"\x80\x04]\x94h\0a.",
    "field that holds itself": lambda c: b"\x80\x04}\x8c\x04tags]\x94h\0as.",
    "dict that holds itself": lambda c: b"\x80\x04}\x94\x8c\x04tagsh\0s.",
    "DUP": lambda c: b"\x80\x04N" + b"2" * 200_000 + b".",
    "POP of nothing": lambda c: b"\x80\x04000000.",
    "no STOP": lambda c: b"\x80\x04N",
    "protocol 255": lambda c: b"\x80\xffN.",
    "unhashable key": lambda c: b"\x80\x04}]Ns.",
    "zlib bomb": lambda c: zlib.compress(pickle.dumps({"pos": bytes(1 << 26)}, 4), 9),
    "zlib bomb of opcodes": lambda c: zlib.compress(b"\x80\x04" + b"}" * (1 << 26) + b".", 9),
    "zlib in zlib": lambda c: zlib.compress(zlib.compress(dumped())),
    "zlib of nothing": lambda c: zlib.compress(b""),
    "natoms of 10⁴⁰⁰": lambda c: dumped(natoms=10**400),
    "sid of a million digits": lambda c: dumped(sid=1 << 4_000_000),
    "sid of control characters": lambda c: dumped(sid="\x1b[2J\n\0"),
    "surrogate sid": lambda c: dumped(sid="\ud800"),
    "odd names": lambda c: dumped(**{"\ud800\0": 1, "": 2, "__class__": 3}),
    "odd energies": lambda c: dumped(y_relaxed=[[-1.0, [2.0]]], y_init={"a": 1}),
}
