"""Checks of energy models: each raises AssertionError with the numbers.

A model is anything that maps :class:`~flt_mol.structures.Structures` of B systems to
``{"energy": (B,)}`` or a (B,) tensor, in eV. Modules are put in eval mode meanwhile. Two energies
E and E' agree if ``|E' − E| ≤ tolerance · max(1 eV, |E|)``.

Example:
    >>> import torch
    >>> from flt_mol.testing import check_permutation, random_structures
    >>> structures = random_structures(torch.Generator().manual_seed(0))
    >>> check_permutation(lambda s: s.natoms.double(), structures)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from flt_mol.modes import evaluating
from flt_mol.structures import Structures
from flt_mol.testing._common import load_saved_state, seeded, trainable
from flt_mol.testing._energies import Model, compare, energies_agree, energies_of
from flt_mol.testing.structures import (
    random_orthogonal,
    reordered,
    rounded_to_1024ths,
    shifted,
    tiled,
    turned,
)


def check_permutation(
    model: Model,
    structures: Structures,
    *,
    tolerance: float = 1e-5,
    generator: torch.Generator | None = None,
) -> None:
    """The energy does not depend on the order of a system's atoms."""
    permuted, _ = reordered(structures, seeded(generator))
    compare(model, structures, permuted, tolerance, "its atoms were reordered")


def check_translation(
    model: Model,
    structures: Structures,
    *,
    tolerance: float = 1e-5,
    distance: int = 100,
    generator: torch.Generator | None = None,
) -> None:
    """The energy does not change when a whole system is shifted by up to `distance` Å per axis.

    Positions are first rounded to 1/1024 Å and shifts are whole Å, so that the shift itself is
    exact in float32 (below 8,000 Å): what differs is the model's doing. Each system has its own
    shift.
    """
    generator = seeded(generator)
    shift = torch.randint(-distance, distance + 1, (len(structures), 3), generator=generator)
    before = rounded_to_1024ths(structures)
    after = shifted(before, shift.to(before.positions)[before.system])
    compare(model, before, after, tolerance, f"it was shifted by up to {distance} Å")


def check_rotation(
    model: Model,
    structures: Structures,
    *,
    tolerance: float = 1e-4,
    generator: torch.Generator | None = None,
) -> None:
    """For models that claim invariance: positions and cell of each system rotated together.

    The default tolerance leaves room for the rounding of rotated float32 positions.
    """
    q = random_orthogonal(len(structures), seeded(generator))
    after = turned(structures, q)
    compare(model, structures, after, tolerance, "it was rotated with its cell")


def check_batch_equals_alone(
    model: Model,
    structures: Structures,
    *,
    tolerance: float = 1e-5,
    larger: int = 50,
) -> None:
    """A system's energy does not depend on its batch.

    Each alone is compared with all together, with all in reverse, and with a partner `larger`
    times the size of the largest of them before and behind it.
    """
    systems = list(structures)
    with evaluating(model), torch.no_grad():
        alone = torch.cat([energies_of(model, system) for system in systems])
        together = energies_of(model, structures)
        reverse = energies_of(model, Structures.cat(systems[::-1])).flip(0)
        partner = tiled(max(systems, key=lambda system: system.num_atoms), larger)
        beside = energies_of(model, Structures.cat([partner, *systems, partner]))[1:-1]
    energies_agree(structures, alone, together, tolerance, "from alone to all in one batch")
    energies_agree(structures, alone, reverse, tolerance, "from alone to a batch in reverse order")
    situation = f"from alone to a batch with a system of {partner.num_atoms} atoms"
    energies_agree(structures, alone, beside, tolerance, situation)


def check_deterministic(model: Model, structures: Structures) -> None:
    """Two calls in eval mode give the same energies bit for bit."""
    with evaluating(model), torch.no_grad():
        first, second = energies_of(model, structures), energies_of(model, structures)
    energies_agree(structures, first, second, 0.0, "from one call to the next")


def check_save_load(
    model: nn.Module,
    build: Callable[[], nn.Module],
    structures: Structures,
    *,
    tolerance: float = 0.0,
) -> None:
    """A second instance, made by `build()`, has the energies of the first with its state_dict.

    The state goes through `torch.save` and `torch.load(weights_only=True)`, as in a file.
    """
    other = build()
    load_saved_state(model, other)
    with evaluating(model), evaluating(other), torch.no_grad():
        first, second = energies_of(model, structures), energies_of(other, structures)
    energies_agree(
        structures, first, second, tolerance, "from a module to one with its saved state"
    )


def check_empty_and_single_atom(
    model: Model,
    structures: Structures,
    *,
    tolerance: float = 1e-5,
) -> None:
    """Systems of no and of one atom have finite energies, and leave the others' unchanged.

    Args:
        model: see the module.
        tolerance: see the module.
        structures: the others; the single atom is the first of them.
    """
    numbers, positions = structures.atomic_numbers.cpu(), structures.positions.cpu()
    device, dtype = structures.positions.device, positions.dtype
    single = Structures.single(numbers[:1], positions[:1], sid="single atom", dtype=dtype)
    empty = Structures.single([], [], sid="no atoms", dtype=dtype)
    small = [single.to(device), empty.to(device)]
    with evaluating(model), torch.no_grad():
        before = energies_of(model, structures)
        alone = torch.cat([energies_of(model, system) for system in small])
        mixed = energies_of(model, Structures.cat([small[1], structures, *small]))
    for system, energy in zip(small, alone.tolist(), strict=True):
        if not abs(energy) < float("inf"):
            raise AssertionError(f"the energy of a system of {system.sid[0]} is {energy}")
    added = "when systems of one and of no atoms joined the batch"
    energies_agree(structures, before, mixed[1:-2], tolerance, added)
    expected = alone[[1, 0, 1]]
    energies_agree(
        Structures.cat([small[1], *small]),
        expected,
        mixed[[0, -2, -1]],
        tolerance,
        "from alone to a batch with other systems",
    )


def check_gradients(model: nn.Module, structures: Structures) -> None:
    """Every trainable parameter gets a finite gradient from the sum of squared energies.

    The mode of the module is left as it is, and so are its `grad` fields.
    """
    named = trainable(model)
    if not named:
        raise AssertionError("the module has no trainable parameter")
    loss = energies_of(model, structures).square().sum()
    if not loss.requires_grad:
        raise AssertionError("the energies do not depend on any parameter")
    gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    bad = []
    for name, gradient in zip(named, gradients, strict=True):
        if gradient is None:
            bad.append(f"{name} (none)")
        elif not bool(gradient.isfinite().all()):
            count = int((~gradient.isfinite()).sum())
            bad.append(f"{name} ({count} of {gradient.numel()} entries not finite)")
    if bad:
        raise AssertionError(f"parameters without a finite gradient: {', '.join(bad)}")
