"""Token by token gives what the whole sequence gives."""

import pytest
import torch

from flt_mol.nn import (
    FLTAttention,
    FLTBlock,
    FLTEncoder,
    FourierRPE,
    GaussianFrequencies,
    GaussianSpectrum,
)

C, H, B, L = 12, 3, 4, 23
F64 = torch.float64
MAPS = ["softmax", "hyperbolic", "relu", "learned_relu", "softplus", "elu"]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def make(dim=1, dtype=F64, **settings):
    rpe = None
    if dim:
        generator = seeded(1)
        spectrum = GaussianSpectrum(H, 4, dim, generator=generator)
        rpe = FourierRPE(spectrum, GaussianFrequencies(5, dim, generator=generator))
    return FLTAttention(C, H, rpe=rpe, causal=True, generator=seeded(2), **settings).to(dtype)


def draw(*shape, dtype=F64, seed=0):
    return torch.randn(*shape, generator=seeded(seed), dtype=dtype)


def run(layer, x, state, positions=None):
    outs = []
    for t in range(x.shape[1]):
        at = None if positions is None else positions[:, t]
        out, state = layer.step(x[:, t], state, at)
        outs.append(out)
    return torch.stack(outs, 1), state


@pytest.mark.parametrize("feature_map", MAPS)
@pytest.mark.parametrize("dim", [0, 1, 3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(F64, 1e-12), (torch.float32, 3e-6)])
def test_steps_are_the_whole(feature_map, dim, dtype, tolerance):
    layer = make(dim, dtype, feature_map=feature_map)
    x = draw(B, L, C, dtype=dtype)
    # Far from 0: the first token is the origin, for steps and for the whole.
    positions = 1e3 + draw(B, L, dim, dtype=dtype, seed=1) if dim == 3 else None
    whole = layer(x, positions)
    steps, _ = run(layer, x, layer.initial_state(B), positions)
    torch.testing.assert_close(steps, whole, rtol=0, atol=tolerance)


@pytest.mark.parametrize("feature_map", ["softmax", "elu"])
@pytest.mark.parametrize("dim", [0, 1, 3])
def test_a_prefix_at_once_then_steps(feature_map, dim):
    layer = make(dim, feature_map=feature_map)
    x, positions = draw(B, L, C), draw(B, L, 3, seed=1) if dim == 3 else None
    whole = layer(x, positions)
    for stop in (0, 1, 16, 22):
        prefix = None if positions is None else positions[:, :stop]
        state = layer.state_after(x[:, :stop], prefix)
        rest = None if positions is None else positions[:, stop:]
        steps, _ = run(layer, x[:, stop:], state, rest)
        torch.testing.assert_close(steps, whole[:, stop:], rtol=0, atol=1e-11)


def test_prefixes_of_different_lengths_and_sequences_in_another_order():
    layer = make()
    x = draw(B, L, C)
    lengths = torch.tensor([5, 0, 20, 1])
    mask = torch.arange(L) < lengths[:, None]
    order = torch.tensor([2, 2, 0, 1])
    state = layer.state_after(x, mask=mask).streams(order)
    assert state.length.tolist() == [20, 20, 5, 0]
    token = draw(B, C, seed=5)
    out, _ = layer.step(token, state)
    for row, source in enumerate(order.tolist()):
        sequence = torch.cat([x[source, : lengths[source]], token[row : row + 1]])
        torch.testing.assert_close(out[row], layer(sequence)[-1], rtol=0, atol=1e-12)


def test_gradients_flow_through_states_unless_detached():
    layer = make(0)
    x = draw(2, 5, C).requires_grad_()
    seed = draw(2, C, seed=4)
    whole = torch.autograd.grad((layer(x)[:, -1] * seed).sum(), x)[0]
    steps, _ = run(layer, x, layer.initial_state(2))
    torch.testing.assert_close(torch.autograd.grad((steps[:, -1] * seed).sum(), x)[0], whole)
    state = layer.state_after(x[:, :4]).detach()
    out, _ = layer.step(x[:, 4], state)
    gradient = torch.autograd.grad((out * seed).sum(), x)[0]
    assert not gradient[:, :4].any()
    assert gradient[:, 4].any()


def test_what_cannot_go_token_by_token_is_refused():
    with pytest.raises(ValueError, match="only a causal layer in linear mode"):
        FLTAttention(C, H).initial_state(2)
    with pytest.raises(ValueError, match="mode='exact'"):
        make(mode="exact").initial_state(2)
    layer = make(3)
    state = layer.initial_state(2)
    with pytest.raises(ValueError, match="x has 3 systems, the state 2"):
        layer.step(draw(3, C), state)
    with pytest.raises(ValueError, match="positions are missing"):
        layer.step(draw(2, C), state)
    with pytest.raises(ValueError, match="state is of another feature map"):
        make(feature_map="relu").step(draw(2, C), make().initial_state(2))
    with pytest.raises(ValueError, match=r"mask has shape \(2, 1\).*bool \(2,\)"):
        make().step(draw(2, C), make().initial_state(2), mask=torch.ones(2, 1, dtype=torch.bool))
    with pytest.raises(ValueError, match="without positions"):
        make(0).step(draw(2, C), make(0).initial_state(2), draw(2, 3))
    shared = FLTAttention(C, H, position_dim=4, causal=True).double()
    with pytest.raises(ValueError, match="position_features are missing"):
        shared.step(draw(2, C), shared.initial_state(2))


