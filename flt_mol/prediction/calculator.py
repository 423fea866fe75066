"""The ASE calculator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.calculators.calculator import Calculator, PropertyNotImplementedError, all_changes
from ase.stress import full_3x3_to_voigt_6_stress

from flt_mol.data.ase import atoms_record
from flt_mol.prediction.energies import open_quietly, predict_structures
from flt_mol.prediction.members import load_members


class FLTCalculator(Calculator):
    """Energies, forces and stress of a trained model for ASE: ``atoms.calc = FLTCalculator(…)``.

    ``atoms.get_potential_energy()`` is the energy that the model was trained on, in eV: for IS2RE
    models the **adsorption energy after relaxation**, from the structure before it. Its gradient
    is not a force: forces (eV/Å) and stress (eV/Å³) are refused unless the model was trained on
    forces, that is has them among its `config.outputs`; its energy is that of the positions shown.

    Tags count as positions do: set them first (`flt_mol.data.tag_slab`). Warnings are those of
    `flt_mol.predict`.

    Args:
        checkpoint: a checkpoint, the name of a shipped model, or a module; a list or tuple of them
            is an ensemble, whose energy is the mean and which has a `std`.
        device: where models of checkpoints go (cpu if not given); modules stay where they are.

    Raises:
        ValueError: as `flt_mol.predict`.

    Examples:
        >>> from ase.build import add_adsorbate, fcc111
        >>> from flt_mol.data import tag_slab
        >>> slab = fcc111("Pt", (2, 2, 3), vacuum=7.0)
        >>> add_adsorbate(slab, "O", 1.3, "fcc")
        >>> slab = tag_slab(slab, surface="half")
        >>> slab.calc = FLTCalculator("emt-small")
        >>> -3 < slab.get_potential_energy() < 0
        True
    """

    implemented_properties = ["energy"]  # noqa: RUF012 (ASE's own name and kind)
    # Of what ASE compares, what no energy here depends on.
    ignored_changes = {"initial_charges", "initial_magmoms"}  # noqa: RUF012

    std: float | None = None
    """For an ensemble, the standard deviation of the last energies (ddof = 1), eV; else None."""

    def __init__(self, checkpoint: Any, *, device: str | torch.device | None = None) -> None:
        self._members = load_members(checkpoint, device)
        if not self._members.lacking("forces"):
            self.implemented_properties = ["energy", "free_energy", "forces", "stress"]
        # ASE's databases store parameters beside the results.
        super().__init__(checkpoint=list(self._members.labels))  # type: ignore[no-untyped-call]

    def get_property(
        self, name: str, atoms: Atoms | None = None, allow_calculation: bool = True
    ) -> Any:
        """As of ASE; unavailable properties are refused with the reason.

        Raises:
            PropertyNotImplementedError: anything but the energy; of models that were trained on
                forces, anything but these and stress, and stress without three lattice vectors.
        """
        if name not in self.implemented_properties:
            reason = f"the model gives {', '.join(self.implemented_properties)}"
            if "forces" not in self.implemented_properties:
                reason += ", it was not trained on forces"
            raise PropertyNotImplementedError(f"no {name}: {reason}")
        if name == "stress" and atoms is not None and atoms.cell.rank < 3:
            raise PropertyNotImplementedError("no stress: the cell has no volume")
        return super().get_property(name, atoms, allow_calculation)  # type: ignore[no-untyped-call]

    def check_state(self, atoms: Atoms, tol: float = 1e-15) -> list[str]:
        """What has changed since the last calculation, tags and fixed atoms too."""
        changes: list[str] = list(super().check_state(atoms, tol))  # type: ignore[no-untyped-call]
        if self.atoms is not None:
            before, now = (atoms_record(x.copy()) for x in (self.atoms, atoms))
            changes += [x for x in ("tags", "fixed") if not np.array_equal(before[x], now[x])]
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
        each: list[dict[str, torch.Tensor]] = []
        asked: dict[str, Any] = {"stress": True} if "stress" in properties else {}
        found = predict_structures(
            self._members, [structure], collect=lambda _, outputs: each.extend(outputs), **asked
        )
        if self._members.ensemble:
            self.std, found = float(found.std[0]), found.mean
        self.results = {"energy": float(found[0])}
        if "forces" not in self.implemented_properties:
            return
        for name in ("forces", *asked):
            values = torch.stack([out[name] for out in each]).mean(0).cpu().double().numpy()
            if not np.isfinite(values).all():
                raise ValueError(f"{name} of {structure.sid[0]} not finite")
            self.results[name] = values
        self.results["free_energy"] = self.results["energy"]
        if asked:
            self.results["stress"] = full_3x3_to_voigt_6_stress(self.results["stress"][0])
