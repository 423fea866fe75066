"""Weights drawn on CPU from a generator, and linear maps in the dtype of the rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def seeded_generator(generator: torch.Generator | None) -> torch.Generator:
    """`generator` itself, or a new one on CPU seeded by one draw from torch's global one.

    So `torch.manual_seed` decides what modules without a generator of their own draw.

    Raises:
        ValueError: `generator` does not live on CPU.
    """
    if generator is None:
        seed = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
        return torch.Generator("cpu").manual_seed(seed)
    if generator.device.type != "cpu":
        raise ValueError(f"generator is on {generator.device}, expected CPU: torch.Generator()")
    return generator


def draw_normal(*shape: int, generator: torch.Generator | None) -> Tensor:
    """Standard normal draws, float32 on CPU: the same numbers for every default dtype."""
    return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")


def placed(x: Tensor) -> Tensor:
    """`x` on torch's default device in torch's default dtype, as new parameters are."""
    return x.to(device=torch.get_default_device(), dtype=torch.get_default_dtype())


def drawn_weight(
    rows: int, columns: int, generator: torch.Generator, scale: float = 1.0
) -> nn.Parameter:
    """A parameter (rows, columns), normal with standard deviation `scale` / √rows."""
    start = draw_normal(rows, columns, generator=generator)
    return nn.Parameter(placed(start * scale * rows**-0.5))


def drawn_linear(
    inputs: int, outputs: int, bias: bool, generator: torch.Generator, gain: float = 1.0
) -> nn.Linear:
    """A linear map with Xavier-uniform weights times `gain`, drawn on CPU, and no bias at first."""
    weight = torch.empty(outputs, inputs, dtype=torch.float32, device="cpu")
    nn.init.xavier_uniform_(weight, gain, generator=generator)
    # Built without storage, so that torch's own initialisation draws nothing from the global RNG.
    layer = nn.Linear(inputs, outputs, bias=bias, device="meta").to_empty(
        device=torch.get_default_device()
    )
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias:
            layer.bias.zero_()
    return layer


def applied(layer: nn.Linear, x: Tensor) -> Tensor:
    """A linear map in the dtype of `x`, for weights of any dtype."""
    bias = None if layer.bias is None else layer.bias.to(x.dtype)
    return nn.functional.linear(x, layer.weight.to(x.dtype), bias)
