"""A training run, from configuration to files on disk."""

from __future__ import annotations

import logging
import math
import signal
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ase.data import chemical_symbols
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, RichProgressBar
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.seed import isolate_rng
from rich.console import Console

from flt_mol.data import convert, open_dataset
from flt_mol.data.loader import target_statistics
from flt_mol.evaluation.plots import learning_curve, parity
from flt_mol.evaluation.splits import evaluate_model, evaluate_splits
from flt_mol.files import write_rows
from flt_mol.models.build import needs_of, prepare_batch
from flt_mol.models.checkpoint import load_model, read_checkpoint
from flt_mol.models.energy import EnergyModel
from flt_mol.training.callbacks import BEST, LAST, History, WeightAverage, make_loggers, say
from flt_mol.training.config import RunConfig, absolute_paths, load_run_config
from flt_mol.training.data import (
    Splits,
    check_splits,
    data_digest,
    files_line,
    load_splits,
    sids_of,
    split_loader,
    with_rule,
    without_idle_outputs,
)
from flt_mol.training.finetune import start_from
from flt_mol.training.folder import run_folder, written_files
from flt_mol.training.processes import Strategy, World, meet, world_of
from flt_mol.training.resume import RESUME, ResumePoint, resume_step
from flt_mol.training.task import EnergyTask

_UNIMPORTANT = (
    ".*does not have many workers.*",
    ".*isinstance.treespec, LeafSpec.*",
    "Grad strides do not match",  # DDP, of second derivatives
    "It is recommended to use `self.log",  # what is logged is of all processes by then
)


@dataclass(frozen=True)
class TrainingResult:
    """Where a run put its files, and its best epoch's metrics.

    Args:
        folder: of the run.
        checkpoint: with the lowest validation MAE.
        best: metrics of that epoch.
        files: all that the run wrote; none of a process that trained beside the one that writes.
        was_finished: whether the run had been finished before, so that nothing was done.
    """

    folder: Path
    checkpoint: Path
    best: dict[str, float]
    files: tuple[Path, ...]
    was_finished: bool = False


def train(config: RunConfig, name: str = "run", console: Console | None = None) -> TrainingResult:
    """Train a model; write ``best.ckpt``, ``last.ckpt``, logs and plots.

    A run that was interrupted, however abruptly, is resumed when the same settings are given again,
    from the latest point in its folder (`ResumePoint`), to the same
    weights, bit for bit. One that is finished in `config.output` is not changed.

    The random states of torch, numpy and Python are restored afterwards. A run that fails or
    is interrupted before there are weights leaves no folder behind; one with weights keeps them,
    and a note of the exception names the folder.

    Args:
        config: see RunConfig.
        name: of the folder under ``runs/`` when `config.output` is None.
        console: where progress goes.

    Raises:
        ValueError: settings that cannot work, an output that cannot be written or holds another
            run, data that cannot be trained on, naming file and record.
        KeyboardInterrupt: on Ctrl-C, at the end of the batch.
        SystemExit: with status 143, on SIGTERM.
    """
    world = world_of(config.training.devices, config.training.nodes)
    console = console or Console() if world.is_first else Console(quiet=True)
    config = RunConfig.model_validate(absolute_paths(config.model_dump(), Path.cwd(), False))
    config = with_rule(config)
    config, idle = without_idle_outputs(config)
    settings = config.model_dump(mode="json", exclude={"output"})
    with run_folder(config.output, name, settings, world) as folder, isolate_rng():
        if (folder / LAST).exists():
            best = read_checkpoint(folder / BEST)["metrics"]
            done = f"the run in {folder} is finished: to train longer give another output"
            for line in (done, *closing_lines(config, best)):
                say(console, line)
            return TrainingResult(folder, folder / BEST, best, written_files(folder), True)
        _store = world.torchrun and meet(world.rank, world.size, "start")
        splits = load_splits(config)
        say(console, files_line(config))
        if idle:
            say(console, f"trained without {', '.join(idle)}: no targets in the first record")
        torch.manual_seed(config.training.seed)
        model = build_model(config, splits.training, console)
        torch.manual_seed(config.training.seed + world.rank)  # the same weights, other dropout
        history = _history(folder, config, {"name": name, **settings}, splits, console)
        if world.is_first and not (folder / RESUME).exists():
            check_splits(splits, model)
            _note_start(history, config, model, splits)
        _fit(model, config, splits, history, world)
        assert history.best is not None
        if world.is_first:
            _finish(history, config, model, splits)
        files = written_files(folder) if world.is_first else ()
        return TrainingResult(folder, folder / BEST, history.best, files)


