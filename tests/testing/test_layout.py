"""Each check passes on a sound layer, and fails on one broken in just that respect."""

import copy
from dataclasses import replace

import pytest
import torch
from testing.sound_layers import Attention, Broken, Padded, Periodic, draw, packed, per_system
from torch import nn

from flt_mol.testing import (
    PackedLayer,
    PaddedLayer,
    check_layer_alone,
    check_layer_causality,
    check_layer_padded_equals_packed,
    check_layer_padding,
    check_layer_streaming,
)


@pytest.mark.parametrize("settings", [{}, {"dim": None}, {"dim": 1}, {"sizes": (0, 3)}])
def test_sound_layers_pass_alone(settings):
    layer = Attention().train()
    check_layer_alone(layer, draw(**settings))
    assert layer.training


@pytest.mark.parametrize("periodic", [True, (False, False, True)])
def test_sound_periodic_layer_passes_alone(periodic):
    check_layer_alone(Periodic(), draw((2, 0, 3), periodic=periodic), larger=5)


def largest(x):
    return x.abs().max() if len(x) else 0


def maximum_of_batch(rows, out):
    return out - 1e-3 * largest(rows.x)


def cancelling_maximum(rows, out):
    """A stabiliser over the batch cancels in exact numbers, and underflows beside large ones."""
    factor = (rows.x[:, :1] - 8 * largest(rows.x)).exp()
    return out * (factor / factor)


def zero_times_all(rows, out):
    return out + 0 * rows.x.sum()


def batch_size(rows, out):
    return out / len(rows)


def mean_of_batch(rows, out):
    return out + 1e-3 * rows.positions.mean()


def only_large_partners(rows, out):
    return out + 0.1 * (rows.num_rows > 300)


def only_wide_partners(rows, out):
    wide = bool(len(out)) and rows.positions[:, 0].max() - rows.positions[:, 0].min() > 100
    return out + 0.1 * wide


def only_loud_partners(rows, out):
    return out + 0.1 * (largest(rows.x) > 50)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (maximum_of_batch, "from a system alone to all in one batch"),
        (batch_size, "from a system alone to all in one batch"),
        (mean_of_batch, "from a system alone to all in one batch"),
        (only_large_partners, "beside 350 rows of 1 times the size"),
        (only_loud_partners, "beside 350 rows of 50 times the size"),
        (cancelling_maximum, "beside 350 rows of 50 times the size"),
        (zero_times_all, "beside 350 rows of nan times the size"),
    ],
)
def test_layers_that_see_their_batch_fail(fault, words):
    with pytest.raises(AssertionError, match=words):
        check_layer_alone(Broken(fault), draw())


@pytest.mark.parametrize("dim", [1, 3])
def test_partners_lie_in_space(dim):
    with pytest.raises(AssertionError, match="beside 350 rows of 1 times the size"):
        check_layer_alone(Broken(only_wide_partners), draw(dim=dim))


def test_empty_systems_must_have_empty_outputs():
    with pytest.raises(AssertionError, match="for 0 rows"):
        check_layer_alone(lambda rows: rows.x if len(rows.x) else torch.zeros(1, 4), draw())


class Reading(Padded):
    """Keys of padding are not masked."""

    def forward(self, x, positions, *, mask):
        out = (x @ self.weight @ x.transpose(1, 2)).softmax(-1) @ x
        return torch.where(mask[..., None], out, 0)


class Soft(Padded):
    """Keys of padding have the weight e^-30, which 1e6 outshines."""

    def forward(self, x, positions, *, mask):
        logits = super().logits(torch.where(mask[..., None], x, 0), None, mask).clamp(min=-30)
        return torch.where(mask[..., None], logits.softmax(-1) @ x, 0)


class Times(Padded):
    """0 · NaN is NaN."""

    def forward(self, x, positions, *, mask):
        x = x * mask[..., None]
        logits = self.logits(x, None, mask)
        return torch.where(mask[..., None], logits.softmax(-1) @ x, 0)


class Slopes(Padded):
    """Values of padding are chosen away too late for its gradients."""

    def forward(self, x, positions, *, mask):
        out = super().forward(x, positions, mask=mask)
        return torch.where(mask[..., None], out + (x @ self.weight).abs().sqrt(), 0)


class PositionsToo(Padded):
    """Positions of padding move the mean."""

    def forward(self, x, positions, *, mask):
        out = super().forward(x, positions, mask=mask)
        return out + torch.where(mask[..., None], 1e-9 * positions.mean(dim=1)[:, None, :1], 0)


class Nonzero(Padded):
    """A bias at padding."""

    def forward(self, x, positions, *, mask):
        return super().forward(x, positions, mask=mask) + 0.5


class Behind(Padded):
    """Takes all padding to lie behind."""

    def forward(self, x, positions, *, mask):
        sizes = mask.sum(dim=1, keepdim=True)
        first = torch.arange(mask.shape[1]) < sizes
        x = torch.where(first[..., None], x, 0)
        return torch.where(mask[..., None], x.cumsum(1) @ self.weight, 0)


