"""Each check passes on a sound layer, and fails on one broken in just that respect."""

import math
import unittest

import pytest
import torch
from testing.sound_layers import Attention, Broken, Periodic, draw, seeded
from torch import nn

from flt_mol.testing import (
    PackedLayer,
    Rows,
    check_layer_autocast,
    check_layer_coincident,
    check_layer_deterministic,
    check_layer_device,
    check_layer_dtype,
    check_layer_gradients,
    check_layer_save_load,
    check_matches,
)

F64 = torch.float64


def test_gradients():
    layer = Attention()
    check_layer_gradients(layer, draw())
    assert all(p.grad is None for p in layer.parameters())
    assert next(layer.parameters()).dtype == torch.float32


def test_dead_parameters_fail():
    layer, rows = Attention(), draw()
    layer.dead = nn.Parameter(torch.zeros(2))
    with pytest.raises(AssertionError, match=r"gradient: dead \(largest entry 0\)"):
        check_layer_gradients(layer, rows)
    check_layer_gradients(layer, rows, invisible=["dea*"])
    layer.dead.requires_grad_(False)
    check_layer_gradients(layer, rows)
    with pytest.raises(AssertionError, match=r"slope \(largest entry .*, though invisible\)"):
        check_layer_gradients(layer, rows, invisible=["slope"])

    class Cancelling(nn.Module):
        """A bias of keys shifts all logits of a query alike: its gradient is rounding."""

        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.ones(4))
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, rows):
            return (rows.x @ (rows.x + self.bias).T).softmax(-1) @ rows.x * self.weight

    with pytest.raises(AssertionError, match="bias"):
        check_layer_gradients(Cancelling(), rows)
    check_layer_gradients(Cancelling(), rows, invisible=["bias"])


def test_gradients_that_are_not_finite_fail():
    def root(rows, out):
        return out + (out - out).abs().sqrt()

    with pytest.raises(AssertionError, match=r"layer.slope \(nan, not finite\)"):
        check_layer_gradients(Broken(root), draw())
    with pytest.raises(AssertionError, match="do not depend on any"):
        check_layer_gradients(Broken(lambda rows, out: out.detach()), draw())
    with pytest.raises(AssertionError, match="no trainable parameter"):
        check_layer_gradients(nn.Identity(), draw())


def distances(norm):
    def layer(rows):
        vectors = rows.positions[:, None] - rows.positions
        return norm(vectors) @ rows.x

    return layer


@pytest.mark.parametrize("second", [False, True])
def test_coincident(second):
    rows = draw()
    check_layer_coincident(Attention(), rows, second=second)
    check_layer_coincident(Periodic(), draw(periodic=True), second=second)
    safe = distances(lambda v: (v.square().sum(-1) + 1e-6).sqrt())
    check_layer_coincident(safe, rows, second=second)
    for order in (0.5, 0.25):
        with pytest.raises(AssertionError, match=r"gradients by positions of .* of system 0: \["):
            check_layer_coincident(
                distances(lambda v, order=order: v.square().sum(-1) ** order), rows, second=second
            )
    with pytest.raises(AssertionError, match=r"outputs of 13 of 13 rows are not finite"):
        check_layer_coincident(distances(lambda v: 1 / v.square().sum(-1)), rows, second=second)
    with pytest.raises(AssertionError, match="outputs do not depend on positions"):
        check_layer_coincident(lambda r: r.x.sin(), rows)


def test_coincident_gradients_of_forces():
    norm = distances(lambda v: v.norm(dim=-1))  # torch's own has a zero slope at zero
    check_layer_coincident(norm, draw())
    with pytest.raises(AssertionError, match="gradients of forces by positions"):
        check_layer_coincident(norm, draw(), second=True)


def test_coincident_touches_every_system():
    """Only two rows of a system that is not the largest lie in one place."""
    seen = []

    def layer(rows):
        seen.append(rows.positions.detach())
        return rows.x + rows.positions[:, :1]

    check_layer_coincident(layer, draw((1, 4, 0, 6)))
    (r,) = seen
    assert torch.equal(r[1], r[2])
    assert not torch.equal(r[2], r[3])
    assert not torch.equal(r[0], r[1])
    assert torch.equal(r[5:], r[5].expand(6, 3))


