"""Our attention in PyG's GPS layer."""

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("torch_geometric.nn")
from torch_geometric.nn import GINConv, GPSConv

from flt_mol.integrations.pyg import FLTGPSConv
from flt_mol.nn import FLTAttention, FourierRPE, GaussianFrequencies, GaussianSpectrum

WIDTH = 16


def attention(with_positions=False):
    rpe = None
    if with_positions:
        rpe = FourierRPE(GaussianSpectrum(2, num_terms=4), GaussianFrequencies(4))
    return FLTAttention(WIDTH, 2, rpe=rpe)


def conv():
    return GINConv(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)))


def graphs():
    torch.manual_seed(0)
    x, batch = torch.randn(7, WIDTH), torch.tensor([0, 0, 0, 1, 1, 1, 1])
    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [1, 2, 0, 4, 5, 6, 3]])
    return x, edges, batch, torch.rand(7, 3)


class Exact(nn.MultiheadAttention):
    """PyG's own path, which calls it with dense batches, with our exact attention inside."""

    def __init__(self, inner):
        super().__init__(WIDTH, 1)
        self.inner = inner

    def forward(self, query, key, value, key_padding_mask=None, need_weights=False):
        return self.inner(query, mask=~key_padding_mask), None


@pytest.mark.parametrize("norm", ["batch_norm", "layer_norm", "graph_norm", None])
@pytest.mark.parametrize("local", [True, False])
def test_it_is_gpsconv_with_another_attention(norm, local):
    """Values and gradients, against PyG's forward pass around the same attention."""
    x, edges, batch, _ = graphs()
    layer = FLTGPSConv(WIDTH, conv() if local else None, attention(), norm=norm)
    pyg = GPSConv(WIDTH, copy.deepcopy(layer.conv), norm=norm)
    pyg.mlp.load_state_dict(layer.mlp.state_dict())
    pyg.attn = Exact(copy.deepcopy(layer.attn))
    results = []
    for module in (layer, pyg):
        inputs = x.clone().requires_grad_()
        out = module(inputs, edges, batch)
        (out * torch.linspace(-1, 1, WIDTH)).sum().backward()
        results.append((out.detach(), inputs.grad))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)


def test_positions_matter_and_shifts_do_not():
    x, edges, batch, positions = graphs()
    layer = FLTGPSConv(WIDTH, conv(), attention(True), norm="layer_norm").eval()
    out = layer(x, edges, batch, positions)
    torch.testing.assert_close(layer(x, edges, batch, positions + 5.0), out, atol=1e-4, rtol=1e-4)
    assert (layer(x, edges, batch, 2 * positions) - out).abs().max() > 1e-3


def test_graphs_do_not_see_each_other():
    x, edges, batch, positions = graphs()
    layer = FLTGPSConv(WIDTH, conv(), attention(True), norm="layer_norm").eval()
    alone = layer(x[:3], edges[:, :3], None, positions[:3])
    torch.testing.assert_close(layer(x, edges, batch, positions)[:3], alone, atol=1e-5, rtol=1e-5)


def test_dropout():
    x, edges, batch, _ = graphs()
    layer = FLTGPSConv(WIDTH, conv(), attention(), dropout=0.5, norm=None)
    assert not torch.equal(layer(x, edges, batch), layer(x, edges, batch))
    layer.eval()
    assert torch.equal(layer(x, edges, batch), layer(x, edges, batch))


def test_weights_drawn_anew():
    layer = FLTGPSConv(WIDTH, conv(), attention())
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    layer.reset_parameters()
    same = {name for name, value in layer.state_dict().items() if torch.equal(before[name], value)}
    assert {name for name in before if name.startswith("attn.")} <= same
    assert not {name for name in same if name.startswith(("mlp.", "conv.nn"))}


@pytest.mark.parametrize(
    ("other", "options", "words"),
    [
        (FLTAttention(8, 2), {}, "width 8"),
        (FLTAttention(WIDTH, 2), {"heads": 4}, "heads"),
    ],
)
def test_what_does_not_fit(other, options, words):
    with pytest.raises((ValueError, TypeError), match=words):
        FLTGPSConv(WIDTH, None, other, **options)
