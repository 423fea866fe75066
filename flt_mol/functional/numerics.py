"""Random draws and ways out of a graph, the same for all modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

_F = TypeVar("_F", bound=Callable[..., object])
_OUTSIDE: dict[Callable[..., object], Any] = {}


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
        raise ValueError(
            f"generator is on {generator.device}; draws are made on CPU so that they are the same "
            "on every machine: use torch.Generator('cpu')"
        )
    return generator


def draw_normal(*shape: int, generator: torch.Generator | None) -> Tensor:
    """Standard normal draws, float32 on CPU: the same numbers for every default dtype."""
    return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")


def placed(x: Tensor) -> Tensor:
    """`x` on torch's default device in torch's default dtype, as new parameters are."""
    return x.to(device=torch.get_default_device(), dtype=torch.get_default_dtype())


def outside(function: _F) -> _F:
    """`function` as `torch.compiler.disable` makes it, which graphs call without looking inside.

    Not as a decorator: that would import the compiler, seconds, with the module. ``fullgraph=True``
    needs it made before the graph: a graph cannot make it.
    """
    if function not in _OUTSIDE:
        _OUTSIDE[function] = torch.compiler.disable(function)
    found: _F = _OUTSIDE[function]
    return found
