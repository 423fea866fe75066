"""Attention that makes its features again, against the form written out: values and gradients."""

import pytest
import torch
from flt_mol.functional._feature_groups import groups_of
from flt_mol.functional._rows import ordinary
from flt_mol.functional.recomputed import (
    recomputed_softmax_attention,
    written_out_attention,
)
from torch.utils.checkpoint import checkpoint

from flt_mol.functional import _feature_groups
from flt_mol.functional.feature_maps import SharedLogits

SYSTEMS = ([0, 4, 4, 5, 11], [0, 11], [0, 1, 2, 3, 11])


def _inputs(num_queries, num_keys, *, scale=1.0, dtype=torch.float64, at=True):
    draw = torch.Generator().manual_seed(0)

    def normal(*shape, factor=1.0):
        x = factor * torch.randn(*shape, generator=draw, dtype=torch.float64)
        return x.to(dtype).requires_grad_()

    heads, head_dim, features, value_dim, width = 3, 4, 7, 5, 6
    query = normal(num_queries, heads, head_dim, factor=scale)
    key = normal(num_keys, heads, head_dim, factor=scale)
    value = normal(num_keys, heads, value_dim)
    projection = normal(heads, features, head_dim).detach()
    places = [None, None]
    if at:
        places = [
            SharedLogits(normal(n, width), normal(heads, width, features))
            for n in (num_queries, num_keys)
        ]
    return query, key, value, projection, places


def _wanted(query, key, value, places):
    return [query, key, value, *(x for at in places if at is not None for x in at)]


def _both(inputs, ptr, key_ptr=None, order=1):
    """Output and gradients of both forms for one random direction; second ones if `order` is 2."""
    query, key, value, projection, places = inputs
    wanted = _wanted(query, key, value, places)
    results = []
    for form in (recomputed_softmax_attention, written_out_attention):
        out = form(query, key, value, projection, ptr, key_ptr, *places)
        draw = torch.Generator().manual_seed(1)
        direction = torch.randn(out.shape, generator=draw, dtype=torch.float64).to(out.dtype)
        found = torch.autograd.grad(out, wanted, direction, create_graph=order == 2)
        if order == 2:
            total = sum((x * x.detach().cos()).sum() for x in found)
            found = found + torch.autograd.grad(total, wanted)
        results.append([out, *found])
    return results


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("at", [False, True])
@pytest.mark.parametrize("offsets", SYSTEMS)
def test_values_and_gradients_equal_the_form_written_out(monkeypatch, chunk, at, offsets):
    monkeypatch.setattr(_feature_groups, "NUMBERS", chunk * 21)  # of 3 heads, 7 features
    found, expected = _both(_inputs(11, 11, at=at), torch.tensor(offsets))
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("chunk", [2, 100])
def test_context_with_other_lengths_and_none(monkeypatch, chunk):
    monkeypatch.setattr(_feature_groups, "NUMBERS", chunk * 21)
    ptr, key_ptr = torch.tensor([0, 3, 5, 5, 7]), torch.tensor([0, 0, 6, 8, 9])
    found, expected = _both(_inputs(7, 9), ptr, key_ptr)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    out, to_query, to_key = found[:3]
    assert not out[:3].any()  # no keys, no attention
    assert not to_query[:3].any()
    assert not to_key[6:8].any()  # no queries


@pytest.mark.parametrize("offsets", [[0, 4, 4, 6], [0, 6]])
def test_second_derivatives(monkeypatch, offsets):
    monkeypatch.setattr(_feature_groups, "NUMBERS", 3 * 21)
    found, expected = _both(_inputs(6, 6), torch.tensor(offsets), order=2)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


def test_gradients_by_differences():
    query, key, value, projection, places = _inputs(5, 5)
    ptr = torch.tensor([0, 2, 5])

    def form(query, key, value, *at):
        pairs = SharedLogits(*at[:2]), SharedLogits(*at[2:])
        return recomputed_softmax_attention(query, key, value, projection, ptr, None, *pairs)

    assert torch.autograd.gradcheck(form, _wanted(query, key, value, places))


