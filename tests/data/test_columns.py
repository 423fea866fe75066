"""Columns make what the slow path makes, or nothing."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flt_mol.data.columns import Columns
from flt_mol.data.oc20 import to_structures
from flt_mol.structures import Structures

KINDS = ("tags", "fixed", "cell")
FIELDS = [field.name for field in dataclasses.fields(Structures)]


def equal(a: Structures, b: Structures) -> bool:
    """Whether two batches are the same, bits and types and order of names included."""
    for name in FIELDS:
        x, y = getattr(a, name), getattr(b, name)
        if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
            same = x.dtype == y.dtype and x.shape == y.shape
            same &= x.numpy().tobytes() == y.numpy().tobytes()
        else:
            same = repr(x) == repr(y)
        if not same:
            return False
    return True


def columns_of(records: Sequence[Mapping[str, Any]]) -> Columns:
    """The obvious way from records of arrays to columns."""

    def column(name: str) -> Any:
        values = [record[name] for record in records if name in record]
        return np.concatenate(values) if len(values) == len(records) else None

    cell = column("cell")
    pbc = column("pbc")
    return Columns(
        sid=tuple(record["sid"] for record in records),
        natoms=np.array([record["natoms"] for record in records]),
        atomic_numbers=column("atomic_numbers"),
        positions=column("pos"),
        tags=column("tags"),
        fixed=column("fixed"),
        cell=cell.reshape(-1, 3, 3),
        pbc=None if pbc is None else pbc.reshape(-1, 3),
        energy=column("y_relaxed"),
        energy_initial=column("y_init"),
        positions_relaxed=column("pos_relaxed"),
    )


def slow(records: Sequence[Mapping[str, Any]]) -> tuple[Structures | None, set[str]]:
    """What the slow path makes, and the kinds of notes that it gives."""
    notes: dict[str, str] = {}
    parts = []
    for record in records:
        try:
            parts.append(to_structures(record, where="here", notes=notes))
        except ValueError:
            return None, set(notes)
    return Structures.cat(parts), set(notes)


def _record(rng: np.random.Generator, n: int, sid: Any = 5, **changes: Any) -> dict[str, Any]:
    record = {
        "sid": sid,
        "natoms": n,
        "atomic_numbers": rng.integers(1, 119, n).astype(np.float32),
        "pos": rng.normal(size=(n, 3)).astype(np.float32),
        "tags": rng.integers(1, 3, n),
        "fixed": rng.integers(0, 2, n).astype(np.float32),
        "cell": np.diag([9.0, 8.0, 20.0]) + rng.normal(size=(3, 3)),
        "y_relaxed": rng.normal(size=1),
        "y_init": rng.normal(size=1),
        "pos_relaxed": rng.normal(size=(n, 3)),
        **changes,
    }
    return {name: value for name, value in record.items() if value is not ...}


BAD: dict[str, list[Any]] = {
    "sid": ["text", 1 << 63, -(1 << 63), (1 << 63) - 1, True, 1.5],
    "atomic_numbers": [0, 119, 1.5, np.nan, np.inf, -1, 2.0**40, 118, 1],
    "pos": [np.nan, np.inf, -np.inf, 3.5e38, -3.5e38, 3.4e38, 100.0, 99.9, 1e3, -300.0],
    "pos_relaxed": [np.nan, np.inf, 1e39, 500.0, -1e30],
    "tags": [-1, 3, 0.5, np.nan, 0],
    "fixed": [0.5, np.nan, 7, -1],
    "y_relaxed": [np.nan, np.inf, 1e300],
    "y_init": [np.nan, -np.inf, 3],
    "cell": [np.nan, np.inf, 1e39, 0.0, 1e-3, 30.0, 1e20],
}
PATTERNS = [[True] * 3, [False] * 3, [True, True, False], [False, True, False], [True, False, True]]


@st.composite
def _batches(draw: st.DrawFn) -> list[dict[str, Any]]:
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    records = [_record(rng, draw(st.integers(1, 4)), sid=i) for i in range(draw(st.integers(1, 4)))]
    for name in draw(st.sets(st.sampled_from(["pbc"]))):
        for record in records:
            record[name] = np.array(draw(st.sampled_from(PATTERNS)))
    for name in draw(st.sets(st.sampled_from(["tags", "fixed", "y_relaxed", "pos_relaxed"]))):
        for record in records:
            del record[name]
    for name in draw(st.sets(st.sampled_from(["pos", "atomic_numbers", "cell", "fixed"]))):
        kind = draw(st.sampled_from(["f2", "f4", "f8", "i8", "u1", "i1"]))
        for record in records:
            if name in record:
                record[name] = record[name].astype(kind)
    for name in draw(st.lists(st.sampled_from(sorted(BAD)), max_size=2)):
        record = draw(st.sampled_from(records))
        value = draw(st.sampled_from(BAD[name]))
        if name == "sid":
            record[name] = value
        elif name in record:
            wide = np.asarray(record[name], dtype=np.float64)
            whole = draw(st.booleans())
            wide.reshape(-1)[: None if whole else draw(st.integers(1, wide.size))] = value
            record[name] = wide
    return records


@settings(max_examples=400, deadline=None)
@given(_batches(), st.sets(st.sampled_from(KINDS)))
def test_columns_make_what_the_slow_path_makes(
    records: list[dict[str, Any]], known: set[str]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast = columns_of(records).structures(known)
    expected, notes = slow(records)
    if fast is not None:
        assert expected is not None
        assert equal(fast, expected)
        assert notes <= known


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.int64, np.uint8])
@pytest.mark.parametrize("pattern", [None, *PATTERNS], ids=str)
def test_ordinary_systems_are_made_at_once(dtype: Any, pattern: Any) -> None:
    rng = np.random.default_rng(4)
    pbc = ... if pattern is None else np.array(pattern)
    records = [
        _record(rng, n, sid, pbc=pbc, pos=rng.integers(0, 9, (n, 3)).astype(dtype))
        for n, sid in ((1, "a"), (5, -3), (80, 2**62))
    ]
    fast = columns_of(records).structures()
    expected, notes = slow(records)
    assert not notes
    assert fast is not None
    assert expected is not None
    assert equal(fast, expected)
    assert fast.positions.is_contiguous()


def test_several_patterns_of_pbc_in_one_batch() -> None:
    rng = np.random.default_rng(4)
    records = [_record(rng, 3, pbc=np.array(pattern)) for pattern in PATTERNS]
    fast = columns_of(records).structures()
    expected, _ = slow(records)
    assert fast is not None
    assert expected is not None
    assert equal(fast, expected)
    records[-2]["cell"] = np.zeros((3, 3))
    assert columns_of(records).structures({"cell"}) is None


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_missing_is_taken_once_it_is_known(kind: str) -> None:
    rng = np.random.default_rng(4)
    missing = np.zeros((3, 3)) if kind == "cell" else ...
    records = [_record(rng, 3, **{kind: missing}) for _ in range(2)]
    assert columns_of(records).structures(set(KINDS) - {kind}) is None
    fast = columns_of(records).structures({kind})
    expected, notes = slow(records)
    assert notes == {kind}
    assert fast is not None
    assert expected is not None
    assert equal(fast, expected)


def test_tags_that_are_all_zero_in_one_system() -> None:
    rng = np.random.default_rng(4)
    records = [_record(rng, 3), _record(rng, 3, tags=np.zeros(3))]
    assert columns_of(records).structures() is None
    assert columns_of(records).structures({"tags"}) is not None


@pytest.mark.parametrize("height", [0.4999, 0.5001])
@pytest.mark.parametrize("axes", [[0], [0, 2], [0, 1, 2]], ids=str)
def test_thin_cells(height: float, axes: list[int]) -> None:
    rng = np.random.default_rng(1)
    turn = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    cell = np.array([[height, 0, 0], [0, 9.0, 2.0], [0, 4.0, 9.0]]) @ turn
    records = [_record(rng, 2, cell=cell, pbc=np.isin(np.arange(3), axes)) for _ in range(2)]
    assert (slow(records)[0] is None) == (height < 0.5)
    assert (columns_of(records).structures() is None) == (height < 0.5)


def test_columns_that_do_not_belong_together() -> None:
    columns = columns_of([_record(np.random.default_rng(1), 3)])
    for name in ("atomic_numbers", "positions", "tags", "fixed", "positions_relaxed"):
        shorter = getattr(columns, name)[1:]
        assert dataclasses.replace(columns, **{name: shorter}).structures() is None
    for change in (
        {"sid": ()},
        {"sid": (1, 2)},
        {"natoms": np.array([0])},
        {"cell": np.zeros((2, 3, 3))},
        {"pbc": np.ones((2, 3), bool)},
        {"energy": np.zeros(2)},
        {"energy": np.array([True])},
    ):
        assert dataclasses.replace(columns, **change).structures({"cell"}) is None
    assert columns.structures() is not None


def test_the_batch_does_not_share_memory_with_the_columns() -> None:
    columns = columns_of([_record(np.random.default_rng(1), 3)])
    batch = columns.structures()
    assert batch is not None
    before = batch.positions.clone()
    columns.positions[:] = 7
    assert torch.equal(batch.positions, before)


@pytest.mark.parametrize("sid", [-(2**63), 2**63 - 1])
def test_all_of_int64_are_sids(sid: int) -> None:
    made = columns_of([_record(np.random.default_rng(0), 3, sid)]).structures(KINDS)
    assert made is not None
    assert made.sid == (sid,)
    for beyond in (-(2**63) - 1, 2**63):
        assert columns_of([_record(np.random.default_rng(0), 3, beyond)]).structures() is None
