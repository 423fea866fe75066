"""The training loop of a run: Lightning's, with our loaders, callbacks and ways to stop."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any, NamedTuple

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from rich.console import Console

from flt_mol.data.loader import Loader
from flt_mol.models.energy import EnergyModel
from flt_mol.outputs import counted
from flt_mol.training.callbacks import EarlyStop, EpochProgress, History, WeightAverage
from flt_mol.training.config import RunConfig, TrainingConfig
from flt_mol.training.loggers import make_loggers
from flt_mol.training.processes import World
from flt_mol.training.resume import RESUME, ResumePoint, Stopped, WholeFiles, steps_done
from flt_mol.training.run_data import split_loader
from flt_mol.training.task import EnergyTask

__all__ = ["Batches", "fit"]


class Batches(NamedTuple):
    """The loaders of a run, and the processes that share them."""

    config: RunConfig
    training: Any
    validation: Any
    cutoff: float | None
    world: World

    def loaders(self) -> tuple[Loader, Loader]:
        """Of training and validation systems."""
        settings = self.config.training
        still = settings.noise == 0 and settings.interpolation == 0
        train_loader = split_loader(
            self.training,
            "training",
            settings,
            shuffle=True,
            cutoff=self.cutoff if still else None,
            rank=self.world.rank,
            world_size=self.world.size,
        )
        return train_loader, split_loader(
            self.validation,
            "validation",
            settings,
            cutoff=self.cutoff,
            rank=self.world.rank,
            world_size=self.world.size,
        )


def fit(
    model: EnergyModel,
    config: RunConfig,
    batches: Batches,
    history: History,
    console: Console,
    resume: Path | None,
    data: int = 0,
) -> None:
    """Train; afterwards the model has the final weights, averaged where that is asked for."""
    settings = config.training
    train_loader, validation_loader = batches.loaders()
    each = math.ceil(len(train_loader) / settings.accumulate)
    steps = each * settings.epochs
    if settings.max_steps is not None:
        steps = min(steps, settings.max_steps)
    lines = [_announced(model, batches, each, steps)]
    if resume is None:
        lines.append(_advice(batches, len(train_loader), steps))
    else:
        where = _place(steps_done(resume), each, steps)
        lines.append(f"going on with the run in {history.folder}, {where}")
    for line in filter(None, lines):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    splits = config.data.train, config.data.validation
    task = EnergyTask(model, settings, steps, config.loss, splits)
    progress = EpochProgress(console, history, config.data.validation)
    trainer = _trainer(
        settings, history, progress, steps, len(train_loader), resume, batches.world, data
    )
    try:
        with history.interruptible():
            trainer.fit(
                task,
                train_loader,
                validation_loader,
                ckpt_path=resume,
                weights_only=None if resume is None else True,
            )
    except Stopped as stop:
        if batches.world.is_watched:  # another status, and the first process is killed for it
            raise SystemExit(0) from None
        if stop.number == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise
    except SystemExit as stop:
        # Lightning answers Ctrl-C and SIGTERM with exits of status 1 and 0.
        if isinstance(stop.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        if isinstance(stop, SIGTERMException):
            raise SystemExit(128 + signal.SIGTERM) from None
        raise
    model.load_state_dict(history.weights(task).state_dict())


def _announced(model: EnergyModel, batches: Batches, each: int, steps: int) -> str:
    """What a run is about to do, `each` steps an epoch and `steps` in all."""
    epochs, ends = batches.config.training.epochs, ""
    if steps < each * epochs:
        last = math.ceil(steps / each)
        ends = f" (training.max_steps ends it in epoch {last} of {epochs})"
    return (
        f"{counted(len(batches.training), 'system')} to train on, {len(batches.validation):,} to "
        f"validate, {sum(p.numel() for p in model.parameters()):,} parameters, "
        f"{counted(steps, 'step')}{ends}"
    )


def _place(done: int, each: int, steps: int) -> str:
    """Where a run goes on that has made `done` of `steps` steps, `each` of them an epoch.

    Example:
        >>> _place(151, 67, 804), _place(804, 67, 804)
        ('in epoch 3 of 12, after step 151 of 804', 'after the last of 804 steps')
    """
    if done >= steps:
        return f"after the last of {counted(steps, 'step')}"
    epoch, epochs = done // each + 1, math.ceil(steps / each)
    return f"in epoch {epoch:,} of {epochs:,}, after step {done:,} of {steps:,}"


def _advice(batches: Batches, loaded: int, steps: int) -> str:
    """What to say where one step an epoch sees all systems; nothing where there are more.

    Args:
        batches: of the run.
        loaded: batches of a process in an epoch.
        steps: of the whole run.
    """
    systems, settings, size = len(batches.training), batches.config.training, batches.world.size
    if loaded > settings.accumulate or systems < 3:
        return ""
    by = "batch_size" if settings.batch_atoms is None else "batch_atoms"
    given = f"training.{by}={getattr(settings, by)}"
    given += f" × accumulate={settings.accumulate}" if settings.accumulate > 1 else ""
    given += f" × {size} processes" if size > 1 else ""
    if loaded > 1:
        more = f"training.accumulate=1 makes {loaded} an epoch"
    elif by == "batch_atoms":
        more = f"a smaller training.{by} makes more"
    else:
        few = 2 ** int(math.log2(max(2, systems // size // 10)))
        more = f"training.{by}={few} makes {math.ceil(systems / size / few)} an epoch"
    return (
        f"{systems:,} systems at {given}: one step an epoch, {steps:,} in all. Few steps learn "
        f"little; {more}"
    )


def _trainer(
    settings: TrainingConfig,
    history: History,
    progress: EpochProgress,
    steps: int,
    batches: int,
    resume: Path | None,
    world: World,
    data: int,
) -> Trainer:
    callbacks: list[Any] = [history, progress]
    if settings.ema_decay is not None:
        history.average = WeightAverage(settings.ema_decay)
        callbacks.insert(0, history.average)
    if settings.early_stop is not None:
        callbacks.append(EarlyStop(settings.early_stop))
    point = history.folder / RESUME
    callbacks.append(ResumePoint(point, settings.save_minutes, lambda: history.stop, data))
    try:
        return Trainer(
            max_epochs=math.ceil(steps / math.ceil(batches / settings.accumulate)),
            max_steps=steps,
            accumulate_grad_batches=settings.accumulate,
            accelerator=settings.accelerator,
            devices=world.devices,
            num_nodes=world.nodes,
            strategy="ddp" if world.size > 1 else "auto",
            use_distributed_sampler=False,
            precision=settings.precision,  # type: ignore[arg-type]
            gradient_clip_val=settings.gradient_clip,
            log_every_n_steps=min(50, batches),
            num_sanity_val_steps=0,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=make_loggers(settings.loggers, history.folder, resume),
            callbacks=callbacks,
            plugins=[WholeFiles()],
        )
    except MisconfigurationException as error:
        raise ValueError(
            f"training.accelerator={settings.accelerator} with "
            f"training.precision={settings.precision} does not work here: {error}"
        ) from error
