"""Batches hold every system once, whatever the loader's options."""

from __future__ import annotations

import gc
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Subset

from flt_mol.data import collate, make_loader, open_dataset
from flt_mol.data.loading.batching import Loader
from flt_mol.data.memory import MemoryDataset
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
    assert collate(batch) is batch


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


def test_a_batch_is_what_its_systems_are_one_by_one(write_lmdb: Any, make_record: Any) -> None:
    records = {i: make_record(sid=i, bulk_index=3, ads_index=1) for i in range(5)}
    dataset = open_dataset(write_lmdb(records))
    (batch,) = make_loader(dataset, 5)
    assert batch.sid == tuple(range(5))
    assert torch.equal(batch.tags, Structures.cat(list(dataset)).tags)
    assert batch.info == {"bulk_index": (3,) * 5, "ads_index": (1,) * 5}


@pytest.mark.filterwarnings("ignore:list of 11 Structures")
@pytest.mark.parametrize("kind", ["list", "dataset", "subset", "batch"])
def test_by_atoms(kind: str, systems: list[Structures]) -> None:
    source: Any = {
        "list": systems,
        "dataset": MemoryDataset(systems),
        "subset": Subset(MemoryDataset(systems), range(11)),
        "batch": Structures.cat(systems),
    }[kind]
    loader = make_loader(source, max_atoms=13, shuffle=True, seed=2)
    for _ in range(3):
        batches = list(loader)
        assert len(batches) == len(loader)
        assert max(batch.num_atoms for batch in batches) <= 13
        assert sorted(sid for batch in batches for sid in batch.sid) == list(range(11))
    assert [b.sid for b in make_loader(source, max_atoms=13)][:2] == [(0, 1, 2, 3), (4, 5)]


def test_ranks_share_an_epoch(systems: list[Structures]) -> None:
    loaders = [
        make_loader(systems, max_atoms=13, shuffle=True, rank=rank, world_size=3)
        for rank in range(3)
    ]
    epochs = [_epoch(loader) for loader in loaders]
    assert [len(epoch) for epoch in epochs] == [len(loaders[0])] * 3
    assert sorted(sid for epoch in epochs for sids in epoch for sid in sids) == list(range(11))


def test_batches_come_with_their_pairs(systems: list[Structures]) -> None:
    for batch in make_loader(systems, 4, cutoff=2.0):
        assert batch.cutoff == 2.0
        found = Structures.cat(list(batch)).with_pairs(2.0).pairs
        assert found is not None
        assert batch.pairs is not None
        assert all(torch.equal(x, y) for x, y in zip(found, batch.pairs, strict=True))


@pytest.mark.parametrize("done", [0, 1, 2])
def test_going_on_where_a_run_was_stopped(systems: list[Structures], done: int) -> None:
    def make() -> Loader:
        return make_loader(systems, max_atoms=25, shuffle=True, seed=4)

    whole = make()
    epochs = [_epoch(whole) for _ in range(3)]
    stopped = make()
    stopped.set_epoch(1)
    for k, _ in enumerate(stopped, 1):
        if k == done:
            break
    state = stopped.state_dict() if done else {**stopped.state_dict(), "epoch": 1, "position": 0}
    resumed = make()
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    next(iter(resumed))
    assert resumed.state_dict()["position"] in (state["position"] + 1, 0)
    resumed.load_state_dict(state)
    assert _epoch(resumed) == epochs[1][done:]
    assert _epoch(resumed) == epochs[2]
    assert resumed.state_dict() == whole.state_dict()


def test_a_finished_epoch_is_finished(systems: list[Structures]) -> None:
    loader = make_loader(systems, 4)
    for _ in loader:
        pass
    assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (1, 0)


def test_memory_does_not_grow_with_epochs() -> None:
    count = 20_000
    pair = [Structures.single([6] * n, torch.zeros(n, 3)) for n in (1, 2)]
    loader = make_loader(pair * (count // 2), max_atoms=750, shuffle=True)
    held: list[int] = []
    tracemalloc.start()
    try:
        for _ in range(4):
            for _batch in loader:
                pass
            gc.collect()
            held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    # One number for each record, kept once, would be more than this.
    assert held[3] - held[1] < 4 * count


def test_refusals(systems: list[Structures], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        make_loader(systems, 0)
    with pytest.raises(ValueError, match="max_atoms must be at least 1, got -3"):
        make_loader(systems, max_atoms=-3)
    with pytest.raises(ValueError, match="no systems"):
        make_loader([], 4)
    with pytest.raises(ValueError, match=r"one of batch_size.*given: none"):
        make_loader(systems)
    with pytest.raises(ValueError, match="given: batch_size and max_pairs"):
        make_loader(systems, 4, max_pairs=2)
    with pytest.raises(ValueError, match="pair_cache needs cutoff"):
        make_loader(systems, 4, pair_cache=tmp_path)
    with pytest.raises(ValueError, match="max_pairs needs cutoff and pair_cache"):
        make_loader(systems, max_pairs=100, cutoff=2.0)


def test_a_system_beyond_the_budget_is_named(write_lmdb: Any, make_record: Any) -> None:
    path = write_lmdb({7: make_record(sid=1234)})
    message = r"sid 1234 \(.*data.lmdb, key 7\) has 6 atoms, more than a batch may hold, 5: allow"
    with pytest.raises(ValueError, match=message):
        make_loader(open_dataset(path), max_atoms=5)
