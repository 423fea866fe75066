"""Batches: each system once an epoch, in budgets, the same for all ranks, resumed anywhere."""

import gc
import multiprocessing
import pickle
import time
from dataclasses import astuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset

from flt_mol.data import BatchSampler, collate, make_loader, open_dataset, target_statistics
from flt_mol.data.loader import sizes_of
from flt_mol.structures import Structures
from helpers.systems import make_record, make_system, make_systems, same, write_records


@pytest.fixture
def systems():
    return make_systems(30)


@pytest.fixture
def dataset(tmp_path):
    records = [make_record(i, 4 + i % 9) for i in range(24)]
    return open_dataset(write_records(tmp_path / "a.lmdb", records))


def _paired(batch):
    return batch.with_pairs(3.0)


def sids(batches):
    return [sid for batch in batches for sid in batch.sid]


SIZES = {
    "equal": np.ones(50, np.int64),
    "oc20": np.random.default_rng(0).integers(7, 226, 400),
    "one large": np.array([225] + [7] * 60),
    "few": np.array([3, 1, 2]),
}


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("kind", SIZES)
def test_what_every_epoch_has(kind, ranks, shuffle):
    sizes = SIZES[kind]
    limit = 7 if sizes.max() == 1 else max(int(sizes.max()), 600)
    samplers = [
        BatchSampler(sizes, limit, shuffle=shuffle, seed=4, rank=r, world_size=ranks)
        for r in range(ranks)
    ]
    steps, orders = {len(s) for s in samplers}, []
    assert len(steps) == 1
    for _ in range(3):
        epochs = [list(s) for s in samplers]
        assert {len(batches) for batches in epochs} == steps
        batches = [batch for epoch in epochs for batch in epoch]
        assert sorted(i for batch in batches for i in batch) == list(range(len(sizes)))
        assert max(int(sizes[batch].sum()) for batch in batches) <= limit
        orders.append(batches)
    if len(sizes) > 10:
        assert (orders[0] == orders[1]) == (not shuffle)


def test_budgets_are_well_filled():
    sizes = SIZES["oc20"]
    sampler = BatchSampler(sizes, 2500, shuffle=True)
    assert sizes.sum() / (len(sampler) * 2500) > 0.95
    loads = [int(sizes[batch].sum()) for batch in sampler]
    assert max(loads) - min(loads) <= sizes.max()


def test_without_shuffling_the_order_is_theirs():
    sampler = BatchSampler(np.array([3, 3, 1, 5, 1]), 6)
    assert list(sampler) == list(sampler) == [[0, 1], [2, 3], [4]]


def test_every_epoch_and_seed_has_its_own_order(systems):
    epochs = [sids(make_loader(systems, 4, shuffle=True, seed=s)) for s in (1, 1, 2, -1)]
    loader = make_loader(systems, 4, shuffle=True, seed=1)
    epochs += [sids(loader) for _ in range(3)]
    assert epochs[0] == epochs[1] == epochs[4]
    assert len({tuple(epoch) for epoch in epochs}) == 5


def test_the_global_random_state_is_left_alone(systems):
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    list(make_loader(systems, max_atoms=20, shuffle=True))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_collate(systems):
    assert same(collate(systems[:3]), Structures.cat(systems[:3]))
    assert collate(systems[0]) is systems[0]
    with pytest.raises(ValueError, match="dict"):
        collate([{}])


def test_values_named_like_an_index_are_not_shifted(tmp_path):
    records = [{**make_record(i), "bulk_index": 3, "ads_index": 1} for i in range(3)]
    dataset = open_dataset(write_records(tmp_path / "a.lmdb", records))
    (batch,) = make_loader(dataset, 3)
    assert batch.info["bulk_index"] == (3, 3, 3)
    assert batch.info["ads_index"] == (1, 1, 1)
    assert batch.sid == (0, 1, 2)


def test_a_plain_loader_of_torch(dataset):
    batches = list(DataLoader(dataset, batch_size=5))
    assert sids(batches) == list(range(24))
    assert same(batches[1], dataset.batch(range(5, 10)))


def test_pairs_are_made_on_the_way(systems):
    batch = next(iter(make_loader(systems, 4, prepare=_paired)))
    assert batch.cutoff == 3.0
    assert same(batch, Structures.cat(systems[:4]).with_pairs(3.0))


@pytest.mark.parametrize("options", [{"batch_size": 4}, {"max_atoms": 20}])
@pytest.mark.parametrize("done", [0, 3, 7, 9])
def test_resumed_in_the_middle(options, done, systems):
    expected = make_loader(systems, **options, shuffle=True, seed=1)
    wanted = [sids([batch]) for _ in range(3) for batch in expected]
    first = make_loader(systems, **options, shuffle=True, seed=1)
    got = [sids([batch]) for _, batch in zip(range(done), _forever(first), strict=False)]
    state = pickle.loads(pickle.dumps(first.state_dict()))
    second = make_loader(systems, **options, shuffle=True, seed=1)
    second.load_state_dict(state)
    while len(got) < len(wanted):
        got += [sids([batch]) for batch in second]
    assert got == wanted


def _forever(loader):
    while True:
        yield from loader


def test_breaking_off_goes_to_the_next_epoch(systems):
    loader, other = (make_loader(systems, 4, shuffle=True) for _ in range(2))
    next(iter(loader))
    list(other)
    assert sids(loader) == sids(other)
    loader.set_epoch(1)
    assert loader.state_dict()["epoch"] == 1
    other.set_epoch(1)
    assert sids(loader) == sids(other)


