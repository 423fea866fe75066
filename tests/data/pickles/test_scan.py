"""Pickles that would end the process, or take its memory, are refused before they are loaded."""

from __future__ import annotations

import io
import pickle
import pickletools
import random
import struct
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from flt_mol.data.pickles.scan import _careful, scan, split
from flt_mol.data.pickles.unpickling import unpickle
from flt_mol.data.pickles.values import decode

DEEP = b"\x80\x04}" + b")" + b"\x85" * 3_000_000 + b"Ns."
TUPLE = b"cbuiltins\ntuple\nq\x000N"
HUGE = struct.pack("<I", 0x02000000)


@pytest.mark.parametrize(
    ("attack", "reason"),
    [
        (DEEP, "more than 20000 tuples"),
        (b"}N" + b"\x85" * 30_000 + b"Ns.", "more than 20000 tuples"),
        (b"}N" + b"q\x01\x86h\x01" * 30_000 + b"Ns.", "more than 20000 tuples"),
        (b"}Nq\x01" + b"h\x01\x85q\x01" * 30_000 + b"h\x01Ns.", "more than 20000 tuples"),
        (TUPLE + b"q\x010]h\x01ah\x00h\x01\x85R" * 30_000 + b"}h\x01Ns.", "more than 20000 tuples"),
        (b"\x80\x04Nr" + HUGE + b".", "memo index 33554432 after 4 bytes"),
        (b"Nr" + b"\xff" * 4 + b".", "memo index 4294967295"),
        (b"Np33554432\n.", "memo index 33554432"),
        (b"X" + struct.pack("<I", 100) + b"a" * 100 + b"r" + struct.pack("<I", 90) + b".", "memo"),
        (b"]" * 5_000_000 + b".", "too many values"),
        (b"(" + b"I1\n" * 2_000_000 + b".", "too many values"),
        (b"B" + b"\xff" * 4 + b"abc.", "truncated"),
        (b"\x8e" + b"\xff" * 8 + b".", "truncated"),
        (b"N", "truncated"),
        (b"cos\nsystem", "truncated"),
        (b"\xff.", "invalid load key"),
    ],
    ids=range(16),
)
def test_attacks_are_refused(attack: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=f"f, key 1: damaged record of .*{reason}"):
        unpickle(attack, "f, key 1")