def finetune(
    checkpoint: str | Path,
    structures: Any,
    output: str | Path,
    settings: Sequence[str] = (),
    energy: str = "y_relaxed",
) -> TrainingResult:
    """Fine-tune a checkpoint on structures in memory; as ``flt-mol train finetune``.

    They are written beside the run, `output`.safetensors, so that it can be evaluated and resumed.

    Args:
        checkpoint: file, folder of a run, or name of a shipped model.
        structures: as `flt_mol.open_dataset` takes them, with targets.
        output: folder of the run.
        settings: further ones, as ``["training.epochs=5"]``.
        energy: name of the target, eV.

    Raises:
        ValueError: as `train` and `flt_mol.open_dataset`.
    """
    file = Path(f"{output}.safetensors")
    convert(open_dataset(structures, require_energy=True, energy=energy), file, overwrite=True)
    given = [f"finetune.checkpoint={checkpoint}", f"data.paths.train={file}", f"output={output}"]
    return train(load_run_config("finetune", [*given, *settings]), Path(output).name)


def closing_lines(config: RunConfig, best: Mapping[str, float]) -> list[str]:
    """The best epoch; for a fine-tuning without improvement, a hint."""
    found = f"{config.data.validation} MAE {best['val/mae']:.4f} eV"
    lines = [f"best epoch {int(best['epoch'])}: {found}, EwT {100 * best['val/ewt']:.2f} %"]
    if best["epoch"] == 0:
        lines.append(
            f"training did not improve on {config.finetune.checkpoint}: try a lower "
            "training.learning_rate, finetune.freeze=[encoder], or more structures"
        )
    return lines


def build_model(config: RunConfig, training: Any, console: Console | None = None) -> EnergyModel:
    """The model with its normalisers fitted and the elements marked that it will have seen.

    With ``finetune.checkpoint`` it starts as `start_from` says,
    whose line goes to `console`. Its seed is ``model.seed + training.seed``; what else is drawn
    comes from torch's global generator, which `train` seeds with ``training.seed``.
    """
    seed = config.model.seed + config.training.seed
    model = EnergyModel(config.model.model_copy(update={"seed": seed}))
    # What is in memory is not worth sending to other processes.
    workers = 0 if isinstance(training, list) else config.training.num_workers
    initial = model.normalizer_initial
    reference = config.data.reference
    options = {"initial": initial is not None, "composition": reference == "composition"}
    statistics = target_statistics(training, workers, **options)
    start, before = config.finetune.checkpoint, None
    if start is not None:
        before = read_checkpoint(start).get("trained_on")
        say(console, start_from(model, config.finetune, training, statistics))
    else:
        model.normalizer.fit(statistics.energies, shift := reference != "zero")
        if initial is not None and statistics.energies_initial is not None:
            initial.fit(statistics.energies_initial, shift)
        for name, values in statistics.references.items():
            model.normalizers[name].set_reference(values)
        model.mark_seen(statistics.elements)
    model.trained_on = {
        "systems": statistics.energies.count,
        "energy_median": statistics.median,
        "most_atoms": max(statistics.most_atoms, (before or {}).get("most_atoms", 0)),
    }
    if statistics.references and (own := model.normalizer.reference) is not None:
        each = [f"{chemical_symbols[z]} {own[z]:.3f}" for z in statistics.elements]
        say(console, f"energies of elements (eV): {', '.join(each)}")
    return model


def _history(
    folder: Path, config: RunConfig, noted: dict[str, Any], splits: Splits, console: Console
) -> History:
    """With the sids of the run, unless there are too many."""
    trained, start = sids_of(splits.training), config.finetune.checkpoint
    if start is not None and trained is not None:
        before = read_checkpoint(start)["systems"].get("trained") or ()
        trained = sorted({*trained, *map(str, before)})
    held_out = None
    if config.data.validation_fraction is not None:
        held_out = [str(system.sid[0]) for system in splits.validation]
    systems = {"trained": trained, "held_out": held_out}
    decay = config.training.ema_decay
    return History(
        folder,
        noted,
        {key: sids for key, sids in systems.items() if sids is not None},
        None if decay is None else WeightAverage(decay),
        "csv" in config.training.loggers,
        console,
    )


def _note_start(history: History, config: RunConfig, model: EnergyModel, splits: Splits) -> None:
    """What is held out; what a fine-tuning starts from, a candidate for the best weights."""
    if "held_out" in history.systems:
        rows = [["sid"], *([sid] for sid in history.systems["held_out"])]
        write_rows(history.folder / "held_out.csv", rows)
    if config.finetune.checkpoint is not None:
        metrics = evaluate_model(model, splits.validation, warn=False).metrics
        history.best = {"epoch": 0.0, "val/mae": metrics["mae"], "val/ewt": metrics["ewt"]}
        history.save(BEST, model, history.best)
        name = config.data.validation
        say(history.console, f"epoch    0  MAE {name} {metrics['mae']:.3f} eV, before training")


