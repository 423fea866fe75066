"""The training loop of a run: Lightning's, with our loaders, callbacks and ways to stop."""

from __future__ import annotations

import logging
import math
import os
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, RichProgressBar
from lightning.pytorch.utilities.exceptions import SIGTERMException

from flt_mol.models.energy import EnergyModel
from flt_mol.training.callbacks import History, make_loggers
from flt_mol.training.config import RunConfig
from flt_mol.training.data import Splits, data_digest, split_loader
from flt_mol.training.folder import RunFolder
from flt_mol.training.processes import World
from flt_mol.training.resume import RESUME, ResumePoint, Stopped, resume_step
from flt_mol.training.task import EnergyTask

__all__ = ["fit", "say"]

_UNIMPORTANT = (
    ".*does not have many workers.*",
    ".*isinstance.treespec, LeafSpec.*",
    "It is recommended to use `self.log",  # what is logged is of all processes by then
)


def say(console: Any, line: str) -> None:
    """Print a line as it is."""
    if console is not None and line:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def fit(
    model: EnergyModel,
    config: RunConfig,
    splits: Splits,
    history: History,
    folder: RunFolder,
    world: World,
) -> None:
    """Train; afterwards the model has the final weights, averaged where that is asked for."""
    settings, console = config.training, history.console
    moves = settings.noise > 0 or settings.interpolation > 0  # pairs are searched afterwards
    ours = None if moves else model.cutoff
    loaders = (
        split_loader(splits.training, "training", settings, world, ours, shuffle=True),
        split_loader(splits.validation, "validation", settings, world, model.cutoff),
    )
    each = math.ceil(len(loaders[0]) / settings.accumulate)
    steps = each * settings.epochs
    steps = min(steps, settings.max_steps or steps)
    digest, done = data_digest(splits, world.size), None
    say(
        console,
        f"{len(splits.training):,} systems to train on, {len(splits.validation):,} to validate, "
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {steps:,} steps",
    )
    if folder.resume is not None:
        done = resume_step(folder.resume, digest)
        say(console, f"resuming the run in {folder.path} after step {done:,} of {steps:,}")
    elif each == 1 and len(splits.training) > 2:
        say(console, "one step an epoch learns little: reduce training.batch_size or accumulate")
    point = ResumePoint(folder.path / RESUME, settings.save_minutes, digest)
    task = EnergyTask(
        model, settings, steps, config.loss, (config.data.train, config.data.validation)
    )
    with _quiet_lightning(), _own_exits(world):
        trainer = _trainer(config, history, point, steps, each, done, world)
        weights_only = None if done is None else True
        trainer.fit(task, *loaders, ckpt_path=folder.resume, weights_only=weights_only)
    model.load_state_dict(history.weights(task).state_dict())


def _trainer(
    config: RunConfig,
    history: History,
    point: ResumePoint,
    steps: int,
    each: int,
    done: int | None,
    world: World,
) -> Trainer:
    settings, bar = config.training, history.console.is_terminal and world.is_first
    callbacks: list[Any] = [] if history.average is None else [history.average]
    callbacks += [history, *([RichProgressBar()] if bar else [])]
    if (patience := settings.early_stop) is not None:
        stop = EarlyStopping("val/mae", patience=patience, check_on_train_epoch_end=False)
        callbacks.append(stop)
    try:
        return Trainer(
            max_epochs=math.ceil(steps / each),
            max_steps=steps,
            accumulate_grad_batches=settings.accumulate,
            accelerator=settings.accelerator,
            devices=world.devices,
            num_nodes=world.nodes,
            strategy="ddp" if world.size > 1 else "auto",
            use_distributed_sampler=False,
            precision=settings.precision,
            gradient_clip_val=settings.gradient_clip,
            log_every_n_steps=1,
            num_sanity_val_steps=0,
            enable_checkpointing=False,
            enable_progress_bar=bar,
            enable_model_summary=False,
            logger=make_loggers(settings.loggers, history.folder, done),
            callbacks=[*callbacks, point],
        )
    except MisconfigurationException as error:
        chosen = f"training.accelerator={settings.accelerator}, precision={settings.precision}"
        raise ValueError(f"{chosen} do not work here: {error}") from error


@contextmanager
def _quiet_lightning() -> Iterator[None]:
    """Without what Lightning logs as INFO, and without its warnings that have no meaning here."""
    loggers = [logging.getLogger(f"lightning.{name}") for name in ("pytorch", "fabric")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        for message in _UNIMPORTANT:
            warnings.filterwarnings("ignore", message=message)
        for logger in loggers:
            logger.setLevel(logging.WARNING)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


@contextmanager
def _own_exits(world: World) -> Iterator[None]:
    """Lightning answers Ctrl-C and SIGTERM with exits of status 1 and 0."""
    try:
        yield
    except Stopped as stop:
        if not world.is_first and "TORCHELASTIC_RUN_ID" not in os.environ:
            raise SystemExit(0) from None  # else the first process, which started it, is killed
        if stop.number == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise
    except SystemExit as stop:
        if isinstance(stop.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        if isinstance(stop, SIGTERMException):
            raise SystemExit(128 + signal.SIGTERM) from None
        raise
