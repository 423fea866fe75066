"""Learned optimisers, one small net around each memory or attention; Adam; and how they run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from common.state_space import S4D
from flt_mol.nn import FLTAttention, FourierRPE, GaussianFrequencies, GaussianMixtureSpectrum
from optimizers.tasks import Problem

WIDTH, HEADS = 16, 2


class Adam:
    """Adam (Kingma & Ba, ICLR 2015), members and coordinates each by themselves."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def begin(self, x: Tensor) -> Any:
        """Both moments, and the number of steps."""
        return torch.zeros_like(x), torch.zeros_like(x), 0

    def __call__(self, x: Tensor, values: Tensor, gradient: Tensor, state: Any) -> Any:
        """What is added to x, and the state after it."""
        mean, square, steps = state[0], state[1], state[2] + 1
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.999 * square + 0.001 * gradient.square()
        first, second = mean / (1 - 0.9**steps), square / (1 - 0.999**steps)
        return -self.rate * first / (second.sqrt() + 1e-8), (mean, square, steps)


class LSTM(nn.LSTMCell):
    """`LSTMCell` of as many outputs as inputs."""

    def begin(self, streams: int) -> Any:
        """Zeros."""
        zero = torch.zeros(streams, self.hidden_size)
        return zero, zero

    def forward(self, x: Tensor, state: Any, at: Any = None) -> Any:  # type: ignore[override]
        """One more row (B, C) of each stream."""
        after = super().forward(x.flatten(0, -2), state)
        return after[0].view_as(x), after


class Attending(nn.Module):
    """Attention of a coordinate to all of its steps so far, or of members to each other.

    The first is causal, in a state of constant size; the second goes coordinate by coordinate,
    masked by where members are.
    """

    def __init__(self, attention: FLTAttention) -> None:
        super().__init__()
        self.attention = attention

    def begin(self, streams: int) -> Any:
        """The state before the first step; None among members."""
        return self.attention.initial_state(streams) if self.attention.causal else None

    def forward(self, x: Tensor, state: Any, at: Any = None) -> Any:
        """One more row (B, C) of each stream; or rows (B, n, C), members at (B, n, d)."""
        if self.attention.causal:
            return self.attention.step(x, state)
        return self.attention(x, at if self.attention.rpe is not None else None), state


def attending(dim: int, masked: bool, causal: bool) -> Attending:
    """FLT attention with a Gaussian mixture in d dimensions; without mask it is Performer's."""
    rpe = None
    if masked:
        sigma = (0.003, 0.1) if causal else (0.03, 0.3)
        lengths = {"sigma_min": 2.0, "sigma_max": 50.0, "mean_std": 0.02}
        lengths = lengths if causal else {"sigma_min": 0.5, "sigma_max": 4.0}
        spectrum = GaussianMixtureSpectrum(HEADS, 8, dim=dim, **lengths)
        rpe = FourierRPE(spectrum, GaussianFrequencies(8 if causal else 16, dim, sigma))
    return Attending(FLTAttention(WIDTH, HEADS, num_features=16, rpe=rpe, causal=causal))


MEMORIES: dict[str, Callable[[], nn.Module]] = {
    "FLT": lambda: attending(1, masked=True, causal=True),
    "Performer": lambda: attending(1, masked=False, causal=True),
    "S4D": lambda: S4D(WIDTH, 8),
    "LSTM": lambda: LSTM(WIDTH, WIDTH),
}
POPULATIONS: dict[str, Callable[[int], nn.Module]] = {
    "FLT": lambda dim: attending(dim, masked=True, causal=False),
    "Performer": lambda dim: attending(dim, masked=False, causal=False),
    "LSTM": lambda dim: LSTM(WIDTH, WIDTH),
}


class Core(nn.Module):
    """Features of a coordinate → its step: linear, memory or attention, and a perceptron."""

    def __init__(self, inside: nn.Module, features: int, scale: float) -> None:
        super().__init__()
        self.encode, self.inside = nn.Linear(features, WIDTH), inside
        self.norm, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, 1))
        self.scale = scale
        nn.init.zeros_(self.head[-1].weight)
        nn.init.zeros_(self.head[-1].bias)

    def forward(self, features: Tensor, state: Any, *at: Tensor) -> tuple[Tensor, Any]:
        """Rows (…, F) to steps (…)."""
        x = self.encode(features)
        read, state = self.inside(self.norm(x), state, *at)
        return self.scale * self.head(self.second(x + read))[..., 0], state


def log_sign(gradient: Tensor, power: float = 10.0) -> Tensor:
    """(…, 2), log|g|/p and sign g; −1 and e^p g for |g| < e^−p (Andrychowicz et al., 2016)."""
    smallest = math.exp(-power)
    size = gradient.abs().clamp(min=smallest).log() / power
    return torch.stack([size, (gradient / smallest).clamp(-1.0, 1.0)], -1)


