"""The parts of a block on a batch of slabs, each against the floors that were counted for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flt_mol.analysis.layer_cost import LayerSize
from flt_mol.analysis.speed.floors import (
    Other,
    Product,
    Rates,
    Work,
    attention_products,
    floors_of,
    linear_maps,
    rate_functions,
    with_backward,
)
from flt_mol.analysis.speed.lengths import PASSES, rounded
from flt_mol.analysis.speed.slabs import slabs
from flt_mol.analysis.speed.training_step import Shape
from flt_mol.analysis.timing import interleaved, peak_memory
from flt_mol.nn.attention import FLTAttention
from flt_mol.nn.local_filter import LocalBasis, LocalFilter
from flt_mol.nn.spectral_filter import SpectralFilter
from flt_mol.structures import Structures

__all__ = ["PARTS", "feed_forward_work", "measure", "pair_work", "spectral_work"]

PARTS = ("attention", "spectral filter", "pair filter", "feed-forward net")
_NUMBER, _INDEX = 4, 8  # bytes


def measure(
    passes: str = "forward",
    *,
    num_slabs: int = 32,
    layers: int | None = None,
    shape: dict[str, Any] | None = None,
    rounds: int = 7,
    gemm_size: int = 2048,
) -> dict[str, Any]:
    """Seconds, bytes and floors of each part; geometry is made beforehand, as once for all blocks.

    Args:
        passes: "forward", without gradients, or "training", to all weights and to the features.
        num_slabs: of the batch.
        layers: of slabs, see `slabs`.
        shape: fields of `Shape` other than the default's.
        rounds: see `timing.interleaved`.
        gemm_size: of the product that gives the machine's rate.
    """
    if passes not in PASSES:
        raise ValueError(f"passes is {passes!r}, expected one of {', '.join(PASSES)}")
    sizes, threads = Shape(**(shape or {})), torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        batch = slabs(num_slabs, layers).with_pairs(sizes.cutoff)
        parts = _parts(batch, sizes)
        runs = {name: _run(part, call, batch, sizes, passes) for name, (part, call, _) in
                parts.items()}  # fmt: skip
        machine = rate_functions(gemm_size)
        timings = interleaved({**runs, **machine}, rounds, 0.02, threads)
        held = {name: peak_memory(run) for name, run in runs.items()}
    rates = Rates.of(timings.median("sgemm"), timings.median("copy"), gemm_size, 2**25)
    works = {name: with_backward(work) if passes == "training" else work
             for name, (_, _, work) in parts.items()}  # fmt: skip
    return {
        "seconds": rounded(timings),
        "bytes": held,
        "floors": {name: floors_of(work, rates) for name, work in works.items()},
        "atoms": batch.num_atoms,
        "rates": rates._asdict(),
    }


def _parts(
    batch: Structures, shape: Shape
) -> dict[str, tuple[nn.Module, Callable[[Tensor], Tensor], list[Work]]]:
    """By name: what learns, how it is called, and its work."""
    c, rows = shape.width, batch.num_atoms
    attention = FLTAttention(c, shape.heads, num_features=64)
    spectral = SpectralFilter(c, shape.heads, sigma_max=2.5)
    with torch.no_grad():
        waves = spectral.geometry(batch.positions, batch.cell, batch.pbc, batch.ptr)
        pairs = batch.pairs
        assert pairs is not None
        vectors = pairs.vectors(batch.positions, batch.cell, batch.ptr)
    geometry = LocalBasis(shape.cutoff)(pairs, vectors, rows)  # as training makes it
    local = LocalFilter(c)
    ffn = nn.Sequential(nn.Linear(c, shape.ffn), nn.GELU(), nn.Linear(shape.ffn, c))
    size = LayerSize(tokens=rows, embed_dim=c, num_heads=shape.heads, num_features=64)
    dense = linear_maps(size, "attention") + attention_products(size, positions=False)
    sums = spectral_work(batch.natoms.tolist(), waves.kernel_layout[2].diff().tolist(),
                         waves.wave_layout[2].diff().tolist(), c, spectral)  # fmt: skip
    return {
        PARTS[0]: (attention, lambda x: attention(x, ptr=batch.ptr), dense),
        PARTS[1]: (spectral, lambda x: spectral(x, waves), sums),
        PARTS[2]: (local, lambda x: local(x, geometry), pair_work(rows, len(vectors), c)),
        PARTS[3]: (ffn, ffn, feed_forward_work(rows, c, shape.ffn)),
    }


def feed_forward_work(rows: int, width: int, ffn: int) -> list[Work]:
    """Two linear maps."""
    return [Product(rows, width, ffn), Product(rows, ffn, width)]


def spectral_work(
    sizes: list[int], kernels: list[int], waves: list[int], width: int, layer: SpectralFilter
) -> list[Work]:
    """Two linear maps; of each system T kernels mixed for H heads and applied, or its waves twice.

    Args:
        sizes: atoms n of each system.
        kernels: entries n² of its kernel, 0 where it goes by waves.
        waves: entries n·2K of its waves, 0 where it goes by kernels.
        width: C.
        layer: H and T.
    """
    heads, work = layer.num_heads, list[Work]()
    for n, entries, waved in zip(sizes, kernels, waves, strict=True):
        if entries:
            work.append(Product(heads, layer.num_basis, entries))
            work.append(Product(n, n, width // heads, heads))
        elif waved:
            columns = waved // n
            work += [Product(columns, n, width), Product(n, columns, width)]
    return [Product(sum(sizes), width, width, 2), *work]


def pair_work(rows: int, pairs: int, width: int, basis: int = 32) -> list[Work]:
    """Filters of all pairs from their basis, products with senders summed, three linear maps.

    Filters are never written: bytes are those of basis, indices, values and sums.
    """
    numbers = pairs * basis + basis * width + 2 * rows * width
    flops = 2 * pairs * basis * width + 2 * pairs * width
    sums = Other(flops, _NUMBER * numbers + 2 * _INDEX * pairs)
    maps = [Product(rows, width, width), Product(rows, 2 * width, width),
            Product(rows, width, width)]  # fmt: skip
    return [*maps, sums]


def _run(
    part: nn.Module, call: Callable[[Tensor], Tensor], batch: Structures, shape: Shape, passes: str
) -> Callable[[], object]:
    x = torch.randn(batch.num_atoms, shape.width, requires_grad=True)
    inputs, slope = [x, *part.parameters()], torch.randn(batch.num_atoms, shape.width)

    def forward() -> Tensor:
        with torch.no_grad():
            return call(x)

    return forward if passes == "forward" else lambda: torch.autograd.grad(call(x), inputs, slope)
