"""The training task: what Lightning repeats for every batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from torch.optim import Optimizer

from flt_mol.data.loader import Window
from flt_mol.evaluation.metrics import error_sums
from flt_mol.models.energy import EnergyModel
from flt_mol.structures import Structures
from flt_mol.training.augmentation import move_atoms, rotate, shift_images
from flt_mol.training.config import LossConfig, TrainingConfig
from flt_mol.training.losses import training_loss
from flt_mol.training.processes import gathered


class EnergyTask(LightningModule):
    """Minimises `training_loss` by Adam or AdamW.

    Logs, per epoch, means over systems (energies, eV) and free atoms (displacements, Å; forces):
    ``train/mae``, ``train/loss`` and what else the loss has, ``train/gradient_norm`` (before
    clipping, mean over steps), and ``val/…`` of `error_sums`.

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
        self.model, self.total_steps, self.splits = model, total_steps, splits
        self.training_config, self.loss_config = config, loss or LossConfig()
        self._sids: list[int | str] = []
        self._sums: dict[str, tuple[float, float]] = {}  # over an epoch, and of how many

    def training_step(self, given: tuple[Structures, Window], batch_idx: int) -> Tensor:
        """The loss of a batch, after augmentation; a ValueError if it is not finite."""
        batch, window = given
        self._sids = list(batch.sid)
        progress = min(1.0, self.global_step / max(1, self.total_steps))
        config, scales = self.training_config, self.model.normalizers
        with _naming(self.splits[0]):
            batch, moved = move_atoms(batch, config.noise, config.interpolation)
            batch = shift_images(batch) if config.shift_images else batch
            batch = rotate(batch, config.rotation)
            found = self.model(batch)
            share = self._shares(window, len(batch))
            loss = training_loss(found, batch, progress, self.loss_config, scales, moved, share)
            if not bool(loss.total.isfinite()):
                raise ValueError(f"the loss is {loss.total.item()}{self._where(batch)}")
        for name, (mean, count) in loss.errors.items():
            self._add(f"train/{name}", mean * count, count)
        return loss.total

    def _shares(self, window: Window, systems: int) -> Callable[[str, int], float]:
        """Factors of a batch's means: a step follows the means over all its batches and processes.

        Lightning divides by `accumulate`, for fewer batches too, and DDP by the processes.
        """

        def share(name: str, count: int) -> float:
            atoms = {"displacement": window.atoms, "forces": window.forces}
            mean = atoms.get(name, count * window.systems / systems)
            if self._trainer is not None and self.trainer.world_size > 1:
                counts = torch.tensor(float(mean), device=self.device)
                mean = float(self.trainer.strategy.reduce(counts, reduce_op="mean"))
            return self.training_config.accumulate * count / mean if mean else 0.0

        return share

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Note the norm of the gradient, not yet clipped; a ValueError if it is not finite."""
        parameters = self.model.parameters()
        norm = torch.nn.utils.get_total_norm([x.grad for x in parameters if x.grad is not None])
        scaled = self.trainer.precision == "16-mixed"  # which tries scales that are too large
        if not scaled and not bool(norm.isfinite()):
            raise ValueError(f"split '{self.splits[0]}': the gradient is not finite{self._where()}")
        self._add("train/gradient_norm", norm.detach(), 1)

    def validation_step(self, batch: Structures, batch_idx: int) -> None:
        """Sum errors up for the end of the epoch; a ValueError if outputs are not finite."""
        with _naming(self.splits[1]):
            outputs = self.model(batch)
            if not all(bool(found.isfinite().all()) for found in outputs.values()):
                raise ValueError(f"the model's outputs are not finite{self._where(batch)}")
            for name, (total, count) in error_sums(outputs, batch).items():
                self._add(f"val/{name}", total, count)

    def on_validation_epoch_end(self) -> None:
        """Log the errors of the epoch, training and validation, over all processes."""
        every = gathered(self._sums)
        for name in dict.fromkeys(name for sums in every for name in sums):
            found = [sums[name] for sums in every if name in sums]
            if count := sum(over for _, over in found):
                self.log(name, sum(total for total, _ in found) / count)
        self._sums = {}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the sums of an epoch under way, which Lightning's own means would lose."""
        checkpoint["training_sums"] = gathered(dict(self._sums))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Continue these sums."""
        self._sums = checkpoint["training_sums"][self.global_rank]

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """The optimiser of what is not frozen, and the schedule, stepped after every step."""
        config = self.training_config
        kind = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
        optimizer = kind(
            [parameter for parameter in self.model.parameters() if parameter.requires_grad],
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
        )
        factor = learning_rate_factor(self.total_steps, config)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _add(self, name: str, total: Tensor | float, count: float) -> None:
        before, over = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = before + float(total), over + count

    def _where(self, batch: Structures | None = None) -> str:
        """The systems of a batch; once weights were changed, that these may be wrong instead."""
        sids = self._sids if batch is None else list(batch.sid)
        rate = f"training.learning_rate, {self.training_config.learning_rate:g}"
        late = f", after {self.global_step:,} steps; if these are sound, reduce {rate}"
        return f" on the batch of sids {sids}{late if self.global_step else ''}"


def learning_rate_factor(total_steps: int, config: TrainingConfig) -> Callable[[int], float]:
    """Factor of the peak rate at a step: linear warm-up over w steps, then decay.

    "linear" and "cosine" lead to 0 at the last step, "inverse-sqrt" is √(w / (step + 1)).
    """
    warmup, decay = config.warmup_steps, config.decay
    warmup = max(1, round(total_steps * config.warmup_fraction) if warmup is None else warmup)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if decay == "inverse-sqrt":
            return math.sqrt(warmup / (step + 1))
        done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        return 1.0 - done if decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))

    return factor


@contextmanager
def _naming(split: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"split '{split}': {error}") from error
