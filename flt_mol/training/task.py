"""The training task: what Lightning repeats for every batch."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor

from flt_mol.evaluation.metrics import EnergyMetrics
from flt_mol.models.energy import EnergyModel
from flt_mol.structures import Structures
from flt_mol.training.augmentation import rotate, shift_images
from flt_mol.training.config import TrainingConfig


class EnergyTask(LightningModule):
    """L1 loss |E − y| / std on relaxed energies, AdamW, warm-up then decay.

    Logs, per epoch: ``train/mae``, ``val/mae`` (eV) and ``val/ewt`` (fraction below 0.02 eV), all
    by sums over systems.

    Args:
        model: with its normaliser fitted.
        config: see TrainingConfig.
        total_steps: length of the learning-rate schedule.
    """

    def __init__(self, model: EnergyModel, config: TrainingConfig, total_steps: int) -> None:
        super().__init__()
        self.model = model
        self.training_config = config
        self.total_steps = total_steps
        self._validation = EnergyMetrics()

    def training_step(self, batch: Structures, batch_idx: int) -> Tensor:
        """Mean normalised absolute error of the batch.

        Raises:
            ValueError: the loss is not finite; names the systems of the batch.
        """
        if self.training_config.shift_images:
            batch = shift_images(batch)
        batch = rotate(batch, self.training_config.rotation)
        prediction = self.model(batch)["energy"]
        mae = (prediction - self._target(batch).to(prediction.dtype)).abs().mean()
        if not bool(mae.isfinite()):
            raise ValueError(f"the loss is {mae.item()} on the batch of sids {list(batch.sid)}")
        self.log("train/mae", mae.detach(), on_step=False, on_epoch=True, batch_size=len(batch))
        loss: Tensor = mae / self.model.normalizer.std
        return loss

    def validation_step(self, batch: Structures, batch_idx: int) -> None:
        """Collect errors; the epoch's end reports them."""
        prediction = self.model(batch)["energy"]
        self._validation.update(prediction, self._target(batch), sid=batch.sid)

    def on_validation_epoch_end(self) -> None:
        """Log MAE and EwT over all systems of the split."""
        metrics = self._validation.compute()
        self._validation = EnergyMetrics()
        self.log("val/mae", metrics["mae"])
        self.log("val/ewt", metrics["ewt"])

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW and the schedule, stepped after every batch."""
        config = self.training_config
        optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
        )
        factor = learning_rate_factor(self.total_steps, config.warmup_fraction, config.decay)
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

    @staticmethod
    def _target(batch: Structures) -> Tensor:
        if batch.energy is None:
            raise ValueError(f"this split has no targets: no relaxed energy for sid {batch.sid[0]}")
        return batch.energy


def learning_rate_factor(
    total_steps: int, warmup_fraction: float, decay: str
) -> Callable[[int], float]:
    """Factor of the peak rate at a step: linear warm-up, then "linear" or "cosine" decay to 0.

    Raises:
        ValueError: unknown `decay`.

    Example:
        >>> factor = learning_rate_factor(100, 0.1, "linear")
        >>> [round(factor(step), 2) for step in (0, 9, 55, 100)]
        [0.1, 1.0, 0.5, 0.0]
    """
    if decay not in ("linear", "cosine"):
        raise ValueError(f"training.decay is '{decay}'; known: linear, cosine")
    warmup = max(1, round(total_steps * warmup_fraction))

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        return 1.0 - done if decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))

    return factor
