"""Count, mean and spread of numbers that come in pieces."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Moments:
    """Count, mean and population standard deviation, in float64; ``a + b`` is that of both.

    Pieces may come in any order and of any size; nothing is squared that could overflow.

    Attributes:
        count: numbers seen.
        mean: 0 of none.
        std: 0 of none, of one, and of equal numbers.

    References:
        Chan, Golub & LeVeque, Am. Stat. 37, 242 (1983).

    Example:
        >>> Moments.of(torch.tensor([1.0, 2.0])) + Moments.of(torch.tensor([6.0, 7.0]))
        Moments(count=4, mean=4.0, std=2.54950...)
    """

    count: int = 0
    mean: float = 0.0
    std: float = 0.0

    @classmethod
    def of(cls, values: Tensor) -> Moments:
        """Of all entries of a tensor of finite numbers."""
        x = values.detach().to("cpu", torch.float64).reshape(-1)
        if x.numel() == 0:
            return cls()
        if bool((x == x[0]).all()):
            return cls(x.numel(), float(x[0]), 0.0)
        scale = x.abs().max()
        scaled = x / scale
        return cls(x.numel(), float(scaled.mean() * scale), float(scaled.std(correction=0) * scale))

    def __add__(self, other: object) -> Moments:
        if not isinstance(other, Moments):
            return NotImplemented
        count = self.count + other.count
        if not self.count or not other.count:
            return self if self.count else other
        a, b = self.count / count, other.count / count
        # Halves first: the difference of the largest numbers is no number.
        half = other.mean / 2 - self.mean / 2
        return Moments(
            count,
            self.mean + half * b + half * b,
            math.hypot(
                self.std * math.sqrt(a), other.std * math.sqrt(b), half * (2 * math.sqrt(a * b))
            ),
        )
