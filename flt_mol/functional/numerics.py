"""Precision, random draws and custom operators: what all functions share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from torch.autograd import forward_ad

_F = TypeVar("_F", bound=Callable[..., object])
_OUTSIDE: dict[Callable[..., object], Any] = {}


def at_least_float32(x: Tensor) -> Tensor:
    """`x` in float32, or in float64 if it is float64 already."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def settled(*tensors: Tensor) -> tuple[Tensor, ...]:
    """All of them in the widest of their dtypes, at least float32, as products need them."""
    dtype = torch.float32
    for x in tensors:
        dtype = torch.promote_types(dtype, x.dtype)
    return tuple(x.to(dtype) for x in tensors)


def least_exponent(dtype: torch.dtype) -> float:
    """Where to cut x before exp(x) beside values of 1: far below rounding, far above underflow.

    Numbers below the smallest normal one, e⁻⁸⁷ in float32, make `exp` and every product with them
    ten to eighty times slower on CPUs; so do products of numbers near it with small gradients.
    """
    return -600.0 if dtype == torch.float64 else -60.0


def with_ones(value: Tensor) -> Tensor:
    """(…, V) → (…, V + 1): a last column of ones, whose weighted sum is the normaliser."""
    return torch.cat([value, value.new_ones(1).expand(*value.shape[:-1], 1)], dim=-1)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A context in which products of `x` keep their own dtype, whatever autocast asks for."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.autocast(x.device.type, enabled=False)
    return nullcontext()


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


def operator(name: str) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Make of a function one step for autograd and torch.compile, as `torch.library.custom_op`.

    Reverse mode is what these operators know: `register_autograd` gives them gradients, of any
    order. Forward mode (`torch.func.jvp`, `jacfwd`, `forward_ad`) finds them without a rule, and
    torch then drops tangents without a word, hence derivatives of 0: so it is refused here, where
    every call passes. `torch.func.grad`, `jacrev` and `hessian` are not supported by torch's custom
    operators either, and say so themselves.

    Args:
        name: without the namespace.
    """

    def decorate(function: Callable[..., Any]) -> CustomOpDef:
        @functools.wraps(function)
        def run(*args: Any) -> Any:
            refuse_forward_mode()
            return function(*args)

        schema = torch.library.infer_schema(function, mutates_args=())
        return torch.library.custom_op(f"flt_mol::{name}", run, mutates_args=(), schema=schema)

    return decorate


def refuse_forward_mode() -> None:
    """Raise while forward-mode differentiation goes on, torch.func's included.

    Raises:
        NotImplementedError: it does.
    """
    if getattr(forward_ad, "_current_level", -1) >= 0:
        raise NotImplementedError(
            "forward-mode differentiation (torch.func.jvp, jacfwd, torch.autograd.forward_ad) is "
            "not implemented for flt_mol's operators: use reverse mode, torch.autograd.grad, or "
            "torch.autograd.functional.jacobian, jvp and hvp"
        )
