"""Learned optimisers: memory of gradients for small nets, attention in a population. Train, print.

Each optimiser that is done is a line in results.jsonl; tables and figures are made of these.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from torch import Generator, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from common.figures import BLUE, GREEN, GREY, ORANGE, clean, new_figure, save
from common.loop import seeded
from common.results import Results, markdown_table, mean_sd
from common.timing import threads
from optimizers.learned import (
    MEMORIES,
    POPULATIONS,
    Adam,
    MemoryOptimizer,
    PopulationOptimizer,
    curve,
    meta_train,
)
from optimizers.tasks import Nets, Problem, Rastrigin, has_digits, load_images

RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
ADAM, ADAM_TUNED = "Adam", "Adam, tuned for each test"
COLORS = {"FLT": BLUE, "Performer": GREEN, "S4D": ORANGE, "LSTM": "#8a5aa8"}
FIGURES = {"memory": ["memory"], "population": ["population2", "population4"]}
Draw = Callable[[Generator], Problem]


@dataclass(frozen=True)
class Part:
    """One comparison.

    Attributes:
        build: a learned optimiser by the name of its row.
        rows: these names, and Adam's.
        training, tests: draw problems.
        steps, test_steps: of a run in training and in a test.
        updates, window: meta-steps, and the steps that each differentiates.
    """

    build: Callable[[str], nn.Module]
    rows: tuple[str, ...]
    training: Draw
    tests: dict[str, Draw]
    steps: int
    test_steps: int
    updates: int
    window: int = 20


def memory_part(data: str) -> Part:
    """Nets of 10 classes: trained on half of the images, tested on the other half."""
    images = cache(lambda test, side: load_images(data).part(test, side))
    tests: dict[str, Draw] = {
        "same net": lambda g: Nets(images(True, 4), (8,), "tanh", 4, g),
        "8 × 8 pixels, 16 hidden": lambda g: Nets(images(True, 8), (16,), "tanh", 2, g),
        "two hidden layers, ReLU": lambda g: Nets(images(True, 4), (16, 16), "relu", 2, g),
    }
    rows = (*MEMORIES, ADAM, ADAM_TUNED)
    training: Draw = lambda g: Nets(images(False, 4), (8,), "tanh", 4, g)  # noqa: E731
    return Part(MemoryOptimizer, rows, training, tests, steps=100, test_steps=300, updates=100)


def population_part(dim: int, data: str) -> Part:
    """Functions of d variables, 16 members: α ≤ 1.5 in training, tests with these and others."""
    tests: dict[str, Draw] = {
        f"d = {dim}, new draws": lambda g: Rastrigin(dim, (0.5, 1.5), 1.0, 64, g),
        f"d = {dim}, α = 3, stretched": lambda g: Rastrigin(dim, (3.0, 3.0), 2.0, 64, g),
    }
    rows = (*POPULATIONS, ADAM, ADAM_TUNED)
    build = partial(PopulationOptimizer, dim=dim)
    training: Draw = lambda g: Rastrigin(dim, (0.5, 1.5), 1.0, 48 // dim, g)  # noqa: E731
    return Part(build, rows, training, tests, steps=60, test_steps=180, updates=120)


PARTS: dict[str, Callable[[str], Part]] = {
    "memory": memory_part,
    "population2": partial(population_part, 2),
    "population4": partial(population_part, 4),
}


@cache
def best_rate(draw: Draw, steps: int, seeds: int = 2) -> float:
    """The learning rate of Adam with the lowest value at the end, on problems of its own."""

    def final(rate: float) -> float:
        problems = [draw(Generator().manual_seed(10_000 + seed)) for seed in range(seeds)]
        return fmean(curve(problem, Adam(rate), steps)[-1] for problem in problems)

    return min(RATES, key=final)


def measure(part: Part, row: str, seed: int) -> dict[str, Any]:
    """What the line of results of an optimiser holds: trained, or Adam's rates; and its curves."""
    if row == ADAM:
        rates = dict.fromkeys(part.tests, best_rate(part.training, part.steps))
    elif row == ADAM_TUNED:
        rates = {name: best_rate(draw, part.test_steps) for name, draw in part.tests.items()}
    if row in (ADAM, ADAM_TUNED):
        optimizers: dict[str, Any] = {name: Adam(rate) for name, rate in rates.items()}
        out: dict[str, Any] = {"rates": rates}
    else:
        start = time.process_time()
        with seeded(seed):
            optimizer = part.build(row)
        draw = partial(part.training, Generator().manual_seed(seed))
        meta_train(optimizer, draw, part.updates, part.steps, part.window)
        optimizers = dict.fromkeys(part.tests, optimizer)
        out = {
            "seconds": round(time.process_time() - start, 1),
            "parameters": sum(p.numel() for p in optimizer.parameters()),
        }
    out["curves"] = {
        name: curve(draw(Generator().manual_seed(1000 + seed)), optimizers[name], part.test_steps)
        for name, draw in part.tests.items()
    }
    return out


