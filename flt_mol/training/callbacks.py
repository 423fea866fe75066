"""What happens beside the training loop: best weights, metrics of every epoch, progress."""

from __future__ import annotations

import csv
import importlib.util
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from flt_mol.files import temporary_path
from flt_mol.models.checkpoint import save_checkpoint
from flt_mol.models.energy import EnergyModel
from flt_mol.training.task import EnergyTask

__all__ = [
    "BEST",
    "LAST",
    "EpochProgress",
    "History",
    "WeightAverage",
    "make_loggers",
    "quiet_lightning",
]

BEST, LAST = "best.ckpt", "last.ckpt"
_CSV = Path("logs", "csv", "metrics.csv")
_UNIMPORTANT = (
    ".*does not have many workers.*",
    ".*isinstance.treespec, LeafSpec.*",
    "It is recommended to use `self.log",  # what is logged is of all processes by then
)


class WeightAverage(EMAWeightAveraging):
    """θ̄ ← β θ̄ + (1 − β) θ after every optimiser step; validated, and saved for use.

    Buffers are those of the latest weights.

    Args:
        decay: β.
    """

    def __init__(self, decay: float) -> None:
        super().__init__(use_buffers=False, decay=decay)

    @property
    def model(self) -> EnergyModel:
        """The model with averaged weights."""
        assert self._average_model is not None
        task = self._average_model.module
        assert isinstance(task, EnergyTask)
        return task.model


class History(Callback):
    """Metrics of every epoch, and the weights with the lowest validation MAE as ``best.ckpt``.

    Args:
        folder: where ``best.ckpt`` and, at the end, ``last.ckpt`` go.
        config: plain data of the run, stored in both.
        systems: sids that are trained on and held out, stored in both.
        average: whose weights are used in place of the latest.
        csv: whether metrics go to ``logs/csv/metrics.csv``, too.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        systems: Mapping[str, Any] | None = None,
        average: WeightAverage | None = None,
        csv: bool = False,
    ) -> None:
        self.folder = folder
        self.config = config
        self.systems = systems
        self.average = average
        self.csv = csv
        self.epochs: list[dict[str, float]] = []
        self.best: dict[str, float] | None = None

    def state_dict(self) -> dict[str, Any]:
        """For a run that is resumed."""
        return {"epochs": [dict(row) for row in self.epochs], "best": self.best}

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
        if not trainer.is_global_zero:
            return
        if self.csv:
            self._write_csv()
        if better:
            self.save(BEST, self.weights(pl_module), row)

    def save(self, name: str, model: EnergyModel, row: dict[str, float]) -> None:
        """Write a checkpoint of the run."""
        save_checkpoint(self.folder / name, model, self.config, row, systems=self.systems)

    def _write_csv(self) -> None:
        """As Lightning's logger does, which counts from 0, but not lost or doubled by resuming."""
        rows = [{**x, "epoch": x["epoch"] - 1, "step": x["step"] - 1} for x in self.epochs]
        with (
            temporary_path(self.folder / _CSV) as temporary,
            temporary.open("w", newline="", encoding="utf-8") as file,
        ):
            writer = csv.DictWriter(file, list(rows[-1]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


class EpochProgress(Callback):
    """One bar over all epochs with the current MAEs; plain lines where there is no terminal.

    Args:
        console: rich's; decides whether this is a terminal.
        history: filled by the History callback, which must come before this one.
        validation: what the validation split is called.
    """

    PLAIN_LINES = 10

    def __init__(self, console: Console, history: History, validation: str = "val") -> None:
        self.console = console
        self.validation = validation
        self.history = history
        self._progress: Progress | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the bar."""
        if not self.console.is_terminal:
            return
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("epochs, left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[status]}", markup=False),
            console=self.console,
        )
        self._progress.start()
        self._task = self._progress.add_task("training", total=trainer.max_epochs, status="")

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Move on by the share of an epoch."""
        if self._progress is not None:
            batches = trainer.fit_loop.total_batch_idx + 1
            self._progress.update(self._task, completed=batches / int(trainer.num_training_batches))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show this epoch's errors."""
        row = self.history.epochs[-1]
        status = f"MAE train {row['train/mae']:.3f}  {self.validation} {row['val/mae']:.3f} eV"
        if "val/energy_initial_mae" in row:
            status += f"  initial {row['val/energy_initial_mae']:.3f} eV"
        if "val/displacement" in row:
            status += f"  displacement {row['val/displacement']:.3f} Å"
            status += f" (unmoved {row['val/displacement_unmoved']:.3f})"
        if self._progress is not None:
            self._progress.update(self._task, completed=row["epoch"], status=status)
            return
        total = int(trainer.max_epochs or 0)
        stride = max(1, total // self.PLAIN_LINES)
        if row["epoch"] % stride == 0 or row["epoch"] in (1, total):
            text = f"epoch {int(row['epoch']):>4}/{total}  {status}"
            self.console.print(text, markup=False, soft_wrap=True)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Close the bar."""
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: Any) -> None:
        """Close the bar, so that the error is readable."""
        self._close()

    def _close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def make_loggers(names: Sequence[str], folder: Path, step: int | None = None) -> list[Logger]:
    """Lightning's loggers "tensorboard" and "wandb", which write to `folder`/logs.

    Args:
        names: `training.loggers`; "csv" is :class:`History`'s.
        folder: of the run.
        step: at which the run is resumed; what was logged later is dropped, it comes again.

    Raises:
        ValueError: "wandb", which is not installed.
    """
    made: list[Logger] = []
    if "tensorboard" in names:
        made.append(TensorBoardLogger(folder, name="logs", version="tensorboard", purge_step=step))
    if "wandb" in names:
        if importlib.util.find_spec("wandb") is None:
            raise ValueError("training.loggers has wandb, which is not installed: pip install it")
        from lightning.pytorch.loggers import WandbLogger

        made.append(WandbLogger(name=folder.name, save_dir=str(folder / "logs"), project="flt_mol"))
    return made


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Without what Lightning logs as INFO, and without its warnings that have no meaning here."""
    loggers = [logging.getLogger(f"lightning.{name}") for name in ("pytorch", "fabric")]
    loud = [logger for logger in loggers if logger.level == logging.INFO]
    with warnings.catch_warnings():
        for message in _UNIMPORTANT:
            warnings.filterwarnings("ignore", message=message)
        for logger in loud:
            logger.setLevel(logging.WARNING)
        try:
            yield
        finally:
            for logger in loud:
                logger.setLevel(logging.INFO)
