"""Packing: the fast forms against what anyone would write first."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flt_mol.data.loading.packing import Plan, best_fit, consecutive, halved, reordered

LIMIT = 12
sizes = st.lists(st.integers(1, LIMIT), min_size=1, max_size=60).map(np.array)
orders = st.integers(0, 2**32 - 1).map(np.random.default_rng)


def batches(plan: Plan) -> list[list[int]]:
    assert plan.ends[-1] == len(plan.order)
    return [part.tolist() for part in np.split(plan.order, plan.ends[:-1])]


def slow_consecutive(sizes: np.ndarray, order: np.ndarray) -> list[list[int]]:
    out: list[list[int]] = [[]]
    for i in order.tolist():
        if out[-1] and sizes[out[-1]].sum() + sizes[i] > LIMIT:
            out.append([])
        out[-1].append(i)
    return out


def slow_best_fit(sizes: np.ndarray, order: np.ndarray) -> list[list[int]]:
    out: list[list[int]] = []
    for i in order.tolist():
        free = [LIMIT - sizes[batch].sum() for batch in out]
        fitting = [(f, b) for b, f in enumerate(free) if f >= sizes[i]]
        if fitting:
            out[min(fitting)[1]].append(i)
        else:
            out.append([i])
    return out


@given(sizes, orders)
@settings(deadline=None)
def test_against_the_obvious(sizes: np.ndarray, rng: np.random.Generator) -> None:
    order = rng.permutation(len(sizes))
    assert batches(consecutive(sizes, order, LIMIT)) == slow_consecutive(sizes, order)
    assert batches(best_fit(sizes, order, LIMIT)) == slow_best_fit(sizes, order)


@given(sizes, orders, st.integers(0, 60))
@settings(deadline=None)
def test_halving_keeps_the_order(sizes: np.ndarray, rng: np.random.Generator, more: int) -> None:
    plan = consecutive(sizes, rng.permutation(len(sizes)), LIMIT)
    wanted = min(len(plan.ends) + more, len(sizes))
    after = halved(plan, wanted)
    assert after.order.tolist() == plan.order.tolist()
    assert len(batches(after)) == wanted
    assert min(map(len, batches(after))) >= 1
    assert set(plan.ends) <= set(after.ends)


def test_reordered_batches_stay_whole() -> None:
    plan = Plan(np.array([4, 2, 0, 1, 3]), np.array([2, 3, 5]))
    assert batches(reordered(plan, np.array([2, 0, 1]))) == [[1, 3], [4, 2], [0]]
