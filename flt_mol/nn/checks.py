"""Refusals of what attention is given: by values in eager mode, in the graph where one is built."""

from __future__ import annotations

import torch
from torch import Tensor

from flt_mol.functional.fourier import PositionFeatures
from flt_mol.nn.images import PairWeights


def require(condition: Tensor, message: str) -> None:
    """Refuse numbers that do not fulfil `condition` (), a tensor that depends on them.

    Reading it would break a graph; there it becomes part of the graph, and raises when that runs.

    Raises:
        ValueError: the condition does not hold, in eager mode.
    """
    if torch.compiler.is_compiling():
        torch._assert_async(condition, message)
    elif not bool(condition):
        raise ValueError(message)


def check_tensors(**given: object) -> None:
    """Refuse lists and arrays where a tensor is needed, by their names; None passes.

    Raises:
        ValueError: naming the first that is none.
    """
    for name, value in given.items():
        if value is not None and not isinstance(value, Tensor):
            raise ValueError(
                f"{name} is a {type(value).__name__}, expected a tensor: torch.as_tensor({name})"
            )


def check_rows(x: Tensor, width: int, name: str, weight: Tensor) -> None:
    """Refuse rows of another width, or of another dtype than the weights they meet.

    Raises:
        ValueError: as said.
    """
    if x.dim() not in (2, 3) or x.shape[-1] != width:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}, expected (N, {width}) or (B, L, {width})"
        )
    if x.dtype != weight.dtype and not _autocast(x.device.type):
        raise ValueError(
            f"{name} is {x.dtype}, the layer's weights are {weight.dtype}: convert one of them, "
            f"{name}.to({weight.dtype}) or layer.to({x.dtype})"
        )


def _autocast(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def check_features(at: PositionFeatures, num_rows: int, num_heads: int, position_dim: int) -> None:
    """Refuse position features of other rows, heads or width.

    Raises:
        ValueError: as said.
    """
    rows, width = at.basis.shape[0], at.basis.shape[-1]
    if (rows, width, at.key_weight.shape[0]) != (num_rows, position_dim, num_heads):
        raise ValueError(
            f"position_features have a basis of shape {tuple(at.basis.shape)} for "
            f"{at.key_weight.shape[0]} heads, expected {(num_rows, position_dim)} for {num_heads}"
        )


def check_pairs(pairs: PairWeights | None, ptr: Tensor, num_heads: int, name: str) -> None:
    """Refuse pairs of other heads, of rows that there are not, or of two systems.

    Raises:
        ValueError: as said.
    """
    if pairs is None:
        return
    index_i, index_j, weight = pairs
    if index_i.shape != index_j.shape or weight.shape != (*index_i.shape, num_heads):
        raise ValueError(
            f"{name} have indices {tuple(index_i.shape)} and {tuple(index_j.shape)} and weights "
            f"{tuple(weight.shape)}, expected (P,), (P,) and (P, {num_heads})"
        )
    if index_i.shape[0] == 0:
        return
    rows = ptr[-1]
    both = torch.stack([index_i, index_j])
    inside = (both >= 0) & (both < rows)
    require(inside.all(), f"{name} name rows that are not there: were they made for this batch?")
    system = torch.searchsorted(ptr[1:].to(torch.int64), both.to(torch.int64), right=True)
    require(
        (system[0] == system[1]).all(),
        f"{name} join rows of two systems: were they made with the ptr of this batch?",
    )
