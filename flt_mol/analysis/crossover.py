"""From what size of system on linear attention is faster than exact attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flt_mol.analysis.timing import Timings, interleaved
from flt_mol.nn.attention import FLTAttention
from flt_mol.nn.frequencies import GaussianFrequencies
from flt_mol.nn.rpe import FourierRPE
from flt_mol.nn.spectrum import GaussianSpectrum

__all__ = ["PARTS", "PASSES", "AttentionShape", "column", "crossing", "time_modes"]

PARTS = ("heads", "layer")
PASSES = ("forward", "training")


class AttentionShape(NamedTuple):
    """The attention that is timed.

    Attributes:
        head_dim: D.
        num_features: M.
        embed_dim: C; H = C/D.
        num_frequencies: R; 0 for a layer without positions.
        rows: N, about as many in all as systems of one size are filled up to.
        causal: whether attention is.
    """

    head_dim: int = 64
    num_features: int = 64
    embed_dim: int = 256
    num_frequencies: int = 16
    rows: int = 4096
    causal: bool = False


def time_modes(
    shape: AttentionShape,
    size: int,
    part: str = "layer",
    passes: str = "forward",
    *,
    modes: Sequence[str] = ("linear", "exact"),
    exact_below: int | None = None,
    rounds: int = 7,
) -> Timings:
    """CPU seconds of each mode on a batch of equal systems, on one thread.

    Args:
        shape: the attention.
        size: rows of each system.
        part: "heads", from queries, keys, values and position features to attended values; or
            "layer", with the linear maps around it and position features made from positions.
        passes: "forward", without gradients, or "training", forward and backward.
        modes: "linear", "exact" and "auto".
        exact_below: of mode "auto"; None is the layer's default.
        rounds: see `timing.interleaved`.

    Raises:
        ValueError: unknown `part` or `passes`.
    """
    if part not in PARTS or passes not in PASSES:
        raise ValueError(
            f"part is {part!r} and passes {passes!r}, expected one of {', '.join(PARTS)} and of "
            f"{', '.join(PASSES)}"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = _layer(shape).eval()  # nothing is redrawn; values may come quicker
        x, positions, ptr = _batch(shape, size)
    if exact_below is not None:
        layer.exact_below = exact_below
    runs = {mode: _run(layer, mode, part, passes, (x, positions, ptr)) for mode in modes}
    return interleaved(runs, rounds)


def column(
    shape: AttentionShape,
    sizes: Sequence[int],
    part: str,
    passes: str,
    *,
    check: bool = False,
    exact_below: int | None = None,
    rounds: int = 7,
) -> tuple[list[float], float]:
    """One ratio for each size, and what they amount to.

    Args:
        shape: the attention.
        sizes: rows of a system, ascending.
        part: see `time_modes`.
        passes: see `time_modes`.
        check: False for exact over linear time and where it is 1; True for the time of mode "auto"
            over that of the better one, and the worst of these ratios.
        exact_below: see `time_modes`.
        rounds: see `timing.interleaved`.
    """
    modes = ("linear", "exact", "auto") if check else ("linear", "exact")
    ratios = []
    for size in sizes:
        times = time_modes(
            shape, size, part, passes, modes=modes, exact_below=exact_below, rounds=rounds
        )
        if check:
            over = [times.ratio("auto", mode).median for mode in ("linear", "exact")]
            ratios.append(max(over))
        else:
            ratios.append(times.ratio("exact", over="linear").median)
    return ratios, max(ratios) if check else crossing(sizes, ratios)


def crossing(sizes: Sequence[int], ratios: Sequence[float]) -> float:
    """The size where exact over linear time grows beyond 1, between measured ones in log scale.

    Args:
        sizes: ascending.
        ratios: time of exact over that of linear attention at each.

    Returns:
        The last such size, where there are several; 0 where linear attention is the faster one
        throughout, infinity where exact attention is.

    Example:
        >>> crossing([64, 128, 256], [0.5, 0.8, 1.25])
        181.0
    """
    below = [i for i, ratio in enumerate(ratios) if ratio <= 1]
    if not below:
        return 0.0
    last = below[-1]
    if last == len(sizes) - 1:
        return math.inf
    low, high = (math.log(ratio) for ratio in ratios[last : last + 2])
    share = -low / (high - low)
    return round(
        math.exp(math.log(sizes[last]) * (1 - share) + math.log(sizes[last + 1]) * share), 1
    )


def _layer(shape: AttentionShape) -> FLTAttention:
    heads, rpe = shape.embed_dim // shape.head_dim, None
    if shape.num_frequencies:
        spectrum = GaussianSpectrum(heads, num_terms=16)
        rpe = FourierRPE(spectrum, GaussianFrequencies(shape.num_frequencies))
    return FLTAttention(
        shape.embed_dim, heads, num_features=shape.num_features, rpe=rpe, causal=shape.causal
    )


def _batch(shape: AttentionShape, size: int) -> tuple[Tensor, Tensor | None, Tensor]:
    systems = max(1, shape.rows // size)
    ptr = torch.arange(systems + 1) * size
    x = torch.randn(systems * size, shape.embed_dim, dtype=torch.float32, requires_grad=True)
    positions = 15 * torch.rand(len(x), 3, dtype=torch.float32)
    return x, positions if shape.num_frequencies else None, ptr


def _run(
    layer: FLTAttention,
    mode: str,
    part: str,
    passes: str,
    batch: tuple[Tensor, Tensor | None, Tensor],
) -> Callable[[], object]:
    x, positions, ptr = batch
    inputs = [x, *layer.parameters()]
    if part == "heads":
        with torch.no_grad():
            rows = layer.rows(x, positions, {"ptr": ptr})[1]
        inputs = [rows.query, rows.key, rows.value]
        for tensor in inputs:
            tensor.requires_grad_()

    def forward() -> Tensor:
        if part == "heads":
            return layer.attend(rows, mode)
        layer.mode = mode
        out: Tensor = layer(x, positions, ptr=ptr)
        return out

    def inference() -> object:
        with torch.no_grad():
            return forward()

    def training() -> object:
        out = forward()
        return torch.autograd.grad(out, inputs, torch.ones_like(out), allow_unused=True)

    return inference if passes == "forward" else training
