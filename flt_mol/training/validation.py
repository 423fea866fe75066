"""Errors of a model's outputs over a split, pass by pass, as sums over systems and atoms."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from flt_mol.evaluation.metrics import EnergyMetrics
from flt_mol.structures import Structures, relaxed_displacement
from flt_mol.training.losses import distances, needed, passes

__all__ = ["OutputMetrics"]


class OutputMetrics:
    """Running errors of every output that a model has, each batch counted by its size.

    Example:
        >>> import torch
        >>> metrics = OutputMetrics()
        >>> one = Structures.single([1], [[0, 0, 0]], energy=1.0)
        >>> metrics.update({"energy": torch.tensor([1.5])}, one)
        >>> metrics.compute()
        {'mae': 0.5, 'ewt': 0.0}
    """

    def __init__(self) -> None:
        self._energies: dict[str, list[EnergyMetrics]] = {}
        self._distances: list[float] = []
        self._unmoved, self._atoms = 0.0, 0

    def update(self, outputs: Mapping[str, Tensor], structures: Structures) -> None:
        """Add one batch.

        Args:
            outputs: as of :func:`flt_mol.training.losses.training_loss`.
            structures: with the targets of all these outputs.

        Raises:
            ValueError: a missing target, or an energy that is not finite, naming the sid.
        """
        for name in ("energy", "energy_initial"):
            if name in outputs:
                every = passes(outputs, name)
                target = needed(structures, name)
                found = self._energies.setdefault(name, [EnergyMetrics() for _ in every])
                for metrics, of_pass in zip(found, every, strict=True):
                    metrics.update(of_pass, target, sid=structures.sid)
        if "displacement" in outputs:
            self._add_displacements(passes(outputs, "displacement"), structures)

    def _add_displacements(self, every: Tensor, structures: Structures) -> None:
        needed(structures, "positions_relaxed")
        free = ~structures.fixed
        target = relaxed_displacement(structures)[free]
        sums = distances(every[:, free], target.to(every.dtype)).double().sum(-1).tolist()
        before = self._distances or [0.0] * len(sums)
        self._distances = [a + b for a, b in zip(before, sums, strict=True)]
        self._unmoved += float(target.double().norm(dim=-1).sum())
        self._atoms += int(free.sum())

    def merge(self, other: OutputMetrics) -> None:
        """Add what another process found; none of both may have outputs that the other lacks."""
        for name, of_passes in other._energies.items():
            found = self._energies.setdefault(name, [EnergyMetrics() for _ in of_passes])
            for metrics, more in zip(found, of_passes, strict=True):
                metrics.merge(more)
        before = self._distances or [0.0] * len(other._distances)
        more_of = other._distances or [0.0] * len(before)
        self._distances = [a + b for a, b in zip(before, more_of, strict=True)]
        self._unmoved += other._unmoved
        self._atoms += other._atoms

    def compute(self) -> dict[str, float]:
        """Means by name, eV and Å.

        "mae" and "ewt" of relaxed energies, "energy_initial_mae", "displacement" (mean distance
        over free atoms) and, to compare it with, "displacement_unmoved" (the same if all stayed
        where they are); and where there are several passes, "mae_pass1" and so on for each.

        Raises:
            ValueError: no systems.
        """
        energy = [metrics.compute() for metrics in self._energies.get("energy", [EnergyMetrics()])]
        out = {"mae": energy[-1]["mae"], "ewt": energy[-1]["ewt"]}
        out |= _by_pass("mae", [of_pass["mae"] for of_pass in energy])
        initial = [m.compute()["mae"] for m in self._energies.get("energy_initial", [])]
        if initial:
            out["energy_initial_mae"] = initial[-1]
            out |= _by_pass("energy_initial_mae", initial)
        if self._atoms:
            means = [total / self._atoms for total in self._distances]
            out["displacement"] = means[-1]
            out |= _by_pass("displacement", means)
            out["displacement_unmoved"] = self._unmoved / self._atoms
        return out


def _by_pass(name: str, values: list[float]) -> dict[str, float]:
    if len(values) == 1:
        return {}
    return {f"{name}_pass{k}": value for k, value in enumerate(values, start=1)}
