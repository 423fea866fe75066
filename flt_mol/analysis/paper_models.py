"""What the named models cost to train: parameters, memory, seconds a step, time of the whole run.

Each model takes some steps of its own run (`configs/`): its optimiser, schedule, precision, batch
size, augmentations and loss, in Lightning's loop, on real systems, which are repeated if there are
fewer than the steps take.
"""

from __future__ import annotations

import logging
import math
import resource
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, Trainer

from flt_mol.data import make_loader, open_dataset
from flt_mol.data.recipes import recipe
from flt_mol.files import shipped_folder
from flt_mol.structures import Structures
from flt_mol.training.config import RunConfig, load_run_config
from flt_mol.training.run import build_model
from flt_mol.training.task import EnergyTask

__all__ = [
    "HEAD",
    "RunCost",
    "costs_apart",
    "named_models",
    "notes",
    "row",
    "run_cost",
    "run_of",
    "runs",
    "total_steps",
]

HEAD = (
    "run",
    "parameters",
    "device",
    "systems, atoms a step",
    "s/step",
    "peak memory (GB)",
    "steps of the run",
    "time of the run",
)
_SETS = ("oc20_all", "oc20_100k", "oc20_10k")


class RunCost(NamedTuple):
    """What some steps of a run cost.

    Attributes:
        run: name of the configuration.
        parameters: of the model.
        seconds: of each step, by the wall clock on a GPU, of CPU time elsewhere.
        losses: of each step.
        memory: bytes, the most that was held: on a GPU by tensors, else by the whole process.
        systems: a step, as measured.
        atoms: a step, mean.
        batch_size: systems a step, of the run's own.
        steps: of the whole run.
        device: what it was measured on, in words.
        changed: whether overrides made another model of it.
    """

    run: str
    parameters: int
    seconds: list[float]
    losses: list[float]
    memory: int
    systems: int
    atoms: float
    batch_size: int
    steps: int
    device: str
    changed: bool = False

    @property
    def seconds_per_step(self) -> float:
        """Median; the first step, which warms up, is left out if there are others."""
        return median(self.seconds[1:] or self.seconds)

    @property
    def total_seconds(self) -> float:
        """Of the whole run on this device; proportional to the batch if that was another."""
        return self.steps * self.seconds_per_step * self.batch_size / self.systems


def runs() -> list[str]:
    """All runs that `configs/` holds.

    Example:
        >>> "oc20_10k_flt-base" in runs()
        True
    """
    return sorted(file.stem for file in shipped_folder("configs").glob("*.yaml"))


def named_models() -> list[str]:
    """Named models that have a run on OC20.

    Example:
        >>> "paper-flt-12l" in named_models(), "emt_small" in named_models()
        (True, False)
    """
    return sorted({run.split("_", 2)[2] for run in runs() if run.startswith("oc20_")})


def run_of(model: str) -> str:
    """The run of a named model on the largest part of OC20 it has a configuration for.

    Raises:
        ValueError: it has none.

    Example:
        >>> run_of("paper-flt-12l")
        'oc20_all_paper-flt-12l'
    """
    known_runs = runs()
    for name in (f"{data}_{model}" for data in _SETS):
        if name in known_runs:
            return name
    known = ", ".join(named_models())
    raise ValueError(f"model '{model}' has no run on OC20 in configs/; those that do: {known}")


def total_steps(config: RunConfig) -> int:
    """Steps of the whole run, from the number of systems that the data set's recipe states.

    Raises:
        ValueError: batches by atoms, a data set without a name, or no count for its split.
    """
    training, data = config.training, config.data
    if training.batch_atoms is not None or data.name is None:
        raise ValueError("steps are known for named data sets and a batch_size only")
    count = recipe(data.name).metadata["splits"].get(data.train, {}).get("count")
    if count is None:
        raise ValueError(f"data set {data.name} states no count for split '{data.train}'")
    steps: int = training.epochs * math.ceil(count / training.batch_size)
    return steps if training.max_steps is None else min(steps, training.max_steps)


def run_cost(
    run: str,
    data: str | Path,
    steps: int = 10,
    batch_size: int | None = None,
    overrides: Sequence[str] = (),
) -> RunCost:
    """Take the first steps of a run and measure them.

    Args:
        run: name of a configuration.
        data: file or folder of systems with targets, to train on in place of the run's own.
        steps: at least 1; two or more leave the first out of the time.
        batch_size: systems; None takes the run's own.
        overrides: of the configuration, as of `load_run_config`.

    Raises:
        ValueError: no such run, settings or data that cannot work, or a loss that is not finite.
    """
    config = load_run_config(run, overrides)
    own = config.training.batch_size
    size = own if batch_size is None else batch_size
    if steps < 1 or size < 1:
        raise ValueError(f"need a step and a system at least, got {steps} and {size}")
    whole = total_steps(config)
    systems = _systems(config, data, steps * size)
    with torch.random.fork_rng():
        torch.manual_seed(config.training.seed)
        model = build_model(config, systems)
        meter = _Meter()
        _fit(EnergyTask(model, config.training, whole, config.loss), config, systems, size, meter)
    return RunCost(
        run,
        sum(p.numel() for p in model.parameters()),
        meter.seconds,
        meter.losses,
        meter.memory,
        size,
        sum(int(system.natoms.sum()) for system in systems) / steps,
        own,
        whole,
        meter.device,
        config.model != load_run_config(run).model,
    )