class MemoryOptimizer(nn.Module):
    """One step from one gradient and the memory of those before, coordinate by coordinate."""

    def __init__(self, memory: str) -> None:
        super().__init__()
        self.core = Core(MEMORIES[memory](), 2, scale=0.05)

    def begin(self, x: Tensor) -> Any:
        """The memories of all coordinates, empty."""
        return self.core.inside.begin(x.numel())

    def forward(self, x: Tensor, values: Tensor, gradient: Tensor, state: Any) -> Any:
        """What is added to x, and the state after it."""
        step, state = self.core(log_sign(gradient.flatten()), state)
        return step.view_as(x), state


class PopulationOptimizer(nn.Module):
    """Steps of n members in d dimensions from gradients, values and places of all of them.

    A coordinate of a member sees its gradient, where it is relative to the members' mean and to
    the best place it had, and the member's value relative to the others'.
    """

    def __init__(self, kind: str, dim: int) -> None:
        super().__init__()
        self.core = Core(POPULATIONS[kind](dim), 5, scale=0.2)

    def begin(self, x: Tensor) -> Any:
        """Memories, and the best value and place of each member."""
        return self.core.inside.begin(x.numel()), torch.full(x.shape[:2], torch.inf), x

    def forward(self, x: Tensor, values: Tensor, gradient: Tensor, state: Any) -> Any:
        """What is added to x, and the state after it."""
        memory, best, place = state
        better = values < best
        best, place = torch.where(better, values, best), torch.where(better[..., None], x, place)
        deviation = values.std(1, keepdim=True) + 1e-3
        level = ((values - values.mean(1, keepdim=True)) / deviation)[..., None, None]
        centred = x - x.mean(1, keepdim=True)
        features = [
            log_sign(gradient), centred[..., None], (place - x)[..., None],
            level.expand(*x.shape, 1),
        ]  # fmt: skip
        count, members, dim = x.shape
        rows = torch.cat(features, -1).transpose(1, 2).flatten(0, 1)
        at = x[:, None].expand(-1, dim, -1, -1).flatten(0, 1)
        step, memory = self.core(rows, memory, at)
        return step.view(count, dim, members).transpose(1, 2), (memory, best, place)


class Run:
    """An optimiser at work on a problem: x, its values and gradient, the optimiser's state."""

    def __init__(self, problem: Problem, optimizer: Any) -> None:
        self.problem, self.optimizer = problem, optimizer
        self.x = problem.start()
        self.state = optimizer.begin(self.x)
        self.values, self.gradient = problem.evaluate(self.x)

    def advance(self) -> Tensor:
        """One step; a number whose gradient is that of the meta-loss at the new x.

        Gradients that the optimiser sees count as constants: there are no second derivatives.
        """
        given = self.x.detach(), self.values, self.gradient
        step, self.state = self.optimizer(*given, self.state)
        self.x = self.x + step
        self.values, self.gradient = self.problem.evaluate(self.x)
        slope = self.problem.meta_gradient(self.x.detach(), self.gradient)
        return (slope * self.x).sum() / len(self.x)

    def detach(self) -> None:
        """Forget how x and the state came about."""
        self.x, self.state = self.x.detach(), detached(self.state)


def detached(state: Any) -> Any:
    """A state of nested tuples without its graph."""
    if isinstance(state, Tensor):
        return state.detach()
    if not isinstance(state, tuple):
        return state
    parts = [detached(part) for part in state]
    return type(state)._make(parts) if hasattr(state, "_make") else tuple(parts)


def meta_train(
    optimizer: nn.Module,
    problems: Callable[[], Problem],
    updates: int,
    steps: int,
    window: int,
    rate: float = 3e-3,
) -> list[float]:
    """Train an optimiser by Adam on windows of its own runs; the mean value of each window.

    `problems` draws new ones for each run of `steps`. The steps of each window are the
    loss of one of `updates`, at a learning rate that decays by a cosine.
    """
    trained = torch.optim.Adam(optimizer.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(trained, updates)
    means: list[float] = []
    while len(means) < updates:
        run = Run(problems(), optimizer)
        for _ in range(steps // window):
            losses = [run.advance() for _ in range(window)]
            trained.zero_grad()
            torch.stack(losses).mean().backward()
            nn.utils.clip_grad_norm_(optimizer.parameters(), 1.0)
            trained.step()
            schedule.step()
            run.detach()
            means.append(float(run.values.mean()))
    return means[:updates]


@torch.no_grad()
def curve(problem: Problem, optimizer: Any, steps: int, points: int = 60) -> list[float]:
    """Mean over problems of what they report, at `points` steps evenly from 0 to `steps`.

    The best so far for populations; for nets, the loss at the time.
    """
    run, shown = Run(problem, optimizer), []
    every, best = max(1, steps // points), torch.full((len(run.x),), torch.inf)
    for step in range(steps + 1):
        if run.values.dim() == 2:
            best = torch.minimum(best, problem.report(run.x, run.values))
        if step % every == 0:
            found = best if run.values.dim() == 2 else problem.report(run.x, run.values)
            shown.append(round(float(found.mean()), 5))
        if step < steps:
            run.advance()
    return shown
