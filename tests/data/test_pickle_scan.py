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

from flt_mol.data.pickle_scan import scan
from flt_mol.data.stored_values import decode
from flt_mol.data.unpickling import unpickle

DEEP = b"\x80\x04}" + b")" + b"\x85" * 3_000_000 + b"Ns."
TUPLE = b"cbuiltins\ntuple\nq\x000N"
HUGE = struct.pack("<I", 0x02000000)


@pytest.mark.parametrize(
    ("attack", "reason"),
    [
        (DEEP, "more than 20000 tuples"),
        (b"}N" + b"\x85" * 30_000 + b"Ns.", "more than 20000 tuples"),
        (b"}N" + b"q\x01\x86h\x01" * 30_000 + b"Ns.", "more than 20000 tuples"),
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
    ids=range(15),
)
def test_attacks_are_refused(attack: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=f"f, key 1: damaged record of .*{reason}"):
        unpickle(attack, "f, key 1")


def test_python_survives() -> None:
    code = (
        "import sys; from flt_mol.data.unpickling import unpickle\n"
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
    monkeypatch.setattr("flt_mol.data.stored_values._BYTES", 10_000)
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
