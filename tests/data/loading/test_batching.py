"""Batches hold every system once, whatever the loader's options."""

from __future__ import annotations

import gc
import math
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from ase.build import molecule
from torch.utils.data import DataLoader, Dataset, Subset, default_collate

from flt_mol.data import cached_pairs, collate, make_loader, open_dataset
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


@pytest.mark.parametrize("name", ["batch_size", "max_atoms", "max_pairs"])
@pytest.mark.parametrize("limit", [2.5, math.inf, math.nan, "4", True])
def test_limits_are_whole_numbers(name: str, limit: Any, systems: list[Structures]) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be a whole number, got {limit!r}"):
        make_loader(systems, **{name: limit})


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ({"sampler": [1]}, "shuffle, seed, rank"),
        ({"batch_sampler": None}, "batch_size, max_atoms or max_pairs"),
        ({"drop_last": True}, "none is dropped"),
        ({"collate_fn": list}, "batches come as Structures"),
        ({"generator": torch.Generator()}, "drawn from seed"),
        ({"in_order": False}, "state_dict counts them"),
    ],
)
def test_options_of_torch_that_are_ours(option: Any, why: str, systems: list[Structures]) -> None:
    (name,) = option
    with pytest.raises(ValueError, match=f"^make_loader takes no {name}: .*{why}"):
        make_loader(systems, 4, **option)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_workers_for_one_epoch(systems: list[Structures]) -> None:
    alone = make_loader(systems, 4, shuffle=True)
    loader = make_loader(systems, 4, shuffle=True, num_workers=1, persistent_workers=False)
    assert [_epoch(loader), _epoch(loader)] == [_epoch(alone), _epoch(alone)]
    assert loader._iterator is None
    assert make_loader(systems, 4, num_workers=1).persistent_workers
    assert make_loader(systems, 4, persistent_workers=False).num_workers == 0


@pytest.mark.parametrize("kind", ["list", "dataset", "file", "subset"])
@pytest.mark.filterwarnings("ignore:list of 11 Structures")
def test_torchs_own_loader(
    kind: str, systems: list[Structures], write_lmdb: Any, make_record: Any
) -> None:
    dataset: Any = systems if kind == "list" else MemoryDataset(systems)
    if kind in ("file", "subset"):
        dataset = open_dataset(write_lmdb({i: make_record(sid=i) for i in range(11)}))
    dataset = Subset(dataset, range(11)) if kind == "subset" else dataset
    loader: Any = DataLoader(dataset, batch_size=4)
    for batch, wanted in zip(loader, make_loader(dataset, 4), strict=True):
        assert isinstance(batch, Structures)
        assert batch.sid == wanted.sid
        assert torch.equal(batch.positions, wanted.positions)
    named: Any = default_collate([{"system": system, "weight": 1.0} for system in systems])
    assert named["system"].sid == tuple(range(11))
    assert named["weight"].shape == (11,)


def test_a_position_beyond_the_epoch(systems: list[Structures]) -> None:
    loader = make_loader(systems, 4)
    with pytest.raises(ValueError, match="is 4, and an epoch has 3 batches"):
        loader.load_state_dict({**loader.state_dict(), "position": 4})
    with pytest.raises(
        ValueError, match="'unit': 'atoms', 'limit': 14.*'unit': 'systems', 'limit': 4"
    ):
        make_loader(systems, max_atoms=14).load_state_dict(loader.state_dict())


def test_a_system_beyond_the_budget_is_named(write_lmdb: Any, make_record: Any) -> None:
    path = write_lmdb({7: make_record(sid=1234)})
    message = r"sid 1234 \(.*data.lmdb, key 7\) has 6 atoms, more than a batch may hold, 5: allow"
    with pytest.raises(ValueError, match=message):
        make_loader(open_dataset(path), max_atoms=5)


class _Objects(Dataset[Any]):
    """A data set of anything."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


@pytest.mark.parametrize("kind", ["Atoms", "dict", "Data", "mixed"])
def test_lists_of_other_things(kind: str, systems: list[Structures], make_record: Any) -> None:
    items: list[Any] = [make_record(), make_record()]
    if kind == "Data":
        data = pytest.importorskip("torch_geometric.data")
        items = [data.Data(**make_record()) for _ in range(2)]
    elif kind in ("Atoms", "mixed"):
        items = [molecule("H2O"), molecule("CO")]
    first = 1 if kind == "mixed" else 0
    name = type(items[0]).__name__
    told = rf"its system {first} is a {name}; open_dataset makes .* make_loader\(open_dataset\("
    given = systems[:first] + items
    for source in (given, tuple(given)):
        with pytest.raises(ValueError, match=told):
            make_loader(source, 2)
        with pytest.raises(ValueError, match=told):
            cached_pairs(source, 2.0, "nowhere")
    with pytest.raises(ValueError, match=told):
        collate(given)
    with pytest.raises(ValueError, match=f"and it is a {name}"):
        make_loader(items[0], 2)
    # Of these nothing is read before the first batch, or before sizes are asked for.
    with pytest.raises(ValueError, match=told):
        next(iter(make_loader(_Objects(given), 2)))
    with pytest.raises(ValueError, match=rf"is a {name}; open_dataset makes"):
        make_loader(_Objects(given), max_atoms=50)


@pytest.mark.filterwarnings("ignore:list of 2 Atoms")
def test_what_the_refusal_says_works(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="it is a str; open_dataset makes one of paths"):
        make_loader(str(tmp_path), 2)  # type: ignore[arg-type]
    (batch,) = make_loader(open_dataset([molecule("H2O"), molecule("CO")]), 2)
    assert batch.natoms.tolist() == [3, 2]


def test_a_cache_itself_for_its_folder(systems: list[Structures], tmp_path: Path) -> None:
    cache = cached_pairs(systems, 2.0, tmp_path)
    assert cache.path.parent == tmp_path
    by_folder = list(make_loader(systems, max_pairs=200, cutoff=2.0, pair_cache=tmp_path))
    for options in ({}, {"cutoff": 2.0}):
        batches = list(make_loader(systems, max_pairs=200, pair_cache=cache, **options))
        assert [batch.sid for batch in batches] == [batch.sid for batch in by_folder]
        for batch, wanted in zip(batches, by_folder, strict=True):
            assert batch.cutoff == 2.0
            assert all(map(torch.equal, batch.pairs, wanted.pairs))
    with pytest.raises(ValueError, match=r"holds pairs within 2 Å, not 3 Å"):
        make_loader(systems, 4, cutoff=3.0, pair_cache=cache)
    with pytest.raises(ValueError, match="is the cache of another data set"):
        make_loader(systems[::-1], 4, pair_cache=cache)
