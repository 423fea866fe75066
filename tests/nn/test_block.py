"""Blocks of attention, spectral and local filters in every combination, and stacks of them."""

import itertools

import pytest
import torch
from periodic import F64, batch, rotation, seeded
from torch import nn

from flt_mol.functional.neighbors import neighbor_pairs
from flt_mol.nn import ImageKeys, LocalBasis, LocalFilter, PairCorrection
from flt_mol.nn.attention import FLTAttention
from flt_mol.nn.block import BlockGeometry, FLTBlock, FLTEncoder
from flt_mol.nn.frequencies import GaussianFrequencies
from flt_mol.nn.rpe import FourierRPE
from flt_mol.nn.spectral_filter import SpectralFilter
from flt_mol.nn.spectrum import GaussianSpectrum

C, H, CUTOFF = 8, 2, 4.2
SIZES = (5, 0, 1, 6)
PARTS = ("attention", "spectral", "local")
COMBINATIONS = [parts for count in (1, 2, 3) for parts in itertools.combinations(PARTS, count)]
RAW = [("local", "raw"), (*PARTS, "raw")]
with_raw = pytest.mark.parametrize("parts", COMBINATIONS + RAW, ids="+".join)
every_combination = pytest.mark.parametrize("parts", COMBINATIONS, ids="+".join)


def make_attention(**settings):
    return FLTAttention(C, H, num_features=16, generator=seeded(1), **settings)


def make_block(parts, seed=0, **settings):
    """A block with these parts, whose feed-forward net is drawn with a seed of its own."""
    given = {
        "attention": make_attention(**settings) if "attention" in parts else None,
        "spectral": SpectralFilter(C, H, sigma_max=2.0, generator=seeded(2 + seed)),
        "local": LocalFilter(C, 6, 2, 4, seeded(3 + seed)),
    }
    filters = {name: given[name] for name in ("spectral", "local") if name in parts}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        raw = {"local_norm": False} if "raw" in parts else {}
        return FLTBlock(given["attention"], 16, **filters, **raw).double()


def geometry_of(parts, positions, cell, pbc, ptr, block=None):
    """What these parts need, and nothing else."""
    given = {}
    if "spectral" in parts:
        spectral = SpectralFilter(C, H, sigma_max=2.0, generator=seeded(9)).double()
        given["plane_waves"] = spectral.geometry(positions, cell, pbc, ptr)
    if "local" in parts:
        pairs = neighbor_pairs(positions, cell, pbc, ptr, CUTOFF)
        vectors = pairs.vectors(positions, cell, ptr)
        given["local"] = LocalBasis(CUTOFF, 6, 4)(pairs, vectors)
    return given


def draw(rows=12, dtype=F64):
    return torch.randn(rows, C, generator=seeded(7), dtype=F64).to(dtype)


def norm(layer, x):
    centred = x - x.mean(-1, keepdim=True)
    scale = (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    return centred * scale * layer.weight + layer.bias


@with_raw
def test_a_block_is_the_sum_of_its_parts(parts):
    """And its own feed-forward net: as the docstring has it."""
    block, x, system = make_block(parts), draw(), batch(SIZES)
    ptr, given = system[-1], geometry_of(parts, *system)
    with torch.no_grad():
        for p in block.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=seeded(p.numel()), dtype=F64))
    out = block(x, ptr, **given)
    expected = x
    if "attention" in parts:
        expected = expected + block.attention(norm(block.attention_norm, x), ptr=ptr)
    if "spectral" in parts:
        expected = expected + block.spectral(norm(block.attention_norm, x), given["plane_waves"])
    if "local" in parts:
        near = x if "raw" in parts else norm(block.attention_norm, x)
        expected = expected + block.local(near, given["local"])
    expected = expected + block.ffn(norm(block.ffn_norm, expected))
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    for name in PARTS:
        assert (getattr(block, name) is not None) == (name in parts)


