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
from flt_mol.training.losses import LossConfig, training_loss

__all__ = ["TARGETS", "Settings", "Trained", "seeded", "train", "without_denormals"]

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
            losses; "relaxed" or "initial", one of them alone.
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
        return _trained(model, systems, settings, _Objective(model, settings, loss or {}), seed,
                        report)  # fmt: skip


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
    """The loss of a batch; with both energies as targets it is halved, to be their mean."""

    def __init__(self, model: Any, settings: Settings, extra: Mapping[str, Any]) -> None:
        joint = settings.targets == "joint"
        self.config = LossConfig(**{"energy_initial_weight": float(joint), **extra})
        self.factor = 0.5 if joint else 1.0
        self.normalizers = {"energy": model.normalizer}
        if joint:
            self.normalizers["energy_initial"] = model.normalizer_initial

    def __call__(self, outputs: Mapping[str, Tensor], batch: Structures, progress: float) -> Tensor:
        loss = training_loss(outputs, batch, progress, self.config, self.normalizers)
        return self.factor * loss.total


def _trained(
    model: nn.Module,
    systems: Sequence[Structures],
    settings: Settings,
    objective: _Objective,
    seed: int,
    report: Callable[[int, float], None] | None,
) -> Trained:
    per_epoch = max(1, len(systems) // settings.batch_size)
    total = settings.epochs * per_epoch
    optimizer, scheduler = _optimizer(model, settings, total)
    generator = torch.Generator().manual_seed(seed)
    start, mean = time.process_time(), 0.0
    model.train()
    for epoch in range(settings.epochs):
        order = torch.randperm(len(systems), generator=generator).tolist()
        summed = torch.zeros(())
        for index in range(per_epoch):
            rows = order[index * settings.batch_size : (index + 1) * settings.batch_size]
            batch = Structures.cat([systems[row] for row in rows])
            loss = objective(model(batch), batch, (epoch * per_epoch + index) / total)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
            optimizer.step()
            scheduler.step()
            summed += loss.detach()
        mean = summed.item() / per_epoch
        if not mean < float("inf"):
            raise ValueError(f"the loss of epoch {epoch + 1} is {mean}")
        if report is not None:
            report(epoch + 1, mean)
    return Trained(model, (time.process_time() - start) / settings.epochs, mean)


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
