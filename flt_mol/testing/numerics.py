"""Checks of numbers: gradients, precision, repetition, saved states, fast against plain forms."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import replace
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor, nn

from flt_mol.testing.layers import (
    Layer,
    agree,
    evaluated,
    evaluating,
    fitted,
    load_saved_state,
    outputs,
    same,
    seeded,
    trainable,
)
from flt_mol.testing.rows import Rows

# A gradient smaller than this share of the largest one, in float64, is rounding.
_INVISIBLE = 1e-10


def check_gradients(
    layer: nn.Module,
    rows: Any,
    *,
    invisible: Sequence[str] = (),
    generator: torch.Generator | None = None,
) -> None:
    """Every trainable parameter gets a gradient: one that is finite and not zero, in float64.

    Args:
        layer: left as it is.
        rows: enough of them, and different ones.
        invisible: patterns of names (``*.key.bias``) that outputs cannot depend on: theirs must
            be zero or none.
        generator: of the direction in which outputs are summed.
    """
    double, rows = fitted(deepcopy(layer).double(), rows)
    named = trainable(double)
    with evaluating(double):
        out = outputs(double, rows.to(torch.float64))
    if not named or not out.requires_grad:
        raise AssertionError("the outputs do not depend on any trainable parameter")
    direction = torch.randn(out.shape, generator=seeded(generator), dtype=torch.float32).to(out)
    found = torch.autograd.grad(out, list(named.values()), direction, allow_unused=True)
    largest = {
        name: 0.0 if g is None or not g.numel() else float(g.abs().max())
        for name, g in zip(named, found, strict=True)
    }
    threshold = _INVISIBLE * max((v for v in largest.values() if v < math.inf), default=0.0)
    bad = {}
    for name, value in largest.items():
        hidden = any(fnmatch(name, f"*{pattern}") for pattern in invisible)
        if not value < math.inf or (value <= threshold) != hidden:
            bad[name] = value
    if bad:
        raise AssertionError(f"parameters without a proper gradient, with its size: {bad}")


def check_coincident(layer: Layer, rows: Rows, *, second: bool = False) -> None:
    """Rows in one place have finite outputs and gradients, by features and by positions.

    Two rows of each system are put in one place, and all rows of the largest. With `second`,
    gradients of the gradients must be finite too, as training on forces needs.
    """
    layer, rows = fitted(layer, rows)
    positions = rows.placed().detach().clone()
    for start, size in zip(rows.ptr.tolist(), rows.sizes.tolist(), strict=False):
        stop = start + (size if size == int(rows.sizes.max()) else 2)
        if size > 1:
            positions[start:stop] = positions[start]
    leaves = [positions.requires_grad_(), rows.x.detach().clone().requires_grad_()]
    with evaluating(layer):
        out = outputs(layer, replace(rows, positions=leaves[0], x=leaves[1]))
        options: dict[str, Any] = {"create_graph": second, "allow_unused": True}
        found = torch.autograd.grad(out.square().sum(), leaves, **options)
        if found[0] is None:
            raise AssertionError("outputs do not depend on positions")
        again: Sequence[Tensor | None] = ()
        if second and found[0].requires_grad:
            again = torch.autograd.grad(found[0].square().sum(), leaves, allow_unused=True)
    names = ("outputs", "gradient by positions", "gradient by x", "second gradient", "by x")
    for name, values in zip(names, (out, *found, *again), strict=False):
        bad = [] if values is None else (~values.isfinite()).any(1).nonzero().flatten().tolist()
        if bad:
            raise AssertionError(f"{name} of rows {bad} are not finite where rows coincide")


def check_deterministic(layer: Layer, rows: Any) -> None:
    """Two calls in eval mode are the same bit for bit, and draw nothing from torch's generator."""
    layer, rows = fitted(layer, rows)
    state = torch.get_rng_state()
    first, second = evaluated(layer, rows), evaluated(layer, rows)
    same(layer, first, second, 0.0, "from one call to the next")
    if not torch.equal(state, torch.get_rng_state()):
        raise AssertionError("in eval mode the layer draws from torch's global generator")


def check_save_load(
    layer: nn.Module, build: Callable[[], nn.Module], rows: Any, *, tolerance: float = 0.0
) -> float:
    """A second instance, made by `build()`, has the outputs of the first with its state_dict.

    The state goes through `torch.save` and `torch.load(weights_only=True)`, as in a file. Let
    `build` use another seed, so that what is drawn but not saved shows.
    """
    other = build()
    load_saved_state(layer, other)
    (layer_, rows_), (other_, _) = fitted(layer, rows), fitted(other, rows)
    first, second = evaluated(layer_, rows_), evaluated(other_, rows_)
    return same(layer_, first, second, tolerance, "from a layer to one with its saved state")


