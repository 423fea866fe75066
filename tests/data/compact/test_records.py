"""The bytes of one compact record: what goes in comes out, bit for bit, in the same types."""

from __future__ import annotations

import math
import struct
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flt_mol.data import open_dataset
from flt_mol.data.compact import decode, encode
from flt_mol.data.compact.values import from_json, to_json
from flt_mol.data.oc20 import to_structures
from flt_mol.data.options import ReadOptions
from flt_mol.structures import Structures

OPTIONS = (ReadOptions(), ReadOptions(ignore_energy=True))


def bits(value: Any) -> Any:
    """A value in which −0.0, kinds of NaN and types are told apart."""
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        array = np.asarray(value)
        return type(value), str(value.dtype), array.shape, array.tobytes()
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, complex):
        return complex, bits(value.real), bits(value.imag)
    if isinstance(value, dict):
        return [(bits(name), bits(inner)) for name, inner in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [bits(item) for item in value]
    if isinstance(value, set | frozenset):
        return type(value), sorted((bits(item) for item in value), key=repr)
    return type(value), value


def seen(record: Any, options: ReadOptions = OPTIONS[0]) -> Any:
    """All that a record makes: the fields of its structures, and the notes."""
    notes: dict[str, str] = {}
    system = to_structures(record, where="f", default_sid="key", options=options, notes=notes)
    return bits({**vars(system), "info": dict(system.info)}), notes


class Described(dict[str, Any]):
    """A record that knows the shapes of its fields, like one out of a pickle."""

    def describe(self, name: str) -> tuple[str, Any]:
        return type(self[name]).__name__, getattr(self[name], "shape", None)


def there_and_back(record: Any, **options: Any) -> Any:
    payload = encode(record, "f", **options)
    result = decode(payload, "f")
    assert encode(result, "f", **options) == payload
    for read in OPTIONS:
        assert seen(result, read) == seen(record, read)
    return result


def test_numbers_keep_all_their_bits(make_record: Any) -> None:
    record = make_record()
    result = there_and_back(record)
    for name in ("pos", "pos_relaxed", "cell"):
        assert result[name].dtype == np.float32
        assert result[name].tobytes() == record[name].numpy().tobytes()
    assert result["atomic_numbers"].tolist() == [78, 78, 78, 78, 6, 8]
    assert (result["sid"], result["natoms"]) == (101, 6)
    assert (result["y_init"], result["y_relaxed"]) == (6.25, -1.25)
    assert set(result) == set(record) - {"edge_index"}


def test_only_rows_that_differ_are_stored_twice(make_record: Any) -> None:
    record = make_record()
    relaxed = record["pos"].clone()
    sizes = []
    for atom in (None, 0, 4):
        if atom is not None:
            relaxed[atom, 1] = torch.nextafter(relaxed[atom, 1], torch.tensor(9.0))
        result = there_and_back({**record, "pos_relaxed": relaxed})
        assert result["pos_relaxed"].tobytes() == relaxed.numpy().tobytes()
        sizes.append(len(encode({**record, "pos_relaxed": relaxed}, "f")))
    assert sizes == [80 + 6 * 14, 80 + 6 * 14 + 12, 80 + 6 * 14 + 24]


def test_signs_of_zeros_are_kept(make_record: Any) -> None:
    positions = torch.zeros(6, 3)
    record = make_record(pos=positions, pos_relaxed=-positions, y_relaxed=-0.0)
    record["cell"] = record["cell"] * torch.tensor([1.0, -0.0, 1.0]) + torch.eye(3) * 5
    result = there_and_back(record)
    assert np.signbit(result["pos_relaxed"]).all()
    assert not np.signbit(result["pos"]).any()
    assert math.copysign(1, result["y_relaxed"]) == -1


FLOATS = {
    "float32": lambda x: x,
    "float64": lambda x: x.double() + 1e-12,
    "float16": lambda x: x.half(),
    "bfloat16": lambda x: x.bfloat16(),
    "numpy float64": lambda x: x.double().numpy() / 3,
    "longdouble": lambda x: x.double().numpy().astype(np.longdouble) / 3,
    "big-endian": lambda x: x.numpy().astype(">f4"),
    "fortran": lambda x: np.asfortranarray(x.numpy()),
    "ints": lambda x: x.round().long(),
    "list": lambda x: x.double().tolist(),
    "with axis": lambda x: x[None],
}


@pytest.mark.parametrize("field", ["pos", "pos_relaxed", "cell"])
@pytest.mark.parametrize("kind", FLOATS)
def test_types_of_floats(field: str, kind: str, make_record: Any) -> None:
    record = make_record()
    result = there_and_back({**record, field: FLOATS[kind](record[field])})
    wide = kind in ("float64", "numpy float64", "longdouble", "ints", "list")
    assert result[field].dtype == (np.float64 if wide else np.float32)


@pytest.mark.parametrize("both", [{"pos", "pos_relaxed"}, {"pos", "cell"}, {"cell", "force"}])
def test_several_fields_of_float64(both: set[str], make_record: Any) -> None:
    record = make_record(force=torch.randn(6, 3, generator=torch.Generator().manual_seed(1)))
    record |= {name: record[name].double() / 3 for name in both}
    result = there_and_back(record, forces=True)
    for name in ("pos", "pos_relaxed", "cell", "force"):
        assert result[name].dtype == (np.float64 if name in both else np.float32)
        assert result[name].tobytes() == record[name].numpy().tobytes()


SPELLINGS: dict[str, dict[str, Any]] = {
    "far away": {"pos": torch.full((6, 3), 300.0), "pos_relaxed": torch.full((6, 3), 301.0)},
    "cell of three": {"cell": [9.0, 8.0, 7.0]},
    "cell flat": {"cell": torch.eye(3).flatten() * 9},
    "cell of zeros": {"cell": torch.zeros(3, 3)},
    "half a cell": {"cell": np.diag([9.0, 9.0, 0.0])},
    "pbc one": {"pbc": True},
    "pbc three": {"pbc": [True, False, True]},
    "pbc ints": {"pbc": np.array([[0, 1, 0]])},
    "pbc false": {"pbc": False},
    "tags float": {"tags": torch.tensor([0.0, 0.0, 1.0, 1.0, 2.0, 2.0])},
    "tags zero": {"tags": [0] * 6},
    "fixed two": {"fixed": torch.tensor([[2, 0, 0, 0, 0, -1]])},
    "natoms tensor": {"natoms": torch.tensor([6.0])},
    "sid text": {"sid": "random7"},
    "sid empty": {"sid": ""},
    "sid not ascii": {"sid": "Tëst 中 \ud800"},
    "sid bytes": {"sid": b"r7"},
    "sid bool": {"sid": True},
    "sid largest": {"sid": 2**63 - 1},
    "sid smallest": {"sid": -(2**63) + 1},
    "sid float": {"sid": torch.tensor(7.0)},
    "y int": {"y_relaxed": 2, "y_init": np.int8(-3)},
    "y float32": {"y_relaxed": np.float32(0.1), "y_init": torch.tensor([[0.1]])},
    "y_init nan": {"y_init": math.nan},
    "y_init nan of numpy": {"y_init": np.float32("nan")},
    "y_init text": {"y_init": "1.5"},
    "y_init true": {"y_init": True},
    "y_init several": {"y_init": torch.tensor([1.0, 2.0])},
    "y_init array": {"y_init": np.zeros((2, 2))},
    "y_init inf tensor": {"y_init": torch.tensor(math.inf)},
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_other_spellings(spelling: str, make_record: Any) -> None:
    there_and_back(make_record(**SPELLINGS[spelling]))


OPTIONAL = ("natoms", "tags", "fixed", "cell", "sid", "y_init", "y_relaxed", "pos_relaxed")


@pytest.mark.parametrize("missing", [*OPTIONAL, "all"])
@pytest.mark.parametrize("value", [..., None])
def test_missing_fields_stay_missing(missing: str, value: Any, make_record: Any) -> None:
    names = OPTIONAL if missing == "all" else (missing,)
    result = there_and_back(make_record(**dict.fromkeys(names, value)))
    assert not set(names) & set(result)


EXTRAS: dict[str, Any] = {
    "int": -7,
    "large int": 10**80,
    "bool": False,
    "float": 0.1,
    "zero": -0.0,
    "nan": math.nan,
    "other nan": struct.unpack("<d", b"\1\0\0\0\0\0\xf8\xff")[0],
    "inf": -math.inf,
    "complex": complex(-0.0, math.nan),
    "text": 'Pt "(111)" \ud800 中\n',
    "bytes": b"\0\xff",
    "bytearray": bytearray(b"ab"),
    "list": [1, 2.0, None, "x", [True]],
    "long list": list(range(64)),
    "tuple": (1, (2, b"3")),
    "dict": {"a": {"b": (1,)}, "c": None},
    "dict with numbers": {1: "one", (2, 3): "pair", "$tuple": [1]},
    "dict with a mark": {"$tuple": [1, 2]},
    "dict of marks": {"$a": 1, "b": 2},
    "empty": {},
    "set": {3, 1, "z", (1, 2)},
    "frozenset": frozenset({b"a", 2}),
    "array": np.array([1.5, 2.5], dtype=np.float32),
    "array of one": torch.tensor([3]),
    "number": np.int16(4),
    "array of texts": np.array(["a", "bc"]),
    "array inside": {"a": np.arange(6, dtype="i2").reshape(2, 3), "b": torch.ones(2).half()},
    "numbers inside": [np.float32(0.1), np.bool_(True), np.str_("t"), np.array(5)],
    "empty arrays inside": [np.empty((0, 3)), torch.empty(2, 0)],
}


@pytest.mark.parametrize("name", EXTRAS)
def test_further_values_keep_their_types(name: str, make_record: Any) -> None:
    result = there_and_back(Described(make_record(**{name: EXTRAS[name]})))
    assert bits(from_json(to_json(EXTRAS[name]))) == bits(EXTRAS[name])
    assert name in result


def test_arrays_come_back_in_the_byte_order_of_the_machine() -> None:
    array = np.arange(6, dtype=">i2").reshape(2, 3)[:, ::-1]
    result = from_json(to_json(array))
    assert result.dtype == np.dtype("i2")
    assert np.array_equal(result, array)


def test_all_further_values_at_once_and_in_order(make_record: Any) -> None:
    result = there_and_back(Described(make_record(**EXTRAS, **{"$tuple": 1, "": 2})))
    assert list(result)[-len(EXTRAS) - 2 :] == [*EXTRAS, "$tuple", ""]


def test_lists_of_a_pickle_stay_however_long(
    make_record: Any, write_lmdb: Any, pickle_pyg: Any
) -> None:
    path = write_lmdb({0: pickle_pyg(make_record(places=list(range(200)), large=np.zeros(65)))})
    record = open_dataset(path).record(0)
    result = there_and_back(record)
    assert result["places"] == list(range(200))
    assert "large" not in result


def test_what_is_left_out(make_record: Any) -> None:
    graph = {
        "edge_index": torch.zeros(2, 8, dtype=torch.long),
        "cell_offsets": torch.zeros(8, 3),
        "distances": torch.zeros(8),
        "neighbors": torch.tensor([8]),
        "edge_attr": torch.zeros(8, 2),
        "force": torch.zeros(6, 3),
        "large": np.zeros(65),
        "table": np.zeros((2, 2)),
        "_private": 1,
        "x": None,
    }
    assert encode(make_record(**graph), "f") == encode(make_record(edge_index=...), "f")
    assert "force" in there_and_back(make_record(**graph), forces=True)


REFUSED: dict[str, dict[str, Any]] = {
    "no positions": {"pos": None},
    "nan": {"pos": torch.full((6, 3), math.nan)},
    "target": {"y_relaxed": math.inf},
    "no energy": {"y_relaxed": 2e9},
    "element": {"atomic_numbers": [200] * 6},
    "tags": {"tags": [7] * 6},
    "count": {"natoms": 5},
    "flat": {"cell": np.ones((3, 3))},
    "sid": {"sid": 1.5},
    "large sid": {"sid": 2**63},
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_makes_no_structures_is_refused_with_the_same_words(
    case: str, make_record: Any
) -> None:
    record = make_record(**REFUSED[case])
    with pytest.raises(ValueError, match="f.lmdb, key 3") as expected:
        to_structures(record, where="f.lmdb, key 3")
    with pytest.raises(ValueError, match="f.lmdb, key 3") as caught:
        encode(record, "f.lmdb, key 3")
    assert str(caught.value) == str(expected.value)


def endless() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (object(), "object"),
        ({"a": [slice(1)]}, "slice"),
        (endless, "nested"),
        ({"a": np.array([object()])}, "object"),
        ({"a": torch.ones(1).to_sparse()}, "Tensor"),
        ({"a": 10**5000}, "digits"),
    ],
)
def test_values_that_cannot_be_kept_are_named(value: Any, reason: str, make_record: Any) -> None:
    value = {"a": endless()} if value is endless else value
    with pytest.raises(ValueError, match=f"f.lmdb, key 3, sid 101: odd .*{reason}"):
        encode(make_record(odd=value), "f.lmdb, key 3")


def test_forces_of_another_shape_are_refused_where_asked_for(make_record: Any) -> None:
    record = make_record(force=torch.zeros(5, 3))
    encode(record, "f")
    with pytest.raises(ValueError, match="sid 101: force has shape"):
        encode(record, "f", forces=True)


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())
    | st.binary()
    | st.complex_numbers(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.sampled_from(["$set", "$dict"]), inner)
        | st.dictionaries(st.integers() | st.binary(), inner, max_size=3)
    ),
    max_leaves=10,
)


