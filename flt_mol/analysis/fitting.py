"""A short fit, for tables and pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

__all__ = ["fit"]


def fit(
    parameters: Iterable[nn.Parameter], loss: Callable[[], Tensor], steps: int, rate: float
) -> None:
    """Lower a loss by Adam, the step size falling from `rate` to 0 as a half cosine.

    Args:
        parameters: what is changed.
        loss: computed anew in every step; what it returns is a scalar.
        steps: how many updates.
        rate: the first step size.
    """
    optimiser = torch.optim.Adam(parameters, lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        optimiser.zero_grad()
        with torch.enable_grad():
            loss().backward()
        optimiser.step()
        schedule.step()
