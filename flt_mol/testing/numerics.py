"""Checks of numbers: gradients, precision, repetition, devices, saved states.

See :mod:`flt_mol.testing.symmetry` for what the checks of layers raise and return.
"""

from __future__ import annotations

import unittest
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from fnmatch import fnmatch

import torch
from torch import Tensor, nn

from flt_mol.modes import evaluating
from flt_mol.testing._common import load_saved_state, seeded, trainable
from flt_mol.testing.layers import Layer, agree_at, evaluated, outputs
from flt_mol.testing.rows import Rows

INVISIBLE = 1e-10
"""A gradient smaller than this share of the largest one, in float64, is rounding."""


def check_layer_gradients(
    layer: nn.Module,
    rows: Rows,
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
    double, rows = deepcopy(layer).double(), rows.to(torch.float64)
    named = trainable(double)
    if not named:
        raise AssertionError("the layer has no trainable parameter")
    with evaluating(double):
        out = outputs(double, rows)
    if not out.requires_grad:
        raise AssertionError("the outputs do not depend on any parameter")
    direction = torch.randn(out.shape, generator=seeded(generator), dtype=torch.float32).to(out)
    found = torch.autograd.grad(out, list(named.values()), direction, allow_unused=True)
    largest = {
        name: 0.0 if g is None or not g.numel() else float(g.abs().max())
        for name, g in zip(named, found, strict=True)
    }
    finite = [value for value in largest.values() if value < float("inf")]
    threshold = INVISIBLE * max(finite, default=0.0)
    bad = []
    for name, value in largest.items():
        hidden = any(fnmatch(name, pattern) for pattern in invisible)
        if not value < float("inf"):
            bad.append(f"{name} ({value}, not finite)")
        elif (value <= threshold) != hidden:
            bad.append(f"{name} (largest entry {value:.3g}{', though invisible' * hidden})")
    if bad:
        raise AssertionError(f"parameters without a proper gradient: {', '.join(bad)}")


def check_layer_coincident(layer: Layer, rows: Rows, *, second: bool = False) -> None:
    """Rows in one place have finite outputs and gradients, by features and by positions.

    Two rows of each system are put in one place, and all rows of the largest.

    Args:
        layer: see :mod:`flt_mol.testing.layers`.
        rows: with systems of two and more.
        second: whether gradients of the gradients must be finite, as training on forces needs.
    """
    positions = rows.needed_positions().detach().clone()
    for start, size in zip(rows.ptr.tolist(), rows.sizes.tolist(), strict=False):
        stop = start + (size if size == int(rows.sizes.max()) else 2)
        if size > 1:
            positions[start:stop] = positions[start]
    leaves = [positions.requires_grad_(), rows.x.detach().clone().requires_grad_()]
    with evaluating(layer):
        out = outputs(layer, replace(rows, positions=leaves[0], x=leaves[1]))
        _finite(rows, "outputs", out)
        found = torch.autograd.grad(
            out.square().sum(), leaves, create_graph=second, allow_unused=True
        )
        if found[0] is None:
            raise AssertionError("outputs do not depend on positions")
        gradients = {"gradients": found}
        if second and found[0].requires_grad:
            again = torch.autograd.grad(found[0].square().sum(), leaves, allow_unused=True)
            gradients["gradients of forces"] = again
        for words, both in gradients.items():
            for name, gradient in zip(("positions", "x"), both, strict=True):
                if gradient is not None:
                    _finite(rows, f"{words} by {name}", gradient)


def check_layer_deterministic(layer: Layer, rows: Rows) -> None:
    """Two calls in eval mode are the same bit for bit, and draw nothing from torch's generator."""
    state = torch.get_rng_state()
    first, second = evaluated(layer, rows), evaluated(layer, rows)
    agree_at(rows, first, second, 0.0, "from one call to the next")
    if not torch.equal(state, torch.get_rng_state()):
        raise AssertionError("in eval mode the layer draws from torch's global generator")


def check_layer_save_load(
    layer: nn.Module, build: Callable[[], nn.Module], rows: Rows, *, tolerance: float = 0.0
) -> float:
    """A second instance, made by `build()`, has the outputs of the first with its state_dict.

    The state goes through `torch.save` and `torch.load(weights_only=True)`, as in a file. Let
    `build` use another seed, so that what is drawn but not saved shows.
    """
    other = build()
    load_saved_state(layer, other)
    first, second = evaluated(layer, rows), evaluated(other, rows)
    change = "from a layer to one with its saved state"
    return agree_at(rows, first, second, tolerance, change)


def check_layer_dtype(layer: Layer, rows: Rows, *, tolerance: float = 1e-5) -> float:
    """Outputs have the dtype of `x`, and float32 ones agree with float64 ones.

    Tried: all in float64; all in float32; float64 positions and cells beside float32 features;
    float32 while torch's default dtype is float64 (which is set meanwhile, for this process).
    """
    double, single = rows.to(torch.float64), rows.to(torch.float32)
    first = _in_dtype(layer, double, torch.float64)
    cases = {
        "from float64 to float32": (single, torch.float32),
        "from float64 to float32 beside float64 positions": (
            replace(double, x=single.x),
            torch.float32,
        ),
        "from float64 to float32 with float64 as torch's default": (single, torch.float64),
    }
    errors, default = [], torch.get_default_dtype()
    for change, (given, meanwhile) in cases.items():
        try:
            torch.set_default_dtype(meanwhile)
            second = _in_dtype(layer, given, torch.float32)
        finally:
            torch.set_default_dtype(default)
        errors.append(agree_at(rows, first, second.double(), tolerance, change))
    return max(errors)


def check_layer_autocast(
    layer: Layer, rows: Rows, dtype: torch.dtype = torch.bfloat16, *, tolerance: float = 0.05
) -> float:
    """Under autocast, outputs are near those without, and all gradients are finite.

    Returns:
        The error found, relative to the largest output: state it, and pass it as `tolerance`.
    """
    first = evaluated(layer, rows)
    leaves = [rows.x.detach().clone().requires_grad_(), *trainable(layer).values()]
    names = ["x", *trainable(layer)]
    with evaluating(layer):
        with torch.autocast(rows.x.device.type, dtype=dtype):
            out = outputs(layer, replace(rows, x=leaves[0]))
        gradients = torch.autograd.grad(out.float().square().sum(), leaves, allow_unused=True)
    change = f"under autocast to {dtype}"
    error = agree_at(rows, first, out.detach(), tolerance, change)
    for name, gradient in zip(names, gradients, strict=True):
        if gradient is not None and not bool(gradient.isfinite().all()):
            raise AssertionError(f"the gradient of {name} is not finite {change}")
    return error


def check_layer_device(layer: nn.Module, rows: Rows, *, tolerance: float = 1e-4) -> float:
    """Outputs on an accelerator are those on the CPU, and they stay there.

    Raises:
        unittest.SkipTest: there is only the CPU. pytest counts that as skipped.
    """
    found = torch.accelerator.current_accelerator()
    if found is None or not torch.accelerator.is_available():
        raise unittest.SkipTest("there is no device but the CPU")
    first = evaluated(layer, rows)
    second = evaluated(deepcopy(layer).to(found), rows.to(found))
    if second.device.type != found.type:
        raise AssertionError(f"outputs of rows on {found} are on {second.device}")
    return agree_at(rows, first, second.cpu(), tolerance, f"from the CPU to {found}")


def _finite(rows: Rows, name: str, values: Tensor) -> None:
    """Raise for the first row of `values` (N, …) that is not finite."""
    bad = (~values.isfinite()).flatten(1).any(dim=1).nonzero()
    if len(bad):
        where = int(bad[0])
        system = int(rows.system[where])
        raise AssertionError(
            f"{name} of {len(bad)} of {rows.num_rows} rows are not finite where rows lie in one "
            f"place, the first being row {where - int(rows.ptr[system])} of system {system}: "
            f"{values[where].detach().flatten()[:3].tolist()}"
        )


def _in_dtype(layer: Layer, rows: Rows, dtype: torch.dtype) -> Tensor:
    """Outputs of the layer with all its floats in `dtype`."""
    copy: Layer = deepcopy(layer).to(dtype) if isinstance(layer, nn.Module) else layer
    out = evaluated(copy, rows)
    if out.dtype != dtype:
        raise AssertionError(f"outputs of {dtype} rows are {out.dtype}")
    return out
