"""Records come out exactly as stored, and a hostile pickle runs nothing."""

from __future__ import annotations

import collections
import io
import pickle
import random
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flt_mol.data.pickles.torch_storage import StoredStorage
from flt_mol.data.pickles.unpickling import Record, unpickle
from flt_mol.data.pickles.values import _Decoder

PROTOCOLS = range(6)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.float32).reshape(4, 3),
        np.asfortranarray(np.arange(12.0).reshape(4, 3)),
        np.arange(6, dtype=np.uint8)[::2],
        np.arange(5, dtype=">i4"),
        np.array([True, False, True]),
        np.array(1.5),
        np.empty((0, 3)),
        np.array(["Pt", "O"]),
    ],
    ids=["f4", "fortran", "strided", "big-endian", "bool", "0d", "empty", "text"],
)
def test_numpy_arrays_round_trip(array: Any, protocol: int) -> None:
    value = unpickle(pickle.dumps({"a": array}, protocol=protocol), "here")["a"]
    assert value.dtype == array.dtype.newbyteorder("=")
    assert value.shape == array.shape
    np.testing.assert_array_equal(value, array)


def test_numpy_1_module_names_are_known() -> None:
    data = pickle.dumps({"a": np.arange(3.0), "b": np.float32(2.5)}, protocol=2)
    old = data.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    record = unpickle(old, "here")
    np.testing.assert_array_equal(record["a"], [0.0, 1.0, 2.0])
    assert record["b"] == 2.5


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    "value",
    [
        np.float64(-1.5),
        np.int64(7),
        np.bool_(True),
        "text",
        b"bytes",
        b"",
        bytearray(b"ab"),
        1 << 80,
        1 + 2j,
        {1, 2},
        frozenset({3}),
        (1, [2.5, None], {"a": True}),
        collections.OrderedDict(a=1),
    ],
)
def test_plain_values_round_trip(value: Any, protocol: int) -> None:
    result = unpickle(pickle.dumps({"v": value}, protocol=protocol), "here")["v"]
    assert result == value
    assert not isinstance(result, np.generic)


@pytest.mark.parametrize(
    "tensor",
    [
        *(
            torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
            for dtype in (
                torch.float64,
                torch.float32,
                torch.float16,
                torch.bfloat16,
                torch.int64,
                torch.int32,
                torch.int16,
                torch.int8,
                torch.uint8,
                torch.bool,
                torch.complex64,
                torch.complex128,
            )
        ),
        torch.tensor(-1.5),
        torch.empty(0, 3),
        torch.arange(12).reshape(3, 4).t()[1:, ::2],
        torch.ones(1, 3).expand(4, 3),
    ],
    ids=lambda t: f"{t.dtype}{list(t.shape)}",
)
def test_tensors_round_trip(tensor: torch.Tensor) -> None:
    result = unpickle(pickle.dumps({"t": tensor}), "here")["t"]
    assert result.dtype == tensor.dtype
    assert result.is_contiguous()
    assert torch.equal(result, tensor)


