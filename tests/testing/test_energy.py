"""Each check passes on a sound module, and fails on one broken in just that respect."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from flt_mol.structures import Structures
from flt_mol.testing import (
    check_batch_equals_alone,
    check_deterministic,
    check_empty_and_single_atom,
    check_gradients,
    check_periodic_images,
    check_permutation,
    check_rotation,
    check_save_load,
    check_translation,
    random_structures,
)


def fractional(structures):
    return torch.linalg.solve(
        structures.cell[structures.system].transpose(1, 2), structures.positions
    )


def per_system(structures, values):
    total = torch.zeros(len(structures), dtype=values.dtype)
    return total.index_add(0, structures.system, values)


def centred(structures):
    n = structures.natoms.clamp(min=1)[:, None]
    mean = torch.zeros(len(structures), 3, dtype=torch.float32)
    mean = mean.index_add(0, structures.system, structures.positions) / n
    return structures.positions - mean[structures.system]


class Sound(nn.Module):
    """Σ w_z + squared distances from the centre: all properties but periodic images."""

    def __init__(self, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        weights = torch.randn(119, generator=generator, dtype=torch.float32)
        self.weights = nn.Parameter(weights)
        self.scale = nn.Parameter(torch.tensor(0.01, dtype=torch.float32))
        self.register_buffer("draw", torch.rand((), generator=generator, dtype=torch.float32))
        self.dropout = nn.Dropout(0.5)

    def forward(self, structures):
        squares = centred(structures).square().sum(dim=1)
        values = self.weights[structures.atomic_numbers] + self.scale * self.draw * squares
        return {"energy": self.dropout(per_system(structures, values))}


class Periodic(nn.Module):
    """Σ cos 2π(fractional coordinates): periodic, not translation invariant."""

    def forward(self, structures):
        waves = torch.cos(2 * torch.pi * fractional(structures).double()).sum(dim=1)
        return per_system(structures, waves)


class Broken(Sound):
    """Sound but for what `fault(structures, energies)` does to its energies."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault

    def forward(self, structures):
        return {"energy": self.fault(structures, super().forward(structures)["energy"])}


@pytest.fixture
def structures():
    return random_structures(torch.Generator().manual_seed(1))


CHECKS = [
    check_permutation,
    check_translation,
    check_rotation,
    check_batch_equals_alone,
    check_deterministic,
    check_empty_and_single_atom,
    check_gradients,
]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("periodic", [True, False])
def test_sound_module_passes(check, periodic):
    generator = torch.Generator().manual_seed(2)
    model = Sound().train(check is not check_gradients)
    training = model.training
    check(model, random_structures(generator, (1, 6, 30), periodic))
    assert model.training is training


def first_atom(structures, energy):
    return energy + structures.atomic_numbers[structures.ptr[:-1]]


def by_index(structures, energy):
    place = torch.arange(structures.num_atoms) - structures.ptr[structures.system]
    return energy + 1e-3 * per_system(structures, place * structures.atomic_numbers.float())


def of_positions(structures, energy):
    return energy + 1e-3 * per_system(structures, structures.positions[:, 0])


def float32_phases(structures, energy):
    """What Fourier features of coordinates that were not centred do; exact but for rounding."""
    phase = 2 * torch.pi * structures.positions[:, 0] * 1.0
    return energy + per_system(structures, torch.sin(phase).square() + torch.cos(phase / 7) * 0)


def of_orientation(structures, energy):
    return energy + 1e-2 * per_system(structures, centred(structures)[:, 2].square())


def batch_maximum(structures, energy):
    return energy - 1e-3 * structures.positions.abs().max()


def batch_size(structures, energy):
    return energy / len(structures)


def neighbour_in_batch(structures, energy):
    return energy + 1e-3 * energy.roll(1)


def only_large_partners(structures, energy):
    return energy + (structures.natoms.max() > 100)


def random(structures, energy):
    return energy + 1e-3 * torch.rand(len(structures), dtype=torch.float32)


