"""Trainings killed at random moments: do they resume to the weights of an undisturbed one?

From the command line: ``PYTHONPATH=.:tests python -m helpers.kill_training --kills 50``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from flt_mol.training.config import RunConfig
from flt_mol.training.resume import RESUME
from helpers.killing import moments, run
from helpers.training import RANDOM, go, tiny_run

CHECKPOINTS = ("best.ckpt", "last.ckpt")
LOG = "logs/csv/metrics.csv"


def kill_trainings(
    config: RunConfig, folder: Path, kills: int, seed: int = 0
) -> Iterator[tuple[float, int | None, list[str]]]:
    """Kill trainings, each at its moment of the time that an undisturbed one takes, and resume.

    Yields:
        Seconds to the kill, steps that were kept (None where nothing was), and the files that are
        not those of an undisturbed run: none is the aim.
    """
    whole = folder / "undisturbed"
    run(work, config, folder / "warm")
    needed = run(work, config, whole)
    assert needed is not None
    for number, moment in enumerate(moments(kills, needed, seed)):
        output = folder / f"killed{number}"
        while run(work, config, output, limit=moment) is not None:  # it was faster this time
            output = output.with_name(f"{output.name}-")
            moment *= 0.9
        point = output / RESUME
        steps = steps_done(point) if point.exists() else None
        run(work, config, output)
        yield moment, steps, differing(whole, output)


def steps_done(point: Path) -> int:
    """Optimiser steps before a point."""
    return int(torch.load(point, map_location="cpu", weights_only=True)["global_step"])


def work(config: RunConfig, output: Path) -> None:
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        go(config, output)


def differing(one: Path, other: Path) -> list[str]:
    """Names of the checkpoints and logs that are not the same, bit for bit."""
    names = [name for name in CHECKPOINTS if not _same(one / name, other / name)]
    if (one / LOG).read_bytes() != (other / LOG).read_bytes():
        names.append(LOG)
    return names + [RESUME] * (other / RESUME).exists()


def _same(one: Path, other: Path) -> bool:
    a, b = (torch.load(path, map_location="cpu", weights_only=True) for path in (one, other))
    weights, others = a["state_dict"], b["state_dict"]
    alike = weights.keys() == others.keys() and a["metrics"] == b["metrics"]
    return alike and all(torch.equal(weights[key], others[key]) for key in weights)


def disturbed_run(folder: Path) -> RunConfig:
    """All that is random, an average, gradients of two batches, a point after every step."""
    return tiny_run(
        folder,
        14,
        4,
        model=RANDOM,
        epochs=3,
        accumulate=2,
        ema_decay=0.8,
        noise=0.02,
        rotation="z",
        shift_images=True,
        save_minutes=0.0,
    )


def main() -> int:
    """Print one line for each training; 1 on any difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = kill_trainings(disturbed_run(folder), folder, given.kills, given.seed)
        for seconds, steps, files in rows:
            wrong += bool(files)
            print(f"{seconds:6.2f} s, steps kept: {steps}, differing: {files or 'none'}")
    print(f"{given.kills - wrong} of {given.kills} bit-identical to an undisturbed run")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