def test_deterministic():
    check_layer_deterministic(Attention().train(), draw())
    calls = []

    def counting(rows, out):
        calls.append(1)
        return out + 1e-6 * len(calls)

    def drawing(rows, out):
        torch.rand(())
        return out

    with pytest.raises(AssertionError, match="from one call to the next"):
        check_layer_deterministic(Broken(counting), draw())
    with pytest.raises(AssertionError, match="global generator"):
        check_layer_deterministic(Broken(drawing), draw())


def test_save_load():
    rows = draw()
    assert check_layer_save_load(Attention(0), lambda: Attention(1), rows) == 0

    class Unsaved(Attention):
        def __init__(self, seed):
            super().__init__(seed)
            draw = self.draw
            del self.draw
            self.register_buffer("draw", draw, persistent=False)

    with pytest.raises(AssertionError, match="to one with its saved state"):
        check_layer_save_load(Unsaved(0), lambda: Unsaved(1), rows)
    with pytest.raises(AssertionError, match="unexpected"):
        check_layer_save_load(Attention(), lambda: nn.Linear(1, 1), rows)


def test_dtype():
    assert 0 < check_layer_dtype(Attention(), draw()) < 1e-5
    assert check_layer_dtype(lambda rows: rows.x, draw()) < 1e-7
    assert torch.get_default_dtype() == torch.float32


def always_single(rows, out):
    return out.float()


def promoted(rows, out):
    return out + 0 * rows.positions[:, :1]


def default(rows, out):
    return out + 1e-9 * torch.tensor([1.0] * out.shape[1])


def coarse(rows, out):
    return (out * 1000).round() / 1000 if out.dtype == torch.float32 else out


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (always_single, "outputs of torch.float64 rows are torch.float32"),
        (promoted, "outputs of torch.float32 rows are torch.float64"),
        (default, "outputs of torch.float32 rows are torch.float64"),
        (coarse, "from float64 to float32"),
    ],
)
def test_dtype_fails(fault, words):
    with pytest.raises(AssertionError, match=words):
        check_layer_dtype(Broken(fault), draw())
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    layer = Attention()
    error = check_layer_autocast(layer, draw(), dtype)
    assert 1e-5 < error < 0.05
    assert check_layer_autocast(layer, draw(), dtype, tolerance=error) == error
    with pytest.raises(AssertionError, match=f"under autocast to {dtype}"):
        check_layer_autocast(layer, draw(), dtype, tolerance=0.9 * error)
    assert all(p.grad is None for p in layer.parameters())


def test_autocast_that_overflows_fails():
    def large(rows, out):
        return (out @ (1e4 * torch.eye(4)) @ (1e4 * torch.eye(4))).float() / 1e8

    check_layer_autocast(Broken(large), draw(), torch.bfloat16)
    with pytest.raises(AssertionError, match="inf"):
        check_layer_autocast(Broken(large), draw(), torch.float16)

    def slope(rows, out):
        tiny = (out.sum() * 0 + 1e-30).to(out.dtype)
        return out + tiny.sqrt() * (out.dtype != torch.float32)

    check_layer_autocast(Broken(slope), draw(), torch.bfloat16)
    with pytest.raises(AssertionError, match="gradient of .* is not finite under autocast"):
        check_layer_autocast(Broken(slope), draw(), torch.float16)


def test_device(monkeypatch):
    if not torch.accelerator.is_available():
        with pytest.raises(unittest.SkipTest, match="no device but the CPU"):
            check_layer_device(Attention(), draw())
    # The CPU in the role of the accelerator: a layer that another device makes differ.
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *args: torch.device("cpu"))
    assert check_layer_device(Attention(), draw()) == 0
    calls = []

    def second_call(rows, out):
        calls.append(1)
        return out + 1e-3 * (len(calls) > 1)

    with pytest.raises(AssertionError, match="from the CPU to cpu"):
        check_layer_device(Broken(second_call), draw())


