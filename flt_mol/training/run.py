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
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from rich.console import Console

from flt_mol.data.loading.statistics import target_statistics
from flt_mol.evaluation.plots import learning_curve, parity
from flt_mol.evaluation.splits import evaluate_splits
from flt_mol.models.energy import EnergyModel
from flt_mol.structures import Structures
from flt_mol.training.callbacks import EpochProgress, History
from flt_mol.training.checkpoints import load_model
from flt_mol.training.checks import check_accelerator, check_run
from flt_mol.training.config import RunConfig, TrainingConfig, absolute
from flt_mol.training.finetune_settings import absolute_start
from flt_mol.training.folders import check_run_folder, run_folder
from flt_mol.training.held_out import load_splits, write_sids
from flt_mol.training.run_data import split_loader
from flt_mol.training.starting import start_from
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

    The state of torch's random generators is the same after as before. A run that fails or is
    interrupted before its first ``best.ckpt`` leaves no folder behind; one with weights keeps
    them, and the exception carries a note that says where.

    Args:
        config: see RunConfig.
        name: of the folder under ``runs/`` when `config.output` is None.
        console: where progress goes.

    Raises:
        ValueError: settings that cannot work, an output that cannot be written, data that cannot
            be trained on, naming file and record.
        KeyboardInterrupt: as it came.
        SystemExit: with status 143, on SIGTERM.
    """
    console = console or Console()
    check_run(config)
    check_accelerator(config.training.accelerator)
    check_run_folder(config.output)
    here = Path.cwd()
    start = absolute_start(config.finetune, here)
    config = replace(config, data=absolute(config.data, here), finetune=start)
    training, validation = load_splits(config)
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")
        torch.manual_seed(config.training.seed)
        model = build_model(config, training, console)
        with run_folder(config.output, name) as folder:
            return _run(folder, name, config, model, training, validation, console)


def _run(
    folder: Path,
    name: str,
    config: RunConfig,
    model: EnergyModel,
    training: Any,
    validation: Any,
    console: Console,
) -> TrainingResult:
    # Where a run lay means nothing to whoever gets its weights, or trains it again.
    plain = {k: v for k, v in asdict(config).items() if k != "output"}
    again = {"defaults": ["run_schema", "_self_"], **plain}
    text = yaml.safe_dump(again, sort_keys=False, allow_unicode=True)
    (folder / "config.yaml").write_text(text, encoding="utf-8")
    if config.data.validation_fraction is not None:
        write_sids(folder / "held_out.csv", validation)
    history = History(folder, {"name": name, **plain})
    _fit(model, config, training, validation, history, console)
    assert history.best is not None
    best = load_model(folder / "best.ckpt")
    result = evaluate_splits(best, {config.data.validation: validation})
    learning_curve(history.epochs, folder / "learning_curve.png")
    parity(result, folder / "parity.png")
    files = tuple(sorted(path for path in folder.rglob("*") if path.is_file()))
    return TrainingResult(folder, folder / "best.ckpt", history.best, files)


def build_model(
    config: RunConfig, training: Sequence[Structures], console: Console | None = None
) -> EnergyModel:
    """The model with its normalisers fitted, and the elements it will have seen.

    With ``finetune.checkpoint`` it begins as :func:`~flt_mol.training.starting.start_from` says,
    and frozen parameters need no gradient; `console` is told.

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
    if config.finetune.checkpoint is not None:
        start = start_from(model, config.finetune, training, statistics)
        if console is not None:
            console.print(str(start), highlight=False, markup=False, soft_wrap=True)
        return model
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
) -> None:
    settings = config.training
    cutoff = model.cutoff
    still = settings.noise == 0 and settings.interpolation == 0
    train_loader = split_loader(
        training, "training", settings, shuffle=True, cutoff=cutoff if still else None
    )
    validation_loader = split_loader(validation, "validation", settings, cutoff=cutoff)
    steps = len(train_loader) * settings.epochs
    if settings.max_steps is not None:
        steps = min(steps, settings.max_steps)
    console.print(
        f"{len(training)} systems to train on, {len(validation)} to validate, "
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {steps} steps"
    )
    callbacks = [history, EpochProgress(console, history)]
    splits = config.data.train, config.data.validation
    task = EnergyTask(model, settings, steps, config.loss, splits)
    trainer = _trainer(settings, history.folder, callbacks, steps, len(train_loader))
    try:
        with history.interruptible():
            trainer.fit(task, train_loader, validation_loader)
    except SystemExit as stop:
        # Lightning answers Ctrl-C and SIGTERM with exits of status 1 and 0.
        if isinstance(stop.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        if isinstance(stop, SIGTERMException):
            raise SystemExit(128 + signal.SIGTERM) from None
        raise


def _trainer(
    settings: TrainingConfig, folder: Path, callbacks: list[Any], steps: int, epoch: int
) -> Trainer:
    try:
        return Trainer(
            max_epochs=math.ceil(steps / epoch),
            max_steps=steps,
            accelerator=settings.accelerator,
            devices=1,
            precision=settings.precision,  # type: ignore[arg-type]
            gradient_clip_val=settings.gradient_clip,
            log_every_n_steps=min(50, epoch),
            num_sanity_val_steps=0,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=[
                CSVLogger(folder, name="logs", version="csv"),
                TensorBoardLogger(folder, name="logs", version="tensorboard"),
            ],
            callbacks=callbacks,
        )
    except MisconfigurationException as error:
        raise ValueError(
            f"training.accelerator={settings.accelerator} with "
            f"training.precision={settings.precision} does not work here: {error}"
        ) from error
