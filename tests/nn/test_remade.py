"""Activations that are made again: the same numbers, less memory, nothing run twice in sight."""

import pytest
import torch
from torch import nn

from flt_mol.nn._remade import after_activation


def _layers(dtype=torch.float64):
    torch.manual_seed(0)
    x = torch.randn(6, 4, dtype=dtype, requires_grad=True)
    return nn.Linear(4, 8, dtype=dtype), nn.GELU(), nn.Linear(8, 3, dtype=dtype), x


def test_values_and_derivatives_of_any_order():
    first, activation, last, x = _layers()
    wanted = [x, *first.parameters(), *last.parameters()]
    results = []
    for form in (after_activation, lambda h, a, b: b(a(h))):
        out = form(first(x), activation, last)
        found = torch.autograd.grad(out.sin().sum(), wanted, create_graph=True)
        second = torch.autograd.grad(found[0].square().sum(), wanted, allow_unused=True)
        results.append([out, *found, *(s for s in second if s is not None)])
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def test_the_activation_is_not_kept():
    first, activation, last, x = _layers()
    hidden = first(x)
    kept = set()

    def note(saved):
        kept.add(saved.untyped_storage().data_ptr())
        return saved

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        plain = last(activation(hidden))
    without = len(kept - {p.untyped_storage().data_ptr() for p in last.parameters()})
    assert without == 2  # hidden and its activation
    out = after_activation(hidden, activation, last)
    assert torch.equal(out, plain)
    # What a checkpoint keeps is out of reach of hooks around it; that it is made again is not.
    assert _made(hidden, activation, last) == ["forward", "backward"]


def _made(hidden, activation, last):
    """When the activation is made, by a module that notes its calls."""
    calls = []

    class Noting(nn.GELU):
        def forward(self, x):
            calls.append("forward" if not calls else "backward")
            return super().forward(x)

    after_activation(hidden, Noting(), last).sum().backward(retain_graph=True)
    return calls


@pytest.mark.parametrize("watched", [1, 2])
def test_hooks_see_one_call(watched):
    layers = _layers()
    first, activation, last, x = layers
    calls = []
    layers[watched].register_forward_hook(lambda *_: calls.append(1))
    after_activation(first(x), activation, last).sum().backward()
    assert calls == [1]


def test_without_gradients_it_is_the_plain_call():
    first, activation, last, x = _layers()
    with torch.no_grad():
        expected = last(activation(first(x)))
        assert torch.equal(after_activation(first(x), activation, last), expected)