def check_dtype(layer: Layer, rows: Any, *, tolerance: float = 1e-5) -> float:
    """Outputs have the dtype of `x`, and float32 ones agree with float64 ones.

    Tried: all in float64; all in float32; float64 positions and cells beside float32 features;
    float32 while torch's default dtype is float64 (which is set meanwhile, for this process).
    """
    layer, rows = fitted(layer, rows)
    double, single = rows.to(torch.float64), rows.to(torch.float32)
    first = _in_dtype(layer, double, torch.float64)
    errors: list[float] = []
    default = torch.get_default_dtype()
    for given in (single, replace(double, x=single.x), single):
        try:
            torch.set_default_dtype(torch.float64 if len(errors) == 2 else torch.float32)
            second = _in_dtype(layer, given, torch.float32)
        finally:
            torch.set_default_dtype(default)
        errors.append(same(layer, first, second, tolerance, "from float64 to float32"))
    return max(errors)


def check_autocast(
    layer: Layer, rows: Any, dtype: torch.dtype = torch.bfloat16, *, tolerance: float = 0.05
) -> float:
    """Under autocast, outputs are near those without, and all gradients are finite."""
    layer, rows = fitted(layer, rows)
    first = evaluated(layer, rows)
    leaves = {"x": rows.x.detach().clone().requires_grad_(), **trainable(layer)}
    with evaluating(layer):
        with torch.autocast(rows.x.device.type, dtype=dtype):
            out = outputs(layer, replace(rows, x=leaves["x"]))
        total = out.float().square().sum()
        gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    for name, gradient in zip(leaves, gradients, strict=True):
        if gradient is not None and not bool(gradient.isfinite().all()):
            raise AssertionError(f"the gradient of {name} is not finite under autocast to {dtype}")
    return same(layer, first, out, tolerance, f"under autocast to {dtype}")


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
    arguments = list(inputs), list(parameters), second, seed
    expected, found = _derivatives(reference, *arguments), _derivatives(fast, *arguments)
    if odd := set(expected) ^ set(found):
        raise AssertionError(f"one of fast and reference has no {', '.join(sorted(odd))}")
    errors = [agree(name, expected[name], found[name], tolerance) for name in expected]
    return max(errors, default=0.0)


def _derivatives(
    function: Callable[..., Any],
    inputs: list[Any],
    parameters: list[Tensor],
    second: bool,
    seed: int,
) -> dict[str, Tensor]:
    """Values and gradients of `function`, by the names that messages give them."""
    generator = torch.Generator().manual_seed(seed)

    def random_sum(tensors: Iterable[Tensor]) -> Tensor:
        draws = [(torch.randn(y.shape, generator=generator).to(y), y) for y in tensors]
        return torch.stack([(u * y).sum() for u, y in draws]).sum()

    leaves = {f"parameter {i}": p for i, p in enumerate(parameters)}
    for i, value in enumerate(inputs):
        if isinstance(value, Tensor) and value.is_floating_point():
            leaves[f"input {i}"] = value.detach().clone().requires_grad_()
    result = function(*(leaves.get(f"input {i}", value) for i, value in enumerate(inputs)))
    values = [result] if isinstance(result, Tensor) else list(result)
    found = {f"output {i}": y for i, y in enumerate(values)}
    total = random_sum(y for y in values if y.is_floating_point())
    for order in ("", "second ")[: 1 + second]:
        if total.requires_grad:
            options: dict[str, Any] = {"create_graph": second, "allow_unused": True}
            gradients = torch.autograd.grad(total, list(leaves.values()), **options)
            kept = {n: g for n, g in zip(leaves, gradients, strict=True) if g is not None}
            found |= {f"the {order}gradient by {name}": g for name, g in kept.items()}
            total = random_sum(kept.values()) if kept else total
    return {name: y.detach() for name, y in found.items()}


def _in_dtype(layer: Layer, rows: Rows, dtype: torch.dtype) -> Tensor:
    """Outputs of the layer with all its floats in `dtype`."""
    copy = deepcopy(layer).to(dtype) if isinstance(layer, nn.Module) else layer
    out = evaluated(copy, rows)
    if out.dtype != dtype:
        raise AssertionError(f"outputs of {dtype} rows are {out.dtype}")
    return out
