"""One layer over lengths: time and memory of all contestants, and of the products they need.

All take turns in one process, together with the layer's bare matrix products, a large product and
a large copy, so that every ratio and every fraction of a floor is of numbers from the same minutes.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flt_mol.analysis.layer_cost import LayerSize, inference, training
from flt_mol.analysis.speed.floors import (
    Rates,
    Work,
    block_products,
    floors_of,
    gemm_runner,
    linear_maps,
    rate_functions,
    with_backward,
)
from flt_mol.analysis.speed.layers import CORES, LAYERS, build_core, build_layer
from flt_mol.analysis.speed.points import out_of_memory
from flt_mol.analysis.timing import Timings, interleaved, on_threads, peak_memory

__all__ = ["FLOOR", "PARTS", "PASSES", "installed", "installed_package", "measure", "rounded"]

PARTS, PASSES = ("block", "core"), ("forward", "training")
FLOOR = "GEMM floor"
Run = Callable[[], object]


def installed_package(name: str) -> bool:
    """Whether a package is there, without importing it."""
    return importlib.util.find_spec(name) is not None


def installed(names: list[str]) -> list[str]:
    """Those contestants whose packages are there."""
    packages = {name: LAYERS[name].package for name in names}
    return [n for n, package in packages.items() if package is None or installed_package(package)]


def measure(
    tokens: int,
    part: str = "block",
    passes: str = "forward",
    *,
    names: list[str] | None = None,
    size: dict[str, Any] | None = None,
    rounds: int = 7,
    at_least: float = 0.05,
    gemm_size: int = 2048,
) -> dict[str, Any]:
    """Seconds, bytes and floors of all contestants at one length.

    Args:
        tokens: N.
        part: "block", or "core" for attention alone, from queries, keys and values on.
        passes: "forward", without gradients, or "training", forward and backward.
        names: of contestants; None for all. What is not installed is left out.
        size: fields of `LayerSize` other than the default's.
        rounds: see `timing.interleaved`.
        at_least: seconds of one measurement, likewise.
        gemm_size: of the product that gives the machine's rate.

    Returns:
        By name ``seconds`` of each round, ``bytes`` of the tensors that are held at once, and
        ``floors`` in seconds; ``stopped``, names that ran out of memory; ``left_out``, names that
        are not installed; ``rates`` of the machine.

    Raises:
        ValueError: unknown `part` or `passes`.
    """
    if part not in PARTS or passes not in PASSES:
        raise ValueError(f"part is {part!r} and passes {passes!r}, expected {PARTS}, {PASSES}")
    sizes = LayerSize(**{**(size or {}), "tokens": tokens})
    chosen = list(LAYERS if part == "block" else CORES) if names is None else names
    present = installed(chosen)
    threads = torch.get_num_threads()
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # of other packages
        torch.manual_seed(0)
        runs = {name: _run(name, sizes, part, passes) for name in present}
        floor = _work(linear_maps(sizes), passes) if part == "block" else []
        runs |= {FLOOR: gemm_runner(floor)} if floor else {}
        held, stopped = _memory(runs, threads)
        timed = {name: run for name, run in runs.items() if name not in stopped}
        machine = rate_functions(gemm_size)
        timings = interleaved({**timed, **machine}, rounds, at_least, threads)
    rates = Rates.of(timings.median("sgemm"), timings.median("copy"), gemm_size, 2**25)
    return {
        "seconds": rounded(timings),
        "bytes": {name: number for name, number in held.items() if name != FLOOR},
        "floors": {name: _floors(name, sizes, part, passes, rates) for name in present},
        "stopped": stopped,
        "left_out": [name for name in chosen if name not in present],
        "rates": rates._asdict(),
    }


def _run(name: str, size: LayerSize, part: str, passes: str) -> Run:
    if part == "core":
        return _core_run(name, size, passes)
    layer = build_layer(name, size)
    x = torch.randn(size.tokens, size.embed_dim, requires_grad=True)
    positions = 15 * torch.rand(size.tokens, 3)
    return (inference if passes == "forward" else training)(layer, x, positions)


def _core_run(name: str, size: LayerSize, passes: str) -> Run:
    core, rows = build_core(name, size)
    slope = torch.randn_like(core(*rows).detach())

    def forward() -> Tensor:
        with torch.no_grad():
            return core(*rows)

    return forward if passes == "forward" else lambda: torch.autograd.grad(core(*rows), rows, slope)


def _memory(runs: dict[str, Run], threads: int) -> tuple[dict[str, int], list[str]]:
    held, stopped = {}, []
    with on_threads(threads):
        for name, run in runs.items():
            try:
                held[name] = peak_memory(run)
            except (MemoryError, RuntimeError) as error:
                if not out_of_memory(error):
                    raise
                stopped.append(name)
    return held, stopped


def _work(work: list[Work], passes: str) -> list[Work]:
    return with_backward(work) if passes == "training" else work


def _floors(name: str, size: LayerSize, part: str, passes: str, rates: Rates) -> dict[str, float]:
    """Counted, not measured: flops, bytes, and the larger of both product by product."""
    work = block_products(size, LAYERS[name].kind)
    if part == "core":
        work = work[len(linear_maps(size)) :]
    return floors_of(_work(work, passes), rates)


def rounded(timings: Timings) -> dict[str, list[float]]:
    """Seconds by name, to four digits."""
    return {name: [float(f"{t:.4g}") for t in times] for name, times in timings.seconds.items()}
