"""One training run from configuration to files on disk."""

from __future__ import annotations

import math
import signal
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from rich.console import Console

from flt_mol.data.loading.statistics import target_statistics
from flt_mol.evaluation.plots import learning_curve, parity
from flt_mol.evaluation.splits import evaluate_splits
from flt_mol.models.energy import EnergyModel
from flt_mol.structures import Structures
from flt_mol.training.callbacks import EarlyStop, EpochProgress, History, WeightAverage
from flt_mol.training.checkpoints import load_model
from flt_mol.training.checks import check_accelerator, check_run
from flt_mol.training.config import RunConfig, TrainingConfig, absolute
from flt_mol.training.folders import RunFolder, check_run_folder, run_folder
from flt_mol.training.loggers import make_loggers
from flt_mol.training.resume import RESUME, ResumePoint, WholeFiles, kept_random_states
from flt_mol.training.run_data import load_split, split_loader
from flt_mol.training.task import EnergyTask


@dataclass(frozen=True)
class TrainingResult:
    """Where a run put its files, and its best epoch's metrics."""

    folder: Path
    checkpoint: Path
    best: dict[str, float]
    files: tuple[Path, ...]


def train(config: RunConfig, name: str = "run", console: Console | None = None) -> TrainingResult:
    """Train a model; write ``best.ckpt``, ``last.ckpt``, logs and plots.

    A run that was broken off, however abruptly, goes on when the same settings are given again,
    from the latest point in its folder (:class:`~flt_mol.training.resume.ResumePoint`), to the same
    weights, bit for bit, as if nothing had happened.

    The random states of torch, numpy and Python are the same after as before. A run that fails or
    is interrupted before there are weights leaves no folder behind; one with weights keeps them,
    and the exception carries a note that says where.

    Args:
        config: see RunConfig.
        name: of the folder under ``runs/`` when `config.output` is None.
        console: where progress goes.

    Raises:
        ValueError: settings that cannot work, an output that cannot be written or holds another
            run, data that cannot be trained on, naming file and record.
        KeyboardInterrupt: as it came.
        SystemExit: with status 143, on SIGTERM.
    """
    console = console or Console()
    check_run(config)
    check_accelerator(config.training.accelerator)
    config = replace(config, data=absolute(config.data, Path.cwd()))
    settings = run_settings(config)
    check_run_folder(config.output, settings)
    training, validation = (
        load_split(config, split) for split in (config.data.train, config.data.validation)
    )
    with torch.random.fork_rng(), kept_random_states(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")
        torch.manual_seed(config.training.seed)
        model = build_model(config, training)
        with run_folder(config.output, name, settings) as folder:
            history = History(folder.path, {"name": name, **settings})
            return _run(folder, history, config, model, training, validation, console)


def run_settings(config: RunConfig) -> dict[str, Any]:
    """The run as plain data, without its folder: that means nothing to whoever trains it again."""
    return {k: v for k, v in asdict(config).items() if k != "output"}


def _run(
    folder: RunFolder,
    history: History,
    config: RunConfig,
    model: EnergyModel,
    training: Any,
    validation: Any,
    console: Console,
) -> TrainingResult:
    _fit(model, config, training, validation, history, console, folder.resume)
    assert history.best is not None
    best = load_model(folder.path / "best.ckpt")
    result = evaluate_splits(best, {config.data.validation: validation})
    learning_curve(history.epochs, folder.path / "learning_curve.png")
    parity(result, folder.path / "parity.png")
    history.finish(model)
    (folder.path / RESUME).unlink(missing_ok=True)
    files = tuple(
        sorted(path for path in folder.path.rglob("*") if path.is_file() and path.name[0] != ".")
    )
    return TrainingResult(folder.path, folder.path / "best.ckpt", history.best, files)


def build_model(config: RunConfig, training: Sequence[Structures]) -> EnergyModel:
    """The model with its normalisers fitted, and the elements it will have seen.

    Its seed is ``model.seed + training.seed``, and `model.config` says so; what else is drawn comes
    from torch's global generator, which :func:`train` seeds with ``training.seed``. So runs of
    different ``training.seed`` have nothing random in common.
    """
    seed = config.model.seed + config.training.seed
    model = EnergyModel(replace(config.model, seed=seed))
    # What is in memory is not worth sending to other processes.
    workers = 0 if isinstance(training, list) else config.training.num_workers
    initial = model.normalizer_initial
    statistics = target_statistics(training, workers, initial=initial is not None)
    model.normalizer.fit(statistics.energies)
    if initial is not None and statistics.energies_initial is not None:
        initial.fit(statistics.energies_initial)
    model.mark_seen(statistics.elements)
    return model


def _fit(
    model: EnergyModel,
    config: RunConfig,
    training: Any,
    validation: Any,
    history: History,
    console: Console,
    resume: Path | None,
) -> None:
    """Train; afterwards the model has the final weights, averaged where that is asked for."""
    settings = config.training
    cutoff = model.cutoff
    still = settings.noise == 0 and settings.interpolation == 0
    train_loader = split_loader(
        training, "training", settings, shuffle=True, cutoff=cutoff if still else None
    )
    validation_loader = split_loader(validation, "validation", settings, cutoff=cutoff)
    steps = math.ceil(len(train_loader) / settings.accumulate) * settings.epochs
    if settings.max_steps is not None:
        steps = min(steps, settings.max_steps)
    console.print(
        f"{len(training)} systems to train on, {len(validation)} to validate, "
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {steps} steps"
    )
    if resume is not None:
        console.print(f"going on with the run in {history.folder}")
    splits = config.data.train, config.data.validation
    task = EnergyTask(model, settings, steps, config.loss, splits)
    trainer = _trainer(settings, history, console, steps, len(train_loader), resume)
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
) -> Trainer:
    callbacks: list[Any] = [history, EpochProgress(console, history)]
    if settings.ema_decay is not None:
        history.average = WeightAverage(settings.ema_decay)
        callbacks.insert(0, history.average)
    if settings.early_stop is not None:
        callbacks.append(EarlyStop(settings.early_stop))
    point = history.folder / RESUME
    callbacks.append(ResumePoint(point, settings.save_minutes, lambda: history.interrupted))
    try:
        return Trainer(
            max_epochs=math.ceil(steps / math.ceil(batches / settings.accumulate)),
            max_steps=steps,
            accumulate_grad_batches=settings.accumulate,
            accelerator=settings.accelerator,
            devices=1,
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
