"""A batch arrives as it was sent."""

from __future__ import annotations

import pickle
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flt_mol.data.loading.transport import Packed
from flt_mol.functional.neighbors import NeighborPairs
from flt_mol.structures import Structures


def make(n: int, **others: Any) -> Structures:
    rng = torch.Generator().manual_seed(n)
    return Structures.single(
        torch.randint(1, 119, (n,), generator=rng),
        4 * torch.rand(n, 3, generator=rng),
        cell=4 * torch.eye(3),
        pbc=[True, True, False],
        fixed=[k % 2 for k in range(n)],
        **others,
    )


def assert_same(a: Structures, b: Structures) -> None:
    for f in fields(Structures):
        x, y = getattr(a, f.name), getattr(b, f.name)
        if isinstance(x, torch.Tensor):
            assert x.dtype == y.dtype, f.name
            assert torch.equal(x, y), f.name
        elif f.name == "pairs" and x is not None:
            assert {v.dtype for v in y} == {torch.int64}
            assert all(torch.equal(v, w) for v, w in zip(x, y, strict=True))
        else:
            assert x == y, f.name


@given(
    st.lists(st.integers(0, 7), min_size=1, max_size=5),
    st.sampled_from([None, 0.1, 3.0]),
    st.booleans(),
    st.sampled_from([torch.float32, torch.float64]),
)
@settings(deadline=None)
def test_there_and_back(sizes: list[int], cutoff: Any, full: bool, dtype: torch.dtype) -> None:
    more: Any = {"energy": 1.5, "energy_initial": -0.1, "info": {"facet": "111"}} if full else {}
    batch = Structures.cat([make(n, sid=f"s{n}", dtype=dtype, **more) for n in sizes])
    batch = batch if cutoff is None else batch.with_pairs(cutoff)
    assert_same(pickle.loads(pickle.dumps(Packed.of(batch))).unpack(), batch)


@pytest.mark.parametrize("shift", [2**7 - 1, -(2**7), 2**7, 2**15, 2**31, -(2**40)])
def test_shifts_of_any_length(shift: int) -> None:
    one = torch.zeros(1, dtype=torch.int64)
    pairs = NeighborPairs(one, one, torch.tensor([[0, shift, 1]]))
    batch = Structures(**{**vars(make(1)), "pairs": pairs, "cutoff": 1.0})
    assert_same(Packed.of(batch).unpack(), batch)


def test_the_block_is_given_back() -> None:
    packed = Packed.of(make(5, energy=1.0).with_pairs(3.0))
    batch = packed.unpack()
    packed.block.zero_()
    assert_same(batch, make(5, energy=1.0).with_pairs(3.0))
