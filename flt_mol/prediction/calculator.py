"""The ASE calculator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.calculators.calculator import Calculator, PropertyNotImplementedError, all_changes
from ase.stress import full_3x3_to_voigt_6_stress

from flt_mol.data import from_ase
from flt_mol.prediction.energies import (
    energies_of,
    evaluating,
    open_quietly,
    predict_structures,
    prepared,
)
from flt_mol.prediction.members import load_members
from flt_mol.structures import Structures


class FLTCalculator(Calculator):
    """Energies, forces and stress of a trained model for ASE: ``atoms.calc = FLTCalculator(…)``.

    ``atoms.get_potential_energy()`` is the energy that the model was trained on, in eV: for IS2RE
    models the **adsorption energy after relaxation**, from the structure before it. Its gradient
    is not a force: forces (eV/Å) and stress (eV/Å³) are refused unless the model was trained on
    forces, that is has them among its `config.outputs`; its energy is that of the positions shown.

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
        configs = [getattr(model, "config", None) for model in self._members.models]
        if all("forces" in getattr(config, "outputs", ()) for config in configs):
            self.implemented_properties = ["energy", "forces", "stress"]
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
            reason = (
                "the model gives energy, forces and stress"
                if "forces" in self.implemented_properties
                else "the model was not trained on forces, and the gradient of its energy, of "
                "adsorption after relaxation, is not a force"
            )
            raise PropertyNotImplementedError(f"no {name}: {reason}")
        if name == "stress" and atoms is not None and atoms.cell.rank < 3:
            raise PropertyNotImplementedError("no stress: the cell has no volume")
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
        if "forces" not in self.implemented_properties:
            found = predict_structures(self._members, [structure])
            if self._members.ensemble:
                self.spread, found = float(found.spread[0]), found.mean
            self.results = {"energy": float(found[0])}
            return
        if set(system_changes) - {"positions", "cell"}:
            predict_structures(self._members, [structure])  # which warns of unusual structures
        found = [
            _outputs(model, structure, "stress" in properties) for model in self._members.models
        ]
        if self._members.ensemble:
            self.spread = float(np.std([out["energy"] for out in found], ddof=1))
        self.results = {name: np.mean([out[name] for out in found], axis=0) for name in found[0]}
        self.results["energy"] = float(self.results["energy"])


def _outputs(model: Any, structure: Structures, stress: bool) -> dict[str, Any]:
    """Energy, eV, forces (N, 3), eV/Å, and stress as ASE has it, (6,), eV/Å³."""
    with evaluating(model), torch.inference_mode():
        out = model(prepared(model, structure), **({"stress": True} if stress else {}))
    found = {name: out[name].cpu().double().numpy() for name in ("forces", "stress") if name in out}
    found["energy"] = energies_of(out, structure)[0]
    for name, values in found.items():
        if not np.isfinite(values).all():
            raise ValueError(f"the model gives {name} that is not finite for {structure.sid[0]}")
    if stress:
        found["stress"] = full_3x3_to_voigt_6_stress(found["stress"][0])
    return found
