"""Padded rows, unsorted rows, sequences: the same numbers as the packed rows they stand for."""

import pytest
import torch

from flt_mol.functional import softmax_attention
from flt_mol.nn import (
    ELUFeatures,
    FLTAttention,
    FLTBlock,
    FLTEncoder,
    FourierRPE,
    GaussianFrequencies,
    GaussianSpectrum,
)
from helpers.masks import relative_mask

C, H, B, L = 12, 3, 5, 11
F64 = torch.float64
MODES = ["linear", "exact", "auto"]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def rpe_of(dim, generator, heads=H):
    spectrum = GaussianSpectrum(heads, 4, dim, generator=generator)
    return FourierRPE(spectrum, GaussianFrequencies(5, dim, generator=generator))


def make(mode="linear", dim=3, seed=1, **settings):
    generator = seeded(seed)
    rpe = None if dim is None else rpe_of(dim, generator)
    settings = {"num_features": 24, "exact_below": 5, **settings}
    layer = FLTAttention(C, H, rpe=rpe, mode=mode, generator=generator, **settings)
    with torch.no_grad():  # a bias that padding would show
        layer.out.bias.normal_(generator=generator)
        layer.value.bias.normal_(generator=generator)
    return layer


def padded_inputs(dtype=F64, seed=0):
    """Rows with holes, one full, one empty, one of a single token."""
    generator = seeded(seed)
    x = torch.randn(B, L, C, generator=generator, dtype=dtype)
    positions = 3 * torch.randn(B, L, 3, generator=generator, dtype=dtype)
    mask = torch.rand(B, L, generator=generator) < 0.6
    mask[1], mask[2], mask[3] = True, False, torch.arange(L) == 4
    return x, positions, mask


def packed_inputs(x, positions, mask):
    sizes = mask.sum(1)
    ptr = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    return x[mask], positions[mask], ptr


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(F64, 1e-12), (torch.float32, 1e-6)])
def test_padded_is_packed(mode, causal, dtype, tolerance):
    layer = make(mode, causal=causal).to(dtype)
    x, positions, mask = padded_inputs(dtype)
    rows, places, ptr = packed_inputs(x, positions, mask)
    out = layer(x, positions, mask=mask)
    torch.testing.assert_close(
        out[mask], layer(rows, places, ptr=ptr), rtol=0, atol=tolerance, check_stride=False
    )
    assert torch.equal(out[~mask], torch.zeros_like(out[~mask]))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("filling", [0.0, 1e6, float("nan"), float("inf")])
def test_what_stands_in_the_padding_has_no_influence(mode, filling):
    layer = make(mode).double()
    x, positions, mask = padded_inputs()
    expected = layer(x, positions, mask=mask)
    x, positions = x.clone(), positions.clone()
    x[~mask], positions[~mask] = filling, filling
    x.requires_grad_(), positions.requires_grad_()
    out = layer(x, positions, mask=mask)
    assert torch.equal(out, expected)
    inputs = [x, positions, *layer.parameters()]
    gradients = torch.autograd.grad(out.square().sum(), inputs, allow_unused=True)
    assert all(g is None or g.isfinite().all() for g in gradients)
    assert not gradients[0][~mask].any()
    assert gradients[0][mask].any()


def test_padded_without_a_mask_is_all_real():
    layer = make().double()
    x, positions, _ = padded_inputs()
    mask = torch.ones(B, L, dtype=torch.bool)
    torch.testing.assert_close(
        layer(x, positions), layer(x, positions, mask=mask), rtol=0, atol=1e-13
    )
    torch.testing.assert_close(layer(x, positions)[2], layer(x[2], positions[2]))


