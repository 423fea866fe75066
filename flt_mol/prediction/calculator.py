"""The ASE calculator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.calculators.calculator import Calculator, PropertyNotImplementedError, all_changes
from numpy.typing import NDArray
from torch import nn

from flt_mol.data import from_ase
from flt_mol.prediction.energies import (
    evaluating,
    model_device,
    open_quietly,
    predict_structures,
)
from flt_mol.prediction.members import load_members
from flt_mol.structures import Structures


class FLTCalculator(Calculator):
    """Energies of a trained model for ASE: ``atoms.calc = FLTCalculator("emt_small")``.

    ``atoms.get_potential_energy()`` is the energy that the model was trained on, in eV: for IS2RE
    models the **adsorption energy after relaxation**, from the structure before it. Its gradient
    is not a force: forces are refused unless the model was trained on them
    (`trained_on_forces`); no shipped model was. Stress is always refused.

    Tags count as positions do: set them first (`flt_mol.data.tag_slab`). Warnings are those of
    :func:`flt_mol.predict`.

    Args:
        checkpoint: a checkpoint, the name of a shipped model, or a module; a list or tuple of them
            is an ensemble, whose energy is the mean and which has a :attr:`spread`.
        device: where models of checkpoints go (cpu if not given); modules stay where they are.

    Raises:
        ValueError: as :func:`flt_mol.predict`.

    Example:
        >>> from ase.build import add_adsorbate, fcc111
        >>> from flt_mol.data import tag_slab
        >>> slab = fcc111("Pt", (2, 2, 3), vacuum=7.0)
        >>> add_adsorbate(slab, "O", 1.3, "fcc")
        >>> slab = tag_slab(slab, surface="half")
        >>> slab.calc = FLTCalculator("emt_small")
        >>> -3 < slab.get_potential_energy() < 0
        True
    """

    implemented_properties = ["energy"]  # noqa: RUF012 (ASE's own name and kind)
    # Of what ASE compares, what no energy here depends on.
    ignored_changes = {"initial_charges", "initial_magmoms"}  # noqa: RUF012

    spread: float | None = None
    """For an ensemble, the standard deviation of the last energies (ddof = 1), eV; else None."""

    def __init__(self, checkpoint: Any, *, device: str | torch.device | None = None) -> None:
        self._members = load_members(checkpoint, device)
        if all(getattr(model, "trained_on_forces", False) for model in self._members.models):
            self.implemented_properties = ["energy", "forces"]
        # ASE's databases store parameters beside the results.
        super().__init__(checkpoint=list(self._members.labels))  # type: ignore[no-untyped-call]

    def get_property(
        self, name: str, atoms: Atoms | None = None, allow_calculation: bool = True
    ) -> Any:
        """As of ASE; unavailable properties are refused with the reason.

        Raises:
            PropertyNotImplementedError: anything but the energy; forces too, of models that were
                not trained on them.
        """
        if name not in self.implemented_properties:
            raise PropertyNotImplementedError(
                f"no {name}: the energy is that of adsorption after relaxation, and its gradient "
                "is not a force"
            )
        return super().get_property(name, atoms, allow_calculation)  # type: ignore[no-untyped-call]

    def check_state(self, atoms: Atoms, tol: float = 1e-15) -> list[str]:
        """What has changed since the last calculation, tags and fixed atoms too."""
        changes: list[str] = list(super().check_state(atoms, tol))  # type: ignore[no-untyped-call]
        if self.atoms is not None:
            before, now = (from_ase(x.copy(), ignore_energy=True) for x in (self.atoms, atoms))
            for name in ("tags", "fixed"):
                if not torch.equal(getattr(before, name), getattr(now, name)):
                    changes.append(name)
        return changes

    def calculate(
        self,
        atoms: Atoms | None = None,
        properties: Any = ("energy",),
        system_changes: Any = all_changes,
    ) -> None:
        """Fill `results`; called by ASE."""
        super().calculate(atoms, properties, system_changes)  # type: ignore[no-untyped-call]
        if self.atoms is None:
            raise ValueError("there are no atoms to calculate; give atoms, or set atoms.calc")
        structure = replace(open_quietly(self.atoms)[0], sid=(str(self.atoms.symbols),))
        found = predict_structures(self._members, [structure])
        if self._members.ensemble:
            self.spread, found = float(found.spread[0]), found.mean
        self.results = {"energy": float(found[0])}
        if "forces" in self.implemented_properties and "forces" in properties:
            forces = [_forces(model, structure) for model in self._members.models]
            self.results["forces"] = np.mean(forces, axis=0)


def _forces(model: nn.Module, structure: Structures) -> NDArray[np.float64]:
    """(N, 3), eV/Å: −∂E/∂r."""
    moved = structure.to(model_device(model))
    positions = moved.positions.detach().clone().requires_grad_()
    with evaluating(model), torch.enable_grad():
        output = model(replace(moved, positions=positions))
        energy = output["energy"] if isinstance(output, dict) else output
        (gradient,) = torch.autograd.grad(energy.sum(), positions)
    forces = -gradient.detach().to("cpu", torch.float64).numpy()
    if not np.isfinite(forces).all():
        raise ValueError(f"the model gives forces that are not finite for {structure.sid[0]}")
    return np.asarray(forces)
