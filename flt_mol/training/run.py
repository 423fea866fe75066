"""The story of a training run, from configuration to files on disk."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities.exceptions import SIGTERMException
from rich.console import Console

from flt_mol.data.loader import Loader, target_statistics, trained_on
from flt_mol.evaluation.plots import learning_curve, parity
from flt_mol.evaluation.splits import evaluate_splits
from flt_mol.models.checkpoint import find_checkpoint, load_model, read_checkpoint
from flt_mol.models.energy import EnergyModel
from flt_mol.prediction import surface_rule
from flt_mol.training.callbacks import (
    BEST,
    LAST,
    EpochProgress,
    History,
    WeightAverage,
    make_loggers,
    quiet_lightning,
)
from flt_mol.training.config import RunConfig, TrainingConfig
from flt_mol.training.data import (
    OUTPUT_TARGETS,
    data_digest,
    load_splits,
    sids_of,
    split_loader,
    warn_of_shared,
    write_sids,
)
from flt_mol.training.finetune import start_from, without_idle_outputs
from flt_mol.training.folder import (
    RunFolder,
    check_output,
    finished_run,
    run_folder,
    written_files,
)
from flt_mol.training.processes import World, followed_folder, shown_folder, world_of
from flt_mol.training.resume import (
    RESUME,
    ResumePoint,
    Stopped,
    WholeFiles,
    check_resume,
    kept_random_states,
    steps_done,
)
from flt_mol.training.task import EnergyTask

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


class _Splits(NamedTuple):
    training: Any
    validation: Any


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
    console = console or Console()
    world = world_of(config.training.devices, config.training.nodes)
    if not world.is_first:
        console = Console(quiet=True)
    config, idle = without_idle_outputs(_absolute(config))
    settings = config.model_dump(mode="json", exclude={"output"})
    if (finished := finished_run(config.output, settings)) is not None:
        return _left_as_it_is(finished, config, console)
    if world.is_first:
        check_output(config.output, settings)
    splits = _Splits(*load_splits(config))
    warn_of_shared(*splits)
    if idle:
        fields = ", ".join(getattr(config.data, OUTPUT_TARGETS[name]) for name in idle)
        _say(console, f"no training record holds {fields}: trained without {', '.join(idle)}")
    with torch.random.fork_rng(), kept_random_states(), quiet_lightning():
        torch.manual_seed(config.training.seed)
        model = build_model(config, splits.training, console)
        if not world.is_first:  # the same initial weights, other dropout
            torch.manual_seed(world.seed(config.training.seed))
        with _folder(config, name, settings, world) as folder:
            noted = {"name": name, **settings, **_inherited(config)}
            history = _history(folder, config, noted, splits)
            if folder.resume is None and config.finetune.checkpoint is not None and world.is_first:
                _start(history, config, model, splits, console)
            _fit(model, config, splits, history, folder, world, console)
            assert history.best is not None
            if world.is_first:
                _finish(history, config, model, splits)
            files = written_files(folder.path) if world.is_first else ()
            return TrainingResult(folder.path, folder.path / BEST, history.best, files)


def closing_lines(config: RunConfig, best: Mapping[str, float]) -> list[str]:
    """The best epoch; of a fine-tuning that gained nothing, that it did not, and what to try.

    Example:
        >>> closing_lines(RunConfig(), {"epoch": 11.0, "val/mae": 0.08141, "val/ewt": 0.2555})
        ['best epoch 11: val_id MAE 0.0814 eV, EwT 25.55 %']
    """
    lines = [
        f"best epoch {int(best['epoch'])}: {config.data.validation} MAE {best['val/mae']:.4f} eV, "
        f"EwT {100 * best['val/ewt']:.2f} %"
    ]
    if config.finetune.checkpoint is not None and best["epoch"] == 0:
        shifted = ", with energies shifted" if config.finetune.normalizer == "refit" else ""
        lines.append(
            f"training gained nothing over what it started from, {config.finetune.checkpoint}: "
            f"best.ckpt is that{shifted}. Try a lower rate (training.learning_rate), fewer weights "
            "(finetune.freeze=[encoder]), more structures; or last.ckpt, where few structures were "
            "there to choose by"
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
        line = start_from(model, config.finetune, training, statistics)
        _say(console, line)
    else:
        model.normalizer.fit(statistics.energies)
        if initial is not None and statistics.energies_initial is not None:
            initial.fit(statistics.energies_initial)
        model.mark_seen(statistics.elements)
    model.trained_on = trained_on(statistics, before)
    return model


def _say(console: Console | None, line: str) -> None:
    if console is not None and line:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _absolute(config: RunConfig) -> RunConfig:
    """Relative paths taken from the working directory, so that config.yaml means the same."""
    paths = {split: str(Path(path).absolute()) for split, path in config.data.paths.items()}
    data = config.data.model_copy(update={"paths": paths})
    start = config.finetune.checkpoint
    if start is not None and Path(start).exists():
        start = str(Path(start).absolute())
    finetune = config.finetune.model_copy(update={"checkpoint": start})
    return config.model_copy(update={"data": data, "finetune": finetune})


def _left_as_it_is(folder: Path, config: RunConfig, console: Console) -> TrainingResult:
    """A chain of jobs may give the command of a finished run once more."""
    checkpoint = folder / BEST
    best = read_checkpoint(checkpoint)["metrics"]
    _say(console, f"the run in {folder} is finished, and is left as it is")
    for line in closing_lines(config, best):
        _say(console, line)
    _say(
        console,
        f"to train longer, or on changed data, give another output (--finetune {folder} starts "
        "from its weights), or remove this one",
    )
    return TrainingResult(folder, checkpoint, best, written_files(folder), was_finished=True)


@contextmanager
def _folder(
    config: RunConfig, name: str, settings: Mapping[str, Any], world: World
) -> Iterator[RunFolder]:
    """Of the process that writes, or for those that follow it."""
    if world.is_first:
        with run_folder(config.output, name, settings) as folder, shown_folder(folder.path, world):
            yield folder
        return
    path = followed_folder(config.output)
    resume = path / RESUME
    yield RunFolder(path, resume if resume.exists() else None)


def _inherited(config: RunConfig) -> dict[str, Any]:
    """The tag rule of the checkpoint that a run starts from, noted in its own checkpoints."""
    start = config.finetune.checkpoint
    if start is None:
        return {}
    try:
        rule = surface_rule(start)
    except ValueError:  # in somebody's dataset.yaml
        rule = None
    return {} if rule is None else {"inherited_tag_rule": {"surface": rule, "from": start}}


def _history(
    folder: RunFolder, config: RunConfig, noted: Mapping[str, Any], splits: _Splits
) -> History:
    """With the sids of the run, unless there are too many."""
    trained, held_out = sids_of(splits.training), None
    if config.data.validation_fraction is not None:
        held_out = sids_of(splits.validation)
    systems = {"trained": trained, "held_out": held_out}
    start = config.finetune.checkpoint
    if start is not None and trained is not None:
        before = read_checkpoint(find_checkpoint(start)).get("systems") or {}
        systems["trained"] = sorted({*trained, *map(str, before.get("trained") or ())})
    average = config.training.ema_decay
    return History(
        folder.path,
        noted,
        {key: sids for key, sids in systems.items() if sids is not None},
        None if average is None else WeightAverage(average),
        csv="csv" in config.training.loggers,
    )


def _start(
    history: History, config: RunConfig, model: EnergyModel, splits: _Splits, console: Console
) -> None:
    """What a fine-tuning starts from is a candidate for the best: few structures may not help."""
    metrics = evaluate_splits(model, {"start": splits.validation})["start"].metrics
    row = {"epoch": 0.0, "val/mae": metrics["mae"], "val/ewt": metrics["ewt"]}
    history.best = row
    history.save(BEST, model, row)
    split = config.data.validation
    _say(console, f"epoch    0  MAE {split} {metrics['mae']:.3f} eV, of what it starts from")


def _fit(
    model: EnergyModel,
    config: RunConfig,
    splits: _Splits,
    history: History,
    folder: RunFolder,
    world: World,
    console: Console,
) -> None:
    """Train; afterwards the model has the final weights, averaged where that is asked for."""
    settings = config.training
    loaders = _loaders(config, splits, model.cutoff, world)
    each = math.ceil(len(loaders[0]) / settings.accumulate)
    steps = min(each * settings.epochs, settings.max_steps or math.inf)
    assert isinstance(steps, int)
    digest = data_digest(*splits)
    _say(console, _announced(model, settings, splits, each, steps))
    if folder.resume is not None:
        check_resume(folder.resume, digest)
        where = _place(steps_done(folder.resume), each, steps)
        _say(console, f"resuming the run in {folder.path}, {where}")
    else:
        _say(console, _advice(config, splits, len(loaders[0]), steps, world))
        if "held_out" in (history.systems or {}) and world.is_first:
            write_sids(folder.path / "held_out.csv", (history.systems or {})["held_out"])
    progress = EpochProgress(console, history, config.data.validation)
    point = ResumePoint(folder.path / RESUME, settings.save_minutes, digest)
    callbacks: list[Any] = [history, progress, point]
    if history.average is not None:
        callbacks.insert(0, history.average)
    if settings.early_stop is not None:
        stop = EarlyStopping(
            "val/mae", patience=settings.early_stop, check_on_train_epoch_end=False
        )
        callbacks.insert(-1, stop)
    trainer = _trainer(settings, callbacks, folder, steps, each, len(loaders[0]), world)
    names = config.data.train, config.data.validation
    task = EnergyTask(model, settings, steps, config.loss, names)
    with _own_exits(world):
        trainer.fit(
            task,
            *loaders,
            ckpt_path=folder.resume,
            weights_only=None if folder.resume is None else True,
        )
    model.load_state_dict(history.weights(task).state_dict())


def _loaders(
    config: RunConfig, splits: _Splits, cutoff: float | None, world: World
) -> tuple[Loader, Loader]:
    settings = config.training
    moves = settings.noise > 0 or settings.interpolation > 0  # pairs are searched afterwards
    ours = None if moves else cutoff
    return (
        split_loader(splits.training, "training", settings, world, ours, shuffle=True),
        split_loader(splits.validation, "validation", settings, world, cutoff),
    )


def _trainer(
    settings: TrainingConfig,
    callbacks: list[Any],
    folder: RunFolder,
    steps: int,
    each: int,
    batches: int,
    world: World,
) -> Trainer:
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
            log_every_n_steps=min(50, batches),
            num_sanity_val_steps=0,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=make_loggers(
                settings.loggers,
                folder.path,
                None if folder.resume is None else steps_done(folder.resume),
            ),
            callbacks=callbacks,
            plugins=[WholeFiles()],
        )
    except MisconfigurationException as error:
        raise ValueError(
            f"training.accelerator={settings.accelerator} with "
            f"training.precision={settings.precision} does not work here: {error}"
        ) from error


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


def _finish(history: History, config: RunConfig, model: EnergyModel, splits: _Splits) -> None:
    """Plots, and ``last.ckpt``: the sign that the run is finished."""
    folder = history.folder
    best = load_model(folder / BEST)
    result = evaluate_splits(best, {config.data.validation: splits.validation})
    learning_curve(history.epochs, folder / "learning_curve.png")
    parity(result, folder / "parity.png")
    history.save(LAST, model, history.epochs[-1])
    (folder / RESUME).unlink(missing_ok=True)


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _announced(
    model: EnergyModel, settings: TrainingConfig, splits: _Splits, each: int, steps: int
) -> str:
    """What a run is about to do, `each` steps an epoch and `steps` in all."""
    ends = ""
    if steps < each * settings.epochs:
        last = math.ceil(steps / each)
        ends = f" (training.max_steps ends it in epoch {last} of {settings.epochs})"
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


def _advice(config: RunConfig, splits: _Splits, loaded: int, steps: int, world: World) -> str:
    """Where one step an epoch sees all systems, that this learns little; else nothing."""
    systems, settings = len(splits.training), config.training
    if loaded > settings.accumulate or systems < 3:
        return ""
    key = "batch_size" if settings.batch_atoms is None else "batch_atoms"
    hint = f"reduce training.{key}, {getattr(settings, key)}"
    if loaded > 1:
        hint = f"training.accumulate=1 makes {loaded} an epoch"
    elif key == "batch_size":
        few = 2 ** int(math.log2(max(2, systems // world.size // 10)))
        hint = f"training.batch_size={few} makes {math.ceil(systems / world.size / few)} an epoch"
    return (
        f"{systems:,} systems in one step an epoch, {_counted(steps, 'step')} in all: few steps "
        f"learn little; {hint}"
    )
