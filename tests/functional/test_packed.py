import pytest
import torch

from flt_mol.functional.groups import (
    centred,
    check_ptr,
    dense_ranks,
    first_per_system,
    index_in_system,
    max_per_system,
    mean_per_system,
    offsets_of,
    offsets_of_both,
    spread,
    sum_per_system,
    system_index,
    system_sizes,
)


def test_sizes_and_index_describe_the_same_rows():
    ptr = torch.tensor([0, 0, 3, 3, 4])
    assert system_sizes(ptr, 4) == [0, 3, 0, 1]
    assert system_index(ptr, 4).tolist() == [1, 1, 1, 3]


@pytest.mark.parametrize(
    "ptr",
    [
        torch.tensor([1, 4]),
        torch.tensor([0, 3]),
        torch.tensor([0, 5, 4]),
        torch.tensor([0.0, 4.0]),
        torch.tensor([[0, 4]]),
        torch.tensor([], dtype=torch.int64),
    ],
)
def test_ptr_that_does_not_describe_the_rows_is_refused(ptr):
    with pytest.raises(ValueError, match="ptr"):
        system_sizes(ptr, 4)


def test_the_offsets_of_keys_are_those_of_queries_unless_given():
    ptr, key_ptr = torch.tensor([0, 1, 4]), torch.tensor([0, 2, 2])
    assert check_ptr(ptr, 4) is ptr
    assert check_ptr(ptr, 4, None, 4) is ptr
    assert check_ptr(ptr, 4, key_ptr, 2) is key_ptr
    for arguments, message in (
        ((ptr, 5), "ptr must start"),
        ((ptr, 4, None, 5), "give key_ptr"),
        ((ptr, 4, key_ptr, 3), "key_ptr must start"),
        ((ptr, 4, torch.tensor([0, 2]), 2), "2 systems, key_ptr 1"),
    ):
        with pytest.raises(ValueError, match=message):
            check_ptr(*arguments)


REDUCTIONS = {
    sum_per_system: (0.0, lambda rows: rows.sum(0)),
    mean_per_system: (0.0, lambda rows: rows.mean(0)),
    max_per_system: (float("-inf"), lambda rows: rows.amax(0)),
    first_per_system: (0.0, lambda rows: rows[0]),
}


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
@pytest.mark.parametrize("padding", [0, 2])
def test_reductions_are_those_of_each_system_and_leave_padding_out(reduce, shape, padding):
    ptr = torch.tensor([0, 0, 3, 3, 4, 9])
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9 + padding, *shape, generator=generator, dtype=torch.float64)
    x[9:] = float("nan")
    x.requires_grad_()
    result = reduce(x, ptr)
    empty, of_rows = REDUCTIONS[reduce]
    for b, rows in enumerate(torch.split(x[:9], ptr.diff().tolist())):
        expected = of_rows(rows) if len(rows) else torch.full(shape, empty, dtype=torch.float64)
        torch.testing.assert_close(result[b], expected)
    filled = ptr.diff() > 0
    (gradient,) = torch.autograd.grad(result[filled].sum(), x)
    assert gradient[:9].isfinite().all()
    assert (gradient[9:] == 0).all()


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_reductions_without_rows_or_systems(reduce):
    assert reduce(torch.zeros(0, 3), torch.tensor([0])).shape == (0, 3)
    assert reduce(torch.zeros(0, 3), torch.tensor([0, 0])).shape == (1, 3)
    assert reduce(torch.ones(2, 3), torch.tensor([0])).shape == (0, 3)


def test_spread_gives_every_row_its_own_and_padding_nothing():
    ptr = torch.tensor([0, 0, 2, 3])
    rows = spread(torch.tensor([[9.0], [1.0], [2.0]]), ptr, 5)
    assert rows.flatten().tolist() == [1.0, 1.0, 2.0, 0.0, 0.0]
    assert index_in_system(ptr, 5).tolist() == [0, 1, 0, 0, 0]
    assert system_index(ptr, 5).tolist() == [1, 1, 2, 3, 3]


def test_dense_ranks():
    system = torch.tensor([9, 2, 9, 5, 2])
    assert dense_ranks(system).tolist() == [2, 0, 2, 1, 0]
    assert dense_ranks(system[:0]).tolist() == []


@pytest.fixture
def compiling(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)


@pytest.mark.usefixtures("compiling")
def test_offsets_of_static_shape():
    ptr, order = offsets_of(torch.tensor([7, 2, 7, 4]))
    assert ptr.tolist() == [0, 1, 2, 4, 4]
    assert order.tolist() == [1, 3, 0, 2]
    ptr, order = offsets_of(torch.tensor([1, 1, 3]), num_systems=5)
    assert ptr.tolist() == [0, 0, 2, 2, 3, 3]
    assert order.tolist() == [0, 1, 2]


@pytest.mark.usefixtures("compiling")
def test_offsets_of_two_sets_of_static_shape_agree_on_systems():
    ptr, order, key_ptr, key_order = offsets_of_both(
        torch.tensor([8, 3, 3]), torch.tensor([5, 8, 2, 8])
    )
    # Systems 2, 3, 5, 8, then none.
    assert ptr.tolist() == [0, 0, 2, 2, 3, 3, 3, 3]
    assert key_ptr.tolist() == [0, 1, 1, 2, 4, 4, 4, 4]
    assert (order.tolist(), key_order.tolist()) == ([1, 2, 0], [2, 0, 1, 3])


