import pytest
import torch

from flt_mol.functional.packed import (
    centred,
    offsets_of,
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
