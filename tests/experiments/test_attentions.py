"""Attention of other papers against its definition, written out, with gradients; and causal."""

import importlib
import math
from pathlib import Path

import pytest
import torch
from torch.nn.functional import normalize

LENGTH, SEQUENCES, HEADS, WIDTH = 70, 2, 2, 8
PTR = torch.arange(SEQUENCES + 1) * LENGTH
PLACE = torch.arange(LENGTH)
DISTANCE = PLACE[:, None] - PLACE  # i − j


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "experiments"))


def softmax_kernel(layer, query, key):
    """Σ_m φ_m(q)·φ_m(k), written out as exponentials."""
    w = layer.feature_map.content_projection
    parts = []
    for rows in (query, key):
        rows = rows * rows.shape[-1] ** -0.25
        logits = torch.einsum("...ihd,hmd->...ihm", rows, w)
        parts.append((logits - rows.square().sum(-1, keepdim=True) / 2).exp())
    return torch.einsum("bihm,bjhm->bhij", *parts)


def cosine(layer, query, key, x):
    weights = torch.einsum("bihd,bjhd->bhij", query.relu(), key.relu())
    return weights * (math.pi / 2 * DISTANCE / layer.max_length).cos()


def random_features(layer, query, key, x):
    w = layer.projection * layer.scale
    u, v = (torch.einsum("bihd,hmd->bihm", normalize(rows, dim=-1), w) for rows in (query, key))
    if layer.kernel == "gaussian":  # cos(a − b) = cos a cos b + sin a sin b
        weights = (u[:, :, None] - v[:, None]).cos().mean(-1).permute(0, 3, 1, 2)
    else:
        weights = 2 * (u.relu()[:, :, None] * v.relu()[:, None]).mean(-1).permute(0, 3, 1, 2)
    if layer.gate is None:
        return weights
    gate = torch.sigmoid(layer.gate(x)).transpose(1, 2)  # (B, H, L)
    rows = []
    for i in range(LENGTH):
        forgotten = gate[..., : i + 1].flip(-1).cumprod(-1).flip(-1)[..., 1:]
        factor = torch.cat([forgotten, torch.ones_like(gate[..., :1])], -1)
        seen = factor * (1 - gate[..., : i + 1])
        rows.append(torch.nn.functional.pad(seen, (0, LENGTH - i - 1)))
    return weights * torch.stack(rows, -2)


def stochastic(layer, query, key, x):
    generator = torch.Generator().manual_seed(0)
    size = layer.head_dim
    codes = layer.codes(LENGTH, size, generator)
    common = torch.randn(HEADS, size, 1, size, generator=generator, dtype=torch.float64)
    gate = torch.sigmoid(layer.gate)[..., None, None]
    codes = [gate**0.5 * code + (1 - gate) ** 0.5 * common for code in codes]
    query, key = (
        torch.einsum("bihd,hdir->bihr", rows, code) / size**0.5
        for rows, code in zip((query, key), codes, strict=True)
    )
    return softmax_kernel(layer, query, key)


def log_linear(layer, query, key, x):
    factors = layer.log_mask.exp()[:, DISTANCE.clamp(min=0)]
    return softmax_kernel(layer, query, key) * factors


RFA, SPE, M = "RandomFeature", "Stochastic", {"num_features": 6}
CASES = {
    "cosformer": ("CosFormer", cosine, {"max_length": LENGTH}),
    "gaussian": (RFA, random_features, {"kernel": "gaussian", "gated": False}),
    "arccos": (RFA, random_features, {"kernel": "arccos", "gated": False}),
    "gaussian, gated": (RFA, random_features, {"kernel": "gaussian", "gated": True}),
    "arccos, gated": (RFA, random_features, {"kernel": "arccos", "gated": True}),
    "sine": (SPE, stochastic, M | {"kind": "sine"}),
    "conv": (SPE, stochastic, M | {"kind": "conv", "width": 5}),
    "log-linear": ("LogLinear", log_linear, M | {"max_length": LENGTH + 3}),
    "written out": ("LogLinear", log_linear, M | {"max_length": LENGTH, "fft": False}),
}


def case(name):
    kind, kernel, settings = CASES[name]
    generator = torch.Generator().manual_seed(1)
    kind = getattr(importlib.import_module("common.attentions"), f"{kind}Attention")
    layer = kind(WIDTH, HEADS, generator=generator, **settings).double().eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    rows = torch.randn(SEQUENCES * LENGTH, WIDTH, generator=generator).double()
    return layer, kernel, rows


@pytest.mark.parametrize("name", CASES)
def test_is_its_definition_written_out(name):
    layer, kernel, rows = case(name)

    def definition(rows):
        x = rows.view(SEQUENCES, LENGTH, WIDTH)
        query, key, value = (
            linear(x).unflatten(-1, (HEADS, -1)) for linear in (layer.query, layer.key, layer.value)
        )
        weights = kernel(layer, query, key, x).tril()
        total = weights.sum(-1, keepdim=True)
        total = torch.where(total == 0, 1.0, total)  # no key at all: 0 comes out
        if hasattr(layer, "projection"):  # RFA, whose normaliser has a least value
            most = (PLACE[:, None] + 1).double()
            if layer.gate is not None:
                most = 1 - torch.sigmoid(layer.gate(x)).transpose(1, 2).cumprod(-1)[..., None]
            total = torch.maximum(total, 0.1 * most)
        out = torch.einsum("bhij,bjhd->bihd", weights / total, value)
        return layer.out(out.reshape(-1, WIDTH))

    results = []
    for function in (lambda x: layer(x, ptr=PTR), definition):
        x = rows.clone().requires_grad_()
        out = function(x)
        loss = (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum()
        results.append([out, *torch.autograd.grad(loss, [x, *layer.parameters()])])
    assert results[1][0].abs().max() > 0.1
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", CASES)
def test_sees_no_later_token_and_no_other_sequence(name):
    layer, _, rows = case(name)
    other = rows.clone()
    other[50:LENGTH] += 1.0
    before, after = layer(rows, ptr=PTR), layer(other, ptr=PTR)
    torch.testing.assert_close(after[:50], before[:50], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(after[LENGTH:], before[LENGTH:], rtol=1e-9, atol=1e-9)
    assert (after - before)[50:LENGTH].abs().max(-1).values.min() > 1e-6


@pytest.mark.parametrize("name", ["sine", "conv"])
def test_stochastic_codes_have_the_covariance_they_stand_for(name):
    layer, _, _ = case(name)
    length, columns = 12, 40_000
    query, key = layer.codes(length, columns, torch.Generator().manual_seed(0))
    found = torch.einsum("hdir,hdjr->hdij", query, key) / columns
    distance = DISTANCE[:length, :length]
    if name == "sine":
        turns = math.pi * torch.sigmoid(layer.frequency)[..., None, None] * distance
        waves = (turns + layer.phase[..., None, None]).cos()
        expected = (layer.gain.square()[..., None, None] * waves).sum(2)
    else:
        a, b = layer.filters
        expected = torch.zeros_like(found)
        for u in range(5):
            inside = (u + distance >= 0) & (u + distance < 5)
            shifted = b[..., (u + distance).clamp(0, 4)] * inside
            expected = expected + a[..., u, None, None] * shifted
    torch.testing.assert_close(found, expected, rtol=0, atol=0.06)
    assert expected.abs().max() > 0.3
