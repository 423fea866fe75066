"""CPU time and peak memory of functions, compared so that a busy machine does little harm.

Functions that are compared take turns; the reported number is the median over rounds of their
ratio. One thread and CPU seconds, or several threads and wall-clock seconds.
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


class Timings(NamedTuple):
    """Seconds of one call, by function, then by round."""

    seconds: dict[str, list[float]]

    def median(self, name: str) -> float:
        """Median seconds of one call."""
        return median(self.seconds[name])

    def ratio(self, name: str, over: str) -> tuple[float, float, float]:
        """Median and quartiles of the time of `name` over that of `over`, round by round."""
        pairs = zip(self.seconds[name], self.seconds[over], strict=True)
        ratios = [a / b for a, b in pairs]
        if len(ratios) == 1:
            return ratios[0], ratios[0], ratios[0]
        low, _, high = quantiles(ratios, n=4, method="inclusive")
        return median(ratios), low, high


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Use `number` threads for torch's operators inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """Numbers below 1e-38 count as 0 inside the block.

    PyG's Gaussians of long distances are denormal and make SchNet four times slower on many CPUs.
    """
    before = bool(torch.full((1,), 1e-39).mul(0.5) == 0)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def interleaved(
    functions: Mapping[str, Callable[[], object]],
    rounds: int = 9,
    at_least: float = 0.0,
    num_threads: int = 1,
) -> Timings:
    """Time functions in turns, every other round in reverse order, after one warm-up call each.

    Args:
        functions: what to call, by name.
        rounds: number of rounds.
        at_least: seconds that one measurement should take, for short functions.
        num_threads: of torch's operators; with more than one, wall-clock time.
    """
    clock = time.process_time if num_threads == 1 else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    with threads(num_threads):
        calls = {name: _calls(function, at_least, clock) for name, function in functions.items()}
        order = list(functions)
        for _ in range(rounds):
            for name in order:
                seconds[name].append(_seconds(functions[name], calls[name], clock))
            order.reverse()
    return Timings(seconds)


def _calls(function: Callable[[], object], at_least: float, clock: Callable[[], float]) -> int:
    function()
    if at_least <= 0:
        return 1
    return max(1, round(at_least / max(_seconds(function, 1, clock), 1e-9)))


def _seconds(function: Callable[[], object], calls: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(calls):
        function()
    return (clock() - start) / calls


def peak_memory(function: Callable[[], object]) -> int:
    """Most bytes that tensors hold at once during a call, beyond those held before it.

    Counted by torch's CPU allocator as its profiler reports: the same number in every run.
    Scratch space of BLAS and oneDNN is not in it.
    """
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


def process_memory() -> tuple[int, int] | None:
    """Resident bytes of this process, now and at its peak, as Linux counts; None elsewhere."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith("Vm")}
    return int(found["VmRSS"]) * 1024, int(found["VmHWM"]) * 1024