@with_raw
def test_every_parameter_has_a_gradient_and_every_part_does_something(parts):
    """A parameter without one would stop training on several devices."""
    block, x, system = make_block(parts), draw(), batch(SIZES)
    given = geometry_of(parts, *system)
    out = block(x, system[-1], **given)
    seed = torch.randn(out.shape, generator=seeded(), dtype=F64)
    names = dict(block.named_parameters())
    found = torch.autograd.grad(out, list(names.values()), seed)
    for name, gradient in zip(names, found, strict=True):
        assert gradient.isfinite().all(), name
        assert (gradient != 0).any(), name
    for name in set(parts) & set(PARTS):
        layer = getattr(block, name).out
        kept = {k: v.clone() for k, v in layer.state_dict().items()}
        with torch.no_grad():
            for p in layer.parameters():
                p.zero_()
        assert (block(x, system[-1], **given) - out).abs().max() > 1e-3, name
        layer.load_state_dict(kept)


@every_combination
def test_rotation_and_order_of_a_system_do_not_matter(parts):
    block, x = make_block(parts), draw(6)
    positions, cell, pbc, ptr = batch((6,))
    out = block(x, ptr, **geometry_of(parts, positions, cell, pbc, ptr))
    q, order = rotation(), torch.tensor([3, 5, 0, 1, 4, 2])
    after = geometry_of(parts, (positions @ q.T)[order], cell @ q.T, pbc, ptr)
    torch.testing.assert_close(block(x[order], ptr, **after), out[order], rtol=0, atol=1e-9)


@every_combination
def test_a_missing_geometry_is_named(parts):
    block, x, system = make_block(parts), draw(), batch(SIZES)
    ptr, given = system[-1], geometry_of(parts, *system)
    sources = {"plane_waves": "SpectralFilter.geometry", "local": "a LocalBasis"}
    for name in given:
        rest = {k: v for k, v in given.items() if k != name}
        message = f"this block needs {name}, of {sources[name]}"
        with pytest.raises(ValueError, match=message):
            block(x, ptr, **rest)
    more = geometry_of(PARTS, *system)
    assert torch.equal(block(x, ptr, **more), block(x, ptr, **given))


def test_blocks_that_cannot_be():
    with pytest.raises(ValueError, match=r"widths \[\]"):
        FLTBlock(None, 16)
    with pytest.raises(ValueError, match="ffn_dim"):
        FLTBlock(make_attention(), 0)
    with pytest.raises(ValueError, match=r"parts of widths \[8, 12\]"):
        FLTBlock(make_attention(), 16, local=LocalFilter(12))
    with pytest.raises(ValueError, match=r"parts of widths \[8, 16\]"):
        FLTBlock(None, 16, local=LocalFilter(C), spectral=SpectralFilter(16, 2))


def test_a_block_of_attention_alone_is_what_it_was():
    """Names of parameters, their order, and random numbers: saved models load as before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        block = FLTBlock(make_attention(), 16, 0.5)
        torch.manual_seed(3)
        first, last = nn.Linear(C, 16), nn.Linear(16, C)
    names = [name for name, _ in block.named_parameters()]
    attention = [f"attention.{name}" for name, _ in make_attention().named_parameters()]
    norms = [f"{name}.{x}" for name in ("attention_norm", "ffn_norm") for x in ("weight", "bias")]
    ffn = [f"ffn.{place}.{x}" for place in (0, 2) for x in ("weight", "bias")]
    assert names == [*norms[:2], *attention, *norms[2:], *ffn]
    assert torch.equal(block.ffn[0].weight, first.weight)
    assert torch.equal(block.ffn[2].bias, last.bias)
    assert block.ffn[3].p == 0.5


# Stacks


def make_encoder(parts=PARTS, recycles=1, rpe=None, **settings):
    return FLTEncoder([make_block(parts, s, **settings) for s in (0, 1)], rpe, recycles).double()


def make_rpe():
    spectrum = GaussianSpectrum(H, 3, generator=seeded(5))
    return FourierRPE(spectrum, GaussianFrequencies(5, generator=seeded(6))).double()


@pytest.mark.parametrize("recycles", [1, 3])
@every_combination
def test_a_stack_is_its_blocks_in_order_again_and_again(parts, recycles):
    encoder, x, system = make_encoder(parts, recycles), draw(), batch(SIZES)
    ptr, given = system[-1], geometry_of(parts, *system)
    expected = x
    for _ in range(recycles):
        for block in encoder.blocks:
            expected = block(expected, ptr, **given)
    assert torch.equal(encoder(x, ptr=ptr, **given), expected)
    geometry = BlockGeometry(**given)
    again = x
    for _ in range(recycles):
        again = encoder.once(again, ptr, geometry)
    assert torch.equal(again, expected)


def test_a_pass_is_given_all_that_its_blocks_need():
    """An RPE's features, image keys and pair corrections reach the attention, too."""
    positions, cell, pbc, ptr = batch(SIZES)
    x, rpe = draw(), make_rpe()
    encoder = make_encoder(rpe=rpe, position_dim=rpe.num_features)
    given = geometry_of(PARTS, positions, cell, pbc, ptr)
    features = rpe(positions, ptr)
    out = encoder(x, positions, ptr, **given)
    torch.testing.assert_close(out, encoder.once(x, ptr, BlockGeometry(features, **given)))
    pairs = neighbor_pairs(positions, cell, pbc, ptr, CUTOFF)
    vectors = pairs.vectors(positions, cell, ptr)
    weights = PairCorrection(H, CUTOFF, generator=seeded(2)).double()(pairs, vectors)
    corrected, plain = make_encoder(), make_encoder()
    with_pairs = corrected.once(x, ptr, BlockGeometry(pairs=weights, **given))
    assert torch.equal(with_pairs, corrected(x, ptr=ptr, pairs=weights, **given))
    assert (with_pairs - plain(x, ptr=ptr, **given)).abs().max() > 1e-3
    keys = neighbor_pairs(positions, cell, pbc, ptr, CUTOFF, self_pairs=True)
    mask = ImageKeys(GaussianSpectrum(H, 3, generator=seeded(3)), CUTOFF).double()
    images = mask(keys, keys.vectors(positions, cell, ptr))
    exact = make_encoder(mode="exact")
    with_images = exact.once(x, ptr, BlockGeometry(images=images, **given))
    assert torch.equal(with_images, exact(x, ptr=ptr, images=images, **given))
    assert (with_images - exact(x, ptr=ptr, **given)).abs().max() > 1e-3


def test_own_rpes_of_blocks_are_given_positions():
    positions, _, _, ptr = batch(SIZES)
    x = draw()
    blocks = [FLTBlock(make_attention(rpe=make_rpe()), 16, local=None).double() for _ in range(2)]
    encoder = FLTEncoder(blocks)
    out = encoder(x, positions, ptr)
    assert torch.equal(out, encoder.once(x, ptr, BlockGeometry(positions=positions)))
    assert not torch.equal(out, encoder(x, positions * 1.1, ptr))


@pytest.mark.parametrize("part", ["spectral", "local"])
def test_causal_attention_takes_no_filters(part):
    """They sum over all atoms, those that come later, too."""
    block = make_block(("attention", part), causal=True)
    with pytest.raises(ValueError, match="filters see all atoms: they do not go with causal"):
        FLTEncoder([block])
    with pytest.raises(ValueError, match="filters see all atoms"):
        FLTEncoder([make_block(("attention",), causal=True), make_block((part,))])
    FLTEncoder([make_block(("attention",), causal=True)])


def test_stacks_that_cannot_be():
    with pytest.raises(ValueError, match="recycles must be at least 1, got 0"):
        FLTEncoder([make_block(PARTS)], recycles=0)
    mixed = [make_block(("attention",), causal=c) for c in (False, True)]
    with pytest.raises(ValueError, match="some blocks are causal and some are not"):
        FLTEncoder(mixed)
    own = [FLTBlock(make_attention(rpe=make_rpe()), 16), make_block(("attention",))]
    with pytest.raises(ValueError, match="one rpe for the encoder, or one for each block"):
        FLTEncoder(own)
    with pytest.raises(ValueError, match="one rpe for the encoder, or one for each block"):
        FLTEncoder(own[:1], make_rpe())


def test_blocks_without_attention_go_with_others():
    """They have no say in what is causal, or who owns the RPE."""
    positions, cell, pbc, ptr = batch(SIZES)
    own = FLTBlock(make_attention(rpe=make_rpe()), 16).double()
    encoder = FLTEncoder([make_block(("spectral",)), own, make_block(("local",))])
    given = geometry_of(("spectral", "local"), positions, cell, pbc, ptr)
    assert encoder(draw(), positions, ptr, **given).isfinite().all()
    assert not encoder.causal


