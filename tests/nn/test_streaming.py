"""Token by token gives what the whole sequence gives."""

import pytest
import torch

from flt_mol.nn import FLTAttention, FourierRPE, GaussianFrequencies, GaussianSpectrum

C, H, B, L = 12, 3, 4, 23
F64 = torch.float64
MAPS = ["softmax", "hyperbolic", "relu", "softplus", "elu"]


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
    with pytest.raises(ValueError, match="x has shape"):
        layer.step(draw(3, C), state)
    with pytest.raises(ValueError, match="positions are missing"):
        layer.step(draw(2, C), state)
    with pytest.raises(ValueError, match="without positions"):
        make(0).step(draw(2, C), make(0).initial_state(2), draw(2, 3))
    shared = FLTAttention(C, H, position_dim=4, causal=True).double()
    with pytest.raises(ValueError, match="position_features are missing"):
        shared.step(draw(2, C), shared.initial_state(2))