def test_outputs_must_stay_on_the_device(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    monkeypatch.setattr(Rows, "to", lambda rows, device: rows)
    with pytest.raises(AssertionError, match="of rows on meta are on cpu"):
        check_layer_device(PackedLayer(lambda x, positions, *, ptr: x), draw())


def matching(x, y, n):
    return x.sin() * y, x.sum() ** n


def inputs(dtype=F64):
    generator = seeded(0)
    return [*torch.randn(2, 3, 4, generator=generator, dtype=dtype), 3]


@pytest.mark.parametrize("second", [False, True])
def test_matches(second):
    given = inputs()
    error = check_matches(
        lambda x, y, n: (x.sin() * y, x.sum() * x.sum() * x.sum()), matching, given, second=second
    )
    assert 0 <= error < 1e-14
    assert not given[0].requires_grad


class WrongSlope(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        context.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(context, gradient):
        (x,) = context.saved_tensors
        return 1.001 * gradient * x.cos()


class WrongCurvature(WrongSlope):
    @staticmethod
    def backward(context, gradient):
        (x,) = context.saved_tensors
        return gradient * x.detach().cos()


@pytest.mark.parametrize(
    ("fast", "words"),
    [
        (lambda x, y, n: (x.sin() * y * 1.001, x.sum() ** n), r"output 0: entry \(\d, \d\)"),
        (lambda x, y, n: (x.sin() * y, x.sum() ** n + 1e-3), r"output 1: entry \(\)"),
        (lambda x, y, n: (x.sin() * y)[None], "no output 1"),
        (lambda x, y, n: ((x.sin() * y)[None], x.sum() ** n), r"shape \(3, 4\) → \(1, 3, 4\)"),
        (lambda x, y, n: (WrongSlope.apply(x) * y, x.sum() ** n), "the gradient by input 0"),
        (lambda x, y, n: (x.sin() * y.detach(), x.sum() ** n), "no the gradient by input 1"),
        (lambda x, y, n: (x.sin() * y / 0 * 0, x.sum() ** n), "nan"),
    ],
)
def test_what_does_not_match_fails(fast, words):
    with pytest.raises(AssertionError, match=words):
        check_matches(fast, matching, inputs())


def test_second_derivatives_and_parameters():
    weight = nn.Parameter(torch.ones((), dtype=F64))

    def fast(x, y, n):
        return WrongCurvature.apply(x) * y * weight, x.sum() ** n

    def slow(x, y, n):
        return x.sin() * y * weight, x.sum() ** n

    check_matches(fast, slow, inputs(), parameters=[weight])
    with pytest.raises(AssertionError, match="the second gradient by input 0"):
        check_matches(fast, slow, inputs(), parameters=[weight], second=True)
    with pytest.raises(AssertionError, match="the gradient by parameter 0"):
        check_matches(
            lambda x, y, n: (x.sin() * y * weight**2, x.sum() ** n),
            slow,
            inputs(),
            parameters=[weight],
        )
    assert weight.grad is None


class Turned(torch.autograd.Function):
    """x, with gradients in reverse order: of a plain sum they would look right."""

    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient.flip(0)


def test_gradients_of_each_output_are_told_apart():
    with pytest.raises(AssertionError, match="the gradient by input 0"):
        check_matches(Turned.apply, torch.clone, inputs()[:1])


def test_nan_in_both_does_not_match():
    with pytest.raises(AssertionError, match="nan → nan"):
        check_matches(lambda x: x * torch.nan, lambda x: x * torch.nan, inputs()[:1])


def test_single_precision_at_its_own_tolerance():
    def fast(x):
        return (x.exp() + 1).log()

    x = [inputs(torch.float32)[0]]
    assert 0 < check_matches(fast, nn.functional.softplus, x, 1e-5) < 1e-6
    with pytest.raises(AssertionError, match="relative error"):
        check_matches(fast, nn.functional.softplus, x)


def test_functions_are_layers_too():
    layer = PackedLayer(lambda x, r, *, ptr: x * r[:, :1].cos().to(x.dtype))
    check_layer_deterministic(layer, draw())
    assert math.isfinite(check_layer_dtype(layer, draw(), tolerance=1e-4))
