"""Moments of pieces are those of the whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flt_mol.moments import Moments

numbers = st.lists(
    st.floats(-1e4, 1e4, allow_nan=False, allow_infinity=False), min_size=1, max_size=40
)


def tensor(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@given(numbers, st.integers(1, 7), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_pieces_in_any_order(values: list[float], size: int, random: object) -> None:
    whole = tensor(values)
    mean, std = whole.mean().item(), whole.std(correction=0).item()
    scale = 1e-12 * max(1.0, whole.abs().max().item())
    for order in (values, random.sample(values, len(values))):  # type: ignore[attr-defined]
        found = sum((Moments.of(part) for part in tensor(order).split(size)), Moments())
        assert found.count == len(values)
        assert abs(found.mean - mean) < scale
        assert abs(found.std - std) < scale


def test_a_small_spread_far_from_zero() -> None:
    x = torch.randn(5000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = sum((Moments.of(part) for part in (x - 1e6).split(7)), Moments())
    assert found.std == pytest.approx(x.std(correction=0).item(), rel=1e-9)


def test_nothing_overflows() -> None:
    x = tensor([1.7e308, -1.7e308, 1.7e308, -1.7e308])
    for found in (Moments.of(x), sum(map(Moments.of, x), Moments())):
        assert found.mean == pytest.approx(0.0, abs=1e293)
        assert found.std == pytest.approx(1.7e308)
    assert Moments.of(x[:1]) + Moments.of(x[2:3]) == Moments(2, 1.7e308, 0.0)


def test_equal_numbers_have_no_spread_however_they_come() -> None:
    x = torch.full((30,), 0.1, dtype=torch.float64)
    for size in (1, 7, 30):
        found = sum((Moments.of(part) for part in x.split(size)), Moments())
        assert found == Moments(30, 0.1, 0.0)


def test_of_nothing() -> None:
    assert Moments.of(torch.zeros(0)) == Moments()
    assert Moments() + Moments(2, 1.0, 3.0) + Moments() == Moments(2, 1.0, 3.0)
    assert Moments() + Moments() == Moments()
