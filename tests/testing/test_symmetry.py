"""Each check passes on a sound layer, and fails on one broken in just that respect."""

from dataclasses import replace

import pytest
import torch
from testing.sound_layers import Attention, Broken, Periodic, draw, per_system

from flt_mol.testing import (
    check_layer_cell_basis,
    check_layer_lattice_shifts,
    check_layer_permutation,
    check_layer_rotation,
    check_layer_supercell,
    check_layer_system_order,
    check_layer_translation,
)
from flt_mol.testing.symmetry import supercell

EVERYWHERE = [
    check_layer_permutation,
    check_layer_system_order,
    check_layer_translation,
    check_layer_rotation,
]
LATTICE = [check_layer_lattice_shifts, check_layer_cell_basis, check_layer_supercell]


@pytest.mark.parametrize("check", EVERYWHERE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sound_layer_passes(check, dtype):
    layer = Attention().to(dtype).train()
    error = check(layer, draw(dtype=dtype))
    assert 0 <= error < (1e-5 if dtype == torch.float32 else 1e-13)
    assert layer.training


@pytest.mark.parametrize("check", [*EVERYWHERE, *LATTICE])
@pytest.mark.parametrize("periodic", [True, (True, False, True), (False, False, True)])
def test_sound_periodic_layer_passes(check, periodic):
    layer, rows = Periodic().double(), draw(periodic=periodic, dtype=torch.float64)
    assert check(layer, rows, tolerance=1e-12) < 1e-12


def by_index(rows, out):
    return out + 0.01 * per_system(lambda y: torch.arange(len(y))[:, None] * y, rows, out)


def first_row(rows, out):
    return out + 0.01 * per_system(lambda y: y[:1].expand_as(y), rows, out)


def neighbour_in_batch(rows, out):
    return out + 0.01 * out.roll(1, dims=0)


def place_in_batch(rows, out):
    return out + 0.001 * rows.system[:, None]


def raw_positions(rows, out):
    return out + 1e-4 * rows.positions.sum(dim=1, keepdim=True)


def float32_phases(rows, out):
    """sin²(2πx) repeats every Å: whole shifts change nothing but the rounding of phases."""
    return out + (2 * torch.pi * rows.positions[:, :1]).sin().square()


def orientation(rows, out):
    return out + 1e-3 * per_system(lambda r: r[:, 2:] - r[:, 2:].mean(), rows, rows.positions)


def cartesian_distances(rows, out):
    return out + 1e-3 * per_system(
        lambda r: (r - r.mean(dim=0)).square().sum(dim=1, keepdim=True), rows, rows.positions
    )


def first_vector(rows, out):
    return out + 1e-3 * rows.cell[rows.system, 0].square().sum(dim=-1, keepdim=True).sqrt()


def volume(rows, out):
    return out + 1e-3 * torch.linalg.det(rows.cell).abs()[rows.system, None]


def system_size(rows, out):
    return out / rows.sizes[rows.system, None]


def lattice_of_open_axes(rows, out):
    """Phases that take every axis for a periodic one do not change under lattice shifts."""
    phases = torch.linalg.solve(rows.cell[rows.system].mT, rows.positions[:, :, None])
    return out + 1e-2 * (2 * torch.pi * phases[:, 2]).cos()


@pytest.mark.parametrize(
    ("check", "fault", "words"),
    [
        (check_layer_permutation, by_index, "rows of each system were reordered"),
        (check_layer_permutation, first_row, "rows of each system were reordered"),
        (check_layer_system_order, neighbour_in_batch, "systems came in reverse"),
        (check_layer_system_order, place_in_batch, "systems came in reverse"),
        (check_layer_translation, raw_positions, "each system was shifted by up to 100"),
        (check_layer_rotation, orientation, "each system was rotated"),
    ],
)
def test_broken_layer_fails(check, fault, words):
    with pytest.raises(AssertionError, match=words):
        check(Broken(fault), draw())
    if fault in (by_index, first_row, place_in_batch, orientation):
        for other in EVERYWHERE:
            if other is not check:
                other(Broken(fault), draw())


@pytest.mark.parametrize(
    ("check", "fault", "words"),
    [
        (check_layer_lattice_shifts, cartesian_distances, "moved by lattice vectors"),
        (check_layer_cell_basis, first_vector, "given by other vectors"),
        (check_layer_supercell, volume, "single cell to 2×2×1"),
        (check_layer_supercell, system_size, "single cell to 2×2×1"),
        (check_layer_rotation, lambda rows, out: out + rows.cell[rows.system, 0, :1], "rotated"),
    ],
)
def test_broken_periodic_layer_fails(check, fault, words):
    rows = draw(periodic=True)
    with pytest.raises(AssertionError, match=words):
        check(Broken(fault, Periodic()), rows)
    if fault in (first_vector, volume, system_size):
        check_layer_lattice_shifts(Broken(fault, Periodic()), rows)


def test_only_the_last_supercell_differs():
    def third_vector(rows, out):
        return out + 1e-3 * rows.cell[rows.system, 2].square().sum(dim=-1, keepdim=True).sqrt()

    layer, rows = Broken(third_vector, Periodic()), draw(periodic=True)
    check_layer_supercell(layer, rows, repeats=[(2, 2, 1)])
    with pytest.raises(AssertionError, match="2×2×2 of them"):
        check_layer_supercell(layer, rows)


def test_open_vectors_are_no_lattice():
    layer, rows = Broken(lattice_of_open_axes, Periodic()), draw(periodic=(True, True, False))
    check_layer_lattice_shifts(layer, rows)
    with pytest.raises(AssertionError, match="by other vectors"):
        check_layer_cell_basis(layer, rows)
    for check in LATTICE:
        with pytest.raises(ValueError, match="periodic cells"):
            check(layer, draw(periodic=False))


def test_the_largest_error_is_returned():
    def third_vector(rows, out):
        return out + 0.1 * rows.cell[rows.system, 2].square().sum(dim=-1, keepdim=True).sqrt()

    layer, rows = Broken(third_vector, Periodic()), draw(periodic=True)
    both = check_layer_supercell(layer, rows, tolerance=10, repeats=[(1, 1, 2), (2, 2, 1)])
    assert both == check_layer_supercell(layer, rows, tolerance=10, repeats=[(1, 1, 2)])
    assert both > 0.01


@pytest.mark.parametrize("dim", [2, 3])
def test_rotations_are_proper(dim):
    def handed(rows, out):
        """A volume with a sign, which mirrors change."""
        return out + per_system(
            lambda r: torch.linalg.det(r[1 : dim + 1] - r[0]).expand(len(r), 1),
            rows,
            rows.positions,
        )

    check_layer_rotation(Broken(handed), draw((5, 6, 7, 8, 9), dim=dim))


def test_positions_are_rounded_so_that_shifts_are_exact():
    """A wave of 1/1024 Å is 1 at all rounded positions, and anything beside them."""

    def wave(rows, out):
        return out + (2 * torch.pi * 1024 * rows.positions[:, :1].double()).cos().float()

    check_layer_translation(Broken(wave), draw())


def test_stated_error():
    layer, rows = Broken(orientation), draw()
    error = check_layer_rotation(layer, rows, tolerance=1.0)
    assert 1e-4 < error < 0.1
    assert check_layer_rotation(layer, rows, tolerance=1.001 * error) == error
    with pytest.raises(AssertionError, match="rotated"):
        check_layer_rotation(layer, rows, tolerance=0.999 * error)


def test_translation_catches_phases_of_raw_coordinates():
    check_layer_translation(Broken(float32_phases), draw(), distance=1)
    with pytest.raises(AssertionError, match="up to 1000"):
        check_layer_translation(Broken(float32_phases), draw(), distance=1000)


@pytest.mark.parametrize("dim", [1, 2, 5])
def test_any_dimension(dim):
    rows = draw(dim=dim)
    check_layer_translation(Attention(), rows)
    with pytest.raises(AssertionError, match="shifted"):
        check_layer_translation(Broken(raw_positions), rows)
    if dim == 1:
        with pytest.raises(ValueError, match="one dimension"):
            check_layer_rotation(Attention(), rows)
    else:
        check_layer_rotation(Attention(), rows)


def test_rows_without_positions():
    rows = draw(dim=None)
    check_layer_permutation(Attention(), rows)
    check_layer_system_order(Attention(), rows)
    for check in (check_layer_translation, check_layer_rotation):
        with pytest.raises(ValueError, match="with positions"):
            check(Attention(), rows)


def test_message():
    rows = draw()

    def layer(r):
        out = torch.full((13, 2), 2.0)
        if r is not rows:
            out[-2, 1] = -1
        return out

    with pytest.raises(AssertionError) as caught:
        check_layer_rotation(layer, rows, tolerance=0.01)
    assert str(caught.value) == (
        "outputs changed when each system was rotated; most, those of row 6 of system 2 (7 rows), "
        "column 1: 2 → -1, by -3, where the largest is 2: relative error 1.5, tolerance 0.01"
    )
    with pytest.raises(AssertionError, match=r"reverse order; most, those of row 3 of system 0 "):
        check_layer_system_order(layer, rows)
    with pytest.raises(AssertionError, match=r"shape \(13,\) for 13 rows"):
        check_layer_rotation(lambda r: r.x[:, 0], rows)


def test_permutation_names_rows_as_they_were():
    def layer(rows):
        marked = (rows.x == marked_value).all(dim=1, keepdim=True)
        index = torch.arange(rows.num_rows)[:, None]
        return torch.where(marked, index, 0).float()

    rows = draw((0, 6))
    marked_value = rows.x[4]
    with pytest.raises(AssertionError, match=r"row 4 of system 1 \(6 rows\)"):
        check_layer_permutation(layer, rows)


@pytest.mark.parametrize("check", EVERYWHERE)
def test_nan_never_agrees(check):
    with pytest.raises(AssertionError, match="nan → nan"):
        check(lambda rows: rows.x * torch.nan, draw())
    with pytest.raises(AssertionError, match="inf → inf"):
        check(lambda rows: rows.x.abs() / 0, draw())


def test_supercell_is_the_same_crystal():
    rows = draw((3, 0, 2), periodic=(True, False, True), dtype=torch.float64)
    large, source = supercell(rows, (2, 3, 2))
    assert large.sizes.tolist() == [12, 0, 8]
    assert source.tolist() == [0, 1, 2] * 4 + [3, 4] * 4
    assert torch.equal(large.x, rows.x[source])
    assert torch.equal(large.cell[:, 0], 2 * rows.cell[:, 0])
    assert torch.equal(large.cell[:, 1], rows.cell[:, 1])
    moves = (large.positions - rows.positions[source])[:12:3]
    a, c = rows.cell[0, 0], rows.cell[0, 2]
    torch.testing.assert_close(moves, torch.stack([0 * a, c, a, a + c]), rtol=0, atol=1e-12)
    assert supercell(rows, (2, 3, 2), everywhere=True)[0].sizes.tolist() == [36, 0, 24]


def test_cell_basis_is_another_basis_of_the_same_lattice():
    seen = []

    def layer(rows):
        seen.append(rows)
        return rows.x

    rows = draw((3, 4, 2, 2), periodic=(True, False, True), dtype=torch.float64)
    check_layer_cell_basis(layer, rows)
    before, after = seen
    assert not torch.equal(before.pbc, after.pbc)
    for old, new, p, q in zip(before.cell, after.cell, before.pbc, after.pbc, strict=True):
        whole = new @ torch.linalg.inv(old)
        torch.testing.assert_close(whole, whole.round(), rtol=0, atol=1e-9)
        assert abs(float(torch.linalg.det(whole))) == pytest.approx(1)
        assert whole[q][:, ~p].abs().max() < 1e-9  # periodic vectors of periodic ones alone
        assert torch.equal(new[~q], old[~p])
        assert (whole[q][:, p].round() != 0).sum() > 2  # sheared, not only renumbered


def test_one_periodic_vector_is_reversed():
    seen = []

    def layer(rows):
        seen.append(rows)
        return rows.x

    check_layer_cell_basis(layer, draw((3,), periodic=(False, True, False)))
    before, after = seen
    assert torch.equal(after.cell[after.pbc], -before.cell[before.pbc])


def test_global_random_state_and_rows_are_left_alone():
    state, rows = torch.get_rng_state(), draw(periodic=True)
    copies = replace(rows, x=rows.x.clone(), positions=rows.positions.clone())
    for check in (*EVERYWHERE, *LATTICE):
        check(Periodic(), rows)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(rows.x, copies.x)
    assert torch.equal(rows.positions, copies.positions)
