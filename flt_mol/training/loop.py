"""The training loop of a run: Lightning's, with our loaders, callbacks and ways to stop."""

from __future__ import annotations

import logging
import math
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
    say(console, _announced(model, config, splits, each, steps))
    if folder.resume is not None:
        done = resume_step(folder.resume, digest)
        say(console, f"resuming the run in {folder.path}, {_place(done, each, steps)}")
    elif each == 1 and len(splits.training) > 2:
        key = "batch_size" if settings.batch_atoms is None else "batch_atoms"
        key = key if settings.accumulate == 1 else "accumulate"
        say(
            console,
            f"{len(splits.training):,} systems in one step an epoch, {_counted(steps, 'step')} in "
            f"all: few steps learn little; reduce training.{key}, {getattr(settings, key)}",
        )
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
    callbacks: list[Any] = [history, *([RichProgressBar()] if bar else [])]
    if history.average is not None:
        callbacks.insert(0, history.average)
    if settings.early_stop is not None:
        patience = settings.early_stop
        callbacks.append(
            EarlyStopping("val/mae", patience=patience, check_on_train_epoch_end=False)
        )
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
        raise ValueError(
            f"training.accelerator={settings.accelerator} with "
            f"training.precision={settings.precision} does not work here: {error}"
        ) from error


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
        if world.is_watched:  # with another status the first process would be killed
            raise SystemExit(0) from None
        if stop.number == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise
    except SystemExit as stop:
        if isinstance(stop.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        if isinstance(stop, SIGTERMException):
            raise SystemExit(128 + signal.SIGTERM) from None
        raise


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _announced(model: EnergyModel, config: RunConfig, splits: Splits, each: int, steps: int) -> str:
    """What a run is about to do, `each` steps an epoch and `steps` in all."""
    ends, epochs = "", config.training.epochs
    if steps < each * epochs:
        last = math.ceil(steps / each)
        ends = f" (training.max_steps ends it in epoch {last} of {epochs})"
    return (
        f"{_counted(len(splits.training), 'system')} to train on, {len(splits.validation):,} to "
        f"validate, {sum(p.numel() for p in model.parameters()):,} parameters, "
        f"{_counted(steps, 'step')}{ends}"
    )


def _place(done: int, each: int, steps: int) -> str:
    """Where a run is resumed that has made `done` of `steps` steps, `each` of them an epoch.

    Example:
        >>> _place(151, 67, 804), _place(804, 67, 804)
        ('in epoch 3 of 12, after step 151 of 804', 'after the last of 804 steps')
    """
    if done >= steps:
        return f"after the last of {_counted(steps, 'step')}"
    epoch, epochs = done // each + 1, math.ceil(steps / each)
    return f"in epoch {epoch:,} of {epochs:,}, after step {done:,} of {steps:,}"
