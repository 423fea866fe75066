"""Further values that are too large are refused before anything is made of them."""

from __future__ import annotations

import tracemalloc
import zlib

import numpy as np
import pytest

from flt_mol.data import open_dataset
from flt_mol.data.conversion import convert
from flt_mol.data.conversion.sizes import _exceeds

pytestmark = pytest.mark.filterwarnings("ignore:.*all tags.*:UserWarning")


@pytest.mark.parametrize("kind", ["lmdb", "aselmdb", "extxyz"])
def test_a_large_value_is_refused_by_name(kind, make_record, tmp_path):
    given = open_dataset([make_record(sid=4, log=b"0" * (1 << 26))])
    tracemalloc.start()
    with pytest.raises(ValueError, match="sid 4: log is a bytes of more than 16,777,216 bytes"):
        convert(given, tmp_path / f"out.{kind}", workers=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 25


def test_a_record_that_unpacks_to_much_is_refused(make_record, write_lmdb, tmp_path):
    import pickle

    packed = zlib.compress(pickle.dumps(make_record(log=b"0" * (1 << 25))))
    given = open_dataset(write_lmdb({0: packed, 1: make_record(sid=1)}))
    result = convert(given, tmp_path / "out.lmdb", workers=1, on_error="skip")
    assert result.systems == 1
    assert "key 0, sid 101: log is a bytes" in result.skipped[0]


@pytest.mark.parametrize("value", [
    "x" * 101, b"x" * 101, [0] * 13, [[["x" * 50] * 2]], {"a" * 60: "b" * 60}, {"a": ["x" * 100]},
    1 << 900, ({"a"}, "x" * 90), np.zeros(13),
])  # fmt: skip
def test_sizes_of_all_kinds(value):
    assert _exceeds(value, 100)
    assert not _exceeds(value, 1000)


def test_the_size_of_what_holds_itself_is_found():
    loop: list[object] = []
    loop.append(loop)
    assert _exceeds(loop, 1000)
