"""Time and memory of functions, compared so that a busy machine does little harm.

Times are CPU seconds of this process on one thread: what other processes do to the wall clock does
not count. On several threads they are seconds of the wall clock, since CPU seconds of threads add
up: for those the machine has to be left alone. Functions that are compared take turns, and what is
reported is the median over rounds of their ratio, so that a machine that grows slower slows all of
them. What remains is that others share caches and memory bandwidth: repeat, and look at the
quartiles.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

import torch

__all__ = ["Ratio", "Timings", "interleaved", "on_threads", "one_thread", "peak_memory"]


class Ratio(NamedTuple):
    """How two functions compare.

    Attributes:
        median: of the ratios of all rounds.
        low: their first quartile.
        high: their third quartile.
    """

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        """Median and quartiles, as in 1.02 (1.01–1.03)."""
        return f"{self.median:.3f} ({self.low:.3f}–{self.high:.3f})"


class Timings(NamedTuple):
    """Seconds of functions that took turns: of the CPU on one thread, of the wall clock on several.

    Attributes:
        seconds: of one call, by function, then by round.
    """

    seconds: dict[str, list[float]]

    def median(self, name: str) -> float:
        """Seconds of one call."""
        return median(self.seconds[name])

    def ratio(self, name: str, over: str) -> Ratio:
        """Time of `name` over time of `over`, formed round by round."""
        pairs = zip(self.seconds[name], self.seconds[over], strict=True)
        ratios = [ours / theirs for ours, theirs in pairs]
        if len(ratios) == 1:
            return Ratio(*ratios * 3)
        low, _, high = quantiles(ratios, n=4, method="inclusive")
        return Ratio(median(ratios), low, high)


@contextmanager
def on_threads(number: int) -> Iterator[None]:
    """So many threads for torch's operators, and afterwards as many as before."""
    threads = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread for torch's operators, and afterwards as many as before."""
    with on_threads(1):
        yield


def interleaved(
    functions: Mapping[str, Callable[[], object]],
    rounds: int = 9,
    at_least: float = 0.0,
    threads: int = 1,
) -> Timings:
    """Time functions in turns.

    Every round calls each function once, or as often as takes `at_least` seconds, every other
    round in the opposite order. One round before that is not counted.

    Args:
        functions: what to call, by name.
        rounds: how many rounds are counted.
        at_least: seconds that one measurement should take; for functions of microseconds.
        threads: of torch's operators. With more than one, seconds are those of the wall clock.

    Raises:
        ValueError: no function, no round, or no thread.

    Example:
        >>> timings = interleaved({"a": lambda: sum(range(2000)), "b": lambda: sum(range(1000))})
        >>> len(timings.seconds["a"]), timings.ratio("a", over="b").median > 1
        (9, True)
    """
    if not functions or rounds < 1:
        raise ValueError(f"need a function and a round at least, got {len(functions)} and {rounds}")
    if threads < 1:
        raise ValueError(f"need a thread at least, got {threads}")
    clock = time.process_time if threads == 1 else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    with on_threads(threads):
        calls = {name: _calls(function, at_least, clock) for name, function in functions.items()}
        order = list(functions)
        for _ in range(rounds):
            for name in order:
                seconds[name].append(_seconds(functions[name], calls[name], clock))
            order.reverse()
    return Timings(seconds)


def _calls(function: Callable[[], object], at_least: float, clock: Callable[[], float]) -> int:
    """How many calls take `at_least` seconds, after one that warms up."""
    function()
    if at_least <= 0:
        return 1
    return max(1, round(at_least / max(_seconds(function, 1, clock), 1e-9)))


def _seconds(function: Callable[[], object], calls: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(calls):
        function()
    return (clock() - start) / calls


def peak_memory(function: Callable[[], object], warm_up: bool = True) -> int:
    """Most bytes that tensors hold at once during a call, beyond those they held before it.

    Counted by torch's CPU allocator, as its profiler reports: the same number in every run. Scratch
    space of BLAS and oneDNN is not in it, nor what the C library keeps of freed memory. Resident
    memory, which has both, grew by 7 to 70 % more in layers of 4,096 tokens, but by other amounts
    in every run, with RPE as often less than without: too coarse to compare layers.

    Args:
        function: called twice, the first time to warm up. What it returns is dropped.
        warm_up: False to call it once, where it has been called before.

    Example:
        >>> peak_memory(lambda: torch.zeros(1000, dtype=torch.float32).exp().sum())
        8000
    """
    if warm_up:
        function()
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profile:
        function()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    changes = [event for event in events if event["name"] == "[memory]"]
    held = peak = 0
    for event in sorted(changes, key=lambda event: float(event["ts"])):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak
