"""Feature maps: by their definitions on concatenations, and as what they estimate."""

import pytest
import torch
from torch.nn.functional import elu, softplus

from flt_mol.nn import (
    FEATURE_MAPS,
    ELUFeatures,
    FeatureMap,
    FLTAttention,
    FourierRPE,
    GaussianFrequencies,
    GaussianSpectrum,
    HyperbolicFeatures,
    ReLUFeatures,
    SoftmaxFeatures,
    SoftplusFeatures,
)
from helpers.kernels import kernel_attention

H, D, R, N = 3, 4, 5, 20
F64 = torch.float64
PTR = torch.tensor([0, 0, 1, 6, 6, 16, 20, 20])
RANDOM = [SoftmaxFeatures, HyperbolicFeatures, ReLUFeatures]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def make_rpe(generator):
    spectrum = GaussianSpectrum(H, 4, generator=generator)
    return FourierRPE(spectrum, GaussianFrequencies(R, generator=generator))


def build(kind, position_dim=2 * R, num_features=8, seed=0):
    if kind is ELUFeatures:
        return kind(H, D, position_dim)
    return kind(H, D, position_dim, num_features=num_features, generator=seeded(seed))


def rows_and_positions(seed=0, rows=N):
    generator = seeded(seed)
    x = torch.randn(rows, H, D, generator=generator, dtype=F64)
    return x, make_rpe(seeded(2)).double()(torch.randn(rows, 3, generator=generator, dtype=F64))


def by_definition(features, x, at, key):
    """φ of the concatenation, as the formulas have it."""
    y = x * D**-0.25
    if at is not None:
        y = torch.cat([(at.key if key else at.query).expand(-1, H, -1), y], dim=-1)
    if isinstance(features, ELUFeatures):
        return elu(y) + 1
    if features.learned:
        w, p = features.weight, features.position_weight
    else:
        w, p = features.content_projection, features.position_projection
    w = w if at is None else torch.cat([p, w], dim=-1)
    wx = torch.einsum("nhd,hmd->nhm", y, w)
    norm = y.square().sum(-1, keepdim=True) / 2
    if isinstance(features, SoftmaxFeatures):
        return (wx - norm).exp()
    if isinstance(features, SoftplusFeatures):
        return softplus(wx + features.bias)
    return wx.clamp(min=0)


def test_hyperbolic_directions_are_opposite_pairs():
    phi = build(HyperbolicFeatures)
    for weights in (phi.content_projection, phi.position_projection):
        first, second = weights.chunk(2, dim=1)
        assert torch.equal(second, -first)


def test_small_elu_features_keep_their_digits():
    x = torch.tensor([-30.0, -16.0, 0.0, 2.0])
    found = ELUFeatures(4, 1)(x.reshape(1, 4, 1), None, key=False).flatten()
    expected = torch.where(x > 0, x.double() + 1, x.double().exp())
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", FEATURE_MAPS.values())
@pytest.mark.parametrize("positions", [True, False])
def test_attention_with_every_map_is_that_of_its_definition(kind, positions):
    """Values and gradients, through weights that are written out."""
    generator = seeded(3)
    layer = FLTAttention(
        H * D,
        H,
        # Enough that no ReLU is 0 for all features of a row: 0/0 has no gradient to compare.
        feature_map=build(kind, 2 * R if positions else 0, num_features=64),
        rpe=make_rpe(generator) if positions else None,
        generator=generator,
    ).double()
    x = torch.randn(N, H * D, generator=generator, dtype=F64, requires_grad=True)
    r = torch.randn(N, 3, generator=generator, dtype=F64, requires_grad=True)
    at = layer.rpe(r, PTR) if positions else None
    q, k, v = (f(x).view(N, H, D) for f in (layer.query, layer.key, layer.value))
    phi = [by_definition(layer.feature_map, y, at, key) for y, key in ((q, False), (k, True))]
    truth = layer.out(kernel_attention(*phi, v, PTR).flatten(1))
    out = layer(x, r if positions else None, ptr=PTR)
    torch.testing.assert_close(out, truth, rtol=0, atol=1e-10)
    inputs = [x, *([r] if positions else []), *layer.parameters()]
    seed = torch.randn(out.shape, generator=generator, dtype=F64)
    # ReLU has a scale that attention divides out; no other map may have one.
    pairs = zip(
        torch.autograd.grad(out, inputs, seed),
        torch.autograd.grad(truth, inputs, seed),
        strict=True,
    )
    for gradient, true in pairs:
        torch.testing.assert_close(gradient, true, rtol=1e-9, atol=1e-10)


def test_hyperbolic_features_vary_less_than_as_many_independent_ones():
    x, _ = rows_and_positions(rows=6)
    x = 0.3 * x
    spread = {}
    for kind in (SoftmaxFeatures, HyperbolicFeatures):
        draws = []
        for seed in range(500):
            phi = build(kind, 0, seed=seed).double()
            query, key = (phi(x, None, key=key).exp() for key in (False, True))
            draws.append(torch.einsum("ihm,jhm->hij", query, key) / phi.num_features)
        spread[kind] = torch.stack(draws).var(0).mean()
    assert spread[HyperbolicFeatures] < 0.8 * spread[SoftmaxFeatures]


