"""What checks of energy models share: calling one, and comparing energies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from flt_mol.modes import evaluating
from flt_mol.structures import Structures

Model = Callable[[Structures], Mapping[str, Tensor] | Tensor]


def energies_of(model: Any, structures: Structures) -> Tensor:
    """(B,), eV, of what a model gives, checked to be so."""
    output = model(structures)
    energy: Tensor = output["energy"] if isinstance(output, Mapping) else output
    if tuple(energy.shape) != (len(structures),):
        raise AssertionError(
            f"energies have shape {tuple(energy.shape)} for {len(structures)} systems"
        )
    return energy


def compare(
    model: Model, before: Structures, after: Structures, tolerance: float, change: str
) -> None:
    """The same energies before and after a change."""
    with evaluating(model), torch.no_grad():
        first, second = energies_of(model, before), energies_of(model, after)
    energies_agree(before, first, second, tolerance, f"when {change}")


def energies_agree(
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
