"""Checks of numbers: gradients, coincident rows, precision, saved states."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from fnmatch import fnmatch
from typing import Any

import torch
from torch import nn

from flt_mol.testing.layers import Layer, evaluated, evaluating, fitted, outputs, same, trainable
from flt_mol.testing.rows import Rows, seeded

# A gradient smaller than this share of the largest one, in float64, is rounding.
_INVISIBLE = 1e-10


def check_gradients(layer: nn.Module, rows: Any, *, invisible: Sequence[str] = ()) -> None:
    """Every trainable parameter gets a gradient: one that is finite and not zero, in float64.

    `invisible` are patterns of names (``*.key.bias``) that outputs cannot depend on: gradients of
    theirs must be zero or none. The layer is left as it is.
    """
    double, rows = fitted(deepcopy(layer).double(), rows)
    named = trainable(double)
    with evaluating(double):
        out = outputs(double, rows.to(torch.float64))
    if not named or not out.requires_grad:
        raise AssertionError("the outputs do not depend on any trainable parameter")
    direction = torch.randn(out.shape, generator=seeded(), dtype=torch.float32).to(out)
    options: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
    found = torch.autograd.grad(out, list(named.values()), direction, **options)
    sizes = [float(g.abs().max()) if g.numel() else 0.0 for g in found]
    threshold = _INVISIBLE * max((size for size in sizes if size < math.inf), default=0.0)
    bad = {}
    for name, size in zip(named, sizes, strict=True):
        hidden = any(fnmatch(name, f"*{pattern}") for pattern in invisible)
        if not size < math.inf or (size <= threshold) != hidden:
            bad[name] = size
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
        stop = start + (size if size == int(rows.sizes.max()) else min(size, 2))
        positions[start:stop] = positions[start : start + 1]
    leaves = [positions.requires_grad_(), rows.x.detach().clone().requires_grad_()]
    with evaluating(layer):
        out = outputs(layer, replace(rows, positions=leaves[0], x=leaves[1]))
        options: dict[str, Any] = {"create_graph": second, "allow_unused": True}
        found = torch.autograd.grad(out.square().sum(), leaves, **options)
        if found[0] is None:
            raise AssertionError("outputs do not depend on positions")
        if second and found[0].requires_grad:
            found += torch.autograd.grad(found[0].square().sum(), leaves, allow_unused=True)
    names = ("outputs", "gradient by positions", "gradient by x", "second gradient", "by x")
    for name, values in zip(names, (out, *found), strict=False):
        bad = [] if values is None else (~values.isfinite()).any(1).nonzero().flatten().tolist()
        if bad:
            raise AssertionError(f"{name} of rows {bad} are not finite where rows coincide")


def check_save_load(
    layer: nn.Module, build: Callable[[], nn.Module], rows: Any, *, tolerance: float = 0.0
) -> float:
    """A second instance, made by `build()`, has the outputs of the first with its state_dict.

    The state goes through `torch.save` and `torch.load(weights_only=True)`, as in a file. Let
    `build` use another seed, so that what is drawn but not saved shows; so do random outputs.
    """
    other, stream = build(), io.BytesIO()
    torch.save(layer.state_dict(), stream)
    stream.seek(0)
    wrong = other.load_state_dict(torch.load(stream, weights_only=True), strict=False)
    if any(wrong):
        raise AssertionError(f"the state_dict does not fit a second instance: {wrong}")
    (layer_, rows_), (other_, _) = fitted(layer, rows), fitted(other, rows)
    first, second = evaluated(layer_, rows_), evaluated(other_, rows_)
    return same(layer_, first, second, tolerance, "from a layer to one with its saved state")


def check_dtype(layer: Layer, rows: Any, *, tolerance: float = 1e-5) -> float:
    """Outputs have the dtype of `x`, and float32 ones agree with float64 ones.

    Tried: all in float64; all in float32; float64 positions and cells beside float32 features.
    """
    layer, rows = fitted(layer, rows)
    double, single = rows.to(torch.float64), rows.to(torch.float32)
    outs = []
    for given in (double, single, replace(double, x=single.x)):
        dtype = given.x.dtype
        copy = deepcopy(layer).to(dtype) if isinstance(layer, nn.Module) else layer
        outs.append(evaluated(copy, given))
        if outs[-1].dtype != dtype:
            raise AssertionError(f"outputs of {dtype} rows are {outs[-1].dtype}")
    change = "from float64 to float32"
    return max(same(layer, outs[0], second, tolerance, change) for second in outs[1:])


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
