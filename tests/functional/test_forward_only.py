"""Attention without gradients against the form that has them."""

import itertools

import pytest
import torch
from flt_mol.functional.forward_only import available, forward_softmax_attention, pieces

from flt_mol.functional.feature_maps import (
    SharedLogits,
    softmax_log_features,
    stabilised_features,
)
from flt_mol.functional.linear import linear_attention


def _inputs(num_queries, num_keys, *, scale=1.0, dtype=torch.float64, value_dim=5, at=True):
    draw = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype)

    heads, head_dim, features, width = 3, 4, 7, 6
    query, key = scale * normal(num_queries, heads, head_dim), normal(num_keys, heads, head_dim)
    key = scale * key
    value, projection = normal(num_keys, heads, value_dim), normal(heads, features, head_dim)
    places = [None, None]
    if at:
        places = [
            SharedLogits(normal(n, width), normal(heads, width, features))
            for n in (num_queries, num_keys)
        ]
    return query, key, value, projection, places


def _reference(query, key, value, projection, ptr, key_ptr, places):
    queries = softmax_log_features(query, projection, places[0], subtract_norm=False)
    keys = softmax_log_features(key, projection, places[1])
    return linear_attention(*stabilised_features(queries, keys, ptr, key_ptr), value, ptr, key_ptr)


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("at", [False, True])
def test_equals_the_differentiable_form(chunk, at):
    query, key, value, projection, places = _inputs(11, 11, at=at)
    ptr = torch.tensor([0, 4, 4, 5, 11])
    expected = _reference(query, key, value, projection, ptr, None, places)
    with torch.no_grad():
        found = forward_softmax_attention(
            query, key, value, projection, ptr, None, *places, chunk=chunk
        )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_context_with_other_lengths_and_none():
    query, key, value, projection, places = _inputs(7, 9)
    ptr, key_ptr = torch.tensor([0, 3, 5, 7]), torch.tensor([0, 0, 6, 9])
    expected = _reference(query, key, value, projection, ptr, key_ptr, places)
    found = forward_softmax_attention(query, key, value, projection, ptr, key_ptr, *places, chunk=2)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert not found[:3].any()  # no keys, no attention


@pytest.mark.parametrize("order", [1, -1])
def test_logits_of_any_size_in_any_order(order):
    """The running peak rises or falls by hundreds between chunks: e^709 is float64's end."""
    query, key, value, projection, _ = _inputs(12, 12, at=False)
    key = key * torch.linspace(0, 60, 12, dtype=torch.float64)[::1, None, None]
    key = key if order == 1 else key.flip(0)
    query = 30 * query
    ptr = torch.tensor([0, 12])
    expected = _reference(query, key, value, projection, ptr, None, [None, None])
    found = forward_softmax_attention(query, key, value, projection, ptr, chunk=2)
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_other_systems_have_no_influence_not_even_nan():
    query, key, value, projection, places = _inputs(10, 10)
    ptr = torch.tensor([0, 6, 10])
    alone = forward_softmax_attention(query, key, value, projection, ptr, None, *places, chunk=4)
    key[7] = torch.nan
    found = forward_softmax_attention(query, key, value, projection, ptr, None, *places, chunk=4)
    assert torch.equal(found[:6], alone[:6])
    assert found[6:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_half_precision_is_accumulated_in_float32(dtype):
    query, key, value, projection, places = _inputs(9, 9, dtype=dtype)
    ptr = torch.tensor([0, 9])
    found = forward_softmax_attention(query, key, value, projection, ptr, None, *places)
    assert found.dtype == torch.float32
    wide = [x.float() for x in (query, key, value, projection)]
    at = [SharedLogits(*(x.float() for x in place)) for place in places]
    expected = _reference(*wide, ptr, None, at)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_inputs_are_left_alone():
    given = _inputs(6, 6)
    copies = [x.clone() for x in given[:4]]
    forward_softmax_attention(*given[:4], torch.tensor([0, 6]), None, *given[4])
    assert all(torch.equal(x, copy) for x, copy in zip(given[:4], copies, strict=True))


def test_offsets_that_do_not_fit_are_refused():
    query, key, value, projection, _ = _inputs(5, 5, at=False)
    with pytest.raises(ValueError, match="ptr"):
        forward_softmax_attention(query, key, value, projection, torch.tensor([0, 4]))


def test_available_only_where_values_are_all_that_is_asked_for():
    x = torch.ones(2)
    assert not available(x)
    with torch.no_grad():
        assert available(x, torch.nn.Parameter(x))
        assert not available(x.to("meta"))
        with torch.autocast("cpu", torch.bfloat16):
            assert not available(x)
        inside = []
        torch.func.vmap(lambda row: inside.append(available(row)) or row)(torch.ones(2, 1))
        with torch.autograd.forward_ad.dual_level():
            inside.append(available(x))
        assert inside == [False, False]


def test_pieces_cover_rows_once_in_order():
    for start, length, size in itertools.product((0, 3), range(8), (1, 3, 9)):
        rows = [i for part in pieces(slice(start, start + length), size) for i in range(100)[part]]
        assert rows == list(range(start, start + length))