@pytest.mark.parametrize("dim", [3, 1, None])
def test_sound_padded_layer_passes(dim):
    layer = PaddedLayer(Padded(), filler=3.0)
    rows = draw(dim=dim)
    check_layer_padding(layer, rows)
    assert (layer.filler, layer.before, layer.extra) == (3.0, False, 0)
    assert all(p.grad is None for p in layer.parameters())


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Reading, "outputs, where padding behind the rows holds 1e.06 instead of 0"),
        (Soft, "outputs, where padding behind the rows holds 1e.06"),
        (Times, "outputs, where padding behind the rows holds nan"),
        (Slopes, r"gradient of module.weight"),
        (PositionsToo, "outputs, where padding behind the rows holds 1e.06"),
        (Nonzero, "outputs at padding are not zero where it holds 0: the largest is 0.5"),
        (Behind, "where padding before the rows holds"),
    ],
)
def test_padding_that_shows_fails(module, words):
    layer = PaddedLayer(module(), filler=3.0)
    with pytest.raises(AssertionError, match=words):
        check_layer_padding(layer, draw())
    assert (layer.filler, layer.before, layer.extra) == (3.0, False, 0)


def test_padding_may_be_left_to_be_anything():
    check_layer_padding(PaddedLayer(Nonzero()), draw(), zeros=False)


def test_nan_in_gradients_of_features():
    class Roots(Padded):
        def forward(self, x, positions, *, mask):
            root = torch.where(mask[..., None], x, 0).square().sum(-1, keepdim=True).sqrt()
            return super().forward(x, positions, mask=mask) * root

    with pytest.raises(AssertionError, match=r"gradient of (x|module.weight)"):
        check_layer_padding(PaddedLayer(Roots()), replace(draw(), x=draw().x * 0))


def test_padded_against_packed():
    padded = Padded()

    def same(rows):
        logits = PackedLayer(padded, lambda m, r: m(r.x[None], r.positions[None], mask=ones(r))[0])
        return torch.cat([logits(part) for part in rows])

    def ones(rows):
        return torch.ones(1, rows.num_rows, dtype=torch.bool)

    layer, rows = PaddedLayer(padded), draw()
    assert check_layer_padded_equals_packed(layer, packed(same), rows) < 1e-6
    assert layer.padded_output(rows).shape == (4, 7, 4)
    with pytest.raises(AssertionError, match="from packed to padded"):
        check_layer_padded_equals_packed(layer, Broken(lambda r, y: 1.001 * y, packed(same)), rows)


def test_wrong_shape_of_padded_outputs():
    layer = PaddedLayer(lambda x, positions, *, mask: x[:, 1:])
    with pytest.raises(AssertionError, match=r"shape \(4, 6, 4\) for a mask of \(4, 7\)"):
        layer(draw())


def later_leak(rows, out):
    return out + 1e-3 * per_system(lambda x: x.flip(0).cumsum(0).flip(0), rows, rows.x)


def mean_of_positions(rows, out):
    return out + 1e-3 * per_system(lambda r: r[:, :1] - r[:, :1].mean(dim=0), rows, rows.positions)


def length(rows, out):
    return out / rows.sizes[rows.system, None]


def quiet_leak(rows, out):
    """A constant value with a gradient: 0 · x later."""
    step = torch.heaviside(rows.x, torch.tensor(0.5)).detach() + rows.x - rows.x.detach()
    later = per_system(lambda y: (y - y.detach()).flip(0).cumsum(0).flip(0), rows, step)
    return out + later


def stabiliser(rows, out):
    """exp(x − max of the system) over itself: 0/0 once a later row is 50 times as large."""
    factor = per_system(lambda x: (x - 20 * largest(x)).exp(), rows, rows.x)
    return out * (factor / factor)


@pytest.mark.parametrize("dim", [3, 1, None])
def test_causal_layer_passes(dim):
    check_layer_causality(Attention(causal=True), draw(dim=dim), tolerance=1e-6)
    check_layer_causality(Attention(causal=True), draw((0, 1, 2, 30), dim=dim), tolerance=1e-6)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (later_leak, "67% of each system were 50 times as large"),
        (mean_of_positions, "67% of each system were 50 times as large"),
        (stabiliser, "67% of each system were 50 times as large"),
        (length, "67% of each system were left out"),
        (quiet_leak, r"gradient of .* by the features of row \d of system \d"),
    ],
)
def test_leaks_from_later_rows_fail(fault, words):
    with pytest.raises(AssertionError, match=words):
        check_layer_causality(Broken(fault, Attention(causal=True)), draw())


def test_bidirectional_attention_is_not_causal():
    with pytest.raises(AssertionError, match="50 times as large"):
        check_layer_causality(Attention(), draw())


class CumulativeMean(nn.Module):
    def forward(self, rows):
        count = torch.arange(rows.num_rows) - rows.ptr[rows.system] + 1
        return per_system(lambda x: x.cumsum(0), rows, rows.x) / count[:, None]


def mean_so_far(rows, state):
    total, count = state or (torch.zeros_like(rows.x[:1]), 0)
    sums = total + rows.x.cumsum(0)
    counts = count + torch.arange(1, rows.num_rows + 1)
    return sums / counts[:, None], (sums[-1:], int(counts[-1]))


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
def test_streaming(chunk):
    check_layer_streaming(CumulativeMean(), mean_so_far, draw(), chunk=chunk)


def test_streaming_that_forgets_or_remembers_too_much_fails():
    def forgets(rows, state):
        return mean_so_far(rows, None)

    memory = []

    def remembers(rows, state):
        out, state = mean_so_far(rows, memory[-1] if memory else None)
        memory.append(state)
        return out, state

    words = "steps of 1 with carried state; most, those of row . of system 2"
    for step in (forgets, remembers):
        with pytest.raises(AssertionError, match=words):
            check_layer_streaming(CumulativeMean(), step, draw((2, 0, 7)))
    check_layer_streaming(CumulativeMean(), forgets, draw((2, 0, 7)), chunk=7)


def test_layers_can_be_copied():
    layer = PaddedLayer(Padded())
    torch.testing.assert_close(copy.deepcopy(layer)(draw()), layer(draw()))
