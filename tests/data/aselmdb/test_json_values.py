"""JSON in ASE's spelling: exact there and back, and no harm from hostile texts."""

from __future__ import annotations

import json
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from ase.io.jsonio import decode as ase_decode
from ase.io.jsonio import encode as ase_encode
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flt_mol.data.aselmdb.json_values import StoredJson, decode_json, dump, head_of, inflate, load

DTYPES = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="="),
    hnp.unsigned_integer_dtypes(endianness="="),
    hnp.floating_dtypes(endianness="=", sizes=(16, 32, 64)),
    hnp.complex_number_dtypes(endianness="=", sizes=(64, 128)),
)
ARRAYS = hnp.arrays(DTYPES, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats(allow_nan=False)
    | st.text()
    | st.complex_numbers(allow_nan=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def _there_and_back(value: Any) -> Any:
    return decode_json(load(dump(value)))


def _same(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, np.ascontiguousarray(b).tobytes())


@given(ARRAYS)
def test_arrays_there_and_back(array: Any) -> None:
    array = np.where(np.isnan(array), 0, array).astype(array.dtype)  # nan has many spellings
    assert _same(_there_and_back(array), array)
    assert _same(_there_and_back(array.T), array.T)


@given(ARRAYS)
def test_the_spelling_is_that_of_ase(array: Any) -> None:
    array = np.where(np.isnan(array), 0, array).astype(array.dtype)
    assert json.loads(dump({"a": array})) == json.loads(ase_encode({"a": array}))
    assert _same(decode_json(load(ase_encode({"a": array}).encode()))["a"], array)
    assert _same(np.asarray(ase_decode(dump({"a": array}).decode())["a"]), array)


@given(PLAIN)
def test_plain_values_there_and_back(value: Any) -> None:
    markers = ("__ndarray__", "__complex__", "__ase_objtype__")
    if not any(marker in repr(value) for marker in markers):
        assert _there_and_back({"a": value}) == {"a": value}


def test_nan_and_inf_are_kept() -> None:
    back = _there_and_back({"a": np.float32([np.nan, np.inf, -np.inf]), "b": float("nan")})
    assert np.isnan(back["a"][0])
    assert back["a"][1:].tolist() == [np.inf, -np.inf]
    assert back["b"] != back["b"]


def test_tensors_tuples_and_text() -> None:
    values = {"t": torch.arange(3), "u": (1, "a"), "s": np.array(["ab", "c"]), "i": np.int64(7)}
    back = _there_and_back(values)
    assert back["t"].tolist() == [0, 1, 2]
    assert back["t"].dtype == np.int64
    assert back["u"] == [1, "a"]
    assert back["s"].tolist() == ["ab", "c"]
    assert type(back["i"]) is int


@pytest.mark.parametrize(
    "value", [b"x", {1}, object(), {1: 2}, {"__ndarray__": 1}, np.array([None]), np.array([b"a"])]
)
def test_what_json_does_not_have(value: Any) -> None:
    with pytest.raises(TypeError, match="JSON"):
        dump({"a": value})


HOSTILE = {
    "too few": [[3], "float64", [1.0]],
    "a bomb": [[10**12], "float64", [0.0]],
    "overflow": [[2**40, 2**40], "float64", []],
    "negative": [[-1], "float64", []],
    "ragged": [[2], "float64", [[1.0], [1.0, 2.0]]],
    "nested": [[1, 1], "float64", [[1.0]]],
    "objects": [[1], "object", [None]],
    "records": [[1], "f8,f8", [1.0]],
    "wide text": [[1], "<U100000000", ["a"]],
    "cut text": [[1], "<U1", ["ab"]],
    "text for numbers": [[1], "float64", ["1.5"]],
    "fractions for whole": [[1], "int64", [1.5]],
    "too large": [[1], "int8", [300]],
    "far too large": [[1], "int64", [2**70]],
    "no dtype": [[1], "nothing", [1]],
    "dtype of a list": [[1], ["float64"], [1]],
    "shape of text": [["1"], "float64", [1.0]],
    "true for one": [[True], "float64", [1.0]],
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_arrays_that_do_not_fit_are_refused_where_they_are_asked_for(content: Any) -> None:
    value = load(json.dumps({"good": 1, "bad": {"__ndarray__": content}}).encode())
    assert decode_json(value["good"]) == 1
    with pytest.raises(ValueError, match="array"):
        decode_json(value["bad"])


@pytest.mark.parametrize("kind", ["atoms", "bandpath", "vibrationsdata", "nonsense", 7])
def test_objects_of_ase_are_refused_by_name(kind: Any) -> None:
    value = load(json.dumps({"a": {"__ase_objtype__": kind, "x": 1}, "b": 2}).encode())
    assert decode_json(value["b"]) == 2
    with pytest.raises(ValueError, match=f"object of ASE.*{kind}"):
        decode_json(value["a"])


def test_a_cell_is_an_array() -> None:
    array = {"__ndarray__": [[3, 3], "float64", list(np.eye(3).ravel())]}
    value = load(json.dumps({"__ase_objtype__": "cell", "array": array}).encode())
    assert isinstance(value, StoredJson)
    assert np.array_equal(decode_json(value), np.eye(3))


@pytest.mark.parametrize("text", [b"[" * 200_000, b"{", b"nonsense", b"\xff", b"1" * 5000])
def test_texts_that_are_no_json(text: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        load(text)


def test_nesting_ends() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        decode_json(load(b"[" * 200 + b"]" * 200))


def test_inflate_is_bounded() -> None:
    text = b"a" * 5000
    packed = zlib.compress(text)
    assert inflate(packed) == inflate(text) == text
    assert inflate(packed, 5000) == text
    with pytest.raises(ValueError, match="more than 4999 bytes"):
        inflate(packed, 4999)
    with pytest.raises(ValueError, match="truncated"):
        inflate(packed[:-3])
    with pytest.raises(ValueError, match="damaged"):
        inflate(b"x" + packed[:1:-1])


def test_heads() -> None:
    assert head_of(zlib.compress(b'{"a": 1}' + bytes(1000)), 4) == b'{"a"'
    assert head_of(b'{"a": 1}', 4) == b'{"a"'
    assert head_of(b"xyz") == b""
