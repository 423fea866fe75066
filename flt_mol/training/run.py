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

from flt_mol.data import make_loader, open_dataset
from flt_mol.data.catalog import recipe
from flt_mol.data.loading.batching import Loader
from flt_mol.data.loading.statistics import target_statistics
from flt_mol.data.options import OnError
from flt_mol.data.splits import skipped_message
from flt_mol.evaluation.plots import learning_curve, parity
from flt_mol.evaluation.splits import evaluate_splits
from flt_mol.models.energy import EnergyModel
from flt_mol.structures import Structures
from flt_mol.training.callbacks import EpochProgress, History
from flt_mol.training.checkpoints import load_model
from flt_mol.training.checks import check_accelerator, check_model, check_training
from flt_mol.training.config import DataConfig, RunConfig, TrainingConfig, absolute
from flt_mol.training.folders import check_run_folder, run_folder
from flt_mol.training.task import EnergyTask

IN_MEMORY = 20_000
_AT_ONCE = 256  # systems read in one go
_PINNED = ("auto", "gpu", "cuda")


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
    check_training(config.training)
    check_model(config.model)
    check_accelerator(config.training.accelerator)
    check_run_folder(config.output)
    config = replace(config, data=absolute(config.data, Path.cwd()))
    training, validation = (
        _load(config.data, split) for split in (config.data.train, config.data.validation)
    )
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")
        torch.manual_seed(config.training.seed)
        model = build_model(config, training)
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
    history = History(folder, {"name": name, **plain})
    _fit(model, config, training, validation, history, console)
    assert history.best is not None
    best = load_model(folder / "best.ckpt")
    result = evaluate_splits(best, {config.data.validation: validation})
    learning_curve(history.epochs, folder / "learning_curve.png")
    parity(result, folder / "parity.png")
    files = tuple(sorted(path for path in folder.rglob("*") if path.is_file()))
    return TrainingResult(folder, folder / "best.ckpt", history.best, files)


def build_model(config: RunConfig, training: Sequence[Structures]) -> EnergyModel:
    """The model with its normaliser fitted, and the elements it will have seen."""
    model = EnergyModel(config.model)
    # What is in memory is not worth sending to other processes.
    workers = 0 if isinstance(training, list) else config.training.num_workers
    statistics = target_statistics(training, workers)
    model.normalizer.fit(statistics.energies)
    model.mark_seen(statistics.elements)
    return model


def split_path(data: DataConfig, split: str) -> Path:
    """The file of a split: one's own path first, else the data set's.

    Raises:
        ValueError: neither names it.
    """
    if split in data.paths:
        return Path(data.paths[split])
    if data.name is None:
        raise ValueError(f"no file for split '{split}': set data.paths.{split} or data.name")
    return Path(recipe(data.name).path(split))


def _load(data: DataConfig, split: str) -> Any:
    path = split_path(data, split)
    on_error: OnError = "skip" if data.skip_bad else "raise"
    dataset = open_dataset(path, require_energy=True, on_error=on_error, energy=data.energy)
    if data.name is not None and split not in data.paths:
        recipe(data.name).check_count(split, dataset, stacklevel=3)
    if dataset.skipped:
        warnings.warn(skipped_message(dataset), UserWarning, stacklevel=3)
    if len(dataset) <= IN_MEMORY:
        starts = range(0, len(dataset), _AT_ONCE)
        return [
            system
            for start in starts
            for system in dataset.batch(range(start, min(start + _AT_ONCE, len(dataset))))
        ]
    return dataset


def _fit(
    model: EnergyModel,
    config: RunConfig,
    training: Any,
    validation: Any,
    history: History,
    console: Console,
) -> None:
    settings = config.training
    train_loader = _loader(training, "training", settings, shuffle=True)
    validation_loader = _loader(validation, "validation", settings)
    steps = len(train_loader) * settings.epochs
    if settings.max_steps is not None:
        steps = min(steps, settings.max_steps)
    console.print(
        f"{len(training)} systems to train on, {len(validation)} to validate, "
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {steps} steps"
    )
    callbacks = [history, EpochProgress(console, history)]
    trainer = _trainer(settings, history.folder, callbacks, steps, len(train_loader))
    try:
        with history.interruptible():
            trainer.fit(EnergyTask(model, settings, steps), train_loader, validation_loader)
    except SystemExit as stop:
        # Lightning answers Ctrl-C and SIGTERM with exits of status 1 and 0.
        if isinstance(stop.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        if isinstance(stop, SIGTERMException):
            raise SystemExit(128 + signal.SIGTERM) from None
        raise


def _loader(dataset: Any, split: str, settings: TrainingConfig, shuffle: bool = False) -> Loader:
    atoms = settings.batch_atoms
    try:
        return make_loader(
            dataset,
            settings.batch_size if atoms is None else None,
            max_atoms=atoms,
            shuffle=shuffle,
            seed=settings.seed,
            num_workers=settings.num_workers,
            pin_memory=settings.accelerator in _PINNED and torch.cuda.is_available(),
        )
    except ValueError as error:
        if atoms is None:
            raise
        raise ValueError(f"training.batch_atoms is {atoms}; {split} data: {error}") from error


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
