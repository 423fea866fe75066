"""The training task: what Lightning repeats for every batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from torch.optim import Optimizer

from flt_mol.models.energy import EnergyModel
from flt_mol.outputs import counted
from flt_mol.structures import Structures
from flt_mol.training.augmentation import move_atoms, rotate, shift_images
from flt_mol.training.config import LossConfig, TrainingConfig
from flt_mol.training.freezing import trainable
from flt_mol.training.losses import training_loss
from flt_mol.training.processes import gathered, shares
from flt_mol.training.validation import OutputMetrics

Sums = dict[str, tuple[float, float]]
"""Name → a sum of errors, over so many."""


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
        self._shown: list[int | str] = []
        self._sums: dict[str, tuple[Tensor, float]] = {}

    def training_step(self, batch: Structures, batch_idx: int) -> Tensor:
        """The loss of the batch, its systems shown as the configuration wants them.

        Raises:
            ValueError: a target that is missing, or a loss that is not finite; names the systems
                of the batch.
        """
        config = self.training_config
        self._shown = list(batch.sid)
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
                shares if self._trainer is not None and self.trainer.world_size > 1 else None,
            )
            if not bool(loss.total.isfinite()):
                raise ValueError(
                    f"the loss is {loss.total.item()} on the batch of sids {list(batch.sid)}"
                    f"{self._weights_hint()}"
                )
        for name, part in loss.parts.items():
            self._add(name, part.value, part.over)
        self._add("loss", loss.total.detach(), loss.over)
        return loss.total

    def _add(self, name: str, value: Tensor, count: float) -> None:
        """To the epoch's sums: they belong to the point that a killed run goes on from."""
        total, over = self._sums.get(name, (value.new_zeros((), dtype=_summed_on(value.device)), 0))
        self._sums[name] = total + count * value, over + count

    def _plain_sums(self) -> Sums:
        return {name: (float(total), count) for name, (total, count) in self._sums.items()}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """The sums of an epoch under way."""
        checkpoint["training_sums"] = gathered(self._plain_sums())

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take them up."""
        every = checkpoint["training_sums"]
        rank = self.global_rank
        # Of a run that goes on with other processes, the first one takes all.
        if len(every) != self.trainer.world_size:
            every = [_added(every), *[{}] * (self.trainer.world_size - 1)]
        sums = every[rank]
        self._sums = {
            name: (torch.tensor(total, dtype=_summed_on(self.device), device=self.device), count)
            for name, (total, count) in sums.items()
        }

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """The gradient, no longer than allowed; its length before is logged.

        Raises:
            ValueError: it is not finite, naming the systems.
        """
        assert gradient_clip_val is not None
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), float(gradient_clip_val))
        scaled = self.trainer.precision == "16-mixed"  # which tries too large a scale at times
        if not scaled and not bool(norm.isfinite()):
            raise ValueError(
                f"split '{self.splits[0]}': the gradient is not finite after the batch of sids "
                f"{self._shown}{self._weights_hint()}"
            )
        self._add("gradient_norm", norm.detach(), 1)

    def _weights_hint(self) -> str:
        """What may be wrong other than the systems, once weights have been changed."""
        if self.global_step == 0:
            return ""
        if all(bool(p.isfinite().all()) for p in self.model.parameters()):
            weights = "the weights have grown too large"
        else:
            weights = "the weights themselves are no longer finite"
        rate = self.training_config.learning_rate
        return (
            f", after {counted(self.global_step, 'step')} that went well: if these systems are "
            f"sound, {weights}: lower training.learning_rate, {rate:g}, or warm up for longer "
            "(training.warmup_fraction)"
        )

    def validation_step(self, batch: Structures, batch_idx: int) -> None:
        """Collect errors; the epoch's end reports them."""
        with _naming(self.splits[1]):
            outputs = self.model(batch)
            if not all(bool(found.isfinite().all()) for found in outputs.values()):
                raise ValueError(
                    f"the model's outputs are not finite on the batch of sids {list(batch.sid)}"
                    f"{self._weights_hint()}"
                )
            self._validation.update(outputs, batch)

    def on_validation_epoch_end(self) -> None:
        """Log the errors over all systems of the split, and those of the training epoch."""
        for name, (total, count) in _added(gathered(self._plain_sums())).items():
            if count:
                self.log(f"train/{name}", total / count)
        self._sums = {}
        first, *others = gathered(self._validation)
        for other in others:
            first.merge(other)
        metrics = first.compute()
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


def _added(every: Iterable[Sums]) -> Sums:
    """The sums of several processes together."""
    out: Sums = {}
    for sums in every:
        for name, (total, count) in sums.items():
            before, over = out.get(name, (0.0, 0.0))
            out[name] = before + total, over + count
    return out


def _summed_on(device: torch.device) -> torch.dtype:
    """Of sums over an epoch; Apple's devices have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


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
    """Factor of the peak rate at a step: linear warm-up over w steps, then decay.

    "linear" and "cosine" lead to 0 at the last step, "inverse-sqrt" is √(w / (step + 1)).

    Args:
        total_steps: of the whole training.
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
    warmup = round(total_steps * warmup_fraction) if warmup_steps is None else warmup_steps
    warmup = max(1, warmup)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if decay == "inverse-sqrt":
            return math.sqrt(warmup / (step + 1))
        done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        return 1.0 - done if decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))

    return factor
