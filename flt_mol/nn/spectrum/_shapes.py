"""Special functions the families are made of."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# (−1)^n / (2n+1)!, enough for float64 where x² < 1/4.
_SINE_SERIES = [(-1) ** n / math.factorial(2 * n + 1) for n in range(9)]


def sine_ratio(x: Tensor) -> Tensor:
    """sin(x)/x, 1 at 0, with all derivatives exact there too.

    `torch.sinc` loses its gradient's digits near 0, and its second derivative is NaN at 0.
    """
    squared = x.square()
    small = squared < 0.25
    near = squared.masked_fill(~small, 0.0)
    series = torch.full_like(near, _SINE_SERIES[-1])
    for coefficient in reversed(_SINE_SERIES[:-1]):
        series = series * near + coefficient
    far = x.masked_fill(small, 1.0)
    return torch.where(small, series, far.sin() / far)


def cardinal_bspline(x: Tensor, order: int) -> Tensor:
    r"""β_k(x): the k-fold convolution of the box of width 1 around 0 with itself.

    Support \|x\| ≤ k/2, degree k − 1, k − 2 continuous derivatives, integral 1. By the recurrence
    of Cox and de Boor, all of whose summands are positive: no digits are lost at high order.

    Example:
        >>> cardinal_bspline(torch.tensor([0.0, 0.5, 1.0, 2.0]), order=2)
        tensor([1.0000, 0.5000, 0.0000, 0.0000])
    """
    # The function is even. |x| sets the slope at a kink at 0 to zero, but would lose a curvature.
    u = order / 2 - (x.abs() if order <= 2 else x)
    pieces = [((u >= i) & (u < i + 1)).to(u.dtype) for i in range(order)]
    for m in range(2, order + 1):
        pieces = [
            ((u - i) * pieces[i] + (i + m - u) * pieces[i + 1]) / (m - 1)
            for i in range(order - m + 1)
        ]
    return pieces[0]


def laguerre_function(x: Tensor, degree: int, alpha: float) -> Tensor:
    """e^{−x/2} L_n^{(α)}(x), x ≥ 0, with the generalised Laguerre polynomial of degree n.

    By the recurrence in n, which begins with the exponential: the polynomial alone overflows.

    Example:
        >>> laguerre_function(torch.tensor([0.0, 1e9]), degree=2, alpha=1.0)
        tensor([3., 0.])
    """
    current = (-0.5 * x).exp()
    previous = torch.zeros_like(x)
    for n in range(degree):
        following = ((2 * n + 1 + alpha - x) * current - (n + alpha) * previous) / (n + 1)
        previous, current = current, following
    return current