def mean_of_atoms(structures, energy):
    return energy / structures.natoms


def deviation_of_atoms(structures, energy):
    """Unbiased standard deviation: NaN for single atoms."""
    squares = per_system(structures, centred(structures).square().sum(dim=1))
    return energy + torch.where(structures.natoms > 0, squares / (structures.natoms - 1), 0)


@pytest.mark.parametrize(
    ("check", "fault", "words"),
    [
        (check_permutation, by_index, "its atoms were reordered"),
        (check_translation, of_positions, "it was shifted by up to 100 Å"),
        (check_rotation, of_orientation, "it was rotated with its cell"),
        (check_batch_equals_alone, batch_maximum, "from alone to"),
        (check_batch_equals_alone, batch_size, "from alone to all in one batch"),
        (check_batch_equals_alone, neighbour_in_batch, "from alone to all in one batch"),
        (check_batch_equals_alone, only_large_partners, "with a system of 700 atoms"),
        (check_deterministic, random, "from one call to the next"),
        (check_empty_and_single_atom, mean_of_atoms, "system of no atoms is nan"),
        (check_empty_and_single_atom, deviation_of_atoms, "system of single atom is nan"),
    ],
)
def test_broken_module_fails(structures, check, fault, words):
    with pytest.raises(AssertionError, match=words):
        check(Broken(fault), structures)
    for other in CHECKS:
        if other.__name__ not in (check.__name__, "check_gradients") and fault in (
            by_index,
            of_orientation,
            only_large_partners,
        ):
            other(Broken(fault), structures)


def test_translation_catches_float32_phases(structures):
    """sin²(2πx) repeats every Å, so whole shifts change nothing but the rounding of phases."""
    with pytest.raises(AssertionError, match="shifted by up to 1000 Å"):
        check_translation(Broken(float32_phases), structures, distance=1000)


def test_numbers_in_the_message(structures):
    calls = []

    def model(s):
        calls.append(s)
        return torch.tensor([1.0, 2.0, 3.5 + len(calls)], dtype=torch.float64)

    with pytest.raises(AssertionError) as caught:
        check_deterministic(model, structures)
    assert str(caught.value) == (
        "the energy of 1 of 3 systems changed from one call to the next; most, that of sid 2 "
        "(14 atoms): 4.5 → 5.5 eV, by 1 eV, tolerance 0 · max(1 eV, |E|)"
    )


def test_tolerance_is_relative_above_one_electronvolt(structures):
    values = iter([1000.0, 1000.009, 0.5, 0.50002])

    def model(s):
        return torch.full((3,), next(values), dtype=torch.float64)

    check_permutation(model, structures, tolerance=1e-5)
    with pytest.raises(AssertionError, match="3 of 3"):
        check_permutation(model, structures, tolerance=1e-5)


def test_nan_never_agrees(structures):
    with pytest.raises(AssertionError, match="nan → nan"):
        check_deterministic(lambda s: torch.full((3,), torch.nan), structures)


def test_shape_of_energies(structures):
    with pytest.raises(AssertionError, match=r"shape \(3, 1\) for 3 systems"):
        check_deterministic(lambda s: torch.zeros(3, 1), structures)


@pytest.mark.parametrize("periodic", [True, (True, True, False)])
def test_periodic_images(periodic):
    structures = random_structures(torch.Generator().manual_seed(3), periodic=periodic)
    check_periodic_images(Periodic(), structures, tolerance=1e-5)
    with pytest.raises(AssertionError, match="moved by lattice vectors"):
        check_periodic_images(Sound(), structures)
    with pytest.raises(AssertionError, match="shifted"):
        check_translation(Periodic(), structures)


def test_images_of_what_does_not_repeat_are_no_images():
    structures = random_structures(torch.Generator().manual_seed(3), periodic=False)
    check_periodic_images(Sound(), structures)


