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

from flt_mol.data.loading.batching import Loader
from flt_mol.models.energy import EnergyModel
from flt_mol.outputs import counted
from flt_mol.training.callbacks import EarlyStop, EpochProgress, History, WeightAverage
from flt_mol.training.config import RunConfig, TrainingConfig
from flt_mol.training.loggers import make_loggers
from flt_mol.training.processes import World
from flt_mol.training.resume import RESUME, ResumePoint, WholeFiles
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
    ends = ""
    if settings.max_steps is not None and settings.max_steps < steps:
        steps = settings.max_steps
        last = math.ceil(steps / each)
        ends = f" (training.max_steps ends it in epoch {last} of {settings.epochs})"
    console.print(
        f"{counted(len(batches.training), 'system')} to train on, {len(batches.validation):,} to "
        f"validate, {sum(p.numel() for p in model.parameters()):,} parameters, "
        f"{counted(steps, 'step')}{ends}",
        soft_wrap=True,
    )
    if resume is not None:
        console.print(f"going on with the run in {history.folder}")
    splits = config.data.train, config.data.validation
    task = EnergyTask(model, settings, steps, config.loss, splits)
    trainer = _trainer(
        settings, history, console, steps, len(train_loader), resume, batches.world, data
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
    except SystemExit as stop:
        # Lightning answers Ctrl-C and SIGTERM with exits of status 1 and 0.
        if isinstance(stop.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        if isinstance(stop, SIGTERMException):
            raise SystemExit(128 + signal.SIGTERM) from None
        raise
    model.load_state_dict(history.weights(task).state_dict())


def _trainer(
    settings: TrainingConfig,
    history: History,
    console: Console,
    steps: int,
    batches: int,
    resume: Path | None,
    world: World,
    data: int,
) -> Trainer:
    callbacks: list[Any] = [history, EpochProgress(console, history)]
    if settings.ema_decay is not None:
        history.average = WeightAverage(settings.ema_decay)
        callbacks.insert(0, history.average)
    if settings.early_stop is not None:
        callbacks.append(EarlyStop(settings.early_stop))
    point = history.folder / RESUME
    callbacks.append(ResumePoint(point, settings.save_minutes, lambda: history.interrupted, data))
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
