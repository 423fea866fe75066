"""A diagonal state-space layer, as a recurrence."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class S4D(nn.Module):
    r"""S4D-Lin with zero-order hold: C channels of S complex states each [1].

    ẋ = A x + u, y = 2 Re Σ_s c_s x_s + D u with A = −e^a + iω diagonal; in steps of Δ, with
    Ā = e^{ΔA}: x_l = Ā x_{l−1} + (Ā − 1)/A u_l. The same as a convolution of u with
    K_l = 2 Re Σ_s c_s (Ā − 1)/A Ā^l, l = 0, 1, …, plus D u.

    Args:
        channels: C; each has its own A, c, D and Δ, all learned.
        states: S; at the start A = −½ + iπs.
        step_min, step_max: Δ at the start, from one channel to the last evenly spaced in log Δ.
        generator: on CPU, for c.

    References:
        [1] Gu et al., "On the Parameterization and Initialization of Diagonal State Space Models",
        NeurIPS 2022.
    """

    def __init__(
        self,
        channels: int,
        states: int = 8,
        step_min: float = 0.01,
        step_max: float = 1.0,
        *,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.log_decay = nn.Parameter(torch.full((channels, states), math.log(0.5)))
        self.turn = nn.Parameter(math.pi * torch.arange(states).float().repeat(channels, 1))
        self.read = nn.Parameter(torch.randn(channels, states, 2, generator=generator) / states)
        self.through = nn.Parameter(torch.ones(channels))
        bounds = math.log(step_min), math.log(step_max)
        self.log_step = nn.Parameter(torch.linspace(*bounds, channels))

    def discrete(self) -> tuple[Tensor, Tensor]:
        """Ā and (Ā − 1)/A, both (C, S), complex."""
        rate = torch.complex(-self.log_decay.exp(), self.turn)
        factor = (self.log_step.exp()[:, None] * rate).exp()
        return factor, (factor - 1) / rate

    def begin(self, streams: int) -> Tensor:
        """State (B, C, S) before the first input of each stream."""
        zero = torch.zeros_like(self.turn).expand(streams, -1, -1)
        return torch.complex(zero, zero)

    def forward(self, u: Tensor, state: Tensor, at: object = None) -> tuple[Tensor, Tensor]:
        """One more input (B, C) of each stream; y (B, C), and the state after it."""
        factor, gain = self.discrete()
        state = factor * state + gain * u[..., None]
        read = torch.view_as_complex(self.read)
        return 2 * (read * state).real.sum(-1) + self.through * u, state
