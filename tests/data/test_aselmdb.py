"""Rows of ASE's database in LMDB files: fields, constraints, counts, and damage."""

import json
import zlib

import numpy as np
import pytest

from flt_mol.data import open_dataset
from tests.data.test_opening import FRAMES, row


def changed(index=0, **changes):
    content = json.loads(zlib.decompress(row(FRAMES[index])))
    return zlib.compress(json.dumps({**content, **changes}).encode())


def array(shape, kind, flat):
    return {"__ndarray__": [shape, kind, flat]}


def test_whose_value_counts(write_lmdb):
    path = write_lmdb(
        {
            1: changed(energy=-7.5, forces=array([4, 3], "float64", [0.5] * 12)),
            2: changed(data={"sid": 5, "y_relaxed": None}, key_value_pairs={"y_relaxed": -2.0}),
        },
        "a.aselmdb",
    )
    dataset = open_dataset(path)
    assert dataset.batch([0, 1]).energy.tolist() == [-1.25, -2.0]
    assert dataset.batch([0, 1]).sid == (10, 5)
    assert dataset.record(0)["forces"].shape == (4, 3)
    assert open_dataset(path, energy="calculator")[0].energy.tolist() == [-7.5]
    two = write_lmdb({1: changed(data={"y_relaxed": 1.0}, key_value_pairs={"y_relaxed": 2.0})})
    with pytest.raises(ValueError, match="key 1.*y_relaxed of data is 1.0.*keep one"):
        open_dataset(two)[0]


@pytest.mark.parametrize(
    ("constraints", "fixed"),
    [
        ([], [0, 0, 0, 0]),
        ([{"name": "FixAtoms", "kwargs": {"indices": [0, 3]}}], [1, 0, 0, 1]),
        ([{"name": "FixAtoms", "kwargs": {"indices": array([1], "int64", [2])}}], [0, 0, 1, 0]),
        ([{"name": "FixCartesian", "kwargs": {"a": [1], "mask": [True, True, False]}}], [0] * 4),
        ([{"name": "FixCartesian", "kwargs": {"a": 1, "mask": [True] * 3}}], [0, 1, 0, 0]),
        ([{"name": "FixBondLengths", "kwargs": {"pairs": [[0, 1]]}}], [0] * 4),
    ],
)
def test_constraints(constraints, fixed, write_lmdb):
    path = write_lmdb({1: changed(constraints=constraints)})
    assert open_dataset(path)[0].fixed.tolist() == [bool(f) for f in fixed]


@pytest.mark.parametrize(
    "constraints",
    [7, [{}], [{"name": "FixAtoms", "kwargs": {"indices": [9]}}], [{"name": "FixAtoms"}], ["a"]],
)
def test_constraints_that_cannot_be_read(constraints, write_lmdb):
    with pytest.raises(ValueError, match="key 1: not a row of ASE"):
        open_dataset(write_lmdb({1: changed(constraints=constraints)}))[0]


def test_rows_that_leave_out_what_is_false(write_lmdb):
    content = json.loads(zlib.decompress(changed()))
    for name in ("pbc", "constraints"):
        del content[name]
    system = open_dataset(write_lmdb({1: json.dumps(content).encode()}))[0]
    assert not system.pbc.any()
    assert not system.fixed.any()


DAMAGE = {
    "no JSON": b"{",
    "cut": changed()[:-20],
    "a list": zlib.compress(b"[1]"),
    "not a row": b'{"a": 1}',
    "deep": b'{"data":' * 100_000 + b"1" + b"}" * 100_000,
    "bomb": zlib.compress(b'{"a": "' + b" " * (1 << 27) + b'"}'),
    "array of 10¹²": changed(positions=array([10**6, 10**6], "float64", [0.0])),
    "objects": changed(positions=array([4, 3], "object", [{}] * 12)),
    "odd type": changed(numbers=array([4], "__import__('os')", [1] * 4)),
    "huge numbers": changed(numbers=array([4], "int64", [10**400] * 4)),
    "object of ASE": changed(positions={"__ase_objtype__": "atoms", "numbers": [1]}),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_rows_are_named_or_skipped(damage, write_lmdb):
    path = write_lmdb({1: row(FRAMES[0]), 2: DAMAGE[damage]}, "a.aselmdb")
    with pytest.raises(ValueError, match="a.aselmdb, key 2"):
        open_dataset(path).batch([0, 1])
    assert [s.sid for s in open_dataset(path, on_error="skip")] == [(10,)]


def test_objects_harm_their_own_field_only(write_lmdb):
    path = write_lmdb({1: changed(data={"y_relaxed": -1.0, "odd": {"__complex__": [1, 2]}})})
    system = open_dataset(path)[0]
    assert system.energy.tolist() == [-1.0]
    assert "odd" not in system.info
    # ASE writes cells as objects, too.
    cell = {
        "__ase_objtype__": "cell",
        "array": array([3, 3], "float64", [5.0, 0, 0, 0, 6, 0, 0, 0, 7]),
    }
    assert np.diag(open_dataset(write_lmdb({1: changed(cell=cell)}))[0].cell[0]).tolist() == [
        5,
        6,
        7,
    ]
