"""What a run needs to resume after it was killed, written from time to time."""

from __future__ import annotations

import copy
import random
import signal
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer

import flt_mol
from flt_mol.files import temporary_path
from flt_mol.models.checkpoint import refuse_damaged
from flt_mol.training.processes import gathered, largest

__all__ = [
    "RESUME",
    "ResumePoint",
    "Stopped",
    "WholeFiles",
    "check_resume",
    "kept_random_states",
    "steps_done",
]

RESUME = "resume.ckpt"
_KEY = "flt_mol"


class Stopped(SystemExit):
    """All processes of a run end here, after the same step.

    Args:
        number: of the signal that one of them got.
    """

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


class WholeFiles(TorchCheckpointIO):
    """Lightning's checkpoints under a temporary name, on disk, then renamed."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Whoever reads `path` finds this file whole or the one before, power cuts included."""
        try:
            with temporary_path(path, durable=True) as temporary:
                torch.save(checkpoint, temporary)
        except RuntimeError as error:  # torch's own words for a full disk
            raise OSError(f"{path} cannot be written: {error}") from error


def check_resume(path: Path, data: int) -> None:
    """Refuse a point that cannot be resumed from.

    Args:
        path: of the file.
        data: digest of the data that there are now.

    Raises:
        ValueError: it is damaged, or of other data.
    """
    try:
        refuse_damaged(path)
        saved = torch.load(path, map_location="cpu", weights_only=True)[_KEY]["data"]
    except Exception as error:  # whatever unpickling foreign bytes comes to
        raise ValueError(
            f"{path} is damaged or of another version: remove it to start from the beginning"
        ) from error
    if saved != data:
        raise ValueError(
            f"{path}: the data have changed since this run was interrupted: restore them, or "
            "remove it to start from the beginning"
        )


def steps_done(path: Path) -> int:
    """Optimiser steps before the point in a file, whose tensors are not read."""
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return int(content["global_step"])


class ResumePoint(Callback):
    """Writes the state from which `Trainer.fit` resumes, bit for bit, and stops on signals.

    Beside what Lightning saves (weights, optimiser, schedule, callbacks, place in the epoch and in
    the loader) that is the random states of torch, numpy and Python on every rank. It is written
    after an optimiser step once `minutes` have passed, at ends of epochs with all that came of
    their validation, and before a stop. Ctrl-C and SIGTERM stop at the end of the batch: amid a
    logger's queue they could lock up the program. Of several processes all stop after the same
    step. A second signal does not wait.

    It comes after the callbacks whose state belongs to the point.

    Args:
        path: of the file.
        minutes: between two points within an epoch.
        data: digest of the data, saved with the point.

    Raises:
        Stopped: in all processes, once one of them got a signal.
    """

    def __init__(self, path: Path, minutes: float, data: int = 0) -> None:
        self.path = path
        self.minutes = minutes
        self.data = data
        self._saved_at = time.monotonic()
        self._step_before = 0
        self._after_batch: dict[str, Any] | None = None
        self._random: Mapping[str, Any] | None = None
        self._signal = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take over the signals; Lightning puts back what was there before."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: Any) -> None:
        self._signal = number
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else _end)

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        """The first batch after resuming gets the random numbers that were to come."""
        self._step_before = trainer.global_step
        self._after_batch = None
        if self._random is not None:
            set_random_states(self._random)
            self._random = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A point, if it is time for one; and where a stop takes effect."""
        last = batch_idx + 1 >= trainer.num_training_batches
        if last or trainer.should_stop:
            self._after_batch = copy.deepcopy(trainer.fit_loop.state_dict())
        elif trainer.global_step > self._step_before:  # no gradients are under way
            self._save_or_stop(trainer, time.monotonic() - self._saved_at >= 60 * self.minutes)

    def on_validation_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Several processes finish the validation together; the point before it stays."""
        if self._signal and trainer.world_size == 1:
            raise Stopped(self._signal)

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
        checkpoint[_KEY] = {
            "random_states": gathered(random_states()),
            "stopped": trainer.should_stop,
            "data": self.data,
            "versions": _versions(),
        }

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Restore it."""
        saved = checkpoint[_KEY]
        states = saved["random_states"]
        self._random = states[trainer.global_rank] if trainer.world_size == len(states) else None
        trainer.should_stop = saved["stopped"]
        if saved["versions"] != _versions():
            warnings.warn(
                f"{self.path} was written with {saved['versions']}, and this is {_versions()}: the "
                "weights may come out slightly different",
                UserWarning,
                stacklevel=2,
            )

    def _save_or_stop(self, trainer: Trainer, due: bool) -> None:
        save, number = largest([int(due), self._signal], trainer.strategy.root_device)
        if save or number:
            for logger in trainer.loggers:
                logger.save()
            trainer.save_checkpoint(self.path, weights_only=False)
            self._saved_at = time.monotonic()
        if number:
            raise Stopped(number)


def _end(number: int, frame: Any) -> None:
    raise SystemExit(128 + number)


def _versions() -> dict[str, str]:
    return {"flt_mol": flt_mol.__version__, "torch": str(torch.__version__)}


def random_states() -> dict[str, Any]:
    """The global random states of Python, numpy and torch, as tensors and plain data."""
    generator: Any = np.random.get_state(legacy=False)  # noqa: NPY002
    inner = {k: v.tolist() if k == "key" else v for k, v in generator["state"].items()}
    states = {
        "python": random.getstate(),
        "numpy": {**generator, "state": inner},
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def set_random_states(states: Mapping[str, Any]) -> None:
    """Set what :func:`random_states` gave."""
    generator = dict(states["numpy"])
    inner = dict(generator["state"])
    inner["key"] = np.array(inner["key"], np.uint32)
    random.setstate(states["python"])
    np.random.set_state({**generator, "state": inner})  # noqa: NPY002
    torch.set_rng_state(states["torch"])
    if "cuda" in states and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])


@contextmanager
def kept_random_states() -> Iterator[None]:
    """The global random states of Python, numpy and torch are afterwards what they were before.

    Example:
        >>> before = random.getstate()
        >>> with kept_random_states():
        ...     _ = random.random()
        >>> random.getstate() == before
        True
    """
    states = random_states()
    try:
        yield
    finally:
        set_random_states(states)
