"""Callbacks of training: best weights, metrics of every epoch, loggers."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from rich.console import Console

from flt_mol.files import write_rows
from flt_mol.models.checkpoint import save_checkpoint
from flt_mol.models.energy import EnergyModel
from flt_mol.training.task import EnergyTask

BEST, LAST = "best.ckpt", "last.ckpt"
_CSV = Path("logs", "csv", "metrics.csv")
_LINES = 10


def say(console: Console | None, line: str) -> None:
    """Print a line as it is."""
    if console is not None and line:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


class WeightAverage(EMAWeightAveraging):
    """θ̄ ← β θ̄ + (1 − β) θ after every optimiser step; buffers are those of the latest weights."""

    def __init__(self, decay: float) -> None:
        super().__init__(use_buffers=False, decay=decay)

    @property
    def model(self) -> EnergyModel:
        """The model with averaged weights."""
        assert self._average_model is not None
        task = self._average_model.module
        assert isinstance(task, EnergyTask)
        return task.model


@dataclass(eq=False)
class History(Callback):
    """Metrics of every epoch, and the weights with the lowest validation MAE as ``best.ckpt``.

    Args:
        folder: of the run.
        config: plain data of the run, for its checkpoints.
        systems: sids that are trained on and held out, for its checkpoints, too.
        average: whose weights are used in place of the latest.
        csv: whether metrics go to ``logs/csv/metrics.csv``, too.
        console: where errors are printed, of ten epochs at least.
    """

    folder: Path
    config: Mapping[str, Any]
    systems: Mapping[str, Any]
    average: WeightAverage | None
    csv: bool
    console: Console
    epochs: list[dict[str, float]] = field(default_factory=list, init=False)
    best: dict[str, float] | None = field(default=None, init=False)

    def state_dict(self) -> dict[str, Any]:
        """For a run that is resumed."""
        return {"epochs": list(self.epochs), "best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore it."""
        self.epochs, self.best = list(state_dict["epochs"]), state_dict["best"]

    def weights(self, task: EnergyTask) -> EnergyModel:
        """The model to use: with averaged weights, where they are."""
        return task.model if self.average is None else self.average.model

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """At `max_steps` within an epoch: asking to stop makes Lightning validate first."""
        if 0 < trainer.max_steps <= trainer.global_step:
            trainer.should_stop = True

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validation of this epoch is done by now."""
        assert isinstance(pl_module, EnergyTask)
        metrics = {k: float(v) for k, v in trainer.callback_metrics.items() if "/" in k}
        row = {"epoch": trainer.current_epoch + 1, "step": trainer.global_step, **metrics}
        self.epochs.append(row)
        better = self.best is None or row["val/mae"] < self.best["val/mae"]
        self.best = row if better else self.best
        if trainer.is_global_zero:
            self._print(row, int(trainer.max_epochs or 0), pl_module.splits[1])
            if self.csv:
                self._write_csv()
            if better:
                self.save(BEST, self.weights(pl_module), row)

    def save(self, name: str, model: EnergyModel, row: dict[str, float]) -> None:
        """Write a checkpoint of the run."""
        save_checkpoint(self.folder / name, model, self.config, row, systems=self.systems)

    def _print(self, row: Mapping[str, float], total: int, validation: str) -> None:
        if row["epoch"] % max(1, total // _LINES) and row["epoch"] not in (1, total):
            return
        line = f"epoch {int(row['epoch']):>4}/{total}  MAE train {row['train/mae']:.3f}  "
        line += f"{validation} {row['val/mae']:.3f} eV"
        if "val/displacement" in row:
            moved, unmoved = row["val/displacement"], row["val/displacement_unmoved"]
            line += f"  displacement {moved:.3f} Å (unmoved {unmoved:.3f})"
        if "val/forces_mae" in row:
            line += f"  forces {row['val/forces_mae']:.3f} eV/Å"
        say(self.console, line)

    def _write_csv(self) -> None:
        """As Lightning's logger does, which counts from 0, but not lost or doubled by resuming."""
        rows = [{**x, "epoch": x["epoch"] - 1, "step": x["step"] - 1} for x in self.epochs]
        names = list(rows[-1])
        write_rows(self.folder / _CSV, [names, *([row.get(x) for x in names] for row in rows)])


def make_loggers(names: Sequence[str], history: History, step: int | None) -> list[Logger]:
    """Lightning's loggers "tensorboard" and "wandb", with the settings, which write to logs/.

    What was logged after `step`, where a run is resumed, is dropped; it comes again.
    """
    folder, made = history.folder, list[Logger]()
    if "tensorboard" in names:
        made.append(TensorBoardLogger(folder, name="logs", version="tensorboard", purge_step=step))
    if "wandb" in names:
        if importlib.util.find_spec("wandb") is None:
            raise ValueError("training.loggers has wandb, which is not installed: pip install it")
        netrc = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
        named = os.environ.keys() & {"WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_MODE"}
        online = named or (netrc.is_file() and "wandb" in netrc.read_text())
        number = f"{(folder / 'config.yaml').stat().st_mtime_ns:x}"  # the same when resumed
        given: Any = {"id": number, "resume": "allow", "mode": None if online else "offline"}
        made.append(WandbLogger(folder.name, str(folder / "logs"), project="flt_mol", **given))
    for each in made:
        each.log_hyperparams(dict(history.config))
    return made