def test_save_load(structures):
    check_save_load(Sound(0), lambda: Sound(1), structures)

    class Unsaved(Sound):
        def __init__(self, seed):
            super().__init__(seed)
            draw = self.draw
            del self.draw
            self.register_buffer("draw", draw, persistent=False)

    with pytest.raises(AssertionError, match="to one with its saved state"):
        check_save_load(Unsaved(0), lambda: Unsaved(1), structures)

    class More(Sound):
        def __init__(self):
            super().__init__()
            self.more = nn.Linear(1, 1)

    with pytest.raises(AssertionError, match=r"missing \['more.weight', 'more.bias'\]"):
        check_save_load(Sound(), More, structures)


def test_gradients(structures):
    model = Sound()
    check_gradients(model, structures)
    assert all(p.grad is None for p in model.parameters())

    model.unused = nn.Parameter(torch.zeros(2, dtype=torch.float32))
    with pytest.raises(AssertionError, match=r"unused \(none\)"):
        check_gradients(model, structures)
    model.unused.requires_grad_(False)
    check_gradients(model, structures)

    class Root(Sound):
        def forward(self, s):
            return super().forward(s)["energy"] + (self.scale - self.scale).abs().sqrt()

    with pytest.raises(AssertionError, match=r"scale \(1 of 1 entries not finite\)"):
        check_gradients(Root(), structures)
    with pytest.raises(AssertionError, match="do not depend on any parameter"):
        check_gradients(Broken(lambda s, e: e.detach()), structures)
    with pytest.raises(AssertionError, match="no trainable parameter"):
        check_gradients(Periodic(), structures)


def test_random_structures():
    natoms = (1, 0, 2, 8, 27, 40)
    made = random_structures(torch.Generator().manual_seed(5), natoms, spacing=2.5)
    again = random_structures(torch.Generator().manual_seed(5), natoms, spacing=2.5)
    assert made.natoms.tolist() == list(natoms)
    assert torch.equal(made.positions, again.positions)
    assert torch.equal(made.fixed, made.tags == 0)
    assert bool(made.pbc.all())
    assert made.energy is not None
    for system in made:
        assert float(torch.linalg.det(system.cell[0])) > 0
        distances = torch.cdist(system.positions, system.positions)
        distances = distances + torch.eye(len(distances)) * 100
        assert len(distances) == 0 or float(distances.min()) > 1.2
    inside = fractional(made)
    assert float(inside.min()) >= 0
    assert float(inside.max()) < 1
    mixed = random_structures(torch.Generator().manual_seed(5), (3,), (True, False, True))
    assert mixed.pbc.tolist() == [[True, False, True]]
    double = random_structures(torch.Generator().manual_seed(5), (3,), dtype=torch.float64)
    assert double.positions.dtype == double.cell.dtype == torch.float64


def test_global_random_state_is_left_alone(structures):
    before = torch.get_rng_state()
    for check in (check_permutation, check_translation, check_rotation, check_batch_equals_alone):
        check(Sound(), structures)
    assert torch.equal(before, torch.get_rng_state())


def test_moved_fields_stay_consistent(structures):
    """Relaxed positions and tags follow their atoms."""

    def relaxed(s):
        moved = (s.positions_relaxed - s.positions).square().sum(dim=1)
        return per_system(s, moved.double() * (1 + s.tags) * s.atomic_numbers)

    check_permutation(relaxed, structures)
    check_translation(relaxed, structures, distance=8)
    check_rotation(relaxed, structures)
    bare = replace(structures, positions_relaxed=None)
    for check in (check_permutation, check_translation, check_rotation, check_periodic_images):
        check(lambda s: s.natoms.double(), bare)


def test_systems_without_cell_have_partners_too():
    molecule = Structures.single([6, 8], [[0, 0, 0], [1.1, 0, 0]])
    check_batch_equals_alone(Sound(), molecule)
    with pytest.raises(AssertionError, match="system of 20 atoms"):
        check_batch_equals_alone(
            Broken(lambda s, e: e + (s.natoms.max() > 19)), molecule, larger=10
        )
