"""No graph breaks: compiled layers and exported models give what the eager ones give."""

import shutil

import pytest
import torch

from flt_mol.nn import (
    FLTAttention,
    FLTBlock,
    FLTEncoder,
    FLTMultiheadAttention,
    FourierRPE,
    GaussianFrequencies,
    GaussianSpectrum,
)

pytestmark = pytest.mark.slow
C, H = 12, 3
PTR = torch.tensor([0, 3, 3, 10, 17, 17])


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def make_rpe(dim=3):
    generator = seeded(1)
    spectrum = GaussianSpectrum(H, 4, dim, generator=generator)
    return FourierRPE(spectrum, GaussianFrequencies(5, dim, generator=generator))


def make(dim=3, **settings):
    rpe = make_rpe(dim) if dim else None
    layer = FLTAttention(C, H, rpe=rpe, exact_below=5, generator=seeded(2), **settings)
    with torch.no_grad():
        layer.out.bias.normal_(generator=seeded(3))
    return layer


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed))


def compiled(module, backend="aot_eager", dynamic=None):
    torch._dynamo.reset()
    return torch.compile(module, fullgraph=True, backend=backend, dynamic=dynamic)


def compare(module, *inputs, dynamic=None, **given):
    """Values, and gradients to all parameters, of the module and of its compiled form."""
    expected, out = module(*inputs, **given), compiled(module, dynamic=dynamic)(*inputs, **given)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    seed, parameters = draw(*out.shape, seed=5), list(module.parameters())
    pairs = zip(
        torch.autograd.grad(out, parameters, seed),
        torch.autograd.grad(expected, parameters, seed),
        strict=True,
    )
    for ours, eager in pairs:
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("mode", "causal", "dynamic"),
    [
        ("linear", False, True),
        ("exact", True, False),
        ("auto", False, True),
        ("linear", True, False),
    ],
)
def test_packed(mode, causal, dynamic):
    layer = make(mode=mode, causal=causal)
    compare(layer, draw(17, C), draw(17, 3, seed=1), ptr=PTR, dynamic=dynamic)


@pytest.mark.parametrize("mode", ["linear", "auto"])
def test_padded_with_nan_in_the_padding(mode):
    x, positions = draw(3, 7, C), draw(3, 7, 3, seed=1)
    mask = torch.tensor([[1, 1, 1, 0, 0, 0, 0], [0] * 7, [0, 1, 1, 1, 1, 0, 1]]).bool()
    x[~mask], positions[~mask] = float("nan"), float("nan")
    compare(make(mode=mode), x, positions, mask=mask)


@pytest.mark.parametrize("num_systems", [None, 5])
def test_rows_in_any_order(num_systems):
    system = torch.repeat_interleave(torch.arange(5), PTR.diff())[torch.randperm(17)]
    given = {"system": system, "num_systems": num_systems}
    compare(make(), draw(17, C), draw(17, 3, seed=1), **given)


def test_sequences_and_every_feature_map():
    for feature_map in ("hyperbolic", "relu", "learned_relu", "softplus", "elu"):
        causal = feature_map in ("relu", "learned_relu", "softplus")
        compare(make(1, feature_map=feature_map, causal=causal), draw(2, 9, C))


def test_cross_attention():
    layer = make(mode="auto")
    key_ptr = torch.tensor([0, 6, 8, 9, 9, 9])
    compare(
        layer,
        draw(17, C),
        draw(17, 3, seed=1),
        ptr=PTR,
        context=draw(9, C, seed=2),
        context_positions=draw(9, 3, seed=3),
        context_ptr=key_ptr,
    )


def test_in_the_place_of_torchs_module():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = FLTMultiheadAttention(C, H, batch_first=True)

        def forward(self, x, ignored):
            return self.attention(x, x, x, key_padding_mask=ignored)[0]

    ignored = torch.arange(7) >= torch.tensor([7, 2, 0])[:, None]
    compare(Layer(), draw(3, 7, C), ignored)


def test_an_encoder():
    rpe = make_rpe()
    blocks = [
        FLTBlock(FLTAttention(C, H, position_dim=10, generator=seeded(s)), 16) for s in (1, 2)
    ]
    encoder = FLTEncoder(blocks, rpe, recycles=2)
    mask = torch.arange(7) < torch.tensor([7, 2, 0])[:, None]
    compare(encoder, draw(3, 7, C), draw(3, 7, 3, seed=1), mask=mask)


def test_one_graph_serves_batches_of_all_sizes():
    layer = make()
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    run = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    frames = []
    # Sizes of the first batch that are equal are taken to be equal always: all differ here.
    for sizes in ([6, 8, 3, 2, 7], [9, 2, 5], [4, 3], [20, 3]):
        ptr = torch.tensor([0, *sizes]).cumsum(0)
        x, positions = draw(sum(sizes), C), draw(sum(sizes), 3, seed=1)
        expected = layer(x, positions, ptr=ptr)
        torch.testing.assert_close(run(x, positions, ptr=ptr), expected, rtol=0, atol=1e-5)
        frames.append(counter.frame_count)
    assert len(set(frames)) == 1


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, inside
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's own compiler needs g++")
def test_the_default_compiler_agrees():
    layer, x = make(0), draw(17, C)
    with torch.no_grad():
        out = compiled(layer, backend="inductor")(x, ptr=PTR)
        torch.testing.assert_close(out, layer(x, ptr=PTR), rtol=0, atol=1e-5)


def test_refusals_stay_in_the_graph():
    """Numbers cannot be read while a graph is built; they are checked when it runs."""

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = FLTMultiheadAttention(C, H, batch_first=True, causal=True)

        def forward(self, x, mask):
            return self.attention(x, x, x, attn_mask=mask)[0]

    run = compiled(Layer())
    mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
    assert run(draw(2, 5, C), mask).isfinite().all()
    window = mask.clone()
    window[4, 0] = True
    with pytest.raises(RuntimeError, match="not the causal mask"):
        run(draw(2, 5, C), window)
    run = compiled(make(0))
    with pytest.raises(RuntimeError, match="system holds indices that are not 0 to 1"):
        run(draw(3, C), system=torch.tensor([0, 1, 2]), num_systems=2)
    with pytest.raises(ValueError, match="ptr must"):
        run(draw(3, C), ptr=torch.tensor([0, 4]))


def test_an_exported_layer_takes_its_arguments_by_name():
    layer = make(0)
    rows, offsets = torch.export.Dim("rows", min=2), torch.export.Dim("offsets", min=3)
    program = torch.export.export(
        layer,
        (draw(17, C),),
        {"ptr": PTR},
        dynamic_shapes={"x": {0: rows}, "ptr": {0: offsets}},
    )
    x, ptr = draw(9, C, seed=1), torch.tensor([0, 4, 9])
    expected = layer(x, ptr=ptr)
    torch.testing.assert_close(program.module()(x, ptr=ptr), expected, rtol=0, atol=1e-5)