class _Torch:
    """Pickles as a call of torch's `_load_from_bytes` on a given byte string."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __reduce__(self) -> Any:
        return torch.storage._load_from_bytes, (self.data,)


def _tensor_of(data: bytes) -> bytes:
    class Tensor:
        def __reduce__(self) -> Any:
            arguments = (_Torch(data), 0, (3,), (1,), False, collections.OrderedDict())
            return torch._utils._rebuild_tensor_v2, arguments

    return pickle.dumps({"t": Tensor()})


def _storage(tensor: torch.Tensor) -> Any:
    return torch.storage.TypedStorage(
        wrap_storage=tensor.untyped_storage(), dtype=tensor.dtype, _internal=True
    )


def _decoded(data: bytes) -> str:
    try:
        tensor = StoredStorage(data).decode()
    except Exception as error:
        return f"{type(error).__name__} {error}"
    return f"{tensor.dtype} {tensor.tolist()}"


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16], ids=str
)
def test_damaged_storages_are_read_as_by_the_careful_way(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.BytesIO()
    numbers = torch.tensor([0.0, 1.0, 0.0]).to(dtype)
    torch.save(_storage(numbers), stream, _use_new_zipfile_serialization=False)
    whole = stream.getvalue()
    rng = random.Random(3)
    pieces = [whole, whole[:-1], whole + b"more", whole[:40], b""]
    for _ in range(600):
        changed = bytearray(whole)
        changed[rng.randrange(len(whole))] = rng.randrange(256)
        pieces.append(bytes(changed))
    # Digits and lengths that still fit each other, or no longer do.
    key = re.search(rb"X(.)\0\0\0(\d+)q\x02", whole)
    assert key is not None
    for length, digits in ((1, b"7"), (2, b"7"), (3, b"7890"), (255, b"7" * 255)):
        old, new = key.group()[:-2], b"X" + bytes([length]) + b"\0\0\0" + digits
        pieces.append(whole.replace(old, new))
    quick = [_decoded(data) for data in pieces]
    views = [_decoded(memoryview(data)) for data in pieces]  # type: ignore[arg-type]
    monkeypatch.setattr("flt_mol.data.pickles.torch_storage._quick_head", lambda data: None)
    assert quick == views == [_decoded(data) for data in pieces]
    assert sum("." in text or "[" in text for text in quick) > 100


def test_numbers_of_a_storage_where_they_lie() -> None:
    for dtype in (torch.float32, torch.int64, torch.int32, torch.uint8, torch.float16):
        stream = io.BytesIO()
        tensor = torch.tensor([250, 1, 7]).to(dtype)
        torch.save(_storage(tensor), stream, _use_new_zipfile_serialization=False)
        found = StoredStorage(stream.getvalue()).numbers()
        assert found is not None
        np.testing.assert_array_equal(np.frombuffer(found[1], found[0]), tensor.numpy())
        assert found[0] == tensor.numpy().dtype
        assert StoredStorage(stream.getvalue()[:-1]).numbers() is None
        assert StoredStorage(bytearray(stream.getvalue())).numbers() is None  # type: ignore[arg-type]


def test_zip_format_storages() -> None:
    stream = io.BytesIO()
    torch.save(_storage(torch.arange(3.0)), stream)
    assert unpickle(_tensor_of(stream.getvalue()), "here")["t"].tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("version", [1, 2])
def test_pyg_records(version: int, pickle_pyg: Any, make_record: Any) -> None:
    stored = make_record(x=None)
    record = unpickle(pickle_pyg(stored, version), "here")
    assert isinstance(record, Record)
    assert set(record) == set(stored)
    for name, value in stored.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(record[name], value)
        else:
            assert record[name] == value


def test_records_of_the_installed_pyg(make_record: Any) -> None:
    data = pytest.importorskip("torch_geometric.data")
    stored = make_record()
    for made in (data.Data(**stored), data.Batch.from_data_list([data.Data(**stored)])):
        record = unpickle(pickle.dumps(made), "here")
        for name in ("pos", "tags", "atomic_numbers", "edge_index"):
            assert torch.equal(record[name], stored[name])


def test_compressed_records() -> None:
    data = zlib.compress(pickle.dumps({"sid": 7}))
    assert unpickle(data, "here")["sid"] == 7
    with pytest.raises(ValueError, match="here: damaged record"):
        unpickle(data[:-3], "here")


def test_only_what_is_asked_for_is_decoded() -> None:
    broken = pickle.dumps({"sid": 7, "graph": torch.arange(3)}).replace(
        b"LongStorage", b"LongSt0rage"
    )
    record = unpickle(broken, "f.lmdb, key 3")
    assert record["sid"] == 7
    assert record.describe("graph") == ("tensor", (3,))
    with pytest.raises(ValueError, match=r"f\.lmdb, key 3: field graph: .*LongSt0rage"):
        record["graph"]


CANARY: list[str] = []


def _touch(*_: Any) -> None:
    CANARY.append("touched")


class _Calls:
    """Pickles as a call of any function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def _text(module: str, name: str, argument: str) -> bytes:
    """A protocol 0 pickle that calls module.name(argument)."""
    return f"c{module}\n{name}\n(V{argument}\ntR.".encode()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("posix", "system"),
        ("subprocess", "Popen"),
        ("builtins", "eval"),
        ("builtins", "exec"),
        ("builtins", "getattr"),
        ("builtins", "__import__"),
        ("__builtin__", "eval"),
        ("torch", "load"),
        ("torch.storage", "_load_from_bytes.__globals__"),
        ("numpy", "load"),
        ("numpy.core.multiarray", "_reconstruct.__class__"),
        ("collections", "OrderedDict.__init__"),
        ("torch_geometric.data.data", "Data.__init__"),
        ("torch_geometric.data", "download_url"),
        ("flt_mol.data.pickles.unpickling", "unpickle"),
        ("functools", "partial"),
        ("operator", "attrgetter"),
        ("copyreg", "_reconstructor"),
    ],
)
def test_names_outside_the_table_are_refused(module: str, name: str, tmp_path: Path) -> None:
    target = tmp_path / "harm"
    with pytest.raises(ValueError, match=r"f\.lmdb, key 1") as caught:
        unpickle(_text(module, name, f"touch {target}"), "f.lmdb, key 1")
    assert f"{module}.{name}" in str(caught.value)
    assert not target.exists()


