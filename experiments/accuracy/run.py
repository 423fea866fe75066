"""Train the models of the accuracy table that have no result yet, and print the table.

Each (row, seed) that is done is a line in results.jsonl: the script may be stopped at any time,
started again, and run several times at once with other rows or seeds. With `--equal-time`
every row trains for the time that `ours` takes for the epochs, by the latest measured times of
steps (`--times`), else for the same epochs. `--tune` chooses learning rates: a tenth of the
training systems is held out and alone evaluated. `--times` lets the rows take turns at training
steps instead, in one process on one thread. `--render` only prints.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import lru_cache
from itertools import count
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from accuracy.models import ROWS, build, count_weights, installed, resolved
from common.loop import (
    TARGETS,
    Settings,
    Training,
    evaluate,
    fit_normalizers,
    relabelled,
    seeded,
    train,
)
from common.results import Results, markdown_table, mean_sd
from common.timing import Timings, flushed_denormals, interleaved
from flt_mol.data.recipes import recipe
from flt_mol.structures import Structures

EMT = "emt_adsorption"  # of lines that name no data set
TUNING = "tuning"  # every tenth training system
FOLDER = Path(__file__).parent


def splits_of(data: str, tune: bool = False) -> list[str]:
    """The splits of a table; `test` is left alone."""
    return [TUNING] if tune else [s for s in recipe(data).splits if s.startswith("val_")]


@lru_cache(maxsize=12)
def systems_of(data: str, split: str, limit: int | None, cutoff: float | None) -> list[Structures]:
    """Single systems of a split, with pairs within `cutoff`."""
    dataset = recipe(data).open(split)
    chosen = range(len(dataset) if limit is None else min(limit, len(dataset)))
    found = [dataset[i] for i in chosen]
    return found if cutoff is None else [system.with_pairs(cutoff) for system in found]


def systems_for(tune: bool, *given: Any) -> dict[str, list[Structures]]:
    """Split → systems, those to train on and those of the table; `given` as of `systems_of`."""
    data, *others = given
    train = systems_of(data, "train", *others)
    if tune:
        kept = [system for i, system in enumerate(train) if i % 10]
        return {"train": kept, TUNING: train[::10]}
    return {"train": train} | {s: systems_of(data, s, *others) for s in splits_of(data)}


def measure(
    name: str, seed: int, share: float | None, settings: Settings, data: str, limit: int | None,
    rate: float | None, tune: bool,
) -> dict[str, Any]:  # fmt: skip
    """Train and evaluate one model, for `share` of the epochs; its line of results."""
    row, epochs = ROWS[name], settings.epochs
    if share is not None:
        settings = replace(settings, epochs=round(share * epochs, 2))
    rate = row.rate if rate is None else rate
    settings = settings if rate is None else replace(settings, learning_rate=rate)
    config = resolved(row, settings.targets, data)
    with seeded(seed):
        cutoff = build(row, config, seed).cutoff
    with flushed_denormals():
        systems = systems_for(tune, data, limit, cutoff)
        training = systems.pop("train")
        model, seconds, loss = train(
            lambda: build(row, config, seed), training, settings, seed, row.loss
        )
        found = {s: evaluate(model, each, settings.targets) for s, each in systems.items()}
    return {
        "row": name, "targets": settings.targets, "epochs": settings.epochs,
        "equal_to": None if share is None else epochs, "seed": seed,
        "label": row.label, "config": config, "data": data, "limit": limit, "rate": rate,
        "tune": tune, "shift": settings.shift,
        "parameters": sum(p.numel() for p in model.parameters()), "weights": count_weights(model),
        "seconds_per_epoch": round(seconds, 3), "loss": loss, "splits": found,
        "torch": torch.__version__,
    }  # fmt: skip


def times(names: Sequence[str], settings: Settings, data: str, rounds: int) -> dict[str, Any]:
    """CPU seconds of a training step of each row, in turns on the same batches."""
    every = [relabelled(s, settings.targets) for s in systems_of(data, "train", None, None)]
    order = torch.randperm(len(every), generator=torch.Generator().manual_seed(0)).tolist()
    size = settings.batch_size
    batches = [[every[row] for row in order[k * size : (k + 1) * size]] for k in range(rounds + 1)]
    with flushed_denormals(), seeded(0):
        found = interleaved(
            {name: _stepping(name, settings, data, batches) for name in names}, rounds
        )
    return {
        "times": {name: [round(t, 5) for t in found.seconds[name]] for name in names},
        "targets": settings.targets,
        "data": data,
        "steps_per_epoch": len(every) // size,
    }


def _stepping(
    name: str, settings: Settings, data: str, batches: list[list[Structures]]
) -> Callable[[], object]:
    row = ROWS[name]
    model: Any = build(row, resolved(row, settings.targets, data))
    if model.cutoff is not None:
        batches = [[system.with_pairs(model.cutoff) for system in part] for part in batches]
    fit_normalizers(model, [system for part in batches for system in part], settings)
    training, calls = Training(model, settings, row.loss, len(batches)), count()
    return lambda: training.step(batches[next(calls) % len(batches)])


def lines_of(
    results: Results, settings: Settings, data: str, tune: bool, equal: bool
) -> list[dict[str, Any]]:
    """The trained models of one table."""
    key = "equal_to" if equal else "epochs"
    found = results.read(targets=settings.targets, **{key: settings.epochs})
    found = [r for r in found if equal or r.get("equal_to") is None]
    found = [r for r in found if r.get("shift", True) == settings.shift]
    return [r for r in found if r.get("data", EMT) == data and r.get("tune", False) == tune]


def share_of(results: Results, name: str, settings: Settings, data: str) -> float:
    """Time of a step of `ours` over that of a row, of the latest measurement that has both."""
    for timings, _ in reversed(_timings(results, settings, data)):
        if {"ours", name} <= set(timings.seconds):
            return timings.ratio("ours", name)[0]
    raise SystemExit(f"no time of {name} on {data}: run first with --times --rows ours {name}")


def table(
    results: Results, settings: Settings, data: str, tune: bool = False, equal: bool = False
) -> str:
    """MAE ± standard deviation over seeds (EwT in %) on every split, costs, and recycles."""
    parts, splits = [], splits_of(data, tune)
    models: dict[tuple[str, float | None], dict[int, dict[str, Any]]] = {}
    lines = lines_of(results, settings, data, tune, equal)
    for record in sorted(lines, key=lambda record: list(ROWS).index(record["row"])):
        key = record["row"], record.get("rate")
        models.setdefault(key, {})[record["seed"]] = record
    rows = {_label(*key): list(found.values()) for key, found in models.items()}
    for target in TARGETS[settings.targets]:
        head = [f"{target}, MAE in eV (EwT in %)", "seeds", *splits, "weights", "s/epoch", "epochs"]
        cells = [
            [label, len(records), *(_cell(records, split, target) for split in splits),
             f"{records[0]['weights']:,}", mean_sd([r["seconds_per_epoch"] for r in records], 1),
             f"{fmean(r['epochs'] for r in records):.3g}"]
            for label, records in rows.items()
        ]  # fmt: skip
        parts.append(markdown_table(head, cells))
    return "\n\n".join([*parts, *_moves(rows), *_times(results, settings, data)])


def _label(name: str, rate: float | None) -> str:
    own = rate is None or rate == ROWS[name].rate
    return ROWS[name].label if own else f"{ROWS[name].label}, rate {rate:g}"


def _cell(records: Sequence[dict[str, Any]], split: str, target: str) -> str:
    found = [r["splits"][split][target] for r in records if target in r["splits"].get(split, {})]
    if not found:
        return "–"
    return f"{mean_sd([f['mae'] for f in found])} ({100 * fmean(f['ewt'] for f in found):.0f})"


def _moves(rows: Mapping[str, list[dict[str, Any]]]) -> list[str]:
    """Errors of displacements on val_id, against predicting no movement."""
    cells = []
    for label, records in rows.items():
        found = [r["splits"].get("val_id", {}).get("displacement") for r in records]
        moved = [f for f in found if f is not None]
        if moved:
            stay, error = ([f[key] for f in moved] for key in ("stay", "error"))
            cells.append([label, mean_sd(stay), mean_sd(error)])
    return (
        [markdown_table(["displacement on val_id (Å)", "no movement", "predicted"], cells)]
        if cells
        else []
    )


def _timings(results: Results, settings: Settings, data: str) -> list[tuple[Timings, int]]:
    """Every measurement of times, and the steps of an epoch."""
    lines = [r for r in results.read(targets=settings.targets) if "times" in r]
    return [
        (
            Timings({n: t["seconds"] if isinstance(t, dict) else t for n, t in r["times"].items()}),
            r["steps_per_epoch"],
        )
        for r in lines
        if r.get("data", EMT) == data
    ]


def _times(results: Results, settings: Settings, data: str) -> list[str]:
    lines = _timings(results, settings, data)
    if not lines:
        return []
    timings, steps = lines[-1]
    over = "schnet" if "schnet" in timings.seconds else next(iter(timings.seconds))
    cells = []
    for name, seconds in timings.seconds.items():
        middle, low, high = timings.ratio(name, over)
        cells.append(
            [name, f"{median(seconds) * steps:.1f}", f"{middle:.3f} ({low:.3f}–{high:.3f})"]
        )
    return [markdown_table(["in turns on the same batches", "s/epoch", f"time / {over}"], cells)]


def main() -> None:
    """Parse the command line, train what is missing, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), metavar="ROW")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    add("--epochs", type=int, default=Settings.epochs)
    add("--equal-time", action="store_true", help="the time that `ours` takes for the epochs")
    add("--rate", type=float, help="learning rate, instead of each row's own")
    add("--tune", action="store_true", help="hold out a tenth of train, to choose a learning rate")
    add("--targets", choices=list(TARGETS), default="relaxed")
    add("--data", default=EMT, help="name or folder of a data set")
    add("--limit", type=int, help="systems of each split, to try it")
    add("--jobs", type=int, default=1, help="processes, each on one thread")
    add("--results", type=Path, default=FOLDER / "results.jsonl")
    add("--times", type=int, nargs="?", const=7, metavar="ROUNDS", help="only measure times")
    add("--render", action="store_true", help="only print the table")
    given = parser.parse_args()
    if not (rows := [name for name in given.rows if installed(name)]):
        return
    shift = recipe(given.data).metadata.get("reference") != "zero"
    settings, equal = Settings(given.targets, given.epochs, shift=shift), given.equal_time
    results = Results(given.results)
    if given.times is not None:
        results.append(times(rows, settings, given.data, given.times))
    elif not given.render:
        known = lines_of(results, settings, given.data, given.tune, equal)
        done = {(r["row"], r["seed"], r.get("rate")) for r in known}
        todo = [
            (row, seed)
            for seed in given.seeds
            for row in rows
            if (row, seed, given.rate or ROWS[row].rate) not in done
        ]
        shares = {
            row: share_of(results, row, settings, given.data) if equal else None for row, _ in todo
        }
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(given.jobs, context) as pool:
            others = settings, given.data, given.limit, given.rate, given.tune
            jobs = [pool.submit(measure, *job, shares[job[0]], *others) for job in todo]
            for job in as_completed(jobs):
                record = job.result()
                results.append(record)
                print(f"{record['row']}, seed {record['seed']}: {record['splits']}", flush=True)
    print(f"\n{table(results, settings, given.data, given.tune, equal)}")


if __name__ == "__main__":
    main()
