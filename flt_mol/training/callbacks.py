"""What happens beside the training loop: best weights, history, a progress bar."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from flt_mol.models.checkpoint import save_checkpoint
from flt_mol.models.energy import EnergyModel
from flt_mol.training.folders import LAST
from flt_mol.training.task import EnergyTask


class History(Callback):
    """Metrics of every epoch, and the weights with the lowest validation MAE as ``best.ckpt``.

    Args:
        folder: where ``best.ckpt`` and, at the end, ``last.ckpt`` go.
        config: plain data of the run, stored in both.
        systems: which ones are trained on and held out, stored in both; see
            :func:`~flt_mol.training.seen.systems_seen`.
    """

    average: WeightAverage | None = None

    def __init__(
        self, folder: Path, config: Mapping[str, Any], systems: Mapping[str, Any] | None = None
    ) -> None:
        self.folder = folder
        self.config = config
        self.systems = systems
        self.epochs: list[dict[str, float]] = []
        self.best: dict[str, float] | None = None
        self.stop = 0

    def state_dict(self) -> dict[str, Any]:
        """What it knows, for a run that goes on."""
        return {"epochs": [dict(row) for row in self.epochs], "best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what it knew."""
        self.epochs, self.best = list(state_dict["epochs"]), state_dict["best"]

    def weights(self, task: EnergyTask) -> EnergyModel:
        """The model to use: with averaged weights, where they are."""
        return task.model if self.average is None else self.average.model

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Ctrl-C stops at the end of the batch: amid a logger's queue it could lock up the program.

        A second Ctrl-C does not wait.
        """
        before = signal.getsignal(signal.SIGINT)

        def note(number: int, frame: Any) -> None:
            self.stop = number
            signal.signal(signal.SIGINT, before)

        if before is not signal.default_int_handler or not _is_main_thread():
            yield
            return
        signal.signal(signal.SIGINT, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Of several processes, SIGTERM stops all at the end of the batch.

        Lightning's own answer waits, amid whatever was going on, for the others, which may be
        waiting for this one.
        """
        owner = os.getpid()

        def note(number: int, frame: Any) -> None:
            if os.getpid() != owner:  # a process that loads data has nothing to put in order
                os._exit(128 + number)
            self.stop = number

        if trainer.world_size > 1 and _is_main_thread():
            signal.signal(signal.SIGTERM, note)  # Lightning puts back what was there before

    def on_validation_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Where Ctrl-C takes effect; several processes finish the validation together."""
        if self.stop == signal.SIGINT and trainer.world_size == 1:
            raise KeyboardInterrupt

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """At `max_steps` within an epoch: asking to stop makes Lightning validate first."""
        if 0 < trainer.max_steps <= trainer.global_step:
            trainer.should_stop = True

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validation of this epoch is done by now."""
        assert isinstance(pl_module, EnergyTask)
        metrics = {k: float(v) for k, v in trainer.callback_metrics.items() if "/" in k}
        row = {"epoch": trainer.current_epoch + 1, **metrics}
        self.epochs.append(row)
        if self.best is None or row["val/mae"] < self.best["val/mae"]:
            self.best = row
            if not trainer.is_global_zero:
                return
            self._save("best.ckpt", self.weights(pl_module), row)

    def begin(self, model: EnergyModel, row: dict[str, float]) -> None:
        """The weights before the first step, with their errors, are the best so far."""
        self.best = row
        self._save("best.ckpt", model, row)

    def finish(self, model: EnergyModel) -> None:
        """Keep the final weights too: the sign that the run is done."""
        self._save(LAST, model, self.epochs[-1])

    def _save(self, name: str, model: EnergyModel, row: dict[str, float]) -> None:
        save_checkpoint(self.folder / name, model, self.config, row, systems=self.systems)


class WeightAverage(EMAWeightAveraging):
    """θ̄ ← β θ̄ + (1 − β) θ after every step of the optimiser; validated, and saved for use.

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


class EarlyStop(EarlyStopping):
    """Stop once the validation MAE has not fallen for so many epochs.

    Args:
        patience: epochs.
    """

    def __init__(self, patience: int) -> None:
        # At the end of validation: the point that a run goes on from is made after it.
        super().__init__(
            "val/mae", patience=patience, check_on_train_epoch_end=False, verbose=False
        )


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


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
            TextColumn("epochs"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[status]}", markup=False),
            console=self.console,
        )
        self._progress.start()
        self._task = self._progress.add_task("training", total=self._total(trainer), status="")

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Move on by the share of an epoch."""
        if self._progress is not None:
            batches = trainer.fit_loop.total_batch_idx + 1
            done = batches / max(1, int(trainer.num_training_batches))
            self._progress.update(self._task, completed=done)

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
        total = self._total(trainer)
        stride = max(1, total // self.PLAIN_LINES)
        if row["epoch"] % stride == 0 or row["epoch"] in (1, total):
            text = f"epoch {int(row['epoch']):>4}/{total}  {status}"
            self.console.print(text, markup=False, soft_wrap=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the bar."""
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: Any) -> None:
        """Close the bar, so that the error is readable."""
        self._close()

    def _close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    @staticmethod
    def _total(trainer: Trainer) -> int:
        return int(trainer.max_epochs or 0)