@pytest.mark.parametrize("feature_map", MAPS)
@pytest.mark.parametrize("dim", [0, 1, 3])
def test_several_tokens_on_top_of_a_state(feature_map, dim):
    layer = make(dim, feature_map=feature_map)
    x = draw(B, L, C).requires_grad_()
    positions = 1e2 + draw(B, L, dim, seed=1) if dim == 3 else None
    state = None
    for start, stop in ((0, 5), (5, 5), (5, 6), (6, L - 1)):
        at = None if positions is None else positions[:, start:stop]
        state = layer.state_after(x[:, start:stop], at, state)
    assert state.length.tolist() == [L - 1] * B
    whole = layer(x, positions)[:, -1]
    out, _ = layer.step(x[:, -1], state, None if positions is None else positions[:, -1])
    torch.testing.assert_close(out, whole, rtol=0, atol=1e-11)
    seed = draw(B, C, seed=4)
    both = [torch.autograd.grad((found * seed).sum(), x)[0] for found in (out, whole)]
    torch.testing.assert_close(*both, rtol=0, atol=1e-10)


def test_the_state_of_two_parts_is_that_of_the_whole():
    layer, x = make(dtype=torch.float32), draw(2, 10, C, dtype=torch.float32)
    whole = layer.state_after(x)
    parts = layer.state_after(x[:, 5:], state=layer.state_after(x[:, :5]))
    for a, b in zip(parts, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    # Streams of different lengths, one of which gets nothing.
    lengths = torch.tensor([3, 0])
    mask = torch.arange(5) < lengths[:, None]
    ragged = layer.state_after(x[:, 5:], state=layer.state_after(x[:, :5]), mask=mask)
    assert ragged.length.tolist() == [8, 5]
    token = draw(2, C, dtype=torch.float32, seed=7)
    out = layer.step(token, ragged)[0]
    for b, length in enumerate((8, 5)):
        expected = layer(torch.cat([x[b, :length], token[b : b + 1]]))[-1]
        torch.testing.assert_close(out[b], expected, rtol=0, atol=3e-6)
    with pytest.raises(ValueError, match="3 systems, the state 2"):
        layer.state_after(draw(3, 4, C, dtype=torch.float32), state=whole)


@pytest.mark.parametrize("own", [True, False])
def test_streams_without_a_token_stay_as_they_are(own):
    layer = make() if own else encoder()
    x, mask = draw(B, 3, C), torch.tensor([True, False, True, False])
    state = layer.state_after(x[:, :2])
    token = torch.where(mask[:, None], x[:, 2], torch.nan).requires_grad_()
    out, after = layer.step(token, state, mask=mask)
    full, whole = layer.step(x[:, 2], state)
    torch.testing.assert_close(out[mask], full[mask], rtol=0, atol=0)
    assert not out[~mask].any()
    triples = zip(*((s,) if own else s for s in (state, after, whole)), strict=True)
    for old, new, all_new in triples:
        for a, b, c in zip(old, new, all_new, strict=True):
            if a is not None:
                assert torch.equal(b[~mask], a[~mask])
                assert torch.equal(b[mask], c[mask])
    out.sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters() if p.grad is not None)
    first = layer.step(x[:, 0], layer.initial_state(B), mask=mask)[1]
    both = layer.step(x[:, 0], first, mask=~mask)[0]
    torch.testing.assert_close(both[~mask], layer(x)[~mask, 0], rtol=0, atol=1e-12)


def encoder(dim=1, shared=True, recycles=2):
    rpe = make(dim).rpe if dim else None
    width = rpe.num_features if rpe is not None and shared else None
    own = {} if shared else {"rpe": rpe}
    blocks = [
        FLTBlock(
            FLTAttention(C, H, causal=True, position_dim=width, generator=seeded(k), **own), 16
        )
        for k in range(2)
    ]
    return FLTEncoder(blocks, rpe if shared else None, recycles).to(F64)


@pytest.mark.parametrize(
    ("dim", "shared"), [(0, True), (1, True), (3, True), (1, False), (3, False)]
)
def test_an_encoder_token_by_token(dim, shared):
    stack, x = encoder(dim, shared), draw(B, L, C)
    positions = 1e2 + draw(B, L, 3, seed=1) if dim == 3 else None

    def at(part):
        return None if positions is None else positions[:, part]

    whole = stack(x, positions)
    state = stack.state_after(x[:, :9], at(slice(9)))
    state = stack.state_after(x[:, 9:12], at(slice(9, 12)), state)
    assert len(state) == 4
    for t in range(12, L):
        out, state = stack.step(x[:, t], state, at(t))
        torch.testing.assert_close(out, whole[:, t], rtol=0, atol=1e-10)
    first, _ = stack.step(x[:, 0], stack.initial_state(B), at(0))
    torch.testing.assert_close(first, whole[:, 0], rtol=0, atol=1e-10)
    with pytest.raises(ValueError, match="causal"):
        FLTEncoder([FLTBlock(FLTAttention(C, H), 16)]).initial_state(2)
