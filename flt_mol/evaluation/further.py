"""Errors of what a model gives beside the relaxed energy, where the data have targets for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flt_mol.evaluation.metrics import EnergyMetrics
from flt_mol.structures import Structures, relaxed_displacement

__all__ = ["FurtherErrors"]


class FurtherErrors:
    """Running errors of initial energies and displacements, as sums over systems and atoms.

    Batches without targets for an output are passed over: what is counted is told.

    Example:
        >>> errors = FurtherErrors()
        >>> one = Structures.single([1], [[0, 0, 0]], positions_relaxed=[[0, 0, 2.0]])
        >>> errors.update({"displacement": torch.tensor([[0.0, 0.0, 1.5]])}, one)
        >>> errors.compute()
        {'displacement': 0.5, 'displacement_unmoved': 2.0, 'displacement_atoms': 1}
    """

    def __init__(self) -> None:
        self._initial = EnergyMetrics()
        self._distance, self._unmoved, self._atoms = 0.0, 0.0, 0

    def update(self, outputs: Any, structures: Structures) -> None:
        """Add one batch.

        Args:
            outputs: of the model; "energy_initial" (B,) eV and "displacement" (N, 3) Å are looked
                at, of the last pass. Anything that is no mapping has neither.
            structures: the batch, on any device.

        Raises:
            ValueError: a shape that does not fit, or a number that is not finite, naming the sid.
        """
        if not isinstance(outputs, Mapping):
            return
        if "energy_initial" in outputs and structures.energy_initial is not None:
            self._initial.update(
                outputs["energy_initial"], structures.energy_initial, sid=structures.sid
            )
        if "displacement" in outputs and structures.positions_relaxed is not None:
            self._add_displacements(outputs["displacement"], structures.to("cpu"))

    def _add_displacements(self, predicted: Tensor, structures: Structures) -> None:
        if predicted.shape != structures.positions.shape:
            raise ValueError(
                f"displacements have shape {tuple(predicted.shape)} for "
                f"{structures.num_atoms} atoms, expected ({structures.num_atoms}, 3)"
            )
        free = ~structures.fixed
        target = relaxed_displacement(structures)[free].double()
        distance = torch.linalg.vector_norm(predicted.cpu()[free].double() - target, dim=-1)
        if not bool(distance.isfinite().all()):
            first = int(structures.system[free][~distance.isfinite()][0])
            raise ValueError(f"a displacement of sid {structures.sid[first]} is not finite")
        self._distance += float(distance.sum())
        self._unmoved += float(torch.linalg.vector_norm(target, dim=-1).sum())
        self._atoms += int(free.sum())

    def compute(self) -> dict[str, float]:
        """What there was, by name.

        "energy_initial_mae" (eV), "energy_initial_ewt" (fraction) and "energy_initial_count";
        "displacement", mean distance between predicted and relaxed positions over free atoms (Å),
        "displacement_unmoved", the same if all atoms stayed where they are, "displacement_atoms".
        """
        out: dict[str, float] = {}
        if self._initial.count:
            metrics = self._initial.compute()
            out |= {f"energy_initial_{name}": metrics[name] for name in ("mae", "ewt", "count")}
        if self._atoms:
            out["displacement"] = self._distance / self._atoms
            out["displacement_unmoved"] = self._unmoved / self._atoms
            out["displacement_atoms"] = self._atoms
        return out
