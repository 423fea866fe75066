"""In the place of torch.nn.MultiheadAttention: the same numbers in exact mode, in every layout."""

import pytest
import torch
from torch import nn

from flt_mol.nn import FLTMultiheadAttention

C, H, B, L, S = 16, 4, 3, 7, 5


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def pair(batch_first=True, mode="exact", **settings):
    torch.manual_seed(0)
    causal = settings.pop("causal", False)
    theirs = nn.MultiheadAttention(C, H, batch_first=batch_first, **settings).eval()
    with torch.no_grad():
        for p in theirs.parameters():
            p.normal_(std=0.3)
    ours = FLTMultiheadAttention.from_torch(theirs, mode=mode, causal=causal)
    return theirs, ours


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kdim", [None, 6])
def test_the_same_numbers_as_torchs_module(batch_first, bias, kdim):
    theirs, ours = pair(batch_first, bias=bias, kdim=kdim, vdim=kdim)
    query, key = draw(B, L, C), draw(B, S, kdim or C, seed=1)
    value = draw(B, S, kdim or C, seed=2)
    mask = torch.zeros(B, S, dtype=torch.bool)
    mask[0, 3:], mask[2, 0] = True, True
    if not batch_first:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    for k, v in ((key, key), (key, value)):
        for padding in (None, mask):
            for average in (True, False):
                given = {"key_padding_mask": padding, "average_attn_weights": average}
                expected = theirs(query, k, v, need_weights=True, **given)
                out = ours(query, k, v, need_weights=True, **given)
                torch.testing.assert_close(out[0], expected[0], rtol=0, atol=2e-6)
                torch.testing.assert_close(out[1], expected[1], rtol=0, atol=2e-6)


def test_self_attention_with_padding_and_queries_of_their_own_values():
    theirs, ours = pair()
    x, value = draw(B, L, C), draw(B, L, C, seed=1)
    mask = torch.zeros(B, L, dtype=torch.bool)
    mask[0, 5:], mask[1, 0] = True, True
    for v in (x, value):
        expected, weights = theirs(x, x, v, key_padding_mask=mask)
        out, ours_weights = ours(x, x, v, key_padding_mask=mask, need_weights=True)
        torch.testing.assert_close(out[~mask], expected[~mask], rtol=0, atol=2e-6)
        torch.testing.assert_close(ours_weights[~mask], weights[~mask], rtol=0, atol=2e-6)
        assert not out[mask].any()
    floats = torch.zeros(B, L).masked_fill(mask, float("-inf"))
    assert torch.equal(ours(x, x, v, key_padding_mask=floats)[0], out)


def test_without_a_batch():
    theirs, ours = pair()
    x, key = draw(L, C), draw(S, C, seed=1)
    for k in (x, key):
        expected = theirs(x, k, k)
        out = ours(x, k, k, need_weights=True)
        torch.testing.assert_close(out[0], expected[0], rtol=0, atol=2e-6)
        torch.testing.assert_close(out[1], expected[1], rtol=0, atol=2e-6)
    assert ours(x)[1] is None