@settings(max_examples=200, deadline=None)
@given(PLAIN)
def test_any_plain_value_comes_back(value: Any) -> None:
    assert bits(from_json(to_json(value))) == bits(value)


def test_sets_are_written_in_one_order() -> None:
    names = [f"name {i}" for i in range(20)]
    assert to_json(set(names)) == to_json({*names[10:], *names})


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_record_comes_back(data: Any) -> None:
    n = data.draw(st.integers(1, 9))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    kinds = st.sampled_from([np.float32, np.float64, np.float16])
    pos = rng.normal(size=(n, 3)).astype(data.draw(kinds))
    relaxed = pos.copy()
    relaxed[rng.random((n, 3)) < 0.2] *= -1
    record: dict[str, Any] = {"pos": pos, "atomic_numbers": rng.integers(1, 119, n)}
    optional = {
        "pos_relaxed": relaxed.astype(data.draw(kinds)),
        "cell": rng.normal(size=(3, 3)).astype(data.draw(kinds)) + 9 * np.eye(3),
        "pbc": rng.random(3) < 0.5,
        "tags": rng.integers(0, 3, n),
        "fixed": rng.random(n) < 0.5,
        "natoms": n,
        "sid": data.draw(st.integers(-(2**62), 2**62) | st.text(max_size=5)),
        "y_relaxed": data.draw(st.floats(-1e9, 1e9)),
        "y_init": data.draw(st.floats()),
        "further": data.draw(PLAIN),
    }
    names = data.draw(st.sets(st.sampled_from(sorted(optional))))
    names -= set() if "cell" in names else {"pbc"}
    there_and_back(Described(record | {name: optional[name] for name in sorted(names)}))


