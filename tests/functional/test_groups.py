import pytest
import torch

from flt_mol.functional.exact import exact_attention
from flt_mol.functional.groups import (
    budget_of,
    centred,
    check_ptr,
    first_per_system,
    group_budget,
    groups_of,
    index_in_system,
    mean_per_system,
    offsets_of,
    row_offsets,
    spread,
    sum_per_system,
    system_index,
)
from flt_mol.functional.linear import linear_log_attention

PTR = torch.tensor([0, 2, 2, 5])


def test_indices_and_offsets_describe_the_same_rows():
    assert system_index(PTR, 6).tolist() == [0, 0, 2, 2, 2, 3]
    assert index_in_system(PTR, 6).tolist() == [0, 1, 0, 1, 2, 0]
    assert row_offsets(PTR, 6) == (0, 2, 2, 5)


@pytest.mark.parametrize(
    "ptr", [[1, 5], [0, 4], [0, 6], [0, 3, 2, 5], [], [[0, 5]], [0.0, 5.0]], ids=str
)
def test_offsets_that_do_not_describe_the_rows_are_refused(ptr):
    with pytest.raises(ValueError, match="ptr"):
        check_ptr(torch.tensor(ptr), 5)


def test_offsets_of_keys():
    assert check_ptr(PTR, 5) is PTR
    keys = torch.tensor([0, 1, 1, 4])
    assert check_ptr(PTR, 5, keys, 4) is keys
    for key_ptr, count in ((None, 4), (keys, 5), (torch.tensor([0, 4]), 4)):
        with pytest.raises(ValueError, match="key_ptr"):
            check_ptr(PTR, 5, key_ptr, count)


@pytest.mark.parametrize("ptr", [[1, 5], [0, 7], [0, 3, 2]])
def test_operators_refuse_what_no_rows_are_at(ptr):
    with pytest.raises(ValueError, match="ptr"):
        row_offsets(torch.tensor(ptr), 6)
    with pytest.raises(ValueError, match="int64 or int32, got .*uint8"):
        row_offsets(PTR.to(torch.uint8), 5)


CPU = torch.device("cpu")
OFFSETS, KEYS = (0, 3, 3, 5, 10, 13), (0, 1, 2, 4, 4, 10)  # two more rows are padding


@pytest.mark.parametrize("budget", [1, 6, 8, 30, 2**40])
def test_groups_hold_each_system_once_within_the_budget(budget):
    with group_budget(budget):
        assert budget_of(CPU) == budget
    costs = 3, 0, 4, 0, 18
    groups = groups_of(costs, OFFSETS, KEYS, 15, CPU, budget, heads=2)
    assert sorted(sum(groups.systems, ())) == [0, 2, 4]
    for systems in groups.systems:
        assert len(systems) == 1 or len(systems) * max(costs[b] for b in systems) <= budget
    x = torch.arange(15.0)[:, None]
    for offsets, blocks in ((OFFSETS, groups.rows), (KEYS, groups.keys)):
        for systems, block in zip(groups.systems, blocks, strict=True):
            padded = block.take(x).squeeze(-1)
            real = torch.ones_like(padded, dtype=bool) if block.real is None else block.real
            for b, rows, own in zip(systems, padded, real, strict=True):
                assert rows[own].tolist() == list(range(*offsets[b : b + 2]))
                assert (rows[~own] == offsets[b + 1] - 1).all()
            for heads in (x.expand(2, -1, -1), torch.stack([x, x], 1).transpose(0, 1)):
                flat = padded.repeat(2, 1)[..., None]
                torch.testing.assert_close(block.by_head(heads), flat, rtol=0, atol=0)
    back = groups.put_back([block.take(x).flatten(0, 1) for block in groups.rows])
    expected = [0, 1, 2, 3, 4, 0, 0, 0, 0, 0, 10, 11, 12, 0, 0]
    assert back.flatten().tolist() == expected


def test_systems_of_one_size_are_views():
    x = torch.rand(3, 12, 2)
    (group,) = groups_of((4, 4, 4), (0, 4, 8, 12), (0, 4, 8, 12), 12, CPU, 2**40).rows
    assert group.slots is None
    assert group.by_head(x).data_ptr() == x.data_ptr()
    groups = groups_of((5, 0, 4, 4), (0, 2, 2, 6, 10), (0, 2, 2, 6, 10), 10, CPU, 8)
    assert groups.systems == ((2, 3), (0,))
    assert [(g.start, g.slots) for g in groups.rows] == [(2, None), (0, None)]
    assert groups.complete
    assert groups.place.tolist() == [8, 9, *range(8)]