def table(results: Results, name: str, part: Part, data: str) -> str:
    """For every test what is reached where meta-training ended, and at the end."""
    columns = [(test, steps) for test in part.tests for steps in (part.steps, part.test_steps)]
    cells = []
    for row in part.rows:
        found = results.latest(part=name, row=row, data=data)
        line: list[object] = [row, found[0].get("parameters", "–") if found else "–", len(found)]
        for test, steps in columns:
            curves = [record["curves"][test] for record in found]
            line.append(mean_sd((c[steps * (len(c) - 1) // part.test_steps] for c in curves), 3))
        cells.append(line)
    head = [f"{test}, {steps} steps" for test, steps in columns]
    return markdown_table(["row", "weights", "seeds", *head], cells)


def draw_curves(path: Path, results: Results, parts: dict[str, Part], data: str) -> Path:
    """Geometric mean and standard deviation over seeds, step by step, a panel for each test."""
    panels = [(name, part, test) for name, part in parts.items() for test in part.tests]
    figure = new_figure(3.2 * len(panels), 3.1)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (name, part, test) in zip(axes, panels, strict=True):
        for row in part.rows:
            found = results.latest(part=name, row=row, data=data)
            if not found:
                continue
            logs = np.log([record["curves"][test] for record in found])
            x = np.linspace(0, part.test_steps, logs.shape[1])
            color, line = COLORS.get(row, GREY), ":" if row == ADAM_TUNED else "-"
            axis.plot(x, np.exp(logs.mean(0)), label=row, color=color, linestyle=line)
            band = np.exp(logs.mean(0) + np.outer((-1, 1), logs.std(0)))
            axis.fill_between(x, *band, color=color, alpha=0.15, linewidth=0)
        axis.axvline(part.steps, color=GREY, linewidth=0.8, linestyle="--")
        axis.set(yscale="log", xlabel="step")
        axis.set_title(test, fontsize=9)
        clean(axis)
    axes[0].set_ylabel("loss of all images" if "memory" in parts else "best value so far")
    lines = axes[0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    return save(figure, path, 64)


def main() -> None:
    """Parse the command line, train what is missing, print tables, draw figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--data", choices=["digits", "synthetic"], help="default: digits if found")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--render", action="store_true", help="only print tables and draw figures")
    parser.add_argument("--smoke", action="store_true", help="every row, in seconds; nothing kept")
    given = parser.parse_args()
    usual = "digits" if given.render or (has_digits() and not given.smoke) else "synthetic"
    data, folder = given.data or usual, Path(__file__).parent
    parts = {name: PARTS[name](data) for name in given.parts}
    if given.smoke:
        given.seeds, folder = [0], Path(tempfile.mkdtemp())
        small = {"steps": 4, "window": 2, "updates": 2, "test_steps": 10}
        parts = {name: replace(part, **small) for name, part in parts.items()}
    results = Results(given.results or folder / "results.jsonl")
    jobs = [(seed, name, row) for seed in given.seeds for name in parts for row in parts[name].rows]
    for seed, name, row in [] if given.render else jobs:
        key = {"part": name, "row": row, "seed": seed, "data": data}
        if not results.read(**key):
            with threads(1):
                results.append({**key, **measure(parts[name], row, seed)})
            print(f"{name}, {row}, seed {seed}", flush=True)
    for title, names in FIGURES.items():
        if some := {name: parts[name] for name in names if name in parts}:
            for name, part in some.items():
                print(f"\n{name}\n{table(results, name, part, data)}")
            draw_curves(results.path.with_name(f"{title}.png"), results, some, data)


if __name__ == "__main__":
    main()