@pytest.mark.parametrize("name", ["plane_waves", "local"])
def test_geometry_is_for_packed_rows_only(name):
    system = batch((6, 6))
    ptr, given = system[-1], geometry_of(PARTS, *system)
    encoder = make_encoder({"plane_waves": ("spectral",), "local": ("local",)}[name])
    x, given = draw(12), {name: given[name]}
    expected = encoder(x, ptr=ptr, **given)
    # Full systems of one size are packed rows already.
    same = encoder(x.view(2, 6, C), **given)
    assert torch.equal(same.flatten(0, 1), expected)
    mask = torch.arange(6) < torch.tensor([[6], [4]])
    with pytest.raises(ValueError, match="packed"):
        encoder(x.view(2, 6, C), mask=mask, **given)
    with pytest.raises(ValueError, match="packed|sorted|order"):
        encoder(x, system=torch.tensor([0, 1] * 6), **given)


@every_combination
def test_bf16_autocast(parts):
    block, x, system = make_block(parts).float(), draw(dtype=torch.float32), batch(SIZES)
    positions, cell, pbc, ptr = system
    given = geometry_of(parts, positions.float(), cell.float(), pbc, ptr)
    out = block(x, ptr, **given)
    with torch.autocast("cpu", torch.bfloat16):
        half = block(x, ptr, **given)
    assert half.dtype == torch.float32  # what is added to x is rounded, x is not
    assert (half - out).abs().max() < 0.03 * out.abs().max()
    half.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in block.parameters())


@pytest.mark.slow
def test_a_stack_with_filters_compiles_without_graph_breaks():
    positions, cell, pbc, ptr = batch(SIZES)
    given = geometry_of(PARTS, positions, cell, pbc, ptr)
    encoder, x = FLTEncoder([make_block(PARTS)]), draw()
    torch._dynamo.reset()
    compiled = torch.compile(encoder, fullgraph=True, backend="aot_eager")
    expected = encoder(x, ptr=ptr, **given)
    out = compiled(x, ptr=ptr, **given)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)
    names = dict(encoder.named_parameters())
    seed = torch.randn(out.shape, generator=seeded(), dtype=F64)
    both = (torch.autograd.grad(y, list(names.values()), seed) for y in (out, expected))
    for gradient, truth in zip(*both, strict=True):
        torch.testing.assert_close(gradient, truth, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("mode", ["linear", "exact"])
def test_a_causal_stack_sees_nothing_of_the_future(shared, mode):
    # The mean of all positions, as an origin, would know of later ones.
    def rpe():
        spectrum = GaussianSpectrum(H, 4, generator=seeded(7))
        return FourierRPE(spectrum, GaussianFrequencies(6, generator=seeded(8)))

    given = {"position_dim": 12} if shared else {"rpe": rpe()}
    blocks = [FLTBlock(make_attention(causal=True, mode=mode, **given), 16) for _ in range(2)]
    encoder = FLTEncoder(blocks, rpe() if shared else None, recycles=2)
    generator = seeded(3)
    x, r = torch.randn(9, C, generator=generator), torch.randn(9, 3, generator=generator)
    other_x, other_r = x.clone(), r.clone()
    other_x[6:] *= 50
    other_r[6:] += 40
    ptr = torch.tensor([0, 1, 9])
    before, after = encoder(x, r, ptr), encoder(other_x, other_r, ptr)
    torch.testing.assert_close(before[:6], after[:6], rtol=0, atol=1e-5)
    assert (before[6:] - after[6:]).abs().max() > 1e-2


def test_recycles_repeat_the_stack():
    encoder = FLTEncoder([make_block(("attention",))], recycles=3).double()
    x, ptr = torch.randn(5, C, dtype=F64, generator=seeded(4)), torch.tensor([0, 2, 5])
    once = FLTEncoder(encoder.blocks)
    expected = once(once(once(x, ptr=ptr), ptr=ptr), ptr=ptr)
    torch.testing.assert_close(encoder(x, ptr=ptr), expected)
    assert not torch.allclose(expected, once(x, ptr=ptr))


def test_other_names_of_the_rows_are_refused_with_a_hint():
    encoder = FLTEncoder([FLTBlock(make_attention(), 16)])
    x, system = torch.randn(3, C), torch.tensor([0, 0, 1])
    with pytest.raises(TypeError, match="'batch'.*pairs.*system=batch"):
        encoder(x, batch=system)
    with pytest.raises(TypeError, match="mask=~key_padding_mask"):
        encoder(x[None], key_padding_mask=system[None] > 0)
