"""What positions cost: a layer with its RPE against the same layer without."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flt_mol.analysis.timing import Ratio, Timings, interleaved, one_thread, peak_memory
from flt_mol.nn.attention import FLTAttention
from flt_mol.nn.block import FLTBlock
from flt_mol.nn.frequencies import GaussianFrequencies
from flt_mol.nn.rpe import FourierRPE
from flt_mol.nn.spectrum import GaussianSpectrum

__all__ = [
    "LayerCost",
    "LayerSize",
    "TimedLayer",
    "gaussian_rpe",
    "inference",
    "layer_cost",
    "training",
]

PARTS = ("block", "attention")


class LayerSize(NamedTuple):
    """The layer that is timed, by default the one the library's promises are about.

    Attributes:
        tokens: N, one system.
        embed_dim: C.
        num_heads: H.
        num_features: M.
        num_frequencies: R.
        ffn_dim: hidden width of the block's feed-forward net.
        mode: of the attention.
        feature_map: of the attention.
        causal: whether the attention is.
    """

    tokens: int = 4096
    embed_dim: int = 768
    num_heads: int = 12
    num_features: int = 64
    num_frequencies: int = 32
    ffn_dim: int = 3072
    mode: str = "linear"
    feature_map: str = "softmax"
    causal: bool = False


class LayerCost(NamedTuple):
    """One layer over its twin without RPE; the RPE is computed anew in every call.

    Attributes:
        forward: time of an inference pass, without gradients.
        training: time of forward and backward pass, to all weights and to the layer's input.
        forward_memory: peak memory of the former, beyond weights and input.
        training_memory: of the latter.
        timings: CPU seconds of "forward" and "training", with and without RPE.
        bytes: peak memory under the same names.
    """

    forward: Ratio
    training: Ratio
    forward_memory: float
    training_memory: float
    timings: Timings
    bytes: dict[str, int]


def layer_cost(size: LayerSize, part: str = "block", rounds: int = 9) -> LayerCost:
    """Time and peak memory of a layer with RPE over the same layer without, on one thread.

    Args:
        size: the layer.
        part: "block" (norms, attention and feed-forward net), or "attention" alone.
        rounds: see `timing.interleaved`.

    Raises:
        ValueError: unknown `part`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        runs = _runs(size, part)
    timings = interleaved(runs, rounds)
    with one_thread():
        held = {name: peak_memory(run) for name, run in runs.items()}
    return LayerCost(
        timings.ratio("forward, RPE", over="forward"),
        timings.ratio("training, RPE", over="training"),
        held["forward, RPE"] / held["forward"],
        held["training, RPE"] / held["training"],
        timings,
        held,
    )


def _runs(size: LayerSize, part: str) -> dict[str, Callable[[], object]]:
    if part not in PARTS:
        raise ValueError(f"part is {part!r}, expected one of {', '.join(PARTS)}")
    x = torch.randn(size.tokens, size.embed_dim, dtype=torch.float32, requires_grad=True)
    positions = 15 * torch.rand(size.tokens, 3, dtype=torch.float32)
    runs: dict[str, Callable[[], object]] = {}
    for name, rpe in (("", None), (", RPE", gaussian_rpe(size))):
        layer = TimedLayer(size, part, rpe).eval()  # nothing drops out; values may come quicker
        arguments = (x, None if rpe is None else positions)
        runs[f"forward{name}"] = inference(layer, *arguments)
        runs[f"training{name}"] = training(layer, *arguments)
    return runs


def inference(layer: nn.Module, *arguments: Tensor | None) -> Callable[[], object]:
    """A function that calls the layer without gradients."""

    def run() -> Tensor:
        with torch.no_grad():
            out: Tensor = layer(*arguments)
            return out

    return run


def training(layer: nn.Module, x: Tensor, positions: Tensor | None) -> Callable[[], object]:
    """A function that goes forward and backward, to all weights and to the layer's input."""
    inputs = [x, *layer.parameters()]
    slope = torch.randn_like(x)

    def run() -> tuple[Tensor, ...]:
        return torch.autograd.grad(layer(x, positions), inputs, slope)

    return run


def gaussian_rpe(size: LayerSize) -> FourierRPE:
    """The RPE of the layer, with R random frequencies."""
    spectrum = GaussianSpectrum(size.num_heads, num_terms=16)
    return FourierRPE(spectrum, GaussianFrequencies(size.num_frequencies))


class TimedLayer(nn.Module):
    """Rows (N, C) and positions (N, 3) to rows: what an encoder does for one of its layers."""

    def __init__(self, size: LayerSize, part: str, rpe: FourierRPE | None) -> None:
        super().__init__()
        self.rpe = rpe
        attention = FLTAttention(
            size.embed_dim,
            size.num_heads,
            num_features=size.num_features,
            position_dim=0 if rpe is None else rpe.num_features,
            feature_map=size.feature_map,
            mode=size.mode,
            causal=size.causal,
        )
        self.layer = attention if part == "attention" else FLTBlock(attention, size.ffn_dim)

    def forward(self, x: Tensor, positions: Tensor | None) -> Tensor:
        """Rows (N, C) and positions (N, 3), Å, of one system to rows."""
        ptr = torch.tensor([0, len(x)])
        features = None if self.rpe is None else self.rpe(positions, ptr)
        out: Tensor = self.layer(x, ptr=ptr, position_features=features)
        return out