def _fit(
    model: EnergyModel, config: RunConfig, splits: Splits, history: History, world: World
) -> None:
    """Train; afterwards the model has the final weights, averaged where that is asked for."""
    settings, console, resume = config.training, history.console, history.folder / RESUME
    prepare = partial(prepare_batch, needs_of(model.config))  # without weights: workers get a copy
    moves = settings.noise > 0 or settings.interpolation > 0  # batches are prepared afterwards
    loaders = (
        split_loader(splits.training, settings, world, None if moves else prepare, training=True),
        split_loader(splits.validation, settings, world, prepare),
    )
    each = math.ceil(len(loaders[0]) / settings.accumulate)
    steps = min(each * settings.epochs, settings.max_steps or each * settings.epochs)
    digest, done = data_digest(splits, world.size), None
    say(
        console,
        f"{len(splits.training):,} systems to train on, {len(splits.validation):,} to validate, "
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {steps:,} steps",
    )
    if resume.exists():
        done = resume_step(resume, digest)
        say(console, f"resuming the run in {history.folder} after step {done:,} of {steps:,}")
    point = ResumePoint(resume, settings.save_minutes, digest)
    names = config.data.train, config.data.validation
    if settings.compile:
        model.compile(fullgraph=True, dynamic=True)
    task = EnergyTask(model, settings, steps, config.loss, names)
    with _lightning(world):
        limits = {"max_epochs": math.ceil(steps / each), "max_steps": steps}
        trainer = _trainer(config, history, point, done, world, limits)
        given: Any = {} if done is None else {"ckpt_path": resume, "weights_only": True}
        trainer.fit(task, *loaders, **given)
    model.load_state_dict(history.weights(task).state_dict())


def _trainer(
    config: RunConfig,
    history: History,
    point: ResumePoint,
    done: int | None,
    world: World,
    limits: Mapping[str, Any],
) -> Trainer:
    settings, bar = config.training, history.console.is_terminal and world.is_first
    callbacks: list[Callback] = [] if history.average is None else [history.average]
    callbacks += [history, *([RichProgressBar()] if bar else [])]
    if (patience := settings.early_stop) is not None:
        stop = EarlyStopping("val/mae", patience=patience, check_on_train_epoch_end=False)
        callbacks.append(stop)
    rank_zero_only.rank = world.rank  # type: ignore[attr-defined]
    try:
        return Trainer(
            **limits,
            accumulate_grad_batches=settings.accumulate,
            accelerator=settings.accelerator,
            devices=world.devices,
            num_nodes=world.nodes,
            strategy=Strategy() if world.size > 1 else "auto",
            plugins=[TorchElasticEnvironment() if world.torchrun else LightningEnvironment()],
            use_distributed_sampler=False,
            precision=settings.precision,
            gradient_clip_val=settings.gradient_clip,
            log_every_n_steps=1,
            num_sanity_val_steps=0,
            enable_checkpointing=False,
            enable_progress_bar=bar,
            enable_model_summary=False,
            logger=make_loggers(settings.loggers, history, done),
            callbacks=[*callbacks, point],  # whose file has the states of the others
        )
    except MisconfigurationException as error:
        chosen = f"training.accelerator={settings.accelerator}, precision={settings.precision}"
        raise ValueError(f"{chosen} do not work here: {error}") from error


@contextmanager
def _lightning(world: World) -> Iterator[None]:
    """Quiet, and with our exits: Lightning answers Ctrl-C and SIGTERM by status 1 and 0."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            for message in _UNIMPORTANT:
                warnings.filterwarnings("ignore", message=message)
            yield
    except RuntimeError as error:
        if world.size == 1 or "by peer" not in str(error):
            raise
        raise ConnectionError("another process of this run has ended") from error
    except SystemExit as stop:
        if not (world.is_first or world.torchrun):
            raise SystemExit(0) from None  # else the first process, which started it, is killed
        if isinstance(stop.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        if isinstance(stop, SIGTERMException):
            raise SystemExit(128 + signal.SIGTERM) from None
        raise


def _finish(history: History, config: RunConfig, model: EnergyModel, splits: Splits) -> None:
    """Plots, and ``last.ckpt``: the sign that the run is finished."""
    folder = history.folder
    sources = {config.data.validation: splits.validation}
    result = evaluate_splits(load_model(folder / BEST), sources, warn=False)
    learning_curve(history.epochs, folder / "learning_curve.png")
    parity(result, folder / "parity.png")
    history.save(LAST, model, history.epochs[-1])
    (folder / RESUME).unlink(missing_ok=True)