def test_system_indices_in_any_order():
    system = torch.tensor([3, 1, 3, 0])
    ptr, order = offsets_of(system, 5)
    assert ptr.tolist() == [0, 1, 2, 2, 4, 4]
    assert order.tolist() == [3, 1, 0, 2]
    ptr, order = offsets_of(torch.tensor([0, 0, 2], dtype=torch.uint8))
    assert (ptr.tolist(), order) == ([0, 2, 2, 3], None)
    assert offsets_of(torch.empty(0, dtype=torch.int64))[0].tolist() == [0]


@pytest.mark.parametrize(
    ("system", "count"), [([-1, 0], None), ([0, 2], 2), ([0.0, 1.0], None), ([True], None)]
)
def test_system_indices_that_make_no_sense_are_refused(system, count):
    with pytest.raises(ValueError, match="system"):
        offsets_of(torch.tensor(system), count)


@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
@pytest.mark.parametrize("reduce", [sum_per_system, mean_per_system])
def test_reductions_are_those_of_each_system_and_leave_padding_out(reduce, shape):
    x = torch.randn(5, *shape, dtype=torch.float64)
    padded = torch.cat([x, torch.full((1, *shape), 1e9, dtype=torch.float64)])
    name = reduce.__name__.split("_")[0]
    for ptr, rows in ((PTR, x), (PTR, padded)):
        out = reduce(rows, ptr)
        for b, own in enumerate((x[:2], x[:0], x[2:])):
            expected = getattr(torch, name)(own, 0) if len(own) else torch.zeros(shape)
            torch.testing.assert_close(out[b], expected.to(out.dtype))
    assert reduce(x[:0], torch.tensor([0])).shape == (0, *shape)


def test_first_rows_and_rows_of_their_system():
    x = torch.arange(5.0)[:, None]
    first = first_per_system(x, PTR)
    assert first.flatten().tolist() == [0.0, 0.0, 2.0]
    assert spread(first, PTR, 6).flatten().tolist() == [0.0, 0.0, 2.0, 2.0, 2.0, 0.0]


@pytest.mark.parametrize("shift", [0.0, 1e5])
def test_centring(shift):
    x = torch.randn(5, 3)
    expected = torch.cat([x[:2] - x[:2].mean(0), x[2:] - x[2:].mean(0)])
    out = centred(x + shift, PTR)
    assert (out - expected).abs().max() < (1e-6 if shift == 0 else 1e-2)
    assert sum_per_system(out, PTR).abs().max() < 1e-5 * max(shift, 1)
    assert centred(x.bfloat16(), PTR).dtype == torch.float32


def test_centring_leaves_out_padding_and_other_systems_and_has_no_slope_along_translations():
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    dirty = x.detach().clone()
    dirty[5] = torch.nan
    assert torch.equal(centred(dirty, PTR)[:5], centred(x.detach(), PTR)[:5])
    assert (centred(dirty, PTR)[5] == 0).all()
    (slope,) = torch.autograd.grad(centred(x, PTR).sin().sum(), x)
    assert sum_per_system(slope, PTR).abs().max() < 1e-12


@pytest.mark.parametrize("attend", [linear_log_attention, exact_attention])
@pytest.mark.parametrize("ptr", [PTR, torch.tensor([0, 5]), torch.tensor([0, 2, 4])])
@pytest.mark.parametrize("features", [1, 4])
def test_what_a_small_batch_keeps_changes_no_gradient(attend, ptr, features):
    rows = int(ptr[-1])
    inputs = [torch.randn(rows, 2, n, dtype=torch.float64) for n in (features, features, 3)]
    weight, before = torch.randn(rows, 2, 3).double(), [x.clone() for x in inputs]
    inputs = [x.requires_grad_() for x in inputs]

    def gradients(**settings):
        loss = (attend(*inputs, ptr) * weight).sum()
        return [torch.autograd.grad(loss, inputs, retain_graph=True, **settings) for _ in "12"]

    first, again = gradients()
    kept = (attend(*inputs, ptr) * weight).sum()
    with group_budget(1):
        by_parts, _ = gradients()
        other_groups = torch.autograd.grad(kept, inputs)
    differentiable, _ = gradients(create_graph=True)
    assert all(map(torch.equal, first, again))
    assert all(map(torch.equal, before, inputs))
    for other in (by_parts, differentiable, other_groups):
        torch.testing.assert_close([*other], first, rtol=1e-12, atol=1e-14)
