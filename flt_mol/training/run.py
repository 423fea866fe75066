"""One training run from configuration to files on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from flt_mol.data.loader import target_statistics, trained_on
from flt_mol.evaluation.plots import learning_curve, parity
from flt_mol.evaluation.splits import evaluate_splits
from flt_mol.models.checkpoint import find_checkpoint, load_model, read_checkpoint
from flt_mol.models.energy import EnergyModel
from flt_mol.structures import Structures
from flt_mol.training.callbacks import History
from flt_mol.training.config import RunConfig
from flt_mol.training.data_checks import data_digest, warn_far_off
from flt_mol.training.fitting import Batches, fit
from flt_mol.training.folders import check_run_folder, finished_run, run_folder
from flt_mol.training.held_out import load_splits, write_sids
from flt_mol.training.left_out import left_out_note, without_idle_outputs
from flt_mol.training.processes import followed_folder, shown_folder, world_of
from flt_mol.training.quiet import quiet_lightning
from flt_mol.training.resume import RESUME, check_resume, kept_random_states
from flt_mol.training.seen import read_systems, systems_seen
from flt_mol.training.starting import start_from
from flt_mol.training.tag_rules import inherited


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

    A run that was broken off, however abruptly, goes on when the same settings are given again,
    from the latest point in its folder (:class:`~flt_mol.training.resume.ResumePoint`), to the same
    weights, bit for bit, as if nothing had happened. Of one that is finished in `config.output` the
    result is given, and nothing is touched.

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
    config = RunConfig.model_validate(config.model_dump())
    world = world_of(config.training.devices, config.training.nodes)
    given, config = config, settled(config)
    settings = run_settings(config)
    if not world.is_first:
        console = Console(quiet=True)
    finished = finished_run(config.output, settings)
    if finished is not None:
        return _left_as_it_is(finished, config, console)
    if world.is_first:
        check_run_folder(config.output, settings)
    training, validation = load_splits(config)
    if (note := left_out_note(given, config)) is not None:
        console.print(note, highlight=False, markup=False, soft_wrap=True)
    warn_far_off(training, config.data.train)
    warn_far_off(validation, config.data.validation)
    with torch.random.fork_rng(), kept_random_states(), quiet_lightning():
        torch.manual_seed(config.training.seed)
        model = build_model(config, training, console)
        if not world.is_first:  # the same initial weights, other dropout
            torch.manual_seed(world.seed(config.training.seed))
        batches = Batches(config, training, validation, model.cutoff, world)
        if not world.is_first:
            return _follow(config, name, model, batches, console)
        with run_folder(config.output, name, settings) as folder:
            seen = _systems(config, training, validation)
            noted = {"name": name, **settings, **inherited(config.finetune.checkpoint)}
            history = History(folder.path, noted, seen)
            data = data_digest(training, validation)
            if folder.resume is not None:
                check_resume(folder.resume, data)
            if config.data.validation_fraction is not None:
                write_sids(folder.path / "held_out.csv", seen["held_out"]["sid"])
            if config.finetune.checkpoint is not None and folder.resume is None:
                _begin(history, config, model, validation, console)
            with shown_folder(folder.path, world):
                fit(model, config, batches, history, console, folder.resume, data)
            return _finish(history, config, model, validation)


def best_line(best: Mapping[str, float], split: str) -> str:
    """The metrics of the best epoch in one line.

    Example:
        >>> best_line({"epoch": 11.0, "val/mae": 0.08141, "val/ewt": 0.2555}, "val_id")
        'best epoch 11: val_id MAE 0.0814 eV, EwT 25.55 %'
    """
    return (
        f"best epoch {int(best['epoch'])}: {split} MAE {best['val/mae']:.4f} eV, "
        f"EwT {100 * best['val/ewt']:.2f} %"
    )


def closing_lines(config: RunConfig, best: Mapping[str, float]) -> list[str]:
    """The best epoch; of a fine-tuning that gained nothing, that it did not, and what to try."""
    lines = [best_line(best, config.data.validation)]
    if config.finetune.checkpoint is not None and best["epoch"] == 0:
        shifted = ", with energies shifted" if config.finetune.normalizer == "refit" else ""
        lines.append(
            f"training gained nothing over what it started from, {config.finetune.checkpoint}: "
            f"best.ckpt is that{shifted}. Try a lower rate "
            "(training.learning_rate), fewer weights (finetune.freeze=[encoder]), more structures; "
            "or last.ckpt, where few structures were there to choose by"
        )
    return lines


def _left_as_it_is(folder: Path, config: RunConfig, console: Console) -> TrainingResult:
    """A run that is finished: a chain of jobs may give its command once more."""
    checkpoint = folder / "best.ckpt"
    best = read_checkpoint(checkpoint)["metrics"]
    lines = (
        f"the run in {folder} is finished, and is left as it is",
        *closing_lines(config, best),
        f"to train longer, or anew on changed data, give another folder (output=FOLDER; --finetune "
        f"{folder} would start from its weights), or remove this one",
    )
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return TrainingResult(folder, checkpoint, best, _files(folder), was_finished=True)


def _files(folder: Path) -> tuple[Path, ...]:
    found = (path for path in folder.rglob("*") if path.is_file() and path.name[0] != ".")
    return tuple(sorted(found))


def _systems(config: RunConfig, training: Any, validation: Any) -> dict[str, Any]:
    held_out = validation if config.data.validation_fraction is not None else None
    start = config.finetune.checkpoint
    before = None if start is None else read_systems(read_checkpoint(find_checkpoint(start)))
    return systems_seen(training, held_out, before, config.data.model_dump())


def _begin(
    history: History, config: RunConfig, model: EnergyModel, validation: Any, console: Console
) -> None:
    """What a fine-tuning starts from is a candidate for the best: few structures may not help."""
    metrics = evaluate_splits(model, {"start": validation})["start"].metrics
    history.begin(model, {"epoch": 0, "val/mae": metrics["mae"], "val/ewt": metrics["ewt"]})
    split = config.data.validation
    text = f"epoch    0  MAE {split} {metrics['mae']:.3f} eV, of what it starts from"
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def settled(config: RunConfig) -> RunConfig:
    """The run with relative paths taken from the working directory, and what it can train.

    See :func:`~flt_mol.training.left_out.without_idle_outputs`.
    """
    here = Path.cwd()
    paths = {split: str((here / path).resolve()) for split, path in config.data.paths.items()}
    start = config.finetune.checkpoint
    if start is not None and (here / start).exists():
        start = str((here / start).resolve())
    data = config.data.model_copy(update={"paths": paths})
    finetune = config.finetune.model_copy(update={"checkpoint": start})
    config = config.model_copy(update={"data": data, "finetune": finetune})
    return without_idle_outputs(config)


def run_settings(config: RunConfig) -> dict[str, Any]:
    """The run as plain data, without its folder: that means nothing to whoever trains it again."""
    return {k: v for k, v in config.model_dump().items() if k != "output"}


def _follow(
    config: RunConfig, name: str, model: EnergyModel, batches: Batches, console: Console
) -> TrainingResult:
    """Train beside the first process, and write nothing."""
    folder = followed_folder(config.output)
    history = History(folder, {"name": name})
    resume = folder / RESUME
    fit(model, config, batches, history, console, resume if resume.exists() else None)
    assert history.best is not None
    return TrainingResult(folder, folder / "best.ckpt", history.best, ())


def _finish(
    history: History, config: RunConfig, model: EnergyModel, validation: Any
) -> TrainingResult:
    assert history.best is not None
    folder = history.folder
    best = load_model(folder / "best.ckpt")
    result = evaluate_splits(best, {config.data.validation: validation})
    learning_curve(history.epochs, folder / "learning_curve.png")
    parity(result, folder / "parity.png")
    history.finish(model)
    (folder / RESUME).unlink(missing_ok=True)
    return TrainingResult(folder, folder / "best.ckpt", history.best, _files(folder))


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
    model = EnergyModel(config.model.model_copy(update={"seed": seed}))
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
    model.trained_on = trained_on(statistics)
    return model
