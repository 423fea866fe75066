"""One training loop for every row of a table, ours and others'."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flt_mol.analysis.timing import one_thread
from flt_mol.structures import Structures
from flt_mol.training.config import LossConfig
from flt_mol.training.losses import training_loss

__all__ = ["TARGETS", "Settings", "Trained", "Training", "seeded", "train", "without_denormals"]

TARGETS: dict[str, tuple[str, ...]] = {
    "joint": ("energy", "energy_initial"),
    "relaxed": ("energy",),
    "initial": ("energy_initial",),
}


@dataclass(frozen=True)
class Settings:
    """What all rows of a table share.

    Attributes:
        targets: "joint", both energies by two outputs of one model, lowering the mean of both
            losses; "relaxed" or "initial", one of them alone. Only energies are averaged: weights
            of further losses are per such mean, and the same for all targets.
        epochs: passes over the training systems; systems that do not fill a batch wait for another.
        batch_size: systems.
        learning_rate: of AdamW, at the end of the warm-up.
        beta1: of AdamW.
        beta2: of AdamW.
        eps: of AdamW.
        weight_decay: of AdamW.
        clip: largest norm of the gradient.
        warmup_fraction: of all steps, linear; then the rate falls to 0, linearly.
    """

    targets: str = "joint"
    epochs: int = 18
    batch_size: int = 48
    learning_rate: float = 2e-3
    beta1: float = 0.9
    beta2: float = 0.98
    eps: float = 1e-6
    weight_decay: float = 1e-3
    clip: float = 5.0
    warmup_fraction: float = 0.06

    def __post_init__(self) -> None:
        if self.targets not in TARGETS:
            raise ValueError(f"targets is '{self.targets}'; known: {', '.join(TARGETS)}")
        if self.epochs < 1 or self.batch_size < 1:
            raise ValueError(
                f"epochs is {self.epochs} and batch_size {self.batch_size}, expected at least 1"
            )


class Trained(NamedTuple):
    """A model, and what its training took.

    Attributes:
        model: with its final weights.
        seconds_per_epoch: CPU time of batches, forward and backward passes and updates.
        loss: mean over the last epoch, as :func:`flt_mol.training.losses.training_loss` has it.
    """

    model: nn.Module
    seconds_per_epoch: float
    loss: float


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Torch's global random numbers on CPU start at `seed`, and afterwards are where they were."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@contextmanager
def without_denormals() -> Iterator[None]:
    """Numbers below 1e-38 count as 0 on this thread; afterwards they do as before.

    Without it PyG's Gaussians make SchNet four times slower on many CPUs, and comparing times
    would be unfair.
    """
    before = bool(torch.full((1,), 1e-39).mul(0.5) == 0)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def train(
    build: Callable[[], nn.Module],
    systems: Sequence[Structures],
    settings: Settings,
    seed: int,
    loss: Mapping[str, Any] | None = None,
    report: Callable[[int, float], None] | None = None,
) -> Trained:
    """Build a model and train it on one thread, by AdamW and the L1 loss of normalised targets.

    The same seed gives every model the same order of systems, and the same model twice gives the
    same weights. Nothing is validated on the way: the final weights are what counts.

    Args:
        build: makes the model, from random numbers that this function seeds.
        systems: single systems with their targets, and with pairs if the model wants them.
        settings: see there.
        seed: of initial weights, order of systems, dropout.
        loss: further settings of :class:`flt_mol.training.losses.LossConfig`.
        report: called after each epoch with its number and mean loss.

    Raises:
        ValueError: no systems, a missing target, or a loss that is not finite.
    """
    if not systems:
        raise ValueError("there are no systems to train on")
    systems = [relabelled(system, settings.targets) for system in systems]
    with seeded(seed), one_thread():
        model = build()
        fit_normalizers(model, systems, settings)
        total = settings.epochs * steps_per_epoch(len(systems), settings)
        return _trained(Training(model, settings, loss or {}, total), systems, seed, report)


def relabelled(system: Structures, targets: str) -> Structures:
    """With targets "initial" the energy before relaxation takes the place of the one after it."""
    return replace(system, energy=system.energy_initial) if targets == "initial" else system


def fit_normalizers(model: Any, systems: Sequence[Structures], settings: Settings) -> None:
    """Mean and spread of the targets that are trained."""
    model.normalizer.fit(torch.cat([target_of(system, "energy") for system in systems]))
    if settings.targets == "joint":
        initial = [target_of(system, "energy_initial") for system in systems]
        model.normalizer_initial.fit(torch.cat(initial))


class _Objective:
    """The loss of a batch; with both energies as targets it has their mean in place of their sum.

    ½ (|E − y| / s + w_init |E⁰ − y⁰| / s₀) + w_disp ‖d̂ − d‖, where `LossConfig` has no ½: the
    weight of displacements is what it says there, beside one energy as beside the mean of two.
    """

    def __init__(self, model: Any, settings: Settings, extra: Mapping[str, Any]) -> None:
        joint = settings.targets == "joint"
        self.config = LossConfig(**{"energy_initial_weight": float(joint), **extra})
        self.factor = 0.5 if joint else 1.0
        first = self.config.displacement_weight
        # `training_loss` gives a sum: what is not to be halved with it goes in twice.
        self.displaced = replace(
            self.config,
            displacement_weight=(1.0 if first is None else first) / self.factor,
            displacement_final_weight=self.config.displacement_final_weight / self.factor,
        )
        self.normalizers = {"energy": model.normalizer}
        if joint:
            self.normalizers["energy_initial"] = model.normalizer_initial

    def __call__(self, outputs: Mapping[str, Tensor], batch: Structures, progress: float) -> Tensor:
        config = self.displaced if "displacement" in outputs else self.config
        loss = training_loss(outputs, batch, progress, config, self.normalizers)
        return self.factor * loss.total


class Training:
    """A model with its loss and optimiser, step by step.

    Args:
        model: with its normalisers fitted.
        settings: see there.
        loss: further settings of :class:`flt_mol.training.losses.LossConfig`.
        total: steps that there will be.
    """

    def __init__(
        self, model: nn.Module, settings: Settings, loss: Mapping[str, Any], total: int
    ) -> None:
        self.model, self.settings = model.train(), settings
        self.objective = _Objective(model, settings, loss)
        self.optimizer, self.scheduler = _optimizer(model, settings, total)
        self.total, self.done = total, 0

    def step(self, systems: Sequence[Structures]) -> Tensor:
        """Batch, forward and backward pass, update; the loss before it, ()."""
        batch = Structures.cat(systems)
        loss = self.objective(self.model(batch), batch, self.done / self.total)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        self.optimizer.step()
        self.scheduler.step()
        self.done += 1
        return loss.detach()


def steps_per_epoch(count: int, settings: Settings) -> int:
    """Whole batches of `count` systems; 1 for less than a batch."""
    return max(1, count // settings.batch_size)


def _trained(
    training: Training,
    systems: Sequence[Structures],
    seed: int,
    report: Callable[[int, float], None] | None,
) -> Trained:
    settings, per_epoch = training.settings, steps_per_epoch(len(systems), training.settings)
    generator = torch.Generator().manual_seed(seed)
    start, mean = time.process_time(), 0.0
    for epoch in range(settings.epochs):
        order = torch.randperm(len(systems), generator=generator).tolist()
        summed = torch.zeros(())
        for index in range(per_epoch):
            rows = order[index * settings.batch_size : (index + 1) * settings.batch_size]
            summed += training.step([systems[row] for row in rows])
        mean = summed.item() / per_epoch
        if not mean < float("inf"):
            raise ValueError(f"the loss of epoch {epoch + 1} is {mean}")
        if report is not None:
            report(epoch + 1, mean)
    return Trained(training.model, (time.process_time() - start) / settings.epochs, mean)


def _optimizer(
    model: nn.Module, settings: Settings, total: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    # Not at the top: Lightning takes seconds to load.
    from flt_mol.training.task import learning_rate_factor

    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )
    factor = learning_rate_factor(total, settings.warmup_fraction, "linear")
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def target_of(structures: Structures, name: str) -> Tensor:
    """A target of all systems.

    Raises:
        ValueError: it is missing, naming a sid.
    """
    value: Tensor | None = getattr(structures, name)
    if value is None:
        raise ValueError(f"there is no {name} for sid {structures.sid[0]}, and it is a target")
    return value
