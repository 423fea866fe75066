"""Blocks where no gradient is asked for: the same numbers, and nothing of what modules promise."""

import pytest
import torch
from torch import nn

from flt_mol.functional import _feature_groups
from flt_mol.functional import forward_only as rows_only
from flt_mol.nn import (
    FLTAttention,
    FLTBlock,
    FLTEncoder,
    FourierRPE,
    GaussianFrequencies,
    GaussianSpectrum,
    forward_only,
)

SYSTEMS = {"one": [0, 23], "several": [0, 1, 1, 6, 8, 23], "empty": [0, 0]}


def _rpe(heads, **settings):
    return FourierRPE(GaussianSpectrum(heads, 4), GaussianFrequencies(5), **settings)


def _block(heads=3, features=4, rpe=False, ffn_dim=20, dropout=0.0, **settings):
    torch.manual_seed(0)
    width = 10 if rpe else 0
    attention = FLTAttention(
        12, heads, num_features=features, position_dim=width, dropout=dropout, **settings
    )
    block = FLTBlock(attention, ffn_dim, dropout).double().eval()
    for parameter in block.parameters():  # biases and gains that are not 0 and 1
        nn.init.normal_(parameter, std=0.5)
    return block


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Systems of these tests are too small for the quick form to be quick."""
    monkeypatch.setattr(rows_only, "LEAST", 1)


@pytest.fixture
def calls(monkeypatch):
    """Which of the quick forms were taken."""
    taken = []
    for name in ("_add_short", "_add_long", "_add_folded", "add_feed_forward"):
        original = getattr(forward_only, name)

        def spy(*given, _name=name, _original=original):
            taken.append(_name)
            return _original(*given)

        monkeypatch.setattr(forward_only, name, spy)
    return taken


def _both(block, x, ptr, features=None):
    expected = block(x, ptr, features).detach()
    with torch.no_grad():
        return block(x, ptr, features), expected


@pytest.mark.parametrize("systems", SYSTEMS)
@pytest.mark.parametrize("rpe", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_blocks_equal_their_differentiable_form(systems, rpe, bias, calls):
    block = _block(rpe=rpe, bias=bias)
    ptr = torch.tensor(SYSTEMS[systems])
    x = torch.randn(int(ptr[-1]), 12, dtype=torch.float64)
    features = None
    if rpe:
        positions = 4 * torch.rand(len(x), 3, dtype=torch.float64)
        with torch.no_grad():
            features = _rpe(3).double()(positions, ptr)
    copy = x.clone()
    found, expected = _both(block, x, ptr, features)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(x, copy)
    assert bool({"_add_short", "_add_folded"} & set(calls)) == (len(x) > 0)


@pytest.mark.parametrize(
    ("heads", "features", "form"), [(3, 4, "_add_folded"), (3, 9, "_add_long")]
)
@pytest.mark.parametrize("rpe", [False, True])
def test_long_systems_equal_their_differentiable_form(
    heads, features, form, rpe, calls, monkeypatch
):
    monkeypatch.setattr(rows_only, "CHUNK", 7)
    monkeypatch.setattr(_feature_groups, "NUMBERS", 3 * heads * features)
    block = _block(heads, features, rpe)
    ptr = torch.tensor([0, 3, 5, 50, 52])
    x = 3 * torch.randn(52, 12, dtype=torch.float64)
    at = None
    if rpe:
        with torch.no_grad():
            at = _rpe(heads).double()(4 * torch.rand(52, 3, dtype=torch.float64), ptr)
    found, expected = _both(block, x, ptr, at)
    assert {form, "_add_short"} <= set(calls)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_feed_forward_in_chunks(monkeypatch):
    monkeypatch.setattr(forward_only, "FFN_BYTES", 1)  # 128 rows at a time, the least
    block = _block(ffn_dim=24)
    x = torch.randn(300, 12, dtype=torch.float64)
    found, expected = _both(block, x, torch.tensor([0, 300]))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_auto_is_quick_for_systems_that_are_all_linear(calls):
    block = _block(mode="auto", exact_below=4)
    x = torch.randn(9, 12, dtype=torch.float64)
    _both(block, x, torch.tensor([0, 4, 9]))
    assert "_add_short" in calls
    calls.clear()
    found, expected = _both(block, x, torch.tensor([0, 3, 9]))
    assert calls == ["add_feed_forward"]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_encoder_with_an_rpe_and_padding(calls):
    block = _block(rpe=True)
    encoder = FLTEncoder([block], _rpe(3).double(), recycles=2).eval()
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    positions = torch.rand(2, 5, 3, dtype=torch.float64)
    mask = torch.tensor([[True] * 5, [True] * 2 + [False] * 3])
    expected = encoder(x, positions, mask=mask).detach()
    assert not calls
    with torch.no_grad():
        found = encoder(x, positions, mask=mask)
    assert calls.count("_add_short") == 2
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_hooks_are_called(calls):
    block, seen = _block(), []
    handle = block.attention.value.register_forward_hook(lambda *_: seen.append("value"))
    block.ffn[1].register_forward_pre_hook(lambda *_: seen.append("gelu"))
    x, ptr = torch.randn(4, 12, dtype=torch.float64), torch.tensor([0, 4])
    with torch.no_grad():
        block(x, ptr)
    assert (seen, calls) == (["value", "gelu"], [])
    handle.remove()
    with torch.no_grad():
        block(x, ptr)
    assert calls == ["_add_short"]


def test_replaced_and_parametrised_layers_are_called():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    x, ptr = torch.randn(6, 12, dtype=torch.float64), torch.tensor([0, 6])
    for change in ("subclass", "parametrise", "ffn"):
        block = _block()
        if change == "subclass":
            block.attention.out.__class__ = Doubled
        elif change == "parametrise":
            nn.utils.parametrizations.weight_norm(block.attention.query)
        else:
            block.ffn[1] = nn.SiLU()
        found, expected = _both(block, x, ptr)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_training_mode_drops_out():
    block = _block(dropout=0.5).train()
    x, ptr = torch.randn(6, 12, dtype=torch.float64), torch.tensor([0, 6])
    with torch.no_grad():
        torch.manual_seed(0)
        first = block(x, ptr)
        assert not torch.equal(first, block(x, ptr))


def test_gradients_are_untouched():
    block = _block()
    x = torch.randn(5, 12, dtype=torch.float64, requires_grad=True)
    block(x, torch.tensor([0, 5])).sum().backward()
    assert x.grad is not None
    assert all(p.grad is not None for p in block.parameters())


def test_autocast_keeps_its_dtype(calls):
    block = _block().float()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        block(torch.randn(5, 12), torch.tensor([0, 5]))
    assert not calls


def test_wrong_offsets_and_positions_are_refused():
    block = _block(rpe=True)
    x = torch.randn(5, 12, dtype=torch.float64)
    with torch.no_grad():
        with pytest.raises(ValueError, match="position_features are missing"):
            block(x, torch.tensor([0, 5]))
        with pytest.raises(ValueError, match="ptr"):
            _block()(x, torch.tensor([0, 4]))


def test_many_small_systems_go_together(calls, monkeypatch):
    block = _block()  # 3 heads of 4 features: 12 numbers a row
    x, ptr = torch.randn(20, 12, dtype=torch.float64), torch.arange(0, 21, 5)
    monkeypatch.setattr(rows_only, "LEAST", 60)
    with torch.no_grad():
        quick = block(x, ptr)
        assert calls.count("_add_short") == 1
        monkeypatch.setattr(rows_only, "LEAST", 61)
        torch.testing.assert_close(block(x, ptr), quick, rtol=1e-12, atol=1e-12)
    assert calls == ["_add_short", "add_feed_forward", "add_feed_forward"]
