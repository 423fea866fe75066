"""The story of a training run, from configuration to files on disk."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from rich.console import Console

from flt_mol.data.loader import target_statistics, trained_on
from flt_mol.evaluation.plots import learning_curve, parity
from flt_mol.evaluation.splits import evaluate_splits
from flt_mol.models.checkpoint import find_checkpoint, load_model, read_checkpoint
from flt_mol.models.energy import EnergyModel
from flt_mol.prediction import surface_rule
from flt_mol.training.callbacks import BEST, LAST, History, WeightAverage
from flt_mol.training.config import RunConfig
from flt_mol.training.data import Splits, load_splits, sids_of, without_idle_outputs
from flt_mol.training.finetune import start_from
from flt_mol.training.folder import (
    RunFolder,
    check_output,
    finished_run,
    run_folder,
    written_files,
)
from flt_mol.training.loop import fit, say
from flt_mol.training.processes import World, followed_folder, shown_folder, world_of
from flt_mol.training.resume import RESUME

__all__ = ["TrainingResult", "build_model", "closing_lines", "train"]


@dataclass(frozen=True)
class TrainingResult:
    """Where a run put its files, and its best epoch's metrics.

    Attributes:
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
    from the latest point in its folder (:class:`~flt_mol.training.resume.ResumePoint`), to the same
    weights, bit for bit. One that is finished in `config.output` is left as it is.

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
        KeyboardInterrupt: on Ctrl-C, at the end of the batch.
        SystemExit: with status 143, on SIGTERM.
    """
    world = world_of(config.training.devices, config.training.nodes)
    console = console or Console() if world.is_first else Console(quiet=True)
    config, idle = without_idle_outputs(_absolute(config))
    settings = config.model_dump(mode="json", exclude={"output"})
    if (folder := finished_run(config.output, settings)) is not None:
        say(console, f"the run in {folder} is finished: to train longer give another output")
        best = read_checkpoint(folder / BEST)["metrics"]
        for line in closing_lines(config, best):
            say(console, line)
        return TrainingResult(folder, folder / BEST, best, written_files(folder), True)
    if world.is_first:
        check_output(config.output, settings)
    splits = load_splits(config)
    if idle:
        say(console, f"trained without {', '.join(idle)}: the first record has no targets for it")
    with isolate_rng():
        torch.manual_seed(config.training.seed)
        model = build_model(config, splits.training, console)
        torch.manual_seed(world.seed(config.training.seed))  # the same weights, other dropout
        with _folder(config, name, settings, world) as held:
            history = _history(held, config, {"name": name, **settings}, splits, console)
            if held.resume is None and world.is_first:
                _note_start(history, config, model, splits)
            fit(model, config, splits, history, held, world)
            assert history.best is not None
            if world.is_first:
                _finish(history, config, model, splits)
            files = written_files(held.path) if world.is_first else ()
            return TrainingResult(held.path, held.path / BEST, history.best, files)


def closing_lines(config: RunConfig, best: Mapping[str, float]) -> list[str]:
    """The best epoch; of a fine-tuning that gained nothing, that it did not.

    Example:
        >>> closing_lines(RunConfig(), {"epoch": 11.0, "val/mae": 0.08141, "val/ewt": 0.2555})
        ['best epoch 11: val_id MAE 0.0814 eV, EwT 25.55 %']
    """
    found = f"{config.data.validation} MAE {best['val/mae']:.4f} eV"
    ewt = f"EwT {100 * best['val/ewt']:.2f} %"
    lines = [f"best epoch {int(best['epoch'])}: {found}, {ewt}"]
    if best["epoch"] == 0:
        lines.append(
            f"training gained nothing over {config.finetune.checkpoint}: try a lower "
            "training.learning_rate, finetune.freeze=[encoder], or more structures"
        )
    return lines


def build_model(config: RunConfig, training: Any, console: Console | None = None) -> EnergyModel:
    """The model with its normalisers fitted and the elements marked that it will have seen.

    With ``finetune.checkpoint`` it starts as :func:`~flt_mol.training.finetune.start_from` says,
    which `console` is told. Its seed is ``model.seed + training.seed``; what else is drawn comes
    from torch's global generator, which :func:`train` seeds with ``training.seed``.
    """
    seed = config.model.seed + config.training.seed
    model = EnergyModel(config.model.model_copy(update={"seed": seed}))
    # What is in memory is not worth sending to other processes.
    workers = 0 if isinstance(training, list) else config.training.num_workers
    initial = model.normalizer_initial
    statistics = target_statistics(training, workers, initial=initial is not None)
    start, before = config.finetune.checkpoint, None
    if start is not None:
        before = read_checkpoint(find_checkpoint(start)).get("trained_on")
        say(console, start_from(model, config.finetune, training, statistics))
    else:
        model.normalizer.fit(statistics.energies)
        if initial is not None and statistics.energies_initial is not None:
            initial.fit(statistics.energies_initial)
        model.mark_seen(statistics.elements)
    model.trained_on = trained_on(statistics, before)
    return model


def _absolute(config: RunConfig) -> RunConfig:
    """Checked again, with relative paths taken from the working directory, for config.yaml."""
    config = RunConfig.model_validate(config.model_dump())
    config.data.paths = {k: str(Path(v).absolute()) for k, v in config.data.paths.items()}
    start = config.finetune.checkpoint
    if start is not None and Path(start).exists():
        config.finetune.checkpoint = str(Path(start).absolute())
    return config


@contextmanager
def _folder(
    config: RunConfig, name: str, settings: Mapping[str, Any], world: World
) -> Iterator[RunFolder]:
    """Of the process that writes, or for those that follow it."""
    if world.is_first:
        with run_folder(config.output, name, settings) as folder, shown_folder(folder.path):
            yield folder
        return
    path = followed_folder(config.output)
    resume = path / RESUME
    yield RunFolder(path, resume if resume.exists() else None)


def _history(
    folder: RunFolder,
    config: RunConfig,
    noted: dict[str, Any],
    splits: Splits,
    console: Console,
) -> History:
    """With the sids of the run, unless there are too many, and the tag rule of its start."""
    trained, start = sids_of(splits.training), config.finetune.checkpoint
    if start is not None:
        if (rule := surface_rule(start)) is not None:
            noted["inherited_tag_rule"] = {"surface": rule, "from": start}
        before = read_checkpoint(find_checkpoint(start)).get("systems") or {}
        if trained is not None:
            trained = sorted({*trained, *map(str, before.get("trained") or ())})
    held_out = None if config.data.validation_fraction is None else sids_of(splits.validation)
    systems = {"trained": trained, "held_out": held_out}
    average = config.training.ema_decay
    return History(
        folder.path,
        noted,
        {key: sids for key, sids in systems.items() if sids is not None},
        None if average is None else WeightAverage(average),
        "csv" in config.training.loggers,
        console,
    )


def _note_start(history: History, config: RunConfig, model: EnergyModel, splits: Splits) -> None:
    """What is held out; what a fine-tuning starts from, a candidate for the best weights."""
    if "held_out" in history.systems:
        with (history.folder / "held_out.csv").open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file, lineterminator="\n")
            rows.writerows([["sid"], *([sid] for sid in history.systems["held_out"])])
    if config.finetune.checkpoint is not None:
        metrics = evaluate_splits(model, {"start": splits.validation})["start"].metrics
        history.best = {"epoch": 0.0, "val/mae": metrics["mae"], "val/ewt": metrics["ewt"]}
        history.save(BEST, model, history.best)
        name = config.data.validation
        say(history.console, f"epoch    0  MAE {name} {metrics['mae']:.3f} eV, before training")


def _finish(history: History, config: RunConfig, model: EnergyModel, splits: Splits) -> None:
    """Plots, and ``last.ckpt``: the sign that the run is finished."""
    folder = history.folder
    result = evaluate_splits(load_model(folder / BEST), {config.data.validation: splits.validation})
    learning_curve(history.epochs, folder / "learning_curve.png")
    parity(result, folder / "parity.png")
    history.save(LAST, model, history.epochs[-1])
    (folder / RESUME).unlink(missing_ok=True)
