"""The check of displacements passes on a sound module, and fails on what is broken in one way."""

import pytest
import torch
from torch import nn

from flt_mol.testing import check_displacement_equivariance, random_structures


def from_centre(structures):
    """r_i less the mean of its system, (N, 3)."""
    total = torch.zeros(len(structures), 3).index_add(0, structures.system, structures.positions)
    centre = total / structures.natoms.clamp(min=1)[:, None]
    return structures.positions - centre[structures.system]


class Sound(nn.Module):
    """Free atoms go away from the centre, as far as their element says; two passes."""

    def __init__(self, fault=lambda structures, d: d, in_pass=False):
        super().__init__()
        self.fault = fault
        self.in_pass = in_pass
        self.dropout = nn.Dropout(0.5)

    def forward(self, structures):
        step = 0.01 * structures.atomic_numbers[:, None] * from_centre(structures)
        step = self.dropout(step.masked_fill(structures.fixed[:, None], 0.0))
        broken = self.fault(structures, step)
        first = broken if self.in_pass else step
        last = step if self.in_pass else broken
        return {"displacement": last, "displacement_passes": torch.stack([0.5 * first, last])}


@pytest.fixture
def structures():
    return random_structures(torch.Generator().manual_seed(1), (5, 1, 0, 9), (True, True, False))


def test_a_sound_module_passes(structures):
    model = Sound().train()
    state = torch.get_rng_state()
    assert 0 <= check_displacement_equivariance(model, structures) < 1e-5
    assert model.training
    assert torch.equal(state, torch.get_rng_state())


def along_x(structures, d):
    return d * torch.tensor([1.01, 1, 1])


def chiral(structures, d):
    """r × (c × r) turns properly; times the triple product of the cell it changes hands."""
    hand = torch.linalg.det(structures.cell).sign()[structures.system]
    return d * (1 + 0.01 * hand[:, None])


def fixed_too(structures, d):
    return d + 1e-6 * from_centre(structures) * structures.fixed[:, None]


def by_index(structures, d):
    place = torch.arange(structures.num_atoms) - structures.ptr[structures.system]
    return d * (1 + 0.01 * place[:, None])


def where_it_is(structures, d):
    return d * (1 + 1e-4 * structures.positions.norm(dim=-1, keepdim=True))


def placed(structures, d):
    """Turns with positions, whatever their origin is: only a shift tells."""
    return d + 1e-2 * structures.positions * ~structures.fixed[:, None]


def nan(structures, d):
    largest = structures.atomic_numbers == structures.atomic_numbers[~structures.fixed].max()
    return d.masked_fill((largest & ~structures.fixed)[:, None], torch.nan)


@pytest.mark.parametrize("in_pass", [False, True])
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (along_x, "when it was rotated;"),
        (chiral, "when it was rotated and mirrored;"),
        (fixed_too, r"\d+ of \d+ fixed atoms move, the first being atom \d of sid \d, by \["),
        (by_index, "when its atoms were reordered;"),
        (where_it_is, "when it was shifted by up to 100 Å"),
        (placed, "when it was shifted by up to 100 Å"),
        (nan, "nan → nan"),
    ],
)
def test_a_broken_module_fails(structures, fault, words, in_pass):
    with pytest.raises(AssertionError, match=words):
        check_displacement_equivariance(Sound(fault, in_pass), structures)


def test_shape(structures):
    with pytest.raises(AssertionError, match=r"shape \(3,\) for 15 atoms"):
        check_displacement_equivariance(lambda s: {"displacement": torch.zeros(3)}, structures)


def test_the_error_is_returned_and_the_tolerance_is_relative(structures):
    def slightly(structures, d):
        return d * torch.tensor([1 + 1e-3, 1, 1])

    with pytest.raises(AssertionError, match=r"relative error 0\.000\d+, tolerance 0\.0001"):
        check_displacement_equivariance(Sound(slightly), structures)
    error = check_displacement_equivariance(Sound(slightly), structures, tolerance=2e-3)
    assert 1e-4 < error < 2e-3
