"""Batches hold every system once, whatever the loader's options."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from flt_mol.data import collate, make_loader, open_dataset
from flt_mol.structures import Structures


@pytest.fixture
def systems() -> list[Structures]:
    """Eleven systems of one to eleven atoms."""
    return [
        Structures.single([6] * (n + 1), torch.zeros(n + 1, 3), sid=n, energy=-float(n))
        for n in range(11)
    ]


def _epoch(loader: Any) -> list[Any]:
    return [batch.sid for batch in loader]


def test_collate_keeps_order_and_values(systems: list[Structures]) -> None:
    batch = collate(systems[:4])
    assert batch.sid == (0, 1, 2, 3)
    assert batch.natoms.tolist() == [1, 2, 3, 4]
    assert batch.energy.tolist() == [0, -1, -2, -3]


def test_the_last_batch_is_not_dropped(systems: list[Structures]) -> None:
    assert [len(sids) for sids in _epoch(make_loader(systems, 4))] == [4, 4, 3]
    assert _epoch(make_loader(systems[:3], 32)) == [(0, 1, 2)]
    assert _epoch(make_loader(systems[:1], 32, shuffle=True)) == [(0,)]


def test_order_of_epochs(systems: list[Structures]) -> None:
    loader = make_loader(systems, 4, shuffle=True, seed=5)
    first, second = _epoch(loader), _epoch(loader)
    assert first != second
    for epoch in (first, second):
        assert sorted(sid for sids in epoch for sid in sids) == list(range(11))
    again = make_loader(systems, 4, shuffle=True, seed=5)
    assert [_epoch(again), _epoch(again)] == [first, second]
    assert _epoch(make_loader(systems, 4, shuffle=True, seed=6)) != first


def test_torchs_random_state_is_left_alone(systems: list[Structures]) -> None:
    before = torch.get_rng_state()
    _epoch(make_loader(systems, 4, shuffle=True))
    assert torch.equal(torch.get_rng_state(), before)


def test_loaders_can_be_pickled(write_lmdb: Any, make_record: Any) -> None:
    dataset = open_dataset(write_lmdb({i: make_record(sid=i) for i in range(5)}))
    loader = pickle.loads(pickle.dumps(make_loader(dataset, 2, shuffle=True, seed=3)))
    assert _epoch(loader) == _epoch(make_loader(dataset, 2, shuffle=True, seed=3))


def test_refusals(systems: list[Structures]) -> None:
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        make_loader(systems, 0)
    with pytest.raises(ValueError, match="no systems"):
        make_loader([], 4)
