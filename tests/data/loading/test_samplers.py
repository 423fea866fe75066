"""Every system once an epoch, over all ranks, in batches that keep their limit."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from flt_mol.data.loading import samplers
from flt_mol.data.loading.packing import best_fit, consecutive
from flt_mol.data.loading.samplers import BatchSampler

LIMIT = 20
GOLDEN = [[[2, 4, 0], [5], [6, 1], [3]], [[4, 1, 0], [2, 3], [6], [5]]]


def like_oc20(count: int) -> np.ndarray:
    """Atoms per system: 20 to 225, 80 or so in the mean."""
    rng = np.random.default_rng(0)
    return np.clip(rng.gamma(6.0, 12.0, count).astype(int) + 10, 20, 225)


@given(
    st.lists(st.integers(0, LIMIT), min_size=4, max_size=80).map(np.array),
    st.integers(1, 4),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
)
@settings(deadline=None)
def test_what_every_epoch_has(sizes: np.ndarray, ranks: int, shuffle: bool, seed: int) -> None:
    def part(rank: int) -> BatchSampler:
        return BatchSampler(sizes, LIMIT, shuffle=shuffle, seed=seed, rank=rank, world_size=ranks)

    order = np.arange(len(sizes))
    if shuffle:
        order = order[np.argsort(-sizes, kind="stable")]
    packed = (best_fit if shuffle else consecutive)(np.maximum(sizes, 1), order, LIMIT)
    if len(sizes) // ranks * ranks < len(packed.ends):
        with pytest.raises(ValueError, match="cannot be dealt"):
            part(0)
        return
    parts = [part(rank) for rank in range(ranks)]
    for _ in range(3):
        epoch = [list(part) for part in parts]
        assert [len(batches) for batches in epoch] == [len(part) for part in parts]
        assert len({len(part) for part in parts}) == 1
        every = [batch for batches in epoch for batch in batches]
        assert all(batch and sizes[batch].sum() <= LIMIT for batch in every)
        assert sorted(i for batch in every for i in batch) == list(range(len(sizes)))


def test_without_shuffling_the_order_is_theirs() -> None:
    sampler = BatchSampler(like_oc20(200), 600)
    epochs = [list(sampler), list(sampler)]
    assert epochs[0] == epochs[1]
    assert [i for batch in epochs[0] for i in batch] == list(range(200))


def test_epochs_and_seeds_differ_and_are_repeatable() -> None:
    sizes = like_oc20(300)

    def epochs(seed: int) -> list[list[list[int]]]:
        sampler = BatchSampler(sizes, 900, shuffle=True, seed=seed)
        return [list(sampler) for _ in range(3)]

    first = epochs(1)
    assert first == epochs(1)
    together = [{frozenset(batch) for batch in epoch} for epoch in [*first, *epochs(2)]]
    for a in range(6):
        for b in range(a):
            assert len(together[a] & together[b]) < 3, "batches of the same systems"


@pytest.mark.parametrize("count", [10, 17])
def test_by_count_orders_are_those_of_torch(count: int) -> None:
    generator = torch.Generator().manual_seed(7)
    plain: Any = DataLoader(
        range(count), batch_size=4, shuffle=True, generator=generator, collate_fn=list
    )
    sampler = BatchSampler(np.ones(count), 4, shuffle=True, seed=7)
    assert [list(plain) for _ in range(3)] == [list(sampler) for _ in range(3)]


def test_orders_are_the_same_everywhere() -> None:
    sampler = BatchSampler(np.array([1, 2, 3, 4, 5, 6, 7]), 9, shuffle=True, seed=5)
    assert [list(sampler), list(sampler)] == GOLDEN


@pytest.mark.parametrize(("systems", "fill"), [(10, 0.96), (32, 0.97)])
def test_batches_are_well_filled(systems: int, fill: float) -> None:
    sizes = like_oc20(4000)
    sampler = BatchSampler(sizes, int(systems * sizes.mean()), shuffle=True, world_size=2)
    for epoch in range(3):
        order, ends = sampler.plan(epoch)
        assert len(ends) == 2 * len(sampler)
        loads = np.add.reduceat(sizes[order], [0, *ends[:-1]])
        assert loads.mean() >= fill * sampler.limit


def test_batches_begun_last_do_not_come_last() -> None:
    sizes = like_oc20(2000)
    sampler = BatchSampler(sizes, 1000, shuffle=True)
    emptiest = []
    for epoch in range(8):
        order, ends = sampler.plan(epoch)
        loads = np.add.reduceat(sizes[order], [0, *ends[:-1]])
        emptiest.append(loads.argmin() / len(loads))
    assert min(emptiest) < 0.5


@pytest.mark.parametrize("lucky", [0, 1], ids=["descending", "again"])
def test_an_epoch_that_packs_badly(lucky: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = np.array([6] * 25 + [4] * 25 + [5] * 10)
    sampler = BatchSampler(sizes, 10, shuffle=True)
    best = len(sampler._packed(sampler._descending(np.arange(60))).ends)
    sampler._batches = best + lucky
    monkeypatch.setattr(samplers, "_RETRIES", 50 * lucky)
    for epoch in range(10):
        order, ends = sampler.plan(epoch)
        assert len(ends) == best + lucky
        assert sorted(order) == list(range(60))
        assert np.add.reduceat(sizes[order], [0, *ends[:-1]]).max() <= 10


def test_breaking_off_goes_to_the_next_epoch() -> None:
    sampler = BatchSampler(np.ones(20), 4, shuffle=True, seed=1)
    whole = [list(sampler) for _ in range(3)]
    again = BatchSampler(np.ones(20), 4, shuffle=True, seed=1)
    iterator = iter(again)
    assert [next(iterator), next(iterator)] == whole[0][:2]
    assert list(again) == whole[1]
    again.set_epoch(0)
    assert [list(again), list(again)] == whole[:2]


@pytest.mark.parametrize("done", [0, 2, 5])
def test_going_on_from_a_saved_state(done: int) -> None:
    def make() -> BatchSampler:
        return BatchSampler(like_oc20(40), 700, shuffle=True, seed=3)

    first = make()
    epochs = [list(first) for _ in range(3)]
    stopped = make()
    stopped.set_epoch(1)
    iterator = iter(stopped)
    for _ in range(done):
        next(iterator)
    state = pickle.loads(pickle.dumps(stopped.state_dict()))
    resumed = make()
    resumed.load_state_dict(state)
    assert list(resumed) == epochs[1][done:]
    assert list(resumed) == epochs[2]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"limit": 5}, r"\{'limit': 5\}, not \{'limit': 4\}"),
        ({"seed": 4}, r"\{'seed': 4\}, not"),
        ({"unit": "atoms"}, r"\{'unit': 'atoms'\}, not \{'unit': 'systems'\}"),
        ({"shuffle": False}, r"\{'shuffle': False, 'seed': 0\}, not \{'shuffle': True"),
        ({"world_size": 2}, r"\{'world_size': 2\}, not"),
        ({"sizes": np.ones(21)}, r"\{'systems': 21, 'sizes_crc32': .*\}, not \{'systems': 20,"),
        ({"sizes": [1] * 19 + [2]}, r"\{'sizes_crc32': \d+\}, not \{'sizes_crc32': \d+\}"),
    ],
)
def test_the_state_of_other_batches_is_refused(changed: Any, named: str) -> None:
    options = {"sizes": np.ones(20), "limit": 4, "shuffle": True, "seed": 3}
    state = BatchSampler(**options).state_dict()
    BatchSampler(**options).load_state_dict(state)
    with pytest.raises(ValueError, match=f"not the batches of the saved state: {named}"):
        BatchSampler(**{**options, **changed}).load_state_dict(state)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"position": 6}, "position of the saved state is 6, and an epoch has 5 batches"),
        ({"position": -1}, "position of the saved state must be at least 0, got -1"),
        ({"position": 1.5}, "position of the saved state must be a whole number, got 1.5"),
        ({"epoch": None}, "epoch of the saved state must be a whole number, got None"),
    ],
)
def test_a_state_that_cannot_be(changed: Any, message: str) -> None:
    sampler = BatchSampler(np.ones(20), 4)
    sampler.set_epoch(3)
    before = sampler.state_dict()
    with pytest.raises(ValueError, match=message):
        sampler.load_state_dict({**before, **changed})
    with pytest.raises(ValueError, match="epoch of the saved state"):
        sampler.load_state_dict({k: v for k, v in before.items() if k != "epoch"})
    assert sampler.state_dict() == before
    sampler.load_state_dict({**before, "position": 5})
    assert list(sampler) == []


@pytest.mark.parametrize("limit", [2.5, float("inf"), float("nan"), "4", True, None, [4]])
def test_limits_are_whole_numbers(limit: Any) -> None:
    with pytest.raises(ValueError, match=r"limit must be a whole number, got "):
        BatchSampler(np.ones(20), limit)
    with pytest.raises(ValueError, match="epoch must be a whole number"):
        BatchSampler(np.ones(20), 4).set_epoch(limit)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("limit", [1e4, 2**63 - 1, 10**30, np.int32(40)])
def test_a_limit_that_holds_them_all(limit: Any, shuffle: bool) -> None:
    (batch,) = BatchSampler(np.array([1, 2, 3]), limit, shuffle=shuffle)
    assert sorted(batch) == [0, 1, 2]


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ([], {}, "no systems"),
        ([1, 2], {"world_size": 3}, "2 systems cannot be shared by 3 ranks"),
        ([1, 2], {"rank": 2, "world_size": 2}, "rank is 2 and world_size 2"),
        (
            [5, 9, 11, 8],
            {"unit": "atoms", "name": "abc{}".format},
            "abc2 has 11 atoms, more than a batch may hold, 7.*2 more.*at least 11",
        ),
        ([7, 7, 7, 7, 7], {"world_size": 4}, "5 systems in 5 batches cannot be dealt to 4 ranks"),
    ],
)
def test_refusals(sizes: list[int], options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchSampler(np.array(sizes, np.int64), 7, **options)


def test_nobodys_random_state_is_used() -> None:
    before = torch.get_rng_state()
    list(BatchSampler(like_oc20(50), 300, shuffle=True))
    assert torch.equal(torch.get_rng_state(), before)
