"""One training run from configuration to files on disk."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from rich.console import Console

from flt_mol.data import make_loader, open_dataset
from flt_mol.data.catalog import recipe
from flt_mol.evaluation.plots import learning_curve, parity
from flt_mol.evaluation.splits import evaluate_splits
from flt_mol.models.energy import EnergyModel
from flt_mol.structures import Structures
from flt_mol.training.callbacks import EpochProgress, History
from flt_mol.training.checkpoints import load_model
from flt_mol.training.config import DataConfig, RunConfig
from flt_mol.training.task import EnergyTask

IN_MEMORY = 20_000


@dataclass(frozen=True)
class TrainingResult:
    """Where a run put its files, and its best epoch's metrics."""

    folder: Path
    checkpoint: Path
    best: dict[str, float]
    files: tuple[Path, ...]


def train(config: RunConfig, name: str = "run", console: Console | None = None) -> TrainingResult:
    """Train a model; write ``best.ckpt``, ``last.ckpt``, logs and plots.

    The state of torch's random generators is the same after as before.

    Args:
        config: see RunConfig.
        name: of the folder under ``runs/`` when `config.output` is None.
        console: where progress goes.

    Raises:
        ValueError: data that cannot be trained on, naming file and record.
    """
    console = console or Console()
    training, validation = (
        _load(config.data, split) for split in (config.data.train, config.data.validation)
    )
    folder = _new_folder(config.output, name)
    plain = {"name": name, **asdict(config)}
    (folder / "config.yaml").write_text(yaml.safe_dump(plain, sort_keys=False))
    # Where a run lay means nothing to whoever gets its weights.
    history = History(folder, {k: v for k, v in plain.items() if k != "output"})
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")
        torch.manual_seed(config.training.seed)
        model = build_model(config, training)
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
    energies: list[torch.Tensor] = []
    elements: set[int] = set()
    for i in range(len(training)):
        system = training[i]
        assert system.energy is not None
        energies.append(system.energy)
        elements.update(system.atomic_numbers.tolist())
    model.normalizer.fit(torch.cat(energies))
    model.mark_seen(sorted(elements))
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
    dataset = open_dataset(split_path(data, split), require_energy=True)
    if len(dataset) <= IN_MEMORY:
        return [dataset[i] for i in range(len(dataset))]
    return dataset


def _new_folder(output: str | None, name: str) -> Path:
    """`output`, or the first free of runs/NAME, runs/NAME-2, …; a used folder is never reused.

    Raises:
        ValueError: `output` holds a run already.
    """
    if output is not None:
        folder = Path(output)
        if (folder / "config.yaml").exists():
            raise ValueError(f"{folder} holds a run already; choose another output folder")
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    number = 1
    while True:
        folder = Path("runs") / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return folder


def _fit(
    model: EnergyModel,
    config: RunConfig,
    training: Any,
    validation: Any,
    history: History,
    console: Console,
) -> None:
    settings = config.training
    workers = settings.num_workers
    train_loader = make_loader(
        training, settings.batch_size, shuffle=True, seed=settings.seed, num_workers=workers
    )
    validation_loader = make_loader(validation, settings.batch_size, num_workers=workers)
    steps = len(train_loader) * settings.epochs
    if settings.max_steps is not None:
        steps = min(steps, settings.max_steps)
    console.print(
        f"{len(training)} systems to train on, {len(validation)} to validate, "
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {steps} steps"
    )
    trainer = Trainer(
        max_epochs=settings.epochs,
        max_steps=-1 if settings.max_steps is None else settings.max_steps,
        accelerator=settings.accelerator,
        devices=1,
        precision=settings.precision,  # type: ignore[arg-type]
        gradient_clip_val=settings.gradient_clip,
        log_every_n_steps=min(50, len(train_loader)),
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=[
            CSVLogger(history.folder, name="logs", version="csv"),
            TensorBoardLogger(history.folder, name="logs", version="tensorboard"),
        ],
        callbacks=[history, EpochProgress(console, history)],
    )
    trainer.fit(EnergyTask(model, settings, steps), train_loader, validation_loader)
