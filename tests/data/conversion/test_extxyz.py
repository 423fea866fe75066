"""Frames of extended XYZ as ASE reads them."""

from __future__ import annotations

import io
from contextlib import suppress

import ase.io
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flt_mol.data.conversion.extxyz import encode_frame
from flt_mol.data.oc20 import to_structures


def frame(record):
    return encode_frame(record, to_structures(record, where="here"), "here").decode("ascii")


def read(record):
    return ase.io.read(io.StringIO(frame(record)), format="extxyz")


def test_a_whole_frame():
    record = {
        "pos": np.float32([[0, 0, 0.1], [1.5, 0, 2]]),
        "pos_relaxed": np.float64([[0, 0, 0.1], [1.5, -0.0, 2]]),
        "atomic_numbers": [78, 8],
        "cell": np.diag([5.0, 6.0, 20.5]),
        "pbc": [True, True, False],
        "tags": [0, 2],
        "fixed": [1, 0],
        "sid": "a 1",
        "y_relaxed": -1.25,
        "y_init": 1 / 3,
        "facet": "111",
        "slab": 12,
    }
    assert frame(record).splitlines() == [
        "2",
        'Lattice="5.0 0.0 0.0 0.0 6.0 0.0 0.0 0.0 20.5" '
        "Properties=species:S:1:pos:R:3:tags:I:1:move_mask:L:1:pos_relaxed:R:3 "
        'pbc="T T F" sid="_JSON \\"a 1\\"" y_relaxed=-1.25 y_init=0.3333333333333333 '
        'facet="_JSON \\"111\\"" slab=12',
        "Pt 0 0 0.100000001 0 F 0.0 0.0 0.1",
        "O 1.5 0 2 2 T 1.5 -0.0 2.0",
    ]


def test_ase_reads_what_was_written():
    record = {
        "pos": np.float64([[0, 0, 0.1], [1.5, 0, 2], [1 / 3, 1e-9, 7]]),
        "pos_relaxed": np.float64([[0, 0, 1 / 7], [1.5, 0, 2], [1, 2, 3]]),
        "atomic_numbers": [78, 8, 1],
        "cell": [[5.0, 0.1, 0], [1 / 3, 6.0, 0], [0, 0, 20]],
        "tags": [0, 1, 2],
        "fixed": [1, 0, 1],
        "sid": 7,
        "y_relaxed": -1.1,
    }
    atoms = read(record)
    assert np.array_equal(atoms.positions, record["pos"])
    assert np.array_equal(atoms.arrays["pos_relaxed"], record["pos_relaxed"])
    assert np.array_equal(atoms.cell.array, record["cell"])
    assert atoms.pbc.tolist() == [True, True, True]
    assert atoms.get_chemical_symbols() == ["Pt", "O", "H"]
    assert atoms.get_tags().tolist() == [0, 1, 2]
    assert atoms.constraints[0].index.tolist() == [0, 2]
    assert (atoms.info["sid"], atoms.info["y_relaxed"]) == (7, -1.1)
    assert atoms.calc is None


def test_what_is_not_stored_is_not_written():
    text = frame({"pos": [[0, 0, 0.5]], "atomic_numbers": [29]})
    assert text == '1\nProperties=species:S:1:pos:R:3 pbc="F F F" sid=0\nCu 0.0 0.0 0.5\n'


numbers = hnp.arrays(np.float32, (2, 3), elements=st.floats(-(2.0**60), 2.0**60, width=32))


@settings(max_examples=60, deadline=None)
@given(pos=numbers, wide=st.booleans(), far=st.booleans())
def test_positions_are_exact(pos, wide, far):
    """Near the origin for float32, after rounding; for float64 and far from it, in all digits."""
    pos = np.float32(pos % 90 + 1e4 * far)
    stored = pos.astype(np.float64) / 3 if wide else pos
    record = {"pos": stored, "atomic_numbers": [1, 1], "sid": 1}
    found = read(record).positions
    assert np.array_equal(found.astype(stored.dtype), stored)
    expected = to_structures(record, where="x").positions
    assert torch.equal(to_structures({**record, "pos": found}, where="x").positions, expected)


@settings(max_examples=60, deadline=None)
@given(
    text=st.text(max_size=12),
    others=st.lists(st.one_of(st.text(max_size=4), st.floats(), st.booleans()), max_size=4),
    number=st.one_of(st.integers(-(2**62), 2**62), st.floats(), st.booleans()),
)
def test_values_are_exact_or_refused(text, others, number):
    record = {"pos": [[0, 0, 0.5]], "atomic_numbers": [29], "sid": text, "number": number}
    info = read(record).info
    assert info["sid"] == text
    assert repr(np.asarray(info["number"]).item()) == repr(number)
    found = others
    with suppress(ValueError):  # refused, as ASE would change something
        found = read({**record, "others": others}).info["others"]
    assert repr(found.tolist() if isinstance(found, np.ndarray) else found) == repr(others)


@pytest.mark.parametrize("text", ["1 2", "1,2", "T", "F,T", "True", "_JSON 3", "inf", "-1_0", ""])
def test_texts_that_look_like_something_else(text):
    assert (
        read({"pos": [[0, 0, 0]], "atomic_numbers": [1], "sid": 1, "name": text}).info["name"]
        == text
    )
