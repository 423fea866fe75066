import math

import pytest
import torch

from flt_mol.functional.reference import softmax_attention
from helpers.kernels import kernel_attention
from helpers.masks import relative_mask

PTR = torch.tensor([0, 0, 3, 3, 8])


def block_mask():
    system = torch.tensor([1, 1, 1, 3, 3, 3, 3, 3])
    return system[:, None] == system[None, :]


def test_softmax_attention_is_the_dense_one_with_foreign_pairs_at_minus_infinity():
    q, k, v = torch.randn(3, 8, 2, 4, dtype=torch.float64)
    bias = torch.randn(2, 8, 8, dtype=torch.float64)
    logits = torch.einsum("ihd,jhd->hij", q, k) / 2 + bias
    weights = logits.masked_fill(~block_mask(), -math.inf).softmax(-1)
    expected = torch.einsum("hij,jhd->ihd", weights, v)
    torch.testing.assert_close(softmax_attention(q, k, v, PTR, bias), expected)


def test_softmax_attention_by_hand():
    # Two atoms, q = 0: weights are 1 : e^bias, here 1 : 3.
    zero = torch.zeros(2, 1, 4)
    value = torch.tensor([0.0, 8.0]).reshape(2, 1, 1)
    bias = torch.tensor([[[0.0, math.log(3.0)], [math.log(3.0), 0.0]]])
    out = softmax_attention(zero, zero, value, torch.tensor([0, 2]), bias)
    torch.testing.assert_close(out.flatten(), torch.tensor([6.0, 2.0]))


def test_scale_defaults_to_one_over_root_d():
    q, k, v = torch.randn(3, 5, 1, 16, dtype=torch.float64)
    ptr = torch.tensor([0, 5])
    torch.testing.assert_close(
        softmax_attention(q, k, v, ptr), softmax_attention(q, k, v, ptr, scale=0.25)
    )


def test_kernel_attention_is_the_dense_one_with_foreign_pairs_at_zero():
    q, k = torch.rand(2, 8, 2, 5, dtype=torch.float64)
    v = torch.randn(8, 2, 3, dtype=torch.float64)
    weights = torch.einsum("ihm,jhm->hij", q, k) * block_mask()
    expected = torch.einsum("hij,jhd->ihd", weights / weights.sum(-1, keepdim=True), v)
    torch.testing.assert_close(kernel_attention(q, k, v, PTR), expected)


def test_features_shared_by_heads_are_expanded_in_the_mask():
    phi, psi = torch.randn(4, 1, 6), torch.randn(4, 3, 6)
    mask = relative_mask(phi, psi)
    assert mask.shape == (3, 4, 4)
    torch.testing.assert_close(mask[2, 1, 3], phi[1, 0] @ psi[3, 2])


@pytest.mark.parametrize("attention", [softmax_attention, kernel_attention])
def test_no_systems(attention):
    empty = torch.zeros(0, 2, 4)
    assert attention(empty, empty, empty, torch.tensor([0])).shape == (0, 2, 4)
    assert attention(empty, empty, empty, torch.tensor([0, 0])).shape == (0, 2, 4)


KEY_PTR = torch.tensor([0, 2, 2, 3, 7])


@pytest.mark.parametrize("attention", [softmax_attention, kernel_attention])
def test_causal_rows_see_themselves_and_earlier_rows(attention):
    q, k = torch.rand(2, 8, 2, 5, dtype=torch.float64)
    v = torch.randn(8, 2, 3, dtype=torch.float64)
    out = attention(q, k, v, PTR, causal=True)
    for i, start in ((0, 0), (2, 0), (3, 3), (6, 3)):
        seen, end = slice(start, i + 1), torch.tensor([0, i + 1 - start])
        alone = attention(q[seen], k[seen], v[seen], end)[-1]
        torch.testing.assert_close(out[i], alone)


@pytest.mark.parametrize("attention", [softmax_attention, kernel_attention])
def test_keys_of_another_set(attention):
    ptr = torch.tensor([0, 0, 3, 3, 8])
    q = torch.rand(8, 2, 5, dtype=torch.float64)
    k, v = torch.rand(2, 7, 2, 5, dtype=torch.float64)
    out = attention(q, k, v, ptr, key_ptr=KEY_PTR)
    assert (out[:3] == 0).all()  # the system of rows 0 to 2 has no keys
    pairs = torch.einsum("ihd,jhd->hij", q[3:], k[3:])
    if attention is softmax_attention:
        pairs = (pairs / 5**0.5).exp()
    expected = torch.einsum("hij,jhd->ihd", pairs / pairs.sum(-1, keepdim=True), v[3:])
    torch.testing.assert_close(out[3:], expected)


def test_the_bias_of_other_keys_has_a_column_for_each():
    q, k, v = torch.zeros(1, 1, 4), torch.zeros(3, 1, 4), torch.tensor([0.0, 8.0, 99.0])
    ptr, key_ptr = torch.tensor([0, 1, 1]), torch.tensor([0, 2, 3])
    bias = torch.tensor([0.0, math.log(3.0), 50.0]).reshape(1, 1, 3)
    out = softmax_attention(q, k, v.reshape(3, 1, 1), ptr, bias, key_ptr=key_ptr)
    torch.testing.assert_close(out.flatten(), torch.tensor([6.0]))


def test_autocast_changes_nothing():
    q, k, v = torch.randn(3, 8, 2, 4)
    expected = softmax_attention(q, k, v, PTR)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(softmax_attention(q, k, v, PTR), expected)