@pytest.mark.parametrize("mode", MODES)
def test_positions_of_a_sequence_default_to_the_place_among_real_tokens(mode):
    layer = make(mode, dim=1).double()
    x, _, mask = padded_inputs()
    rows, _, ptr = packed_inputs(x, x, mask)
    index = torch.cat([torch.arange(n, dtype=F64) for n in mask.sum(1).tolist()])[:, None]
    expected = layer(rows, index, ptr=ptr)
    torch.testing.assert_close(layer(rows, ptr=ptr), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(layer(x, mask=mask)[mask], expected, rtol=0, atol=1e-12)
    assert (layer(rows, ptr=ptr) - layer(rows, 2 * index, ptr=ptr)).abs().max() > 1e-3


def test_unsorted_rows_and_empty_systems_give_what_sorted_ones_give():
    layer = make("auto").double()
    x, positions, mask = padded_inputs()
    rows, places, ptr = packed_inputs(x, positions, mask)
    system = torch.repeat_interleave(torch.arange(B), ptr.diff())
    order = torch.randperm(len(rows), generator=seeded(3))
    expected = layer(rows, places, ptr=ptr)
    out = layer(rows[order], places[order], system=system[order], num_systems=B + 2)
    torch.testing.assert_close(out, expected[order], rtol=0, atol=1e-12)


# Cross-attention -------------------------------------------------------------------------------


def cross_inputs(dtype=F64):
    generator = seeded(5)
    ptr, key_ptr = torch.tensor([0, 3, 3, 7, 9]), torch.tensor([0, 6, 8, 9, 9])
    x = torch.randn(9, C, generator=generator, dtype=dtype)
    context = torch.randn(9, 8, generator=generator, dtype=dtype)
    at, key_at = 2 * torch.randn(2, 9, 3, generator=generator, dtype=dtype)
    return x, at, ptr, context, key_at, key_ptr


def test_cross_attention_is_softmax_over_the_contexts_rows():
    layer = make("exact", context_dim=8).double()
    x, at, ptr, context, key_at, key_ptr = cross_inputs()
    out = layer(x, at, ptr=ptr, context=context, context_positions=key_at, context_ptr=key_ptr)
    for b in range(4):
        rows, keys = slice(*ptr[b : b + 2].tolist()), slice(*key_ptr[b : b + 2].tolist())
        q, k, v = (
            f(y).view(len(y), H, C // H)
            for f, y in (
                (layer.query, x[rows]),
                (layer.key, context[keys]),
                (layer.value, context[keys]),
            )
        )
        bias = layer.rpe.sampled_mask(at[rows, None] - key_at[None, keys])
        logits = torch.einsum("ihd,jhd->ijh", q, k) / 2 + bias
        attended = torch.einsum("ijh,jhd->ihd", logits.softmax(1), v).flatten(1)
        torch.testing.assert_close(out[rows], layer.out(attended), rtol=0, atol=1e-12)
    # System 3 has rows and no context.
    torch.testing.assert_close(out[7:], layer.out.bias.expand(2, -1), rtol=0, atol=0)


@pytest.mark.parametrize("mode", MODES)
def test_a_context_of_the_rows_themselves_is_self_attention(mode):
    layer = make(mode).double()
    x, positions, mask = padded_inputs()
    rows, places, ptr = packed_inputs(x, positions, mask)
    out = layer(rows, places, ptr=ptr, context=rows, context_positions=places, context_ptr=ptr)
    torch.testing.assert_close(out, layer(rows, places, ptr=ptr), rtol=0, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_layouts_of_a_context(mode):
    layer = make(mode, context_dim=8).double()
    x, at, ptr, context, key_at, key_ptr = cross_inputs()
    expected = layer(x, at, ptr=ptr, context=context, context_positions=key_at, context_ptr=key_ptr)
    system, key_system = (
        torch.repeat_interleave(torch.arange(4), p.diff()) for p in (ptr, key_ptr)
    )
    order, key_order = (torch.randperm(9, generator=seeded(s)) for s in (1, 2))
    out = layer(
        x[order],
        at[order],
        system=system[order],
        context=context[key_order],
        context_positions=key_at[key_order],
        context_system=key_system[key_order],
    )
    torch.testing.assert_close(out, expected[order], rtol=0, atol=1e-12)
    wide = torch.full((4, 7, 8), float("nan"), dtype=F64)
    wide_at = torch.full((4, 7, 3), float("nan"), dtype=F64)
    mask = torch.arange(7) < key_ptr.diff()[:, None]
    wide[mask], wide_at[mask] = context, key_at
    out = layer(x, at, ptr=ptr, context=wide, context_positions=wide_at, context_mask=mask)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_moving_both_sets_together_changes_nothing(mode):
    layer = make(mode, context_dim=8).double()
    x, at, ptr, context, key_at, key_ptr = cross_inputs()
    given = {"ptr": ptr, "context": context, "context_ptr": key_ptr}
    expected = layer(x, at, context_positions=key_at, **given)
    shift = torch.tensor([1e3, -2e3, 5e2], dtype=F64)
    out = layer(x, at + shift, context_positions=key_at + shift, **given)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-9)
    apart = layer(x, at + 1.0, context_positions=key_at, **given)
    assert (apart - expected).abs().max() > 1e-3


# Modes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_auto_takes_each_system_by_its_own_size(causal):
    layer = make("auto", causal=causal).double()
    x, positions, mask = padded_inputs()
    rows, places, ptr = packed_inputs(x, positions, mask)
    out = layer(rows, places, ptr=ptr)
    outs = {}
    for mode in ("linear", "exact"):
        layer.mode = mode
        outs[mode] = layer(rows, places, ptr=ptr)
    chosen = set()
    for a, b in zip(ptr[:-1].tolist(), ptr[1:].tolist(), strict=True):
        mode = "exact" if b - a < 5 else "linear"
        chosen |= {mode} if b > a else set()
        torch.testing.assert_close(out[a:b], outs[mode][a:b], rtol=0, atol=1e-12)
    assert chosen == {"linear", "exact"}
    assert (outs["linear"] - outs["exact"]).abs().max() > 1e-3


def test_auto_needs_a_map_that_estimates_the_softmax():
    with pytest.raises(ValueError, match="auto"):
        make("auto", dim=None, feature_map="relu")
    layer = make("linear", dim=None, feature_map="softplus")
    with pytest.raises(ValueError, match="auto"):
        layer.mode = "auto"
    layer.mode = "exact"
    with pytest.raises(ValueError, match="expected one of"):
        layer.mode = "fast"


@pytest.mark.parametrize("mode", ["linear", "exact"])
def test_causal_rows_do_not_see_what_follows(mode):
    layer = make(mode, dim=1, causal=True).double()
    x = torch.randn(20, C, generator=seeded(), dtype=F64)
    out = layer(x)
    for stop in (1, 2, 9, 19):
        torch.testing.assert_close(layer(x[:stop]), out[:stop], rtol=0, atol=1e-12)
    first = layer.out(layer.value(x[:1]))
    torch.testing.assert_close(out[:1], first, rtol=0, atol=1e-12)


def test_causal_exact_is_the_lower_triangle_of_the_softmax():
    layer = make("exact", causal=True).double()
    x, positions, _ = padded_inputs()
    x, positions = x[0], positions[0]
    at = layer.rpe(positions)
    q, k, v = (f(x).view(L, H, -1) for f in (layer.query, layer.key, layer.value))
    bias = relative_mask(at.query, at.key)
    bias = bias.masked_fill(torch.ones(L, L).triu(1).bool(), float("-inf"))
    ptr = torch.tensor([0, L])
    expected = layer.out(softmax_attention(q, k, v, ptr, bias).flatten(1))
    torch.testing.assert_close(layer(x, positions), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("factor", [50.0, 1e4])
def test_large_later_tokens_do_not_leak(factor):
    """Two sequences that agree up to token 24; a maximum over all keys would tell them apart."""
    layer = make(dim=1, causal=True)
    x = torch.randn(2, 40, C, generator=seeded(8))
    y = x.clone()
    y[:, 25:] = factor * torch.randn(2, 15, C, generator=seeded(9))
    out, other = layer(x), layer(y)
    torch.testing.assert_close(out[:, :25], other[:, :25], rtol=0, atol=1e-5)
    assert other.isfinite().all()
    assert (out[:, 25:] - other[:, 25:]).abs().max() > 1


# Written out -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("causal", [False, True])
def test_matrices_are_the_weights_in_use(mode, causal):
    layer = make(mode, causal=causal).double()
    x, positions, mask = padded_inputs()
    matrices = layer.matrices(x, positions, mask=mask)
    out = layer(x, positions, mask=mask)
    assert [m.shape for m in matrices] == [(H, n, n) for n in mask.sum(1).tolist()]
    for b, matrix in enumerate(matrices):
        rows = x[b][mask[b]]
        torch.testing.assert_close(matrix.sum(-1), torch.ones_like(matrix.sum(-1)))
        value = layer.value(rows).view(len(rows), H, C // H)
        attended = torch.einsum("hij,jhd->ihd", matrix, value).flatten(1)
        torch.testing.assert_close(out[b][mask[b]], layer.out(attended), rtol=0, atol=1e-12)
        assert not causal or not matrix.triu(1).any()


def test_fidelity_is_the_error_of_the_linear_mode():
    layer = make(dim=3).double()
    layer.exact_below = 0
    x, positions, mask = padded_inputs()
    report = layer.fidelity(x, positions, mask=mask)
    _, rows = layer.rows(x, positions, {"mask": mask})
    with torch.no_grad():
        value = rows.value
        outs, matrices = {}, {}
        for mode in ("linear", "exact"):
            layer.mode = mode
            matrices[mode] = layer.matrices(x, positions, mask=mask)
            parts = torch.split(value, rows.ptr.diff().tolist())
            outs[mode] = torch.cat(
                [
                    torch.einsum("hij,jhd->ihd", m, v)
                    for m, v in zip(matrices[mode], parts, strict=True)
                ]
            )
    error = (outs["linear"] - outs["exact"]).square().sum((0, 2)).sqrt()
    expected = error / outs["exact"].square().sum((0, 2)).sqrt()
    torch.testing.assert_close(report.output_error, expected)
    assert (report.total_variation > 0.01).all()
    assert (report.total_variation < 1).all()
    layer.mode = "auto"
    torch.testing.assert_close(layer.fidelity(x, positions, mask=mask), report)


# Blocks and encoders ---------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_an_encoder_takes_every_layout(causal):
    generator = seeded(4)
    rpe = rpe_of(3, generator)
    blocks = [
        FLTBlock(
            FLTAttention(C, H, position_dim=rpe.num_features, causal=causal, generator=generator),
            16,
        )
        for _ in range(2)
    ]
    encoder = FLTEncoder(blocks, rpe, recycles=2).double()
    x, positions, mask = padded_inputs()
    rows, places, ptr = packed_inputs(x, positions, mask)
    expected = encoder(rows, places, ptr)
    x[~mask] = float("nan")
    out = encoder(x, positions, mask=mask)
    torch.testing.assert_close(out[mask], expected, rtol=0, atol=1e-12)
    assert not out[~mask].any()
    system = torch.repeat_interleave(torch.arange(B), ptr.diff())
    # One row of each system after the other: the order within systems stays.
    order = torch.argsort(torch.arange(len(rows)) - ptr[system], stable=True)
    assert (system[order].diff() < 0).any()
    out = encoder(rows[order], places[order], system=system[order])
    torch.testing.assert_close(out, expected[order], rtol=0, atol=1e-12)
    changed = x.clone()
    changed[1, 6:] = 0.0
    same = encoder(changed, positions, mask=mask)[1, :6]
    difference = (same - encoder(x, positions, mask=mask)[1, :6]).abs().max()
    assert (difference < 1e-12) == causal


def test_blocks_of_one_encoder_are_causal_all_or_none():
    blocks = [FLTBlock(FLTAttention(C, H, causal=causal), 16) for causal in (True, False)]
    with pytest.raises(ValueError, match="causal"):
        FLTEncoder(blocks)


# Refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mask": torch.ones(B, L)}, "mask has shape .* torch.float32"),
        ({"mask": torch.ones(B, L + 1, dtype=torch.bool)}, "mask has shape"),
        ({"ptr": torch.tensor([0, L])}, "with mask"),
        ({"context_ptr": torch.tensor([0, L])}, "no context"),
        ({"context": torch.ones(B + 1, L, C), "context_positions": torch.ones(B + 1, L, 3)}, "6"),
        ({"context": torch.ones(B, L, C + 1)}, "context has shape"),
    ],
)
def test_inputs_that_do_not_belong_together_are_refused(given, message):
    x, positions, _ = padded_inputs(torch.float32)
    with pytest.raises(ValueError, match=message):
        make()(x, positions, **given)


def test_more_refusals():
    x, positions, mask = padded_inputs(torch.float32)
    with pytest.raises(ValueError, match="positions are missing"):
        make()(x)
    with pytest.raises(ValueError, match="positions have shape"):
        make()(x, positions[:, :-1])
    with pytest.raises(ValueError, match="padded ones .* with mask"):
        make()(x[0], positions[0], mask=mask)
    with pytest.raises(ValueError, match="takes no context"):
        make(causal=True)(x, positions, context=x, context_positions=positions)
    with pytest.raises(ValueError, match="context is missing"):
        make(context_dim=8)(x, positions)
    with pytest.raises(ValueError, match="expected a FeatureMap or one of softmax"):
        make(feature_map="cosine")
    with pytest.raises(TypeError, match="num_features"):
        make(feature_map="elu")
    with pytest.raises(ValueError, match="needed"):
        FLTAttention(C, H, feature_map=ELUFeatures(H + 1, 4))


def test_the_default_crossover_follows_the_cost_of_features():
    assert FLTAttention(64, 1, num_features=64).exact_below == 147
    assert FLTAttention(64, 4, num_features=64).exact_below == 208
    assert FLTAttention(64, 1, num_features=128).exact_below == 294
    assert FLTAttention(64, 1, num_features=64, position_dim=32).exact_below == 126
    assert FLTAttention(64, 4, num_features=64, position_dim=32).exact_below == 156
    assert FLTAttention(64, 1, num_features=64, exact_below=7).exact_below == 7
    assert FLTAttention(64, 1, num_features=64, causal=True).exact_below == 407


def test_an_encoder_hands_positions_to_blocks_with_rpes_of_their_own():
    generator = seeded(4)
    blocks = [
        FLTBlock(FLTAttention(C, H, rpe=rpe_of(3, generator), generator=generator), 16)
        for _ in range(2)
    ]
    encoder = FLTEncoder(blocks).double()
    x, positions, mask = padded_inputs()
    rows, places, ptr = packed_inputs(x, positions, mask)
    out = encoder(x, positions, mask=mask)
    expected = rows
    for block in blocks:
        expected = block(expected, ptr, positions=places)
    torch.testing.assert_close(out[mask], expected, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="one rpe for the encoder"):
        FLTEncoder(blocks, rpe_of(3, generator))
    with pytest.raises(ValueError, match="positions, but no rpe"):
        FLTEncoder([FLTBlock(FLTAttention(C, H), 16)])(x.float(), positions.float())


def test_looking_at_a_layer_in_training_leaves_its_draws():
    generator = seeded(4)
    frequencies = GaussianFrequencies(5, learned_sigma=False, redraw_every=1, generator=generator)
    rpe = FourierRPE(GaussianSpectrum(H, 4, generator=generator), frequencies)
    layer = FLTAttention(C, H, rpe=rpe, redraw_every=1, generator=generator).train()
    x, positions = torch.randn(7, C, generator=generator), torch.randn(7, 3, generator=generator)
    out = layer(x, positions)
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    matrix = layer.matrices(x, positions)[0]
    layer.fidelity(x, positions)
    after = layer.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in state.items())
    value = layer.value(x).view(7, H, C // H)
    attended = torch.einsum("hij,jhd->ihd", matrix, value).flatten(1)
    torch.testing.assert_close(layer.out(attended), out, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.uint8, torch.int64])
def test_positions_of_any_number_type_in_cross_attention(dtype):
    layer = make(dim=1)
    x, context = torch.randn(30, C, generator=seeded()), torch.randn(40, C, generator=seeded(1))
    at, key_at = 8 * torch.arange(30)[:, None], 6 * torch.arange(40)[:, None]
    expected = layer(x, at.double(), context=context, context_positions=key_at.double())
    at, key_at = at.to(dtype), key_at.to(dtype)
    out = layer(x, at, context=context, context_positions=key_at)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-4)


def test_values_of_other_rows_than_the_keys():
    x, positions, _ = padded_inputs(torch.float32)
    x, positions = x[0], positions[0]
    with pytest.raises(ValueError, match="one value for each key"):
        make()(x, positions, context_values=x[:-1])


def test_fidelity_of_nothing_is_nothing():
    for layer, given in ((make(dim=None), {"ptr": torch.tensor([0])}), (make(dim=None), {})):
        report = layer.fidelity(torch.zeros(0, C), **given)
        assert torch.equal(report.output_error, torch.zeros(H))
        assert torch.equal(report.total_variation, torch.zeros(H))
