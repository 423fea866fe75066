"""What a run needs to resume after it was killed, written regularly."""

from __future__ import annotations

import copy
import signal
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from flt_mol.files import temporary_path
from flt_mol.models.checkpoint import refuse_damaged
from flt_mol.training.processes import gathered

RESUME = "resume.ckpt"
_KEY = "flt_mol"


def resume_step(path: Path, data: int) -> int:
    """Optimiser steps before the point in a file; `data` is the digest of the data now.

    Raises:
        ValueError: the file is damaged, or of other data.
    """
    hint = "remove it to start from the beginning"
    try:
        refuse_damaged(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
        step, saved = int(content["global_step"]), content[_KEY]["data"]
    except Exception as error:  # anything that unpickling foreign bytes raises
        raise ValueError(f"{path} is damaged or of another version: {hint}") from error
    if saved != data:
        raise ValueError(f"{path}: the data or the number of processes have changed: {hint}")
    return step


class ResumePoint(Callback):
    """Writes the state from which `Trainer.fit` resumes, bit for bit, and stops on signals.

    Beside what Lightning saves that is torch's random states on every rank. It is written after an
    optimiser step once `minutes` have passed, at ends of epochs, and before a stop. Ctrl-C and
    SIGTERM stop all processes at the end of the batch (amid a logger's queue they could lock up the
    program); a second signal does not wait. `data` is the digest of the data, which are the same
    when the run is resumed.
    """

    def __init__(self, path: Path, minutes: float, data: int = 0) -> None:
        self.path, self.minutes, self.data = path, minutes, data
        self._saved_at = time.monotonic()
        self._step_before = 0
        self._after_batch: dict[str, Any] | None = None
        self._random: dict[str, Any] | None = None
        self._signal = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take over the signals; Lightning puts back what was there before."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._note)
            signal.signal(signal.SIGTERM, self._note)

    def _note(self, number: int, frame: Any) -> None:
        self._signal = number
        signal.signal(number, _stop)  # a second one does not wait

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        """The first batch after resuming gets the random numbers that were to come."""
        self._step_before = trainer.global_step
        self._after_batch = None
        if self._random is not None:
            torch.set_rng_state(self._random["torch"])
            if len(self._random["cuda"]) == torch.cuda.device_count():
                torch.cuda.set_rng_state_all(self._random["cuda"])
            self._random = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A point, if it is time for one; and where a stop takes effect."""
        if batch_idx + 1 >= trainer.num_training_batches or trainer.should_stop:
            self._after_batch = copy.deepcopy(trainer.fit_loop.state_dict())
        elif trainer.global_step > self._step_before:  # no gradients are under way
            self._save_or_stop(trainer, time.monotonic() - self._saved_at >= 60 * self.minutes)

    def on_validation_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Several processes finish the validation together; the point before it stays."""
        if self._signal and trainer.world_size == 1:
            _stop(self._signal)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A point."""
        self._save_or_stop(trainer, True)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add what Lightning does not save."""
        if self._after_batch is not None:
            # From a point after validation Lightning would skip steps, or repeat an epoch.
            checkpoint["loops"]["fit_loop"] = self._after_batch
        for progress in checkpoint["loops"]["fit_loop"]["epoch_progress"].values():
            # After a resumed epoch Lightning counts one epoch too few here, and would repeat one.
            progress["ready"] = progress["started"] = progress["processed"] + 1
            progress["completed"] = progress["processed"]
        # All that a run draws comes from torch's global generators.
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        states = gathered({"torch": torch.get_rng_state(), "cuda": cuda})
        stopped = trainer.should_stop
        checkpoint[_KEY] = {"random_states": states, "stopped": stopped, "data": self.data}

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Restore it."""
        saved = checkpoint[_KEY]
        self._random = saved["random_states"][trainer.global_rank]
        trainer.should_stop = saved["stopped"]

    def _save_or_stop(self, trainer: Trainer, due: bool) -> None:
        wanted = torch.tensor([int(due), self._signal], device=trainer.strategy.root_device)
        save, number = trainer.strategy.reduce(wanted, reduce_op="max").tolist()
        if save or number:
            for logger in trainer.loggers:
                logger.save()
            first = trainer.is_global_zero  # which alone writes, and all take part
            with temporary_path(self.path, durable=True) if first else nullcontext(self.path) as to:
                trainer.save_checkpoint(to, weights_only=False)
            self._saved_at = time.monotonic()
        if number:
            _stop(number)


def _stop(number: int, frame: Any = None) -> NoReturn:
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
