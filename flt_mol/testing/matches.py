"""A fast form against a plain one: values, gradients, gradients of gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from flt_mol.testing._common import agree, seeded


def check_matches(
    fast: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: Sequence[Any],
    tolerance: float = 1e-10,
    *,
    parameters: Iterable[Tensor] = (),
    second: bool = False,
    generator: torch.Generator | None = None,
) -> float:
    """``fast(*inputs)`` has the values and gradients of ``reference(*inputs)``.

    Gradients are those of Σ u·y with one random u, by every float tensor of `inputs` and by
    `parameters`. Errors are relative to the largest entry of each reference tensor.

    Args:
        fast: inputs → a tensor or several.
        reference: the same by other means.
        inputs: tensors and whatever else both take; tensors are copied, not touched.
        tolerance: for values and gradients.
        parameters: that both depend on.
        second: whether gradients of the gradients, as training on forces needs, are compared too.
        generator: of u.

    Raises:
        AssertionError: naming what differs most, and where.

    Returns:
        The largest error.

    Example:
        >>> x = torch.linspace(-1, 1, 5, dtype=torch.float64)
        >>> check_matches(torch.nn.functional.silu, lambda x: x * torch.sigmoid(x), [x]) < 1e-14
        True
    """
    seed = int(torch.randint(2**31, (), generator=seeded(generator)))
    parameters = list(parameters)
    expected = _derivatives(reference, inputs, parameters, second, seed)
    found = _derivatives(fast, inputs, parameters, second, seed)
    if set(expected) != set(found):
        odd = ", ".join(sorted(set(expected) ^ set(found)))
        raise AssertionError(f"one of fast and reference has no {odd}")
    errors = [agree(name, expected[name], found[name], tolerance) for name in expected]
    return max(errors, default=0.0)


def _derivatives(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    parameters: list[Tensor],
    second: bool,
    seed: int,
) -> dict[str, Tensor]:
    """Values and gradients of `function`, by the names that messages give them."""
    generator = torch.Generator().manual_seed(seed)

    def random_sum(tensors: Iterable[Tensor]) -> Tensor:
        parts = []
        for y in tensors:
            u = torch.randn(y.shape, generator=generator, dtype=torch.float64, device="cpu")
            parts.append((u.to(y) * y).sum())
        return torch.stack(parts).sum()

    given, leaves = [], {}
    for i, value in enumerate(inputs):
        if isinstance(value, Tensor) and value.is_floating_point():
            value = leaves[f"input {i}"] = value.detach().clone().requires_grad_()
        given.append(value)
    leaves |= {f"parameter {i}": p for i, p in enumerate(parameters)}
    result = function(*given)
    values = [result] if isinstance(result, Tensor) else list(result)
    found = {f"output {i}": y for i, y in enumerate(values)}
    total = random_sum(y for y in values if y.is_floating_point())
    for order in ("", "second ")[: 1 + second]:
        if not total.requires_grad:
            break
        gradients = torch.autograd.grad(
            total, list(leaves.values()), create_graph=second, allow_unused=True
        )
        kept = {name: g for name, g in zip(leaves, gradients, strict=True) if g is not None}
        found |= {f"the {order}gradient by {name}": g for name, g in kept.items()}
        if kept:
            total = random_sum(kept.values())
    return {name: y.detach() for name, y in found.items()}
