"""One training loop for every model of a table, ours and others', on one thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from common.timing import threads
from flt_mol.evaluation import EnergyMetrics
from flt_mol.structures import Structures, relaxed_displacement
from flt_mol.training.config import LossConfig
from flt_mol.training.losses import training_loss

TARGETS = {
    "joint": ("energy", "energy_initial"),
    "relaxed": ("energy",),
    "initial": ("energy_initial",),
}


@dataclass(frozen=True)
class Settings:
    """What all rows of a table share: AdamW, linear warm-up and decay, L1 loss.

    `targets`: "joint" (both energies, the mean of both losses), "relaxed" or "initial" alone.
    `epochs` may be a fraction, rounded to whole steps. Without `shift` the mean of the targets is
    not added: for energies that are 0 where parts are far from each other.
    """

    targets: str = "joint"
    epochs: float = 20
    batch_size: int = 48
    learning_rate: float = 2e-3
    weight_decay: float = 1e-3
    clip: float = 5.0
    warmup_fraction: float = 0.06
    shift: bool = True


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's global generator inside the block, and restore it afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def relabelled(system: Structures, targets: str) -> Structures:
    """With targets "initial", the energy before relaxation takes the place of `energy`."""
    return replace(system, energy=system.energy_initial) if targets == "initial" else system


def fit_normalizers(model: Any, systems: Sequence[Structures], settings: Settings) -> None:
    """Mean and standard deviation of the targets."""
    parts = {"energy": model.normalizer}
    if settings.targets == "joint":
        parts["energy_initial"] = model.normalizer_initial
    for name, part in parts.items():
        part.fit(torch.cat([_target(system, name) for system in systems]), settings.shift)


def _target(structures: Structures, name: str) -> Tensor:
    value: Tensor | None = getattr(structures, name)
    if value is None:
        raise ValueError(f"sid {structures.sid[0]} has no {name}, which is a target")
    return value


class Training:
    """A model with its loss and optimiser, step by step.

    The loss is ½ (|E − y|/s + |E⁰ − y⁰|/s₀) for joint targets, one term else, plus what
    `loss` (keys of `LossConfig`) gives to displacements. `done` of `total` steps are taken.
    """

    def __init__(self, model: Any, settings: Settings, loss: Mapping[str, Any], total: int) -> None:
        joint = settings.targets == "joint"
        self.model, self.settings = model.train(), settings
        self.factor = 0.5 if joint else 1.0
        given = {"energy_initial_weight": float(joint), **loss}
        for key in ("displacement_weight", "displacement_final_weight"):
            if given.get(key) is not None:
                given[key] = given[key] / self.factor  # not halved with the energies
        self.config = LossConfig(**given)
        self.normalizers = {"energy": model.normalizer}
        if joint:
            self.normalizers["energy_initial"] = model.normalizer_initial
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98), eps=1e-6,
            weight_decay=settings.weight_decay,
        )  # fmt: skip
        self.total, self.done = total, 0

    def step(self, systems: Sequence[Structures]) -> float:
        """One update; the loss before it."""
        warmup = max(1, round(self.settings.warmup_fraction * self.total))
        left = max(0.0, (self.total - self.done) / max(1, self.total - warmup))
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * min(1.0, (self.done + 1) / warmup, left)
        batch = Structures.cat(systems)
        progress = self.done / self.total
        outputs = self.model(batch)
        found = training_loss(outputs, batch, progress, self.config, self.normalizers)
        loss = self.factor * found.total
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        self.optimizer.step()
        self.done += 1
        return float(loss.detach())


def train(
    build: Callable[[], nn.Module],
    systems: Sequence[Structures],
    settings: Settings,
    seed: int,
    loss: Mapping[str, Any] | None = None,
) -> tuple[nn.Module, float, float]:
    """Build and train a model; no model is chosen by validation, the final weights count.

    Returns:
        The model, CPU seconds per epoch, mean loss of the last epoch.
    """
    systems = [relabelled(system, settings.targets) for system in systems]
    size, per_epoch = settings.batch_size, max(1, len(systems) // settings.batch_size)
    losses: list[float] = []
    with seeded(seed), threads(1):
        model = build()
        fit_normalizers(model, systems, settings)
        total = max(1, round(settings.epochs * per_epoch))
        training, start = Training(model, settings, loss or {}, total), time.process_time()
        batches = _batches(len(systems), size, torch.Generator().manual_seed(seed))
        while training.done < training.total:
            losses.append(training.step([systems[row] for row in next(batches)]))
            if not losses[-1] < float("inf"):
                raise ValueError(f"the loss of step {len(losses)} is {losses[-1]}")
        seconds = (time.process_time() - start) * per_epoch / len(losses)
    last = losses[-per_epoch:]
    return model, seconds, sum(last) / len(last)


def _batches(count: int, size: int, generator: torch.Generator) -> Iterator[list[int]]:
    """Rows of one batch after the other, in a new order in each epoch, without the rest."""
    while True:
        order = torch.randperm(count, generator=generator).tolist()
        for i in range(max(1, count // size)):
            yield order[i * size : (i + 1) * size]


def evaluate(model: Any, systems: Sequence[Structures], targets: str) -> dict[str, Any]:
    """MAE (eV) and EwT by target; of displacements the mean error over free atoms (Å).

    Models of several recycles also give lists by recycle.
    """
    names = {"initial": {"energy_initial": "energy"}, "relaxed": {"energy": "energy"}}.get(
        targets, {"energy": "energy", "energy_initial": "energy_initial"}
    )
    metrics: dict[str, list[EnergyMetrics]] = {}
    moves, stay, free_atoms = torch.zeros(1), 0.0, 0
    model.eval()
    with torch.no_grad(), threads(1):
        for start in range(0, len(systems), 64):
            batch = Structures.cat([relabelled(s, targets) for s in systems[start : start + 64]])
            outputs = model(batch)
            for name, output in names.items():
                every = _recycles(outputs, output)
                found = metrics.setdefault(name, [EnergyMetrics() for _ in every])
                for metric, prediction in zip(found, every, strict=True):
                    metric.update(prediction, _target(batch, output), sid=batch.sid)
            if "displacement" in outputs and batch.positions_relaxed is not None:
                target, free = relaxed_displacement(batch), ~batch.fixed
                errors = (_recycles(outputs, "displacement") - target).norm(dim=-1)[:, free]
                moves = moves + errors.double().sum(-1)
                stay += target[free].norm(dim=-1).double().sum().item()
                free_atoms += int(free.sum())
    out: dict[str, Any] = {}
    for name, each in metrics.items():
        values = [metric.compute() for metric in each]
        out[name] = {"mae": values[-1]["mae"], "ewt": values[-1]["ewt"]}
        if len(values) > 1:
            out[name]["mae_by_recycle"] = [value["mae"] for value in values]
    if free_atoms:
        by_recycle = (moves / free_atoms).tolist()
        out["displacement"] = {
            "error": by_recycle[-1],
            "stay": stay / free_atoms,
            "by_recycle": by_recycle,
        }
    return out


def _recycles(outputs: Mapping[str, Tensor], name: str) -> Tensor:
    """Every recycle of an output, the first dimension; a single one where there is no stack."""
    return outputs.get(f"{name}_recycles", outputs[name][None])
