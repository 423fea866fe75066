"""Errors of trained models on a split, by target and pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flt_mol.analysis.accuracy.loop import TARGETS, relabelled, target_of
from flt_mol.analysis.timing import one_thread
from flt_mol.displacements import relaxed_displacement
from flt_mol.evaluation.metrics import EnergyMetrics
from flt_mol.structures import Structures

__all__ = ["evaluate"]

_AT_ONCE = 64


def evaluate(model: nn.Module, systems: Sequence[Structures], targets: str) -> dict[str, Any]:
    """Errors of a trained model on a split.

    Returns:
        By target, "energy" and "energy_initial" as far as they were trained, ``mae`` (eV), ``ewt``
        (a fraction) and, for models of several passes, ``mae_by_pass`` (eV). For models that
        predict displacements, under "displacement", ``error``, the mean length of the error over
        free atoms (Å), ``stay``, that of predicting 0, and ``error_by_pass``.
    """
    sums = _Sums(TARGETS[targets])
    was_training = model.training
    model.eval()
    with torch.no_grad(), one_thread():
        for start in range(0, len(systems), _AT_ONCE):
            part = [relabelled(system, targets) for system in systems[start : start + _AT_ONCE]]
            batch = Structures.cat(part)
            sums.add(model(batch), batch)
    model.train(was_training)
    return sums.result()


class _Sums:
    """Sums over systems and atoms, by target and pass."""

    def __init__(self, targets: Sequence[str]) -> None:
        # A model of initial energies alone has them as its "energy", see `relabelled`.
        alone = targets[0] if len(targets) == 1 else None
        self.outputs = {alone or name: "energy" if alone else name for name in targets}
        self.energies: dict[str, list[EnergyMetrics]] = {}
        self.moves: Tensor | None = None
        self.stay, self.free = 0.0, 0

    def add(self, outputs: Mapping[str, Tensor], batch: Structures) -> None:
        for name, output in self.outputs.items():
            every = outputs.get(f"{output}_recycles", outputs[output][None])
            metrics = self.energies.setdefault(name, [EnergyMetrics() for _ in every])
            for metric, prediction in zip(metrics, every, strict=True):
                metric.update(prediction, target_of(batch, output), sid=batch.sid)
        if "displacement" in outputs and batch.positions_relaxed is not None:
            target, free = relaxed_displacement(batch), ~batch.fixed
            every = (outputs.get("displacement_recycles", outputs["displacement"][None]) - target).norm(dim=-1)[:, free].double().sum(-1)
            self.moves = every if self.moves is None else self.moves + every
            self.stay += target[free].norm(dim=-1).double().sum().item()
            self.free += int(free.sum())

    def result(self) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for name, metrics in self.energies.items():
            found = [metric.compute() for metric in metrics]
            out[name] = {"mae": found[-1]["mae"], "ewt": found[-1]["ewt"]}
            if len(found) > 1:
                out[name]["mae_by_pass"] = [each["mae"] for each in found]
        if self.moves is not None and self.free:
            by_pass = (self.moves / self.free).tolist()
            out["displacement"] = {"error": by_pass[-1], "stay": self.stay / self.free}
            if len(by_pass) > 1:
                out["displacement"]["error_by_pass"] = by_pass
        return out