def test_python_survives() -> None:
    code = (
        "import sys; from flt_mol.data.pickles.unpickling import unpickle\n"
        "for data in (b'\\x80\\x04})' + b'\\x85' * 3_000_000 + b'Ns.',):\n"
        "    try: unpickle(data, 'f')\n"
        "    except ValueError: print('refused')\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "refused\n")


def _of_storage(data: bytes) -> bytes:
    """A record with a tensor whose storage is `data`."""

    class Bytes:
        def __reduce__(self) -> Any:
            return torch.storage._load_from_bytes, (data,)

    class Tensor:
        def __reduce__(self) -> Any:
            return torch._utils._rebuild_tensor_v2, (Bytes(), 0, (3,), (1,), False, {})

    return pickle.dumps({"t": Tensor()})


def test_attacks_inside_a_stored_tensor() -> None:
    for attack in (DEEP, b"Nr" + b"\xff" * 4 + b"."):
        record = unpickle(_of_storage(attack), "f, key 1")
        with pytest.raises(ValueError, match="field t: (more than|memo index)"):
            record["t"]


VALUES = [
    {"a": [1, 2.5, -3, 1 << 80, True, None, "text", b"bytes", bytearray(b"x")]},
    {"many": [str(i) for i in range(2000)]},
    {"set": {1, 2}, "frozen": frozenset({"a"}), "tuples": [(i,) for i in range(300)]},
    {"array": np.arange(1000.0), "long": "é" * 300, "large": b"." * 70_000},
    {"tensor": torch.arange(100.0), "complex": 1j},
    list(range(1000)),
    {"large": np.zeros(600_000), "text": "a" * 5_000_000},
]


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_the_end_is_where_pickle_finds_it(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol=protocol)
    assert scan(data) == len(data)
    assert scan(b"12" + data + b"..", 2) == len(data) + 2
    assert scan(pickletools.optimize(data) + b"N.") == len(pickletools.optimize(data))


class _Whole(pickle.Unpickler):
    """Puts a split pickle together."""

    def __init__(self, code: bytes, strings: Any) -> None:
        super().__init__(io.BytesIO(code))
        self.strings = strings

    def persistent_load(self, pid: Any) -> Any:
        value = self.strings[pid]
        return bytes(value) if isinstance(value, memoryview) else value


SPLITTABLE = [
    {"a": b"x" * 300, "b": [b"y" * 70_000, b"y" * 300], "c": bytearray(b"z" * 1000)},
    {"many": [bytes([i]) * 257 for i in range(200)], "short": [b"", b"a", b"b" * 255]},
    {"names": ["n" * i for i in range(300)], "é" * 200: {("k", 1): None}},
    VALUES[3],
    [b"." * 300],
]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("value", SPLITTABLE, ids=range(len(SPLITTABLE)))
def test_parts_of_a_pickle_are_the_whole(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    for given in (data, memoryview(data), data + b"more"):
        parts = split(given)
        if parts is None:  # more memo entries than one byte counts
            assert protocol < 4
            assert "many" in value or "names" in value
            continue
        assert repr(_Whole(*parts).load()) == repr(pickle.loads(data))
        assert bool(parts.strings) == (protocol > 2 and "names" not in value)


def test_byte_strings_of_a_pickle_are_not_copied() -> None:
    data = bytearray(pickle.dumps({"a": b"x" * 300}))
    parts = split(memoryview(data).toreadonly())
    assert parts is not None
    data[data.index(b"xx")] = ord("y")
    assert bytes(parts.strings[0][:3]) == b"yxx"


@pytest.mark.parametrize(
    "data",
    [
        b"K\x00Q.",  # a persistent id
        b"P0\n.",
        b"I1\n.",  # lines
        b"N" + b"\x85" * 30_000 + b".",
        b"B" + HUGE + b"abc.",
        b"\x95" + b"\xff" * 8 + b"N.",  # a frame beyond the end
        b"N",
        b"",
        b"B\x00",
        b"Nr\x00\x00\x00\x00.",
        b"\xffN.",
    ],
    ids=range(11),
)
def test_what_takes_a_careful_look_is_not_split(data: bytes) -> None:
    assert split(data) is None


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_both_looks_agree_on_damaged_pickles(protocol: int) -> None:
    rng = random.Random(protocol)
    value = SPLITTABLE[0] | {"p": [(1.5, 2), (3,), frozenset({7})] * 5, "é": [None, True, -5]}
    whole = pickle.dumps(value, protocol)
    agreed = 0
    for _ in range(500):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            # Opcodes and lengths lie at both ends.
            place = rng.choice(
                (rng.randrange(60), -rng.randrange(1, 250), rng.randrange(len(data)))
            )
            data[place] = rng.randrange(256)
        parts = split(bytes(data))
        if parts is None:
            continue
        assert scan(bytes(data)) == _careful(bytes(data), 0)
        outcomes = []
        for load in (lambda: pickle.loads(bytes(data)), lambda: _Whole(*parts).load()):  # noqa: B023
            try:
                outcomes.append(repr(load()))
            except Exception as error:
                outcomes.append(f"{type(error).__name__} {error}")
        assert outcomes[0] == outcomes[1]
        agreed += 1
    assert agreed > 100


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(
    "tuples",
    [
        [(i, i + 1) for i in range(50_000)],
        [(i, 0.5, None) for i in range(50_000)],
        [(i,) for i in range(50_000)],
        [(70_000 + i, -1 - i, True) for i in range(50_000)],
    ],
    ids=range(4),
)
def test_long_lists_of_short_tuples_are_read(tuples: Any, protocol: int) -> None:
    data = pickle.dumps({"bonds": tuples, "image": b"x" * 300}, protocol)
    assert unpickle(data, "here")["bonds"] == tuples


@pytest.mark.filterwarnings("ignore:invalid escape:DeprecationWarning")
def test_it_ends_as_pickletools_says_of_damaged_pickles() -> None:
    rng = random.Random(2)
    whole = pickle.dumps(VALUES[0] | {"p": [(1.5, 2)] * 5}, protocol=2)
    compared = 0
    for _ in range(500):
        data = bytearray(whole)
        data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            end = max(at for _, _, at in pickletools.genops(bytes(data)) if at is not None) + 1
            found = scan(bytes(data))
        except (ValueError, pickle.UnpicklingError):
            continue
        assert found == end
        compared += 1
    assert compared > 100


def test_a_tensor_named_often_is_decoded_once() -> None:
    tensor = torch.arange(2_500_000, dtype=torch.float32)
    again = unpickle(pickle.dumps({"t": [tensor] * 300}), "here")["t"]
    assert len({t.data_ptr() for t in again}) == 1
    assert torch.equal(again[299], tensor)


def test_views_of_one_stored_tensor_share_its_numbers() -> None:
    data = io.BytesIO()
    torch.save(
        torch.storage.TypedStorage(
            wrap_storage=torch.arange(2_500_000.0).untyped_storage(),
            dtype=torch.float32,
            _internal=True,
        ),
        data,
    )
    name = b"ctorch._utils\n_rebuild_tensor_v2\n"
    storage = b"ctorch.storage\n_load_from_bytes\n"
    size = len(data.getvalue())
    head = b"B" + struct.pack("<I", size) + data.getvalue() + b"q\x000" + b"]("
    one = name + b"(" + storage + b"h\x00\x85RK\x00K\x03\x85K\x01\x85\x89}tR"
    tensors = unpickle(b"}X\x01\x00\x00\x00t" + head + one * 100 + b"es.", "here")["t"]
    assert len({t.data_ptr() for t in tensors}) == 1
    assert tensors[99].tolist() == [0.0, 1.0, 2.0]


def test_what_a_field_decodes_to_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flt_mol.data.pickles.values._BYTES", 10_000)
    row = torch.zeros(10).expand(200, 10)
    for value in ([np.zeros(600), np.zeros(700)], [torch.zeros(1300), torch.zeros(1300)], row):
        record = unpickle(pickle.dumps({"t": value, "u": np.zeros(1000)}), "here")
        if value is not row:
            with pytest.raises(ValueError, match="field t: tensors and arrays of more than 10000"):
                record["t"]
        assert record["u"].shape == (1000,)
    assert decode([1, 2]) == [1, 2]


def test_parameters_are_their_tensors() -> None:
    value = {"pos": torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))}
    position = unpickle(pickle.dumps(value), "here")["pos"]
    assert position.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert not position.requires_grad
    with pytest.raises(ValueError, match="a parameter without tensor"):
        unpickle(b"ctorch._utils\n_rebuild_parameter\n(NI00\nNtR.", "here")
