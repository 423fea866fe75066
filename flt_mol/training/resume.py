"""What a run needs to go on after it was killed, written from time to time, whole or not at all."""

from __future__ import annotations

import copy
import random
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
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
    "random_states",
    "steps_done",
]

RESUME = "resume.ckpt"
_KEY = "flt_mol"
_SHARE = 0.05  # of the time, that saving may take at ends of epochs


class Stopped(SystemExit):
    """Several processes that train together end here, all after the same step.

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
        """Whoever reads `path` finds this one whole or the one before, power cuts included."""
        try:
            with temporary_path(path, durable=True) as temporary:
                torch.save(checkpoint, temporary)
        except (OSError, RuntimeError) as error:
            cause = _system_error(error)
            if cause is None:
                raise
            raise OSError(cause.errno, cause.strerror, str(path)) from error


def _system_error(error: BaseException | None) -> OSError | None:
    """What the system said: torch says something of its own when a disk is full."""
    while error is not None and not (isinstance(error, OSError) and error.errno):
        error = error.__cause__ or error.__context__
    return error


def check_resume(path: Path, data: int) -> None:
    """Refuse a point that one cannot go on from.

    Args:
        path: of the file.
        data: digest of the data that there are now.

    Raises:
        ValueError: it is damaged, or of other data, with the mend.
    """
    mend = f"remove {path} to begin anew"
    try:
        refuse_damaged(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
        saved = content[_KEY]["data"]
    except Exception as error:  # whatever unpickling foreign bytes comes to
        raise ValueError(
            f"{path}: the point to go on from is damaged, or of another version; {mend}"
        ) from error
    if saved != data:
        raise ValueError(
            f"{path}: the data have changed since this run was broken off; {mend}, or put the "
            "data back"
        )


def steps_done(path: Path) -> int:
    """Steps of the optimiser before the point in a file, whose tensors are left on the disk."""
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return int(content["global_step"])


class ResumePoint(Callback):
    """The state of a training in a file, from which `Trainer.fit` goes on bit for bit.

    Beside what Lightning saves (weights, optimiser, schedule, other callbacks, place in the epoch
    and in the loader): the random states of torch, numpy and Python on every rank. It is written
    after steps of the optimiser once `minutes` have passed, at ends of epochs unless they follow
    each other so fast that this would take more than a twentieth of the time, and before a stop
    that was asked for. The point after an epoch holds all that came of its validation.

    It comes after the callbacks whose state belongs to the point.

    Args:
        path: of the file.
        minutes: between two points within an epoch.
        stop: the signal that asks to stop, 0 for none. After a last point KeyboardInterrupt is
            raised for it, or by Lightning what it has for SIGTERM; where several processes train
            together and one of them was asked, :class:`Stopped` by all.
        data: of :func:`~flt_mol.training.data_checks.data_digest`, saved with the point.
    """

    def __init__(self, path: Path, minutes: float, stop: Callable[[], int], data: int = 0) -> None:
        self.path = path
        self.minutes = minutes
        self.stop = stop
        self.data = data
        self._saved_at = time.monotonic()
        self._took = 0.0
        self._step_before = 0
        self._after_batch: dict[str, Any] | None = None
        self._random: Mapping[str, Any] | None = None

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        """The first batch after going on is shown with the random numbers that were to come."""
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
            return
        if trainer.global_step == self._step_before:  # gradients are under way
            return
        self._save_or_stop(trainer, self._since() >= 60 * self.minutes)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A point, unless the last one was a moment ago and nothing ends here."""
        waited = min(60 * self.minutes, self._took / _SHARE)
        self._save_or_stop(trainer, trainer.should_stop or self._since() >= waited)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add what Lightning does not save."""
        states = gathered(random_states())
        if self._after_batch is not None:
            # Of a point made after validation Lightning would skip steps, or make an epoch twice.
            checkpoint["loops"]["fit_loop"] = self._after_batch
        for progress in checkpoint["loops"]["fit_loop"]["epoch_progress"].values():
            # In a run that went on after an epoch's end Lightning counts one epoch too few here,
            # and from a point with such numbers would make one twice.
            progress["ready"] = progress["started"] = progress["processed"] + 1
            progress["completed"] = progress["processed"]
        checkpoint[_KEY] = {
            "random_states": states,
            "stopped": trainer.should_stop,
            "data": self.data,
            "flt_mol_version": flt_mol.__version__,
            "torch_version": str(torch.__version__),
        }

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Take it up."""
        saved = checkpoint[_KEY]
        states = saved["random_states"]
        self._random = states[trainer.global_rank] if trainer.world_size == len(states) else None
        trainer.should_stop = saved["stopped"]
        now = {"flt_mol": flt_mol.__version__, "torch": str(torch.__version__)}
        for name, version in now.items():
            if saved[f"{name}_version"] != version:
                warnings.warn(
                    f"{self.path} was written with {name} {saved[f'{name}_version']}, and this is "
                    f"{version}: the weights may come out a little different",
                    UserWarning,
                    stacklevel=2,
                )

    def _save_or_stop(self, trainer: Trainer, due: int) -> None:
        number = int(signal.SIGTERM) if trainer.received_sigterm else self.stop()
        due, number = largest([due, number], trainer.strategy.root_device)
        if not (due or number):
            return
        self._save(trainer)
        if number and trainer.world_size > 1:
            raise Stopped(number)
        if number == signal.SIGINT:
            raise KeyboardInterrupt

    def _since(self) -> float:
        return time.monotonic() - self._saved_at

    def _save(self, trainer: Trainer) -> None:
        begun = time.monotonic()
        for logger in trainer.loggers:
            logger.save()
        trainer.save_checkpoint(self.path, weights_only=False)
        self._saved_at = time.monotonic()
        self._took = self._saved_at - begun


def random_states() -> dict[str, Any]:
    """The global random states of Python, numpy and torch, as tensors and plain data."""
    generator: Any = np.random.get_state(legacy=False)  # noqa: NPY002
    inner = {k: v.tolist() if k == "key" else v for k, v in generator["state"].items()}
    devices = {}
    if torch.cuda.is_available():
        devices["cuda"] = torch.cuda.get_rng_state_all()
    return {
        "python": random.getstate(),
        "numpy": {**generator, "state": inner},
        "torch": torch.get_rng_state(),
        **devices,
    }


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