def test_offsets_of_two_sets_are_padded_to_the_same_systems():
    few, many = torch.tensor([0, 1]), torch.tensor([2, 0, 3])
    ptr, order, key_ptr, key_order = offsets_of_both(few, many)
    assert (ptr.tolist(), order) == ([0, 1, 2, 2, 2], None)
    assert (key_ptr.tolist(), key_order.tolist()) == ([0, 1, 1, 2, 3], [1, 0, 2])
    swapped = offsets_of_both(many, few)
    assert torch.equal(swapped[0], key_ptr)
    assert torch.equal(swapped[2], ptr)
    with pytest.raises(ValueError, match="0 to 2"):
        offsets_of_both(few, many, num_systems=3)


def test_no_systems_and_no_rows():
    assert system_sizes(torch.tensor([0]), 0) == []
    assert system_index(torch.tensor([0]), 0).tolist() == []
    assert centred(torch.zeros(0, 3), torch.tensor([0, 0])).shape == (0, 3)


def test_offsets_of_sorted_unsorted_and_trailing_empty_systems():
    ptr, order = offsets_of(torch.tensor([0, 0, 2]), num_systems=4)
    assert ptr.tolist() == [0, 2, 2, 3, 3]
    assert order is None
    ptr, order = offsets_of(torch.tensor([2, 0, 2, 0]))
    assert ptr.tolist() == [0, 2, 2, 4]
    assert order.tolist() == [1, 3, 0, 2]  # each system's rows stay in their order
    ptr, order = offsets_of(torch.tensor([], dtype=torch.int64), num_systems=2)
    assert ptr.tolist() == [0, 0, 0]
    assert order is None


@pytest.mark.parametrize(
    ("system", "num_systems"),
    [
        (torch.tensor([0, -1]), None),
        (torch.tensor([0, 3]), 3),
        (torch.tensor([0.0, 1.0]), None),
        (torch.tensor([True, False]), None),
        (torch.tensor([[0, 1]]), None),
    ],
)
def test_system_indices_that_make_no_sense_are_refused(system, num_systems):
    with pytest.raises(ValueError, match="system"):
        offsets_of(system, num_systems)


def test_sum_per_system():
    x = torch.tensor([[1.0], [2.0], [4.0]])
    assert sum_per_system(x, torch.tensor([0, 1, 1, 3])).tolist() == [[1.0], [0.0], [6.0]]


@pytest.mark.parametrize("shift", [0.0, 2.0**17, -(2.0**17)])
def test_centring_loses_nothing_at_1e5_angstrom(shift):
    # Multiples of 1/64 stay exact in float32 after a shift by 2^17 Å = 131072 Å.
    generator = torch.Generator().manual_seed(0)
    positions = torch.randint(-640, 640, (50, 3), generator=generator).float() / 64
    ptr = torch.tensor([0, 20, 20, 50])
    result = centred(positions + shift, ptr)
    exact = positions.double()
    exact = torch.cat([exact[:20] - exact[:20].mean(0), exact[20:] - exact[20:].mean(0)])
    torch.testing.assert_close(result.double(), exact, rtol=0, atol=5e-6)


def test_centring_keeps_systems_apart_and_its_gradient_is_translation_free():
    positions = torch.randn(8, 3, dtype=torch.float64)
    positions[6:] = float("nan")
    positions.requires_grad_()
    ptr = torch.tensor([0, 3, 6, 8])
    result = centred(positions, ptr)
    assert result[:6].isfinite().all()
    (gradient,) = torch.autograd.grad(result[:6].pow(3).sum(), positions)
    assert gradient[:6].abs().max() > 0.1
    torch.testing.assert_close(
        sum_per_system(gradient[:6], torch.tensor([0, 3, 6])), torch.zeros(2, 3).double()
    )


def test_centring_gives_zeros_for_padding_whatever_it_holds():
    positions = torch.randn(7, 2, dtype=torch.float64)
    positions[5:] = float("nan")
    positions.requires_grad_()
    ptr = torch.tensor([0, 2, 2, 5])
    result = centred(positions, ptr)
    assert torch.equal(result[:5], centred(positions[:5], ptr))
    assert (result[5:] == 0).all()
    (gradient,) = torch.autograd.grad(result.pow(3).sum(), positions)
    assert gradient[:5].isfinite().all()
    assert (gradient[5:] == 0).all()


def test_centring_half_precision_is_done_in_float32():
    assert centred(torch.ones(2, 3, dtype=torch.bfloat16), torch.tensor([0, 2])).dtype == (
        torch.float32
    )


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_integer_types_of_indices_do_not_matter(dtype):
    ptr, order = offsets_of(torch.tensor([1, 0, 1, 0, 2, 2], dtype=dtype))
    assert ptr.tolist() == [0, 2, 4, 6]
    assert order.tolist() == [1, 3, 0, 2, 4, 5]
    assert system_index(torch.tensor([0, 2, 5], dtype=dtype), 5).tolist() == [0, 0, 1, 1, 1]