@pytest.mark.parametrize("order", [1, -1])
def test_logits_of_any_size_in_any_order(monkeypatch, order):
    """The running peak rises or falls by hundreds between chunks: e^709 is float64's end."""
    monkeypatch.setattr(_feature_groups, "NUMBERS", 2 * 21)
    query, key, value, projection, _ = _inputs(12, 12, at=False, scale=30.0)
    with torch.no_grad():
        sizes = torch.linspace(0, 2, 12, dtype=torch.float64)[:, None, None]
        key *= sizes if order == 1 else sizes.flip(0)
    found, expected = _both((query, key, value, projection, [None, None]), torch.tensor([0, 12]))
    assert all(torch.isfinite(x).all() for x in found)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


def test_only_what_needs_gradients_gets_them():
    query, key, value, projection, places = _inputs(6, 6)
    ptr, fixed = torch.tensor([0, 6]), SharedLogits(*(x.detach() for x in places[0]))
    for wanted in (query, key, value, places[1].columns, places[1].basis):
        out = recomputed_softmax_attention(
            *(x if x is wanted else x.detach() for x in (query, key, value)),
            *(projection, ptr, None, fixed),
            SharedLogits(*(x if x is wanted else x.detach() for x in places[1])),
        )
        (found,) = torch.autograd.grad(out.square().sum(), wanted)
        reference = written_out_attention(query, key, value, projection, ptr, None, *places)
        (expected,) = torch.autograd.grad(reference.square().sum(), wanted)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_other_systems_have_no_influence_not_even_nan():
    inputs = _inputs(10, 10)
    ptr = torch.tensor([0, 6, 10])
    alone = _both(inputs, ptr)[0]
    with torch.no_grad():
        inputs[1][7] = torch.nan
    found = _both(inputs, ptr)[0]
    # Columns of positions are shared by all systems; rows are not.
    for x, before in zip(found[:5], alone[:5], strict=True):
        assert torch.equal(x[:6], before[:6])
    assert found[0][6:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_half_precision_is_accumulated_in_float32(dtype):
    inputs = _inputs(9, 9, dtype=dtype)
    ptr = torch.tensor([0, 4, 9])
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        found, expected = _both(inputs, ptr)
    assert found[0].dtype == torch.float32
    assert [x.dtype for x in found[1:]] == [x.dtype for x in expected[1:]]
    near = 2e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(found, expected, rtol=near, atol=near)


def test_keeps_nothing_of_the_size_of_features():
    query, key, value, projection, places = _inputs(40, 40)
    ptr, sizes = torch.tensor([0, 20, 40]), {}

    def note(x):
        sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        recomputed_softmax_attention(query, key, value, projection, ptr, None, *places)
    features = 40 * 3 * 7 * 8  # N × H × M numbers of 8 bytes
    assert max(sizes.values()) < features


@pytest.mark.parametrize("reentrant", [False, True])
def test_within_a_checkpoint(reentrant):
    query, key, value, projection, places = _inputs(9, 9)
    wanted, ptr = _wanted(query, key, value, places), torch.tensor([0, 4, 9])

    def form(query, key, value):
        return recomputed_softmax_attention(query, key, value, projection, ptr, None, *places)

    form(query, key, value).sin().sum().backward()
    expected = [x.grad for x in wanted]
    for x in wanted:
        x.grad = None
    out = checkpoint(form, query, key, value, use_reentrant=reentrant)
    out.sin().sum().backward()
    torch.testing.assert_close([x.grad for x in wanted], expected, rtol=0, atol=0)


def test_offsets_that_do_not_fit_are_refused():
    query, key, value, projection, _ = _inputs(5, 5, at=False)
    with pytest.raises(ValueError, match="ptr"):
        recomputed_softmax_attention(query, key, value, projection, torch.tensor([0, 6]))


def test_forward_mode_is_refused():
    query, key, value, projection, _ = _inputs(5, 5, at=False)
    with torch.autograd.forward_ad.dual_level():
        assert not ordinary(query)
        with pytest.raises(NotImplementedError, match="forward-mode"):
            recomputed_softmax_attention(query, key, value, projection, torch.tensor([0, 5]))


def test_groups_hold_every_row_once_and_no_long_system_beside_another():
    for offsets in (*SYSTEMS, [0], [0, 0, 3, 3, 9, 10]):
        for size in (1, 2, 4, 100):
            groups = groups_of(torch.tensor(offsets), size)
            rows = [i for g in groups for i in range(offsets[-1])[g.part]]
            assert rows == list(range(offsets[-1]))
            for g in groups:
                assert sum(g.sizes) == g.part.stop - g.part.start <= size
                assert len(g.systems) == len(g.sizes) > 0
                assert g.first == (g.part.start == offsets[g.systems[0]])
