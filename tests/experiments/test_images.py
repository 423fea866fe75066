"""The image models: other attentions against their definitions, with gradients; files of images."""

import gzip
import importlib
from pathlib import Path

import pytest
import torch
import yaml

from flt_mol.nn import FLTAttention

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(EXPERIMENTS))


def one_layer(name):
    """A layer of experiments/images on two images of 3 × 3 tokens, and its rows."""
    model = importlib.import_module("images.model")
    seeded = {"generator": torch.Generator().manual_seed(0)}
    if name == "cosformer":
        layer = FLTAttention(32, 2, feature_map=model.CosFormerFeatures(2, 16, 9), **seeded)
    else:
        settings = {"feature_map": "learned_relu", "num_features": 16, **seeded}
        layer = model.GridMaskAttention(32, 2, side=3, **settings)
        torch.nn.init.normal_(layer.log_mask, generator=seeded["generator"])
    x = torch.randn(18, 32, generator=seeded["generator"]).double()
    return layer.double(), x, [linear(x).view(18, 2, 16) for linear in (layer.query, layer.key)]


def by_weights(layer, weights, x):
    """Weights (B, H, L, L), not normalised, on the layer's values."""
    value = layer.value(x).view(2, 9, 2, 16)
    weights = weights / weights.sum(-1, keepdim=True)
    return layer.out(torch.einsum("bhij,bjhd->bihd", weights, value).reshape(18, 32))


def assert_same_with_gradients(layer, x, truth):
    out = layer(x, ptr=torch.tensor([0, 9, 18]))
    weights = [p for p in layer.parameters() if p.requires_grad]
    results = [[y, *torch.autograd.grad(y.square().sum(), weights)] for y in (out, truth)]
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


def test_cosformer_on_images_is_its_cosine_of_places():
    layer, x, rows = one_layer("cosformer")
    query, key = (row.relu().view(2, 9, 2, 16) for row in rows)
    place = torch.arange(9.0, dtype=x.dtype)
    cosine = (torch.pi / 18 * (place[:, None] - place)).cos()
    truth = by_weights(layer, torch.einsum("bihd,bjhd->bhij", query, key) * cosine, x)
    assert_same_with_gradients(layer, x, truth)


def test_log_linear_attention_on_a_grid_is_that_of_fourier_transforms():
    """Of rows padded to five places a row: differences of places are then those of the grid."""
    layer, x, rows = one_layer("log_linear")
    masked_attention = importlib.import_module("common.attentions").masked_attention
    places = (5 * torch.arange(3)[:, None] + torch.arange(3)).flatten()
    steps = torch.arange(-12, 13)  # of places; the grid's are 5 dy + dx
    y, x_step = (steps + 2).div(5, rounding_mode="floor"), (steps + 2) % 5 - 2
    mask = layer.log_mask[:, y + 2, x_step + 2].exp()
    phi = [layer.feature_map(row, None, key=i == 1) for i, row in enumerate(rows)]
    parts = []
    for image in range(2):
        own = [z[9 * image : 9 * image + 9] for z in (*phi, layer.value(x).view(18, 2, 16))]
        padded = [z.new_zeros(13, *z.shape[1:]).index_copy(0, places, z) for z in own]
        padded[0] = own[0].new_ones(13, *own[0].shape[1:]).index_copy(0, places, own[0])  # not 0/0
        parts.append(masked_attention(*padded, mask)[places])
    truth = layer.out(torch.cat(parts).reshape(18, 32))
    assert_same_with_gradients(layer, x, truth)


def test_images_are_read_from_idx_files(tmp_path):
    data = importlib.import_module("images.data")
    for part, count in (("train", 3), ("t10k", 2)):
        pixels = bytes([0, 0, 8, 3, 0, 0, 0, count, 0, 0, 0, 2, 0, 0, 0, 2, *range(4 * count)])
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(pixels))
        labels = tmp_path / f"{part}-labels-idx1-ubyte"
        labels.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, count, *range(count)]))
    train, test = data.fashion_mnist(tmp_path)
    deviation = torch.arange(12.0).std()
    torch.testing.assert_close(train.pixels[1, 1, 0], (6 - 5.5) / deviation)
    torch.testing.assert_close(test.pixels[0, 0, 1], (1 - 5.5) / deviation)
    assert test.classes.tolist() == [0, 1]
    labels.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 9, 1]))
    with pytest.raises(ValueError, match=labels.name):
        data.fashion_mnist(tmp_path)
    labels.write_bytes(b"\0\0\x0d\x01")
    with pytest.raises(ValueError, match=labels.name):
        data.fashion_mnist(tmp_path)
    labels.unlink()
    with pytest.raises(FileNotFoundError, match=labels.name):
        data.fashion_mnist(tmp_path)


def test_flt_on_images_sees_places_only_as_differences():
    """Without vectors of places: of FLT shuffled patches change the logits, of Performer not."""
    model = importlib.import_module("images.model")
    config = model.Config(size=6, patch=2, dim=16, layers=1, hidden=16, absolute=False)
    pixels = torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(0))
    shuffled = torch.cat([pixels[:, 2:4], pixels[:, :2], pixels[:, 4:]], 1)
    for kind, sees in (("flt", True), ("performer", False)):
        net = model.ImageTransformer(config, kind, torch.Generator().manual_seed(0))
        assert sees != torch.allclose(net(pixels), net(shuffled), rtol=0, atol=1e-5)


def test_the_papers_image_model_is_a_file():
    model = importlib.import_module("images.model")
    config = model.Config(**yaml.safe_load((EXPERIMENTS / "images" / "paper.yaml").read_text()))
    assert (config.layers, config.terms, config.frequencies) == (12, 25, 64)
