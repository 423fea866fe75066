"""Rows and the adapters: what a layer under test is given."""

import pytest
import torch
from testing.sound_layers import draw, seeded

from flt_mol.testing import PackedLayer, PaddedLayer, Rows, check_layer_permutation, random_rows


def test_random_rows():
    rows, again = draw((3, 0, 2)), draw((3, 0, 2))
    assert torch.equal(rows.x, again.x)
    assert torch.equal(rows.positions, again.positions)
    assert (len(rows), rows.num_rows, rows.sizes.tolist()) == (3, 5, [3, 0, 2])
    assert rows.system.tolist() == [0, 0, 0, 2, 2]
    assert rows.cell.shape == (3, 3, 3)
    assert not rows.pbc.any()
    assert draw(periodic=(True, False, True)).pbc.tolist() == [[True, False, True]] * 4
    assert draw(dim=None).positions is None
    assert draw(dim=2).positions.shape == (13, 2)
    assert draw(dim=2).cell is None
    assert random_rows(seeded(), (3,), 7, dtype=torch.float64).x.dtype == torch.float64
    with pytest.raises(ValueError, match="three dimensions can be periodic, dim is 2"):
        draw(dim=2, periodic=True)


def test_global_random_state_and_default_dtype_do_not_matter():
    state, expected = torch.get_rng_state(), draw()
    torch.set_default_dtype(torch.float64)
    try:
        rows = draw()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), state)
    assert rows.x.dtype == torch.float32
    assert torch.equal(rows.x, expected.x)


@pytest.mark.parametrize("settings", [{}, {"dim": 1}, {"dim": None}, {"periodic": True}])
def test_parts_make_the_whole(settings):
    rows = draw(**settings)
    parts = list(rows)
    assert [part.num_rows for part in parts] == [5, 0, 7, 1]
    again = Rows.cat(parts)
    for name in ("x", "ptr", "positions", "cell", "pbc", "atomic_numbers"):
        value, other = getattr(rows, name), getattr(again, name)
        assert value is other is None or torch.equal(value, other)
    with pytest.raises(IndexError, match="system 4 of 4"):
        rows[4]


def test_rows_need_a_fitting_ptr():
    with pytest.raises(ValueError, match="ptr"):
        Rows(torch.zeros(3, 2), torch.tensor([0, 2]))


def test_structures_of_rows():
    rows = draw(periodic=True)
    structures = rows.structures
    assert torch.equal(structures.positions, rows.positions)
    assert torch.equal(structures.atomic_numbers, rows.atomic_numbers)
    assert torch.equal(structures.cell, rows.cell)
    assert structures.sid == (0, 1, 2, 3)
    assert set(structures.tags.tolist()) == {0, 1, 2}
    with pytest.raises(ValueError, match="no atoms"):
        _ = draw(dim=2).structures


def test_dtype_of_rows():
    rows = draw(periodic=True).to(torch.float64)
    assert rows.x.dtype == rows.positions.dtype == rows.cell.dtype == torch.float64
    assert (rows.ptr.dtype, rows.pbc.dtype) == (torch.int64, torch.bool)


def test_packed_layer_calls():
    rows = draw()

    def module(x, positions, *, ptr):
        assert positions is rows.positions
        assert ptr is rows.ptr
        return 2 * x

    assert torch.equal(PackedLayer(module)(rows), 2 * rows.x)
    called = PackedLayer(3, lambda module, rows: module * rows.x)
    assert torch.equal(called(rows), 3 * rows.x)


@pytest.mark.parametrize("before", [False, True])
def test_padded_layer_calls(before):
    rows, seen = draw((2, 0, 3)), []

    def module(x, positions, *, mask):
        seen.append((x, positions, mask))
        return 2 * x

    layer = PaddedLayer(module, filler=9.0, extra=1, before=before)
    assert torch.equal(layer(rows), 2 * rows.x)
    ((x, positions, mask),) = seen
    expected = [[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0]]
    if before:
        expected = [line[::-1] for line in expected]
    assert mask.int().tolist() == expected
    assert (x.shape, positions.shape) == ((3, 4, 4), (3, 4, 3))
    assert bool((x[~mask] == 9).all())
    assert bool((positions[~mask] == 9).all())
    assert torch.equal(x[mask], rows.x)
    assert torch.equal(positions[mask], rows.positions)


def test_padded_layer_without_rows():
    layer = PaddedLayer(lambda x, positions, *, mask: x)
    assert layer(draw((), dim=None)).shape == (0, 4)
    assert layer(draw((0, 0))).shape == (0, 4)
    assert check_layer_permutation(layer, draw((0, 0))) == 0