def test_calls_inside_a_record_are_refused() -> None:
    CANARY.clear()
    for value in (_Calls(_touch), {"pos": [_Calls(_touch)]}, {_Calls(_touch): 1}):
        with pytest.raises(ValueError, match="_touch"):
            unpickle(pickle.dumps(value), "here")
    assert not CANARY


def test_calls_inside_a_stored_tensor_are_refused(tmp_path: Path) -> None:
    target = tmp_path / "harm"
    stream = io.BytesIO()
    torch.save(_Calls(Path.touch, target), stream, _use_new_zipfile_serialization=False)
    zipped = io.BytesIO()
    torch.save(_Calls(Path.touch, target), zipped)
    for data in (stream.getvalue(), zipped.getvalue(), b"", b"PK", b"\x80\x02N."):
        record = unpickle(_tensor_of(data), "here")
        with pytest.raises(ValueError, match="here: field t"):
            record["t"]
    assert not target.exists()


DATA = b"ctorch_geometric.data.data\nData\n"


@pytest.mark.parametrize(
    "attack",
    [
        # BUILD with slot state sets attributes; on classes and functions of the table too.
        DATA + b"(NV__setstate__\nV1\ns" + b"b.",
        DATA + b"(N(dVfields\nV1\nstb.",
        DATA + b"(dVfields\nV1\nsb.",
        DATA + b")\x81(N(dVstate\nV1\nstb.",
        b"ctorch.storage\n_load_from_bytes\n(N(dVfunction\nV1\nstb.",
        b"ccollections\nOrderedDict\n(dV__call__\nV1\nsb.",
        b"cnumpy\ndtype\n(VO8\ntR.",
        b"cnumpy\ndtype\n(VV8\ntR.",
        b"ccollections\nOrderedDict\n)\x81.",
        b"\x82\x01.",  # extension registry
        b"Pid\n.",  # persistent id
        b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94\x93.",
    ],
)
def test_attribute_tricks_change_nothing(attack: bytes, make_record: Any, pickle_pyg: Any) -> None:
    with pytest.raises(ValueError, match="here"):
        unpickle(attack, "here")
    assert unpickle(pickle_pyg(make_record()), "after")["sid"] == 101


def test_arrays_of_objects_and_records_are_refused() -> None:
    record = np.zeros(2, dtype=[("a", "f4")])
    for array in (np.array([{}, None], dtype=object), record):
        with pytest.raises(ValueError, match="numpy array of"):
            unpickle(pickle.dumps({"a": array}, protocol=4), "here")


