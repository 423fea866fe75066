import importlib.util

import pytest
import torch

from flt_mol.analysis.layer_cost import LayerSize
from flt_mol.analysis.speed import lengths
from flt_mol.analysis.speed.layers import CORES, LAYERS, OURS, DenseBiasAttention, build_core
from flt_mol.analysis.speed.layers import build_layer as build
from flt_mol.analysis.speed.lengths import FLOOR, measure

SIZE = LayerSize(
    tokens=12, embed_dim=16, num_heads=2, num_features=8, num_frequencies=4, ffn_dim=24
)
INSTALLED = [
    name
    for name, layer in LAYERS.items()
    if layer.package is None or importlib.util.find_spec(layer.package)
]


@pytest.fixture(autouse=True)
def _seeded():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", INSTALLED)
def test_layers_have_the_same_maps_and_mix_rows(name):
    layer = build(name, SIZE)
    maps = sum(p.numel() for p in layer.parameters() if p.dim() == 2 and p.shape[0] % 8 == 0)
    assert maps == 4 * 16**2 + 2 * 16 * 24  # beside masks, spectra and norms
    x, positions = torch.randn(12, 16), torch.rand(12, 3)
    out = layer(x, positions)
    assert out.shape == (12, 16)
    changed = layer(torch.cat([x[:-1], x[-1:].flip(1)]), positions)
    assert not torch.equal(out[0], changed[0])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in INSTALLED if name in CORES])
def test_cores_average_values(name):
    core, (query, key, value) = build_core(name, SIZE)
    out = core(query, key, torch.ones_like(value))
    assert out.numel() == 12 * 16
    torch.testing.assert_close(out, torch.ones_like(out), atol=1e-3, rtol=0)


def test_the_dense_bias_is_of_query_minus_key():
    layer = DenseBiasAttention(SIZE)
    with torch.no_grad():
        layer.table.copy_(torch.arange(-11.0, 12.0).expand(2, -1))
    place = torch.arange(12.0)
    torch.testing.assert_close(layer.bias(12), (place[:, None] - place).expand(2, -1, -1))


def test_softmax_with_a_strong_bias_takes_one_value():
    layer = DenseBiasAttention(SIZE)
    with torch.no_grad():
        layer.table.zero_()[:, 11 + 1] = 1000.0  # the row before
        x = torch.randn(12, 16)
        value = layer.qkv(x)[:, 32:]
        torch.testing.assert_close(layer(x)[1:], layer.out(value[:-1]))


@pytest.mark.parametrize("passes", ["forward", "training"])
@pytest.mark.parametrize("part", ["block", "core"])
def test_what_is_measured(part, passes):
    size = {**SIZE._asdict(), "tokens": 0}  # a length of its own comes first
    names = [OURS, "FLT, Gaussian RPE"]
    state = torch.get_rng_state()
    found = measure(12, part, passes, names=names, size=size, rounds=2, at_least=0.0, gemm_size=8)
    assert torch.equal(torch.get_rng_state(), state)
    extra = {FLOOR} if part == "block" else set()
    assert set(found["seconds"]) == {*names, *extra, "sgemm", "copy"}
    assert all(len(times) == 2 for times in found["seconds"].values())
    assert set(found["bytes"]) == set(found["floors"]) == set(names)
    assert found["stopped"] == found["left_out"] == []
    counted = found["floors"]
    assert counted["FLT, Gaussian RPE"]["flops"] > counted[OURS]["flops"] > 0


def test_training_counts_three_times_the_multiplications():
    counts = [
        measure(12, "block", passes, names=[OURS], size=SIZE._asdict(), rounds=1, at_least=0,
                gemm_size=8)["floors"][OURS]["flops"]
        for passes in ("forward", "training")
    ]  # fmt: skip
    assert counts[1] == 3 * counts[0]


def test_what_runs_out_of_memory_is_left_out_of_the_turns(monkeypatch):
    def hungry(size):
        class Hungry(torch.nn.Module):
            def forward(self, x, positions):
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

        return Hungry()

    monkeypatch.setitem(LAYERS, "softmax, dense bias", LAYERS[OURS]._replace(build=hungry))
    names = [OURS, "softmax, dense bias"]
    found = measure(12, names=names, size=SIZE._asdict(), rounds=1, at_least=0, gemm_size=8)
    assert found["stopped"] == ["softmax, dense bias"]
    assert OURS in found["seconds"]
    assert "softmax, dense bias" not in found["seconds"]


def test_packages_that_are_missing_are_said_to_be(monkeypatch):
    lacking = LAYERS["performer-pytorch"]._replace(package="no_such_package")
    monkeypatch.setitem(LAYERS, "performer-pytorch", lacking)
    names = [OURS, "performer-pytorch"]
    found = measure(12, names=names, size=SIZE._asdict(), rounds=1, at_least=0, gemm_size=8)
    assert found["left_out"] == ["performer-pytorch"]


def test_unknown_parts_are_refused():
    with pytest.raises(ValueError, match="part is 'heads'"):
        measure(12, "heads")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in INSTALLED if "softmax" not in name])
def test_layers_have_the_same_number_of_random_features(name):
    size = SIZE._replace(num_features=5)
    shapes = [buffer.shape for buffer in build(name, size).buffers() if buffer.dim() >= 2]
    # (M, D), or one for each head; of positions, too.
    assert any(shape[-2:] == (5, 8) for shape in shapes)


@pytest.mark.parametrize("part", ["block", "core"])
def test_passes_are_what_they_are_called(part):
    assert not lengths._run(OURS, SIZE, part, "forward")().requires_grad
    gradients = lengths._run(OURS, SIZE, part, "training")()
    assert len(gradients) == (3 if part == "core" else 17)
    assert all(gradient.abs().max() > 0 for gradient in gradients if gradient.dim() > 1)
