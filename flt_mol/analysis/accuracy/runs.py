"""Which models are still to be trained, and training them, on as many processes as wanted."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch

from flt_mol.analysis.accuracy.evaluation import evaluate
from flt_mol.analysis.accuracy.loop import Settings, seeded, train, without_denormals
from flt_mol.analysis.accuracy.results import Results, fingerprint
from flt_mol.analysis.accuracy.rows import Row, build, complete, count_weights, resolved
from flt_mol.structures import Structures
from flt_mol.training.config import LossConfig

__all__ = [
    "FORMAT",
    "Corpus",
    "Experiment",
    "Job",
    "Recipe",
    "measure",
    "missing",
    "run",
    "usable",
]

FORMAT = 4
"""Part of every result's key. Settings are in it by themselves, code is not: raise this number by
hand whenever a change of a model, a rival, a loss or the loop changes what training gives, or how
long it takes, under the same settings. All results from before then count as missing."""


class Corpus(Protocol):
    """Systems to train and to evaluate on; a frozen dataclass, so that its fields tell it apart."""

    def load(self, split: str) -> Sequence[Structures]:
        """Single systems of a split, without pairs."""
        ...

    @property
    def splits(self) -> tuple[str, ...]:
        """The split that is trained on first, then those that are evaluated."""
        ...


@dataclass(frozen=True)
class Recipe:
    """A data set that `flt_mol.data.catalog` knows, or a folder like those in ``datasets/``.

    Attributes:
        name: of the data set.
        limit: systems of each split, from its beginning; None for all.
        splits: the split that is trained on first, then those that are evaluated.
    """

    name: str = "emt_adsorption"
    limit: int | None = None
    splits: tuple[str, ...] = ("train", "val_id", "val_ood_ads", "val_ood_cat", "val_ood_both")

    def load(self, split: str) -> list[Structures]:
        """Single systems of a split."""
        from flt_mol.data.catalog import recipe

        dataset = recipe(self.name).open(split)
        count = len(dataset)
        rows = range(count if self.limit is None else min(count, self.limit))
        return list(dataset.batch(rows))


class Job(NamedTuple):
    """One model to train: a row, by name, and a seed."""

    row: str
    seed: int


class Experiment(NamedTuple):
    """Rows that are compared, and under which conditions. All of it can be sent to processes.

    Attributes:
        rows: by name.
        settings: that they share.
        corpus: what they are trained and evaluated on.
    """

    rows: Mapping[str, Row]
    settings: Settings
    corpus: Any

    def build(self, name: str, seed: int) -> Any:
        """The model of a row, with the weights of a seed.

        Raises:
            ImportError: a package that a rival needs is missing.
            ValueError: no such row, or settings that its model does not know.
        """
        row = self.rows[name]
        with seeded(seed):
            return build(row, resolved(row, self.settings.targets, self.rows), seed)

    def key(self, name: str) -> dict[str, Any]:
        """What a line of results says of a row beside its seed: another setting, another key.

        Its hash is of all settings of model, loss and loop, those that nobody set included, of the
        data's, and of `FORMAT`.

        Raises:
            ValueError: no such row, or settings that its model does not know.
        """
        if name not in self.rows:
            raise ValueError(f"there is no row '{name}'; known: {', '.join(self.rows)}")
        row, settings = self.rows[name], self.settings
        about = {
            "format": FORMAT,
            "config": complete(row, resolved(row, settings.targets, self.rows)),
            "rival": row.rival,
            "loss": asdict(LossConfig(**row.loss)),
            "settings": asdict(settings),
            "data": asdict(self.corpus),
        }
        return {
            "row": name,
            "targets": settings.targets,
            "epochs": settings.epochs,
            "hash": fingerprint(about),
        }


def missing(
    experiment: Experiment, results: Results, rows: Iterable[str], seeds: Sequence[int]
) -> list[Job]:
    """Models that have no line yet; the first seed of all rows comes before the second."""
    names = list(rows)
    done = {name: {r["seed"] for r in results.find(**experiment.key(name))} for name in names}
    return [Job(name, seed) for seed in seeds for name in names if seed not in done[name]]


def usable(experiment: Experiment, rows: Iterable[str]) -> tuple[list[str], dict[str, str]]:
    """Rows that can be built here, and why the others cannot."""
    found, reasons = [], {}
    for name in rows:
        try:
            experiment.key(name)
            if experiment.rows[name].rival is not None:
                experiment.build(name, seed=0)
        except (ImportError, ValueError) as error:
            reasons[name] = str(error)
        else:
            found.append(name)
    return found, reasons


def measure(
    experiment: Experiment, job: Job, report: Callable[[int, float], None] | None = None
) -> dict[str, Any]:
    """Train and evaluate one model; what its line of results says.

    Raises:
        ValueError: a model or a loss that refuses its settings.
        ImportError: a package that a rival needs is missing.
    """
    row, settings, corpus = experiment.rows[job.row], experiment.settings, experiment.corpus
    config = resolved(row, settings.targets, experiment.rows)
    cutoff = experiment.build(job.row, job.seed).cutoff
    first, *others = corpus.splits

    def made() -> torch.nn.Module:
        return build(row, config, job.seed)

    with without_denormals():
        systems = _systems(corpus, first, cutoff)
        trained = train(made, systems, settings, job.seed, row.loss, report)
        found = {
            split: evaluate(trained.model, _systems(corpus, split, cutoff), settings.targets)
            for split in others
        }
    return {
        **experiment.key(job.row),
        "seed": job.seed,
        "label": row.label,
        "config": complete(row, config),
        "parameters": sum(p.numel() for p in trained.model.parameters()),
        "weights": count_weights(trained.model),
        "seconds_per_epoch": round(trained.seconds_per_epoch, 3),
        "loss": trained.loss,
        "splits": found,
        "torch": torch.__version__,
    }


def run(
    experiment: Experiment, results: Results, todo: Sequence[Job], processes: int = 1
) -> Iterator[tuple[Job, dict[str, Any] | Exception]]:
    """Train models, append a line for each that is done, and yield it; or the error it met.

    Args:
        experiment: see there.
        results: where lines go.
        todo: as `missing` lists them.
        processes: at once, each on one thread; 1 stays in this process.
    """
    if processes <= 1:
        for job in todo:
            yield job, _recorded(results, lambda job=job: measure(experiment, job))  # type: ignore[misc]
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, len(todo) or 1), context) as pool:
        waiting: dict[Future[dict[str, Any]], Job] = {
            pool.submit(measure, experiment, job): job for job in todo
        }
        for future in as_completed(waiting):
            yield waiting[future], _recorded(results, future.result)


def _recorded(results: Results, work: Callable[[], dict[str, Any]]) -> dict[str, Any] | Exception:
    """One row that cannot be trained shall not keep the others from it."""
    try:
        record = work()
    except (ValueError, RuntimeError, ImportError) as error:
        return error
    results.append(record)
    return record


@lru_cache(maxsize=12)
def _systems(corpus: Corpus, split: str, cutoff: float | None) -> list[Structures]:
    """Single systems with pairs, found once for all models of this process that want them."""
    systems = corpus.load(split)
    return [system if cutoff is None else system.with_pairs(cutoff) for system in systems]