@pytest.mark.parametrize(
    ("size", "stride", "offset"),
    [
        ((4,), (1,), 0),
        ((3,), (1,), 1),
        ((-1,), (1,), 0),
        ((3,), (-1,), 2),
        ((2, 2), (1,), 0),
        ((10**9, 10**9), (0, 0), 0),
        ((10**12,), (0,), 0),
    ],
)
def test_tensors_beyond_their_storage_are_refused(size: Any, stride: Any, offset: int) -> None:
    class Tensor:
        def __reduce__(self) -> Any:
            arguments = (_storage(torch.arange(3.0)), offset, size, stride, False, {})
            return torch._utils._rebuild_tensor_v2, arguments

    data = pickle.dumps({"t": Tensor()})
    with pytest.raises(ValueError, match="a stored tensor of shape"):
        unpickle(data, "here")["t"]


def test_lists_that_double_at_each_level_end() -> None:
    value: Any = [1]
    for _ in range(30):
        value = [value, value]
    record = unpickle(pickle.dumps({"v": value}), "here")
    with pytest.raises(ValueError, match="nested too deeply"):
        record["v"]


def test_json_rows_are_named() -> None:
    with pytest.raises(ValueError, match="aselmdb"):
        unpickle(zlib.compress(b'{"numbers": [1]}'), "here")


def _complaint(data: bytes) -> str:
    """What reading all of the record says, if it raises ValueError."""
    try:
        record = unpickle(data, "f.lmdb, key 5")
        for name in record if isinstance(record, Record) else ():
            record[name]
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("version", [1, 2])
def test_damage_gives_value_errors_only(version: int, pickle_pyg: Any, make_record: Any) -> None:
    whole = pickle_pyg(make_record(extra=np.arange(3.0)), version)
    rng = random.Random(1)
    pieces = [whole[: rng.randrange(len(whole))] for _ in range(60)]
    for _ in range(300):
        changed = bytearray(whole)
        changed[rng.randrange(len(whole))] = rng.randrange(256)
        pieces.append(bytes(changed))
    refused = 0
    for data in pieces:
        message = _complaint(data)
        refused += bool(message)
        assert message.startswith("f.lmdb, key 5: ") or not message
    assert refused > 60


@pytest.mark.parametrize("data", [b"Pid\n.", b"K\x00Q.", b"B\x01\x00\x00\x00a0K\x00Q."])
def test_data_outside_the_record_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="here: .*refers to data outside the record"):
        unpickle(data, "here")


def _doubled(times: int) -> Any:
    value: Any = [1]
    for _ in range(times):
        value = [value, value]
    return value


def test_lists_that_occur_again_are_decoded_once() -> None:
    calls = 0

    class Counted(_Decoder):
        def walk(self, value: Any, depth: int) -> Any:
            nonlocal calls
            calls += 1
            return super().walk(value, depth)

    value = _doubled(28)
    with pytest.raises(ValueError, match="again and again"):
        Counted().walk(value, 32)
    assert calls < 100
    record = unpickle(pickle.dumps({"v": _doubled(10)}), "here")
    assert record["v"] == _doubled(10)
    part = {"a": [torch.ones(2), (1, 2)]}
    shared = unpickle(pickle.dumps({"v": [part, part, {"b": part}]}), "here")["v"]
    assert shared[0] == shared[1] == shared[2]["b"]


def test_long_lists_are_read() -> None:
    value = [[float(i), 0.5, 1.0] for i in range(50_000)]
    assert unpickle(pickle.dumps({"v": value}), "here")["v"] == value


@pytest.mark.parametrize("levels", [12, 20])
def test_lists_that_occur_again_nest_no_deeper(levels: int) -> None:
    """Each part is the part before, a few levels deeper."""
    value: Any = 1
    parts = []
    for _ in range(3):
        for _ in range(levels):
            value = [value]
        parts.append(value)
    for given in (parts, parts[::-1], [parts[0], parts[-1]]):
        with pytest.raises(ValueError, match="nested too deeply"):
            unpickle(pickle.dumps({"v": given}), "here")["v"]
    assert unpickle(pickle.dumps({"v": [parts[0], parts[0]]}), "here")["v"] == [parts[0], parts[0]]
