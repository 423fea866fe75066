"""The training task: what Lightning repeats for every batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor

from flt_mol.models.energy import EnergyModel
from flt_mol.structures import Structures
from flt_mol.training.augmentation import move_atoms, rotate, shift_images
from flt_mol.training.config import TrainingConfig
from flt_mol.training.freezing import trainable
from flt_mol.training.losses import LossConfig, training_loss
from flt_mol.training.validation import OutputMetrics


class EnergyTask(LightningModule):
    """Errors of :mod:`flt_mol.training.losses`, lowered by Adam or AdamW; warm-up, then decay.

    Logs, per epoch, means over systems (energies, eV) and free atoms (displacements, Å) of the last
    pass: ``train/mae``, ``train/energy_initial_mae``, ``train/displacement`` as far as the loss has
    them, and ``train/loss``; ``val/mae``, ``val/ewt`` (fraction below 0.02 eV), and whatever else
    :class:`~flt_mol.training.validation.OutputMetrics` finds, pass by pass.

    Args:
        model: with its normalisers fitted.
        config: see TrainingConfig.
        total_steps: length of the learning-rate schedule.
        loss: see LossConfig; None is its defaults.
        splits: names of the training and validation splits, for errors.
    """

    def __init__(
        self,
        model: EnergyModel,
        config: TrainingConfig,
        total_steps: int,
        loss: LossConfig | None = None,
        splits: tuple[str, str] = ("training", "validation"),
    ) -> None:
        super().__init__()
        self.model = model
        self.training_config = config
        self.total_steps = total_steps
        self.loss_config = LossConfig() if loss is None else loss
        self.splits = splits
        self._validation = OutputMetrics()

    def training_step(self, batch: Structures, batch_idx: int) -> Tensor:
        """The loss of the batch, its systems shown as the configuration wants them.

        Raises:
            ValueError: a target that is missing, or a loss that is not finite; names the systems
                of the batch.
        """
        config = self.training_config
        with _naming(self.splits[0]):
            batch, moved = move_atoms(batch, config.noise, config.interpolation)
            if config.shift_images:
                batch = shift_images(batch)
            batch = rotate(batch, config.rotation)
            loss = training_loss(
                self.model(batch),
                batch,
                min(1.0, self.global_step / max(1, self.total_steps)),
                self.loss_config,
                self.model.normalizers,
                moved,
            )
            if not bool(loss.total.isfinite()):
                raise ValueError(
                    f"the loss is {loss.total.item()} on the batch of sids {list(batch.sid)}"
                )
        for name, part in loss.parts.items():
            if part.over:
                self._log(f"train/{name}", part.value, part.over)
        self._log("train/loss", loss.total.detach(), len(batch))
        return loss.total

    def _log(self, name: str, value: Tensor, count: int) -> None:
        self.log(name, value, on_step=False, on_epoch=True, batch_size=count)

    def validation_step(self, batch: Structures, batch_idx: int) -> None:
        """Collect errors; the epoch's end reports them."""
        with _naming(self.splits[1]):
            self._validation.update(self.model(batch), batch)

    def on_validation_epoch_end(self) -> None:
        """Log the errors over all systems of the split."""
        metrics = self._validation.compute()
        self._validation = OutputMetrics()
        for name, value in metrics.items():
            self.log(f"val/{name}", value)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """The optimiser and the schedule, stepped after every batch."""
        config = self.training_config
        kind = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
        optimizer = kind(
            trainable(self.model),
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
        )
        factor = learning_rate_factor(
            self.total_steps, config.warmup_fraction, config.decay, config.warmup_steps
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def transfer_batch_to_device(
        self, batch: Structures, device: torch.device, dataloader_idx: int
    ) -> Structures:
        """Structures know how to move themselves."""
        return batch.to(device)


@contextmanager
def _naming(split: str) -> Iterator[None]:
    """Say of which split a bad batch is."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"split '{split}': {error}") from error


def learning_rate_factor(
    total_steps: int, warmup_fraction: float, decay: str, warmup_steps: int | None = None
) -> Callable[[int], float]:
    """Factor of the peak rate at a step: linear warm-up, then "linear" or "cosine" decay to 0.

    Args:
        total_steps: at which the rate is 0.
        warmup_fraction: share of them that warms up.
        decay: its form.
        warmup_steps: how many warm up, in place of `warmup_fraction`.

    Raises:
        ValueError: unknown `decay`.

    Example:
        >>> factor = learning_rate_factor(100, 0.1, "linear")
        >>> [round(factor(step), 2) for step in (0, 9, 55, 100)]
        [0.1, 1.0, 0.5, 0.0]
    """
    if decay not in ("linear", "cosine"):
        raise ValueError(f"training.decay is '{decay}'; known: linear, cosine")
    warmup = round(total_steps * warmup_fraction) if warmup_steps is None else warmup_steps
    warmup = max(1, warmup)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        return 1.0 - done if decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))

    return factor
