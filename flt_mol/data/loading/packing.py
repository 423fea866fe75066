"""Systems of different sizes into batches of limited size, and batches into ever so many."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Plan", "best_fit", "consecutive", "halved", "reordered"]

Integers = NDArray[np.int64]


class Plan(NamedTuple):
    """All batches of an epoch.

    Attributes:
        order: (n,) the systems, batch after batch.
        ends: (steps,) where in `order` each batch ends.
    """

    order: Integers
    ends: Integers


def consecutive(sizes: Integers, order: Integers, limit: int) -> Plan:
    """Batches in the given order, each as large as it may be.

    Example:
        >>> consecutive(np.array([3, 3, 1, 1]), np.arange(4), 5).ends.tolist()
        [1, 4]
    """
    total = np.cumsum(sizes[order])
    ends: list[int] = []
    while not ends or ends[-1] < len(order):
        before = total[ends[-1] - 1] if ends else 0
        ends.append(int(np.searchsorted(total, before + limit, side="right")))
    return Plan(order, np.array(ends))


def best_fit(sizes: Integers, order: Integers, limit: int) -> Plan:
    """Each system, in the given order, goes where it leaves the least room, or begins a batch.

    References:
        Johnson et al., SIAM J. Comput. 3, 299 (1974).

    Example:
        >>> best_fit(np.array([3, 3, 1, 2]), np.arange(4), 5)
        Plan(order=array([0, 2, 1, 3]), ends=array([2, 4]))
    """
    in_order = sizes[order]
    smallest = int(in_order.min())
    room: list[tuple[int, int]] = []  # (free, batch), ascending, of batches that can take more
    batch: list[int] = []
    count = 0
    for size in in_order.tolist():
        place = bisect_left(room, (size, 0))
        if place < len(room):
            free, which = room.pop(place)
        else:
            free, which, count = limit, count, count + 1
        batch.append(which)
        if free - size >= smallest:
            insort(room, (free - size, which))
    of = np.array(batch)
    return Plan(order[np.argsort(of, kind="stable")], np.bincount(of).cumsum())


def reordered(plan: Plan, which: Integers) -> Plan:
    """The batches `which` of a plan, in that order."""
    parts = np.split(plan.order, plan.ends[:-1])
    parts = [parts[i] for i in which]
    return Plan(np.concatenate(parts), np.cumsum([len(part) for part in parts]))


def halved(plan: Plan, batches: int) -> Plan:
    """The plan in so many batches, made by halving, again and again, the one of most systems.

    Example:
        >>> halved(Plan(np.arange(5), np.array([4, 5])), 3).ends.tolist()
        [2, 4, 5]
    """
    counts = np.diff(plan.ends, prepend=0)
    heap = list(zip((-counts).tolist(), (plan.ends - counts).tolist(), strict=True))
    heapq.heapify(heap)
    cuts = plan.ends.tolist()
    while len(cuts) < batches:
        count, start = -heap[0][0], heap[0][1]
        half = (count + 1) // 2
        heapq.heapreplace(heap, (-half, start))
        heapq.heappush(heap, (half - count, start + half))
        cuts.append(start + half)
    return Plan(plan.order, np.sort(np.array(cuts)))