@pytest.mark.parametrize("boolean", [True, False])
def test_the_causal_mask(boolean):
    theirs, ours = pair(causal=True)
    x = draw(B, L, C)
    mask = torch.ones(L, L, dtype=torch.bool).triu(1)
    if not boolean:
        mask = nn.Transformer.generate_square_subsequent_mask(L)
    expected = theirs(x, x, x, attn_mask=mask)[0]
    torch.testing.assert_close(ours(x, x, x, attn_mask=mask)[0], expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(
        ours(x, x, x, attn_mask=mask, is_causal=True)[0], expected, rtol=0, atol=2e-6
    )
    torch.testing.assert_close(ours(x)[0], expected, rtol=0, atol=2e-6)


def test_masks_without_a_linear_form_are_refused():
    x = draw(B, L, C)
    causal = torch.ones(L, L, dtype=torch.bool).triu(1)
    ours, own = pair(mode="linear")[1], pair(mode="linear", causal=True)[1]
    with pytest.raises(ValueError, match="build this layer with causal=True"):
        ours(x, x, x, attn_mask=causal)
    for mask in (draw(L, L), draw(L, L) > 0, causal.T):
        with pytest.raises(ValueError, match="mode='exact'") as error:
            ours(x, x, x, attn_mask=mask)
        assert "causal" not in str(error.value)
        with pytest.raises(ValueError, match="not the causal mask"):
            own(x, x, x, attn_mask=mask)
    with pytest.raises(ValueError, match="is_causal"):
        ours(x, x, x, is_causal=True)
    with pytest.raises(ValueError, match=r"attn_mask has shape \(2, 7\)"):
        pair()[1](x, x, x, attn_mask=causal[:2])
    with pytest.raises(ValueError, match=rf"attn_mask .*\({B * H}, {L}, {L}\)"):
        pair()[1](x, x, x, attn_mask=draw(H, L, L))
    with pytest.raises(ValueError, match=rf"key_padding_mask .*\({B}, {L}\), True = ignore"):
        pair()[1](x, key_padding_mask=torch.zeros(L, B, dtype=torch.bool))
    with pytest.raises(ValueError, match="give key=None"):
        own(x, x.clone())
    with pytest.raises(ValueError, match="0 or −inf"):
        pair()[1](x, x, x, key_padding_mask=draw(B, L))
    with pytest.raises(ValueError, match="add_bias_kv"):
        FLTMultiheadAttention.from_torch(nn.MultiheadAttention(C, H, add_bias_kv=True))


MASKS = {
    "bias": lambda shape: 5 * draw(*shape, seed=3),
    "bool": lambda shape: draw(*shape, seed=3) > 0.3,
    "large": lambda shape: torch.where(draw(*shape, seed=3) > 0.3, -1e9, 0.5),
    "causal": lambda shape: torch.ones(shape, dtype=torch.bool).triu(1),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize("keys", [S, L])
def test_any_mask_in_exact_mode(name, heads, keys):
    theirs, ours = pair()
    x = draw(B, L, C).requires_grad_()
    key = x if keys == L else draw(B, S, C, seed=1)
    mask = MASKS[name]((B * H, L, keys) if heads else (L, keys))
    mask[..., 0] = 0  # torch has NaN where a row sees nothing
    padding = torch.zeros(B, keys, dtype=torch.bool)
    padding[0, 3:] = True
    given = {"key_padding_mask": padding, "need_weights": True, "average_attn_weights": False}
    float_padding = torch.zeros(B, keys).masked_fill(padding, -torch.inf)
    torchs = {**given, "key_padding_mask": padding if mask.dtype == torch.bool else float_padding}
    expected, weights = theirs(x, key, key, attn_mask=mask, **torchs)
    out, found = ours(x, key, key, attn_mask=mask, **given)
    real = ~padding if keys == L else torch.ones(B, L, dtype=torch.bool)
    torch.testing.assert_close(out[real], expected[real], rtol=0, atol=1e-5)
    torch.testing.assert_close(found.transpose(1, 2)[real], weights.transpose(1, 2)[real])
    assert not out[~real].any()
    both = [torch.autograd.grad(y[real].square().sum(), x)[0] for y in (out, expected)]
    torch.testing.assert_close(*both, rtol=0, atol=1e-5)


def test_rows_that_see_nothing_and_masks_of_large_negative_numbers():
    _, ours = pair()
    x = draw(B, L, C).requires_grad_()
    hidden = torch.zeros(L, L, dtype=torch.bool)
    hidden[2] = True
    out = ours(x, attn_mask=hidden)[0]
    torch.testing.assert_close(out[:, 2], ours.out_proj(torch.zeros(B, C)))
    assert torch.autograd.grad(out.sum(), x)[0].isfinite().all()
    causal = torch.zeros(L, L).masked_fill(torch.ones(L, L).triu(1) > 0, -1e9)
    linear = pair(mode="linear", causal=True)[1]
    assert torch.equal(linear(x, attn_mask=causal)[0], linear(x)[0])
    bias = draw(L, L)
    both = pair(causal=True)[1](x, attn_mask=bias)[0]
    torch.testing.assert_close(both, pair()[1](x, attn_mask=bias + causal)[0])
    padding = torch.zeros(B, L)
    padding[0, 4:] = -1e9
    assert torch.equal(
        ours(x, key_padding_mask=padding)[0], ours(x, key_padding_mask=padding < 0)[0]
    )


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_inside_torchs_encoder_layer(training, norm_first):
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(
        C, H, 32, dropout=0.0, batch_first=True, norm_first=norm_first
    ).train(training)
    x = draw(B, L, C)
    mask = torch.arange(L) >= torch.tensor([L, 4, 1])[:, None]
    expected = layer(x, src_key_padding_mask=mask)
    layer.self_attn = FLTMultiheadAttention.from_torch(layer.self_attn, mode="exact")
    out = layer(x, src_key_padding_mask=mask)
    torch.testing.assert_close(out[~mask], expected[~mask], rtol=0, atol=5e-6)
    stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
    assert stack(x, src_key_padding_mask=mask)[~mask].isfinite().all()


@pytest.mark.parametrize("training", [True, False])
def test_inside_torchs_decoder_layer(training):
    torch.manual_seed(1)
    layer = nn.TransformerDecoderLayer(C, H, 32, dropout=0.0, batch_first=True).train(training)
    x, memory = draw(B, L, C), draw(B, S, C, seed=1)
    mask = nn.Transformer.generate_square_subsequent_mask(L)
    padding = torch.arange(S) >= torch.tensor([S, 4, 1])[:, None]
    given = {"tgt_mask": mask, "memory_key_padding_mask": padding, "tgt_is_causal": True}
    expected = layer(x, memory, **given)
    layer.self_attn = FLTMultiheadAttention.from_torch(layer.self_attn, mode="exact", causal=True)
    layer.multihead_attn = FLTMultiheadAttention.from_torch(layer.multihead_attn, mode="exact")
    torch.testing.assert_close(layer(x, memory, **given), expected, rtol=0, atol=5e-6)


def test_the_linear_mode_keeps_what_comes_in_and_takes_its_settings():
    _, ours = pair(mode="linear")
    x = draw(B, L, C)
    assert ours(x)[0].shape == x.shape
    layer = FLTMultiheadAttention(C, H, feature_map="softplus", num_features=8)
    assert layer.attention.num_features == 8
    assert layer(x.transpose(0, 1))[0].shape == (L, B, C)
    assert layer.embed_dim == C
    assert layer.num_heads == H


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # what torch's own takes
@pytest.mark.parametrize("which", [(0, 1), (0,), (1,)])
def test_swapped_into_an_existing_stack_that_predicts_with_padding(which):
    """torch has fused paths around attention in eval mode, with nested tensors: none is taken."""
    torch.manual_seed(2)
    layer = nn.TransformerEncoderLayer(C, H, 32, dropout=0.0, batch_first=True)
    stack = nn.TransformerEncoder(layer, 2).eval()
    x = draw(B, L, C)
    mask = torch.arange(L) >= torch.tensor([L, 4, 1])[:, None]
    with torch.no_grad():
        expected = stack(x, src_key_padding_mask=mask)
        for index in which:
            part = stack.layers[index]
            part.self_attn = FLTMultiheadAttention.from_torch(part.self_attn, mode="exact")
        if 0 not in which:
            with pytest.raises(ValueError, match="enable_nested_tensor=False"):
                stack(x, src_key_padding_mask=mask)
            stack.use_nested_tensor = False
        out = stack(x, src_key_padding_mask=mask)
    torch.testing.assert_close(out[~mask], expected[~mask], rtol=0, atol=5e-6)


def test_keys_at_places_of_their_own_and_values_that_do_not_fit():
    from flt_mol.nn import FourierRPE, GaussianFrequencies, GaussianSpectrum

    rpe = FourierRPE(GaussianSpectrum(H, 2), GaussianFrequencies(3))
    layer = FLTMultiheadAttention(C, H, batch_first=True, rpe=rpe)
    x, at, other = draw(B, L, C), draw(B, L, 3, seed=1), draw(B, L, 3, seed=2)
    moved = layer(x, positions=at, key_positions=other)[0]
    expected = layer(x, x.clone(), positions=at, key_positions=other)[0]
    torch.testing.assert_close(moved, expected, rtol=0, atol=1e-6)
    assert (moved - layer(x, positions=at)[0]).abs().max() > 1e-3
    with pytest.raises(ValueError, match="one value for each key"):
        layer(x, x, draw(L, B, C), positions=at)
    with pytest.raises(ValueError, match=r"key_padding_mask is torch.int64"):
        layer(x, positions=at, key_padding_mask=torch.zeros(B, L, dtype=torch.int64))


def test_a_mask_that_hides_nothing_and_a_frozen_module():
    theirs, ours = pair()
    x = draw(B, L, C)
    nothing = torch.zeros(L, L)
    assert torch.equal(ours(x, x, x, attn_mask=nothing)[0], ours(x)[0])
    theirs.in_proj_weight.requires_grad_(False)
    partly = FLTMultiheadAttention.from_torch(theirs).attention
    assert not partly.query.weight.requires_grad
    assert partly.query.bias.requires_grad
    assert partly.out.weight.requires_grad
    frozen = FLTMultiheadAttention.from_torch(theirs.requires_grad_(False))
    assert not any(p.requires_grad for p in frozen.parameters())