def test_the_state_of_other_batches_is_refused(systems):
    state = make_loader(systems, 4, shuffle=True).state_dict()
    for other in (
        make_loader(systems, 5, shuffle=True),
        make_loader(systems, 4),
        make_loader(systems[1:], 4, shuffle=True),
        make_loader(systems, 4, shuffle=True, world_size=2),
        make_loader(systems, 4, shuffle=True, seed=2),
    ):
        with pytest.raises(ValueError, match="state"):
            other.load_state_dict(state)
    with pytest.raises(ValueError, match="state"):
        make_loader(systems, 4, shuffle=True).load_state_dict({**state, "position": 99})


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_give_the_same(method, dataset):
    dataset[0]  # the parent has read before
    options = {"max_atoms": 40, "shuffle": True, "prepare": _paired}
    alone = make_loader(dataset, **options)
    loader = make_loader(dataset, **options, num_workers=2, multiprocessing_context=method)
    for _ in range(2):
        expected, found = list(alone), list(loader)
        assert all(same(a, b) for a, b in zip(expected, found, strict=True))


def test_the_same_file_twice(tmp_path):
    path = write_records(tmp_path / "a.lmdb", [make_record(i) for i in range(12)])
    train, val = open_dataset(path), open_dataset(path)
    train[0]
    loaders = [make_loader(d, 5, num_workers=2) for d in (train, val)]
    for _ in range(2):
        assert [sids(loader) for loader in loaders] == [list(range(12))] * 2


def test_an_error_in_a_worker_arrives_as_it_was_raised(tmp_path):
    records = [make_record(i) for i in range(6)]
    records[4]["pos"][0, 0] = np.nan
    dataset = open_dataset(write_records(tmp_path / "a.lmdb", records))
    with pytest.raises(ValueError, match="sid 4") as alone:
        list(make_loader(dataset, 2))
    with pytest.raises(ValueError, match="sid 4") as caught:
        list(make_loader(dataset, 2, num_workers=1))
    assert str(caught.value) == str(alone.value)


def test_what_workers_read_ahead_does_not_count(dataset):
    loader = make_loader(dataset, 3, num_workers=2, prefetch_factor=4)
    batches = iter(loader)
    next(batches), next(batches)
    assert loader.state_dict()["position"] == 2


def test_no_worker_is_left(dataset):
    loader = make_loader(dataset, 3, num_workers=2)
    next(iter(loader))
    del loader
    gc.collect()
    deadline = time.monotonic() + 20
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not multiprocessing.active_children()


def test_refusals(systems, tmp_path):
    for options in ({}, {"batch_size": 2, "max_atoms": 5}):
        with pytest.raises(ValueError, match=r"batch_size.*max_atoms"):
            make_loader(systems, **options)
    for size in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match=str(size)):
            make_loader(systems, size)
    with pytest.raises(ValueError, match="no systems"):
        make_loader([], 2)
    with pytest.raises(ValueError, match="ranks"):
        make_loader(systems[:2], 1, world_size=3)
    with pytest.raises(ValueError, match="rank"):
        make_loader(systems, 1, rank=2, world_size=2)
    for other in ("a.lmdb", [{}], [systems[0], 3], object()):
        with pytest.raises(ValueError, match="open_dataset"):
            make_loader(other, 2)
    with pytest.raises(ValueError, match="cannot be distributed"):
        BatchSampler(np.array([5, 5, 5]), 5, world_size=2)


def test_a_system_beyond_the_budget_is_named(dataset):
    with pytest.raises(ValueError, match="sid 8 has 12 atoms"):
        make_loader(dataset, max_atoms=11)


def test_some_systems_of_a_data_set(dataset):
    chosen = Subset(dataset, [5, 2])
    assert sizes_of(chosen).tolist() == [9, 6]
    assert sids(make_loader(chosen, max_atoms=9)) == [5, 2]
    assert sizes_of([dataset[1], dataset[0]]).tolist() == [5, 4]


def test_statistics():
    energies = [-1.0, 4.0, 0.5, 2.5]
    systems = [make_system(i, 3 + i, energy=e) for i, e in enumerate(energies)]
    found = target_statistics(systems, initial=True)
    assert found.median == 1.5
    assert found.energies.count == 4
    assert found.energies.mean == pytest.approx(1.5)
    assert found.energies.std == pytest.approx(np.std(energies))
    assert found.energies_initial.mean == pytest.approx(
        np.mean([s.energy_initial.item() for s in systems])
    )
    assert found.most_atoms == 6
    assert set(found.elements) == set(Structures.cat(systems).atomic_numbers.tolist())


@pytest.mark.parametrize("count", [1, 300])
def test_equal_targets_do_not_deviate(count):
    systems = [make_system(i, 3, energy=0.1) for i in range(count)]
    assert astuple(target_statistics(systems).energies) == pytest.approx((count, 0.1, 0.0))


@pytest.mark.parametrize("energy", [None, float("nan")])
def test_targets_that_are_missing_or_not_finite(energy):
    systems = [make_system(i, 3) for i in range(5)] + [make_system(77, 3, energy=energy)]
    with pytest.raises(ValueError, match="77"):
        target_statistics(systems)


def test_energies_of_elements_by_least_squares():
    numbers = [[29, 8], [29, 29, 8], [29, 29, 29, 8, 8], [8, 8, 8]]
    wanted = {29: -3.5, 8: -7.25}
    systems = [
        Structures.single(z, np.arange(3.0 * len(z)).reshape(-1, 3), energy=sum(map(wanted.get, z)))
        for z in numbers
    ]
    found = target_statistics(systems, composition=True)
    reference = found.references["energy"]
    assert {z: round(float(reference[z]), 4) for z in np.flatnonzero(reference)} == wanted
    assert found.energies.std < 1e-5
    assert found.median == pytest.approx(np.median([s.energy.item() for s in systems]))
