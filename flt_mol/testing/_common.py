"""What all checks share: modes, seeds, saved states, and the comparison of rows."""

from __future__ import annotations

import io
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


def seeded(generator: torch.Generator | None) -> torch.Generator:
    """`generator`, or one with seed 0: checks repeat, and leave torch's global one alone."""
    return torch.Generator().manual_seed(0) if generator is None else generator


def load_saved_state(source: nn.Module, target: nn.Module) -> None:
    """Give `target` the state of `source` by way of a file's bytes, read as plain tensors.

    Raises:
        AssertionError: names in one that the other lacks.
    """
    stream = io.BytesIO()
    torch.save(source.state_dict(), stream)
    stream.seek(0)
    wrong = target.load_state_dict(torch.load(stream, weights_only=True), strict=False)
    if wrong.missing_keys or wrong.unexpected_keys:
        raise AssertionError(
            f"the state_dict does not fit a second instance: missing {wrong.missing_keys}, "
            f"unexpected {wrong.unexpected_keys}"
        )


def trainable(module: Any) -> dict[str, nn.Parameter]:
    """Parameters that want a gradient, by name; none for what is no module."""
    if not isinstance(module, nn.Module):
        return {}
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


class Difference(NamedTuple):
    """The largest difference of two tensors of one shape.

    Attributes:
        error: max|second − first| / max|first|; not finite where either is not.
        place: index of the entry that differs most.
        words: the two values there, and the largest.
    """

    error: float
    place: tuple[int, ...]
    words: str


def difference(first: Tensor, second: Tensor) -> Difference:
    """Compare in float64. NaN and infinity agree with nothing, not even with themselves."""
    first, second = first.detach().cpu().double(), second.detach().cpu().double()
    if first.numel() == 0:
        return Difference(0.0, (), "nothing to compare")
    scale = float(first.abs().max())
    size = (second - first).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    place = tuple(int(i) for i in torch.unravel_index(size.argmax(), first.shape))
    worst, old, new = (float(x[place]) for x in (size, first, second))
    error = worst / scale if scale > 0 else (0.0 if worst == 0 else math.inf)
    words = f"{old:.9g} → {new:.9g}, by {new - old:.3g}, where the largest is {scale:.3g}"
    return Difference(error, place, words)


def agree(name: str, first: Tensor, second: Tensor, tolerance: float) -> float:
    """The relative error of `second`, called `name`, against `first`.

    Raises:
        AssertionError: shapes differ, or the error is beyond `tolerance` or not a number.
    """
    if first.shape != second.shape:
        raise AssertionError(f"{name}: shape {tuple(first.shape)} → {tuple(second.shape)}")
    found = difference(first, second)
    if not found.error <= tolerance:  # true for NaN
        raise AssertionError(
            f"{name}: entry {found.place} is {found.words}: relative error {found.error:.3g}, "
            f"tolerance {tolerance:g}"
        )
    return found.error
