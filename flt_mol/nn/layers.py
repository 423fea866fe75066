"""Linear maps: weights drawn from a generator, products in the dtype of the rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flt_mol.functional.numerics import placed


def drawn_linear(
    inputs: int, outputs: int, bias: bool, generator: torch.Generator, gain: float = 1.0
) -> nn.Linear:
    """A linear map with Xavier-uniform weights times `gain`, drawn on CPU, and no bias at first.

    Example:
        >>> drawn_linear(2, 3, bias=False, generator=torch.Generator().manual_seed(0))
        Linear(in_features=2, out_features=3, bias=False)
    """
    weight = torch.empty(outputs, inputs, dtype=torch.float32, device="cpu")
    nn.init.xavier_uniform_(weight, gain, generator=generator)
    # Built without storage, so that torch's own initialisation draws nothing from the global RNG.
    layer = nn.Linear(inputs, outputs, bias=bias, device="meta")
    layer.weight = nn.Parameter(placed(weight))
    if bias:
        layer.bias = nn.Parameter(torch.zeros_like(layer.weight[:, 0]))
    return layer


def applied(layer: nn.Linear, x: Tensor) -> Tensor:
    """A linear map in the dtype of `x`, whatever that of its weights.

    Example:
        >>> applied(nn.Linear(2, 3).double(), torch.ones(1, 2)).dtype
        torch.float32
    """
    bias = None if layer.bias is None else layer.bias.to(x.dtype)
    return nn.functional.linear(x, layer.weight.to(x.dtype), bias)