def costs_apart(
    runs: Iterable[str],
    data: str | Path,
    steps: int = 10,
    batch_size: int | None = None,
    overrides: Sequence[str] = (),
) -> Iterable[RunCost]:
    """As `run_cost` of each run, each in a process of its own, so that memory is its own, too."""
    for run in runs:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            yield pool.submit(run_cost, run, data, steps, batch_size, tuple(overrides)).result()


def row(cost: RunCost) -> list[str]:
    """Cells of a table under `HEAD`; `notes` explains its marks."""
    memory = f"{cost.memory / 1e9:.1f}" if cost.memory else "—"
    return [
        f"{cost.run} †" if cost.changed else cost.run,
        f"{cost.parameters:,}",
        cost.device,
        f"{cost.systems}, {cost.atoms:,.0f}",
        f"{cost.seconds_per_step:.3g}",
        memory,
        f"{cost.steps:,}",
        ("" if cost.systems == cost.batch_size else "≈ ") + _duration(cost.total_seconds),
    ]


def notes(costs: Sequence[RunCost], overrides: Sequence[str] = ()) -> list[str]:
    """Sentences for below the table: how times came about, and what was not as the runs have it."""
    out = ["Time of the run: its steps × s/step, without validation and reading files."]
    for own in sorted({cost.batch_size for cost in costs if cost.systems != cost.batch_size}):
        out.append(
            f"≈: scaled to the run's batch of {own} systems, as if time were proportional to the "
            "systems of a step."
        )
    if overrides:
        out.append(f"Overrides: {' '.join(overrides)}.")
    if any(cost.changed for cost in costs):
        out.append("†: overrides changed the model; it is not the one of this name.")
    return out


def _duration(seconds: float) -> str:
    """In the unit that reads best.

    Example:
        >>> _duration(90), _duration(3600 * 50), _duration(86400 * 800)
        ('1.5 min', '2.1 days', '2.2 years')
    """
    for unit, size, below in (("min", 60, 5400), ("h", 3600, 172800), ("days", 86400, 6.3e7)):
        if seconds < below:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds / (365.25 * 86400):.1f} years"


def _in_words(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    if device.type != "cpu":
        return device.type.upper()
    threads = torch.get_num_threads()
    return f"CPU, {'one thread' if threads == 1 else f'{threads} threads'}"


def _systems(config: RunConfig, data: str | Path, count: int) -> list[Structures]:
    names = config.data
    dataset = open_dataset(
        data,
        require_energy=True,
        energy=names.energy,
        energy_initial=names.energy_initial,
        positions_relaxed=names.positions_relaxed,
    )
    there = list(dataset.batch(range(min(count, len(dataset)))))
    return [there[k % len(there)] for k in range(count)]


def _fit(
    task: EnergyTask, config: RunConfig, systems: list[Structures], size: int, meter: _Meter
) -> None:
    settings = config.training
    moving = settings.noise > 0 or settings.interpolation > 0
    loader = make_loader(systems, size, cutoff=None if moving else task.model.cutoff)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")
        warnings.filterwarnings("ignore", message=".*no `val_dataloader`.*")
        warnings.filterwarnings("ignore", message=".*`val_dataloader`.*|.*validation_step.*")
        trainer = Trainer(
            max_epochs=1,
            accelerator=settings.accelerator,
            devices=1,
            precision=settings.precision,  # type: ignore[arg-type]
            gradient_clip_val=settings.gradient_clip,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[meter],
        )
        trainer.fit(task, loader)


class _Meter(Callback):
    """Seconds and loss of each step, loading included, and the most memory that was held."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.memory = 0
        self.device = ""
        self._last = 0.0

    def on_train_start(self, trainer: Trainer, task: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self._last = _now()

    def on_train_batch_end(
        self, trainer: Trainer, task: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = _now()
        self.seconds.append(now - self._last)
        self.losses.append(float(outputs["loss"]))
        self._last = now

    def on_train_end(self, trainer: Trainer, task: Any) -> None:
        device = trainer.strategy.root_device
        self.device = _in_words(device)
        if device.type == "cuda":
            self.memory = torch.cuda.max_memory_allocated()
        else:
            unit = 1 if sys.platform == "darwin" else 1024
            self.memory = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _now() -> float:
    """On a CPU the time of this process: what else runs there is not the model's cost."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()