@pytest.mark.parametrize("kind", FEATURE_MAPS.values())
def test_direct_maps_are_not_negative_and_say_what_they_are(kind):
    phi = build(kind)
    x, at = rows_and_positions()
    out = phi.double()(x, at, key=True)
    assert out.shape == (N, H, phi.num_features)
    assert phi.exponential or not phi.estimates_softmax
    assert phi.exponential or (out >= 0).all()


def test_relu_directions_are_learned_or_buffers_by_name():
    """W of "learned_relu" gets a gradient and is trained, W of "relu" is drawn and stays."""
    x, r = torch.randn(N, H * D, generator=seeded(2)), torch.randn(N, 3, generator=seeded(3))
    for name, learned in (("learned_relu", True), ("relu", False)):
        layer = FLTAttention(
            H * D, H, feature_map=name, rpe=make_rpe(seeded(1)), generator=seeded(1)
        )
        before = {key: w.clone() for key, w in layer.feature_map.state_dict().items()}
        layer(x, r).square().sum().backward()
        torch.optim.SGD(layer.parameters(), 0.1).step()
        after = layer.feature_map.state_dict()
        assert len(after) == 2  # for content and for positions
        assert len(list(layer.feature_map.parameters())) == 2 * learned
        assert all(learned != torch.equal(after[key], w) for key, w in before.items())


@pytest.mark.parametrize("kind", RANDOM)
def test_redrawing_is_in_training_only_and_goes_on_after_saving(kind):
    settings = {"feature_map": next(n for n, k in FEATURE_MAPS.items() if k is kind)}
    settings |= {"num_features": 8, "redraw_every": 2}
    layer = FLTAttention(H * D, H, **settings, generator=seeded(1))
    x = torch.randn(N, H * D, generator=seeded(2))

    def step(layer):
        out = layer(x)
        out.sum().backward()
        return out.detach()

    first = layer.eval()(x)
    assert all(torch.equal(layer(x), first) for _ in range(5))
    layer.train()
    outs = [step(layer) for _ in range(4)]
    assert torch.equal(outs[0], first)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[2], outs[3])
    assert (outs[1] - outs[2]).abs().max() > 1e-3
    other = FLTAttention(H * D, H, **settings, generator=seeded(7))
    other.load_state_dict(layer.state_dict())
    for _ in range(4):
        assert torch.equal(step(layer), step(other))
    assert torch.equal(layer.eval()(x), first)
    assert torch.equal(other.eval()(x), first)


def test_with_positions_both_parts_of_a_draw_are_of_the_same_step():
    rpe = make_rpe(seeded(2))
    layer = FLTAttention(H * D, H, rpe=rpe, redraw_every=1, generator=seeded(1))
    x, r = torch.randn(N, H * D, generator=seeded(2)), torch.randn(N, 3, generator=seeded(3))
    layer(x, r).sum().backward()
    out = layer(x, r)
    phi = layer.feature_map
    draws = {name: getattr(phi, name) for name in ("content_projection", "position_projection")}
    fixed = FLTAttention(H * D, H, rpe=rpe, generator=seeded(1))
    assert torch.equal(fixed(x, r), layer.eval()(x, r))
    for name, value in draws.items():
        assert not torch.equal(getattr(phi, name), value)  # eval shows the saved one
        setattr(fixed.feature_map, name, value)
    assert torch.equal(fixed(x, r), out)


def test_a_redraw_leaves_earlier_graphs_valid():
    layer = FLTAttention(H * D, H, redraw_every=1, generator=seeded(1))
    x = torch.randn(N, H * D, generator=seeded(2), requires_grad=True)
    first = layer(x)
    expected = torch.autograd.grad(first.sum(), x, retain_graph=True)[0]
    assert not torch.equal(layer(x), first)
    layer.feature_map.redraw()
    assert torch.equal(torch.autograd.grad(first.sum(), x)[0], expected)


def test_a_map_of_ones_own():
    class Squares(FeatureMap):
        def forward(self, x, at, *, key):
            return x.square()

    phi = Squares(H, D, 0, D)
    layer = FLTAttention(H * D, H, feature_map=phi, generator=seeded()).double()
    x = torch.randn(N, H * D, generator=seeded(2), dtype=F64)
    q, k, v = (f(x).view(N, H, D) for f in (layer.query, layer.key, layer.value))
    truth = layer.out(kernel_attention(q.square(), k.square(), v, PTR).flatten(1))
    torch.testing.assert_close(layer(x, ptr=PTR), truth, rtol=0, atol=1e-10)


def test_settings_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="must be even"):
        HyperbolicFeatures(H, D, num_features=7)
    with pytest.raises(ValueError, match="must be ≥ 1"):
        SoftmaxFeatures(H, D, num_features=0)
    with pytest.raises(TypeError, match="redraw_every"):
        FLTAttention(H * D, H, feature_map="softplus", redraw_every=3)
    with pytest.raises(ValueError, match="brings its own settings"):
        FLTAttention(H * D, H, feature_map=SoftmaxFeatures(H, D), num_features=8)
    with pytest.raises(NotImplementedError, match="define forward"):
        FeatureMap(H, D, 0, 4)(torch.zeros(1, H, D), None, key=True)
