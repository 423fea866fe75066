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

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from flt_mol.modes import evaluating
from flt_mol.structures import Structures
from flt_mol.testing._common import load_saved_state, seeded, trainable
from flt_mol.testing.structures import rounded_to_1024ths, shifted, tiled

Model = Callable[[Structures], Mapping[str, Tensor] | Tensor]


def check_permutation(
    model: Model,
    structures: Structures,
    *,
    tolerance: float = 1e-5,
    generator: torch.Generator | None = None,
) -> None:
    """The energy does not depend on the order of a system's atoms."""
    generator = seeded(generator)
    order = torch.cat(
        [
            int(start) + torch.randperm(int(n), generator=generator)
            for start, n in zip(structures.ptr, structures.natoms, strict=False)
        ]
        or [torch.empty(0, dtype=torch.int64)]
    ).to(structures.ptr.device)
    relaxed = structures.positions_relaxed
    permuted = replace(
        structures,
        atomic_numbers=structures.atomic_numbers[order],
        positions=structures.positions[order],
        tags=structures.tags[order],
        fixed=structures.fixed[order],
        positions_relaxed=None if relaxed is None else relaxed[order],
    )
    _compare(model, structures, permuted, tolerance, "its atoms were reordered")


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
    _compare(model, before, after, tolerance, f"it was shifted by up to {distance} Å")


def check_periodic_images(
    model: Model,
    structures: Structures,
    *,
    tolerance: float = 1e-5,
    generator: torch.Generator | None = None,
) -> None:
    """For models that know periodicity: each atom moved by −1, 0 or 1 of each periodic vector.

    Positions and cells are first rounded to 1/1024 Å, so that the moves are exact in float32.
    """
    generator = seeded(generator)
    before = rounded_to_1024ths(structures)
    counts = torch.randint(-1, 2, (before.num_atoms, 3), generator=generator).to(before.positions)
    counts = counts * before.pbc[before.system]
    moves = (counts.unsqueeze(2) * before.cell[before.system]).sum(dim=1)
    after = shifted(before, moves)
    _compare(model, before, after, tolerance, "its atoms were moved by lattice vectors")


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
    generator = seeded(generator)
    normal = torch.randn(len(structures), 3, 3, generator=generator, dtype=torch.float64)
    q, _ = torch.linalg.qr(normal)
    q = q * torch.linalg.det(q).sign()[:, None, None]  # proper rotations only

    def rotated(rows: Tensor, rotation: Tensor) -> Tensor:
        turned = rows.double().unsqueeze(-2) @ rotation.to(rows.device)
        return turned.squeeze(-2).to(rows.dtype)

    relaxed, per_atom = structures.positions_relaxed, q[structures.system.cpu()]
    after = replace(
        structures,
        positions=rotated(structures.positions, per_atom),
        cell=rotated(structures.cell, q[:, None]),
        positions_relaxed=None if relaxed is None else rotated(relaxed, per_atom),
    )
    _compare(model, structures, after, tolerance, "it was rotated with its cell")


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
        alone = torch.cat([_energies(model, system) for system in systems])
        together = _energies(model, structures)
        reverse = _energies(model, Structures.cat(systems[::-1])).flip(0)
        partner = tiled(max(systems, key=lambda system: system.num_atoms), larger)
        beside = _energies(model, Structures.cat([partner, *systems, partner]))[1:-1]
    _agree(structures, alone, together, tolerance, "from alone to all in one batch")
    _agree(structures, alone, reverse, tolerance, "from alone to a batch in reverse order")
    situation = f"from alone to a batch with a system of {partner.num_atoms} atoms"
    _agree(structures, alone, beside, tolerance, situation)


def check_deterministic(model: Model, structures: Structures) -> None:
    """Two calls in eval mode give the same energies bit for bit."""
    with evaluating(model), torch.no_grad():
        first, second = _energies(model, structures), _energies(model, structures)
    _agree(structures, first, second, 0.0, "from one call to the next")


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
        first, second = _energies(model, structures), _energies(other, structures)
    _agree(structures, first, second, tolerance, "from a module to one with its saved state")


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
        before = _energies(model, structures)
        alone = torch.cat([_energies(model, system) for system in small])
        mixed = _energies(model, Structures.cat([small[1], structures, *small]))
    for system, energy in zip(small, alone.tolist(), strict=True):
        if not abs(energy) < float("inf"):
            raise AssertionError(f"the energy of a system of {system.sid[0]} is {energy}")
    added = "when systems of one and of no atoms joined the batch"
    _agree(structures, before, mixed[1:-2], tolerance, added)
    expected = alone[[1, 0, 1]]
    _agree(
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
    loss = _energies(model, structures).square().sum()
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


def _energies(model: Any, structures: Structures) -> Tensor:
    output = model(structures)
    energy: Tensor = output["energy"] if isinstance(output, Mapping) else output
    if tuple(energy.shape) != (len(structures),):
        raise AssertionError(
            f"energies have shape {tuple(energy.shape)} for {len(structures)} systems"
        )
    return energy


def _compare(
    model: Model, before: Structures, after: Structures, tolerance: float, change: str
) -> None:
    with evaluating(model), torch.no_grad():
        first, second = _energies(model, before), _energies(model, after)
    _agree(before, first, second, tolerance, f"when {change}")


def _agree(
    structures: Structures, first: Tensor, second: Tensor, tolerance: float, change: str
) -> None:
    """Raise for the system that differs most, beyond the tolerance or by NaN."""
    first, second = first.detach().cpu().double(), second.detach().cpu().double()
    excess = (second - first).abs() / first.abs().clamp(min=1.0)
    bad = ~(excess <= tolerance)  # NaN is bad, too
    if not bool(bad.any()):
        return
    worst = int(excess.nan_to_num(nan=float("inf")).argmax())
    raise AssertionError(
        f"the energy of {int(bad.sum())} of {len(structures)} systems changed {change}; most, "
        f"that of sid {structures.sid[worst]} ({int(structures.natoms[worst])} atoms): "
        f"{float(first[worst]):.9g} → {float(second[worst]):.9g} eV, "
        f"by {float(second[worst] - first[worst]):.3g} eV, "
        f"tolerance {tolerance:g} · max(1 eV, |E|)"
    )
