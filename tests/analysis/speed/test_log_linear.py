import pytest
import torch

from flt_mol.analysis.speed.log_linear import (
    LogLinearAttention,
    masked_attention,
    masked_attention_reference,
)


def rows(length, heads=2, features=5, width=3):
    generator = torch.Generator().manual_seed(0)
    kind = {"generator": generator, "dtype": torch.float64}
    return [
        torch.rand(length, heads, features, **kind).requires_grad_(),
        torch.rand(length, heads, features, **kind).requires_grad_(),
        torch.randn(length, heads, width, **kind).requires_grad_(),
        (0.1 + torch.rand(heads, 2 * length - 1, **kind)).requires_grad_(),
    ]


@pytest.mark.parametrize("length", [1, 2, 7, 32])
def test_transforms_give_the_sums_over_all_pairs_and_their_gradients(length):
    given = rows(length)
    fast, slow = masked_attention(*given), masked_attention_reference(*given)
    torch.testing.assert_close(fast, slow)
    slope = torch.randn(fast.shape, dtype=fast.dtype, generator=torch.Generator().manual_seed(1))
    for ours, theirs in zip(
        torch.autograd.grad(fast, given, slope),
        torch.autograd.grad(slow, given, slope),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_the_mask_is_of_query_minus_key():
    query = key = torch.ones(4, 1, 1, dtype=torch.float64)
    value = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=torch.float64).view(4, 1, 1)
    mask = torch.full((1, 7), 1e-12, dtype=torch.float64)
    mask[0, 3 + 1] = 1.0  # the key one place before
    expected = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    for attention in (masked_attention, masked_attention_reference):
        out = attention(query, key, value, mask).flatten()
        torch.testing.assert_close(out[1:], expected, atol=1e-9, rtol=0)


def test_a_layer_is_reached_by_gradients_everywhere():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = LogLinearAttention(embed_dim=8, num_heads=2, num_features=16, length=6)
        x = torch.randn(6, 8, dtype=torch.float32)
    gradients = torch.autograd.grad(layer(x).square().sum(), list(layer.parameters()))
    assert len(gradients) == 5
    assert all(gradient.abs().max() > 0 for gradient in gradients)