def changed(payload: bytes, offset: int, content: bytes) -> bytes:
    """A payload with other bytes, and the checksum that belongs to them."""
    body = payload[4:offset] + content + payload[offset + len(content) :]
    return struct.pack("<I", zlib.crc32(body)) + body


def test_every_bit_is_checked(make_record: Any) -> None:
    payload = encode(make_record(facet="111"), "f")
    for bit in range(8 * len(payload)):
        damaged = bytearray(payload)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match="f.lmdb, record 3: damaged record of"):
            decode(bytes(damaged), "f.lmdb, record 3")


@pytest.mark.parametrize("length", [0, 3, 79, 80, 150])
def test_truncated_payloads(length: int, make_record: Any) -> None:
    payload = encode(make_record(), "f")[:length]
    with pytest.raises(ValueError, match="f: damaged record"):
        decode(payload, "f")
    body = payload[4:]
    with pytest.raises(ValueError, match="f: damaged record"):
        decode(struct.pack("<I", zlib.crc32(body)) + body, "f")


@pytest.mark.parametrize(
    ("offset", "content", "reason"),
    [
        (4, b"\xff\xff\xff\xff", "unknown flags 0xfffc0000"),
        (68, struct.pack("<I", 2**32 - 1), "announces"),
        (72, struct.pack("<I", 2**32 - 1), "announces"),
        (76, struct.pack("<I", 2**32 - 1), "announces"),
        (76, struct.pack("<I", 0), "announces"),
        (80 + 2 * 72 + 1, b"\0", "relaxed positions"),
        (80 + 2 * 72 + 12 + 2, b"\xff", "utf-8"),
        (80 + 2 * 72 + 12 + 6, b"x", "Expecting"),
        (80 + 2 * 72 + 12 + 6, b"7" + b" " * 16, "no list of"),
        (80 + 2 * 72 + 12 + 6, b'[["facet"],    2]', "no list of"),
        (80 + 2 * 72 + 12 + 6, b'[["pos",      0]]', "stored twice"),
        (80 + 2 * 72 + 12 + 6, b'[["a", {"$a":0}]]', "unknown kind"),
    ],
)
def test_headers_that_lie_are_refused(
    offset: int, content: bytes, reason: str, make_record: Any
) -> None:
    payload = encode(make_record(sid="random", facet="111"), "f")
    assert payload.endswith(b'random[["facet","111"]]')
    with pytest.raises(ValueError, match=reason):
        decode(changed(payload, offset, content), "f")


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000,
        b'{"$array":["<f8",[1000000000000],""]}',
        b'{"$array":["<f8",[0,-1],""]}',
        b'{"$array":["<f8",[-1,-1],"AAAAAAAAAAA="]}',
        b'{"$array":["O",[1],"AAAAAAAAAAA="]}',
        b'{"$array":["<f3",[0],""]}',
        b'{"$array":["<U999999999",[0],""]}',
        b'{"$array":["<f8",["a"],""]}',
        b'{"$array":["<f8",[0,1e400],""]}',
        b'{"$array":5}',
        b'{"$tensor":["<U1",[0],""]}',
        b'{"$scalar":["<f8",""]}',
        b'{"$tuple":5}',
        b'{"$set":[[]]}',
        b'{"$dict":[[{},1]]}',
        b'{"$dict":[1]}',
        b'{"$float":"00"}',
        b'{"$float":5}',
        b'{"$bytes":"?"}',
        b'{"$complex":["a",1]}',
        b'{"$object":1}',
        b"\xff",
        b"9" * 5000,
    ],
)
def test_json_that_nobody_wrote_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match="."):
        from_json(text)


def test_genuine_records(oc20_data: Any) -> None:
    dataset = open_dataset(oc20_data / "is2re_val_20" / "data.lmdb")
    total = 0
    for index in range(len(dataset)):
        record = dataset.record(index)
        result = there_and_back(record, forces=True)
        total += len(encode(record, "f"))
        for name in ("pos", "pos_relaxed", "force", "cell"):
            assert result[name].tobytes() == record[name].numpy().tobytes()
        for name in ("atomic_numbers", "tags", "fixed"):
            assert (result[name] == record[name].numpy()).all()
        for name in ("sid", "natoms", "y_init", "y_relaxed"):
            assert result[name] == record[name]
            assert type(result[name]) is type(record[name])
    assert total / len(dataset) < 1700


def test_structures_are_the_judge(make_record: Any) -> None:
    assert isinstance(to_structures(decode(encode(make_record(), "f"), "f"), where="f"), Structures)
