"""Trainings killed at random moments: do they go on to the weights of an undisturbed one?"""

from __future__ import annotations

import multiprocessing
import random
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from flt_mol.models.config import EnergyConfig, PairConfig, RPEConfig, SpectralConfig
from flt_mol.training.config import DataConfig, RunConfig, TrainingConfig
from flt_mol.training.resume import RESUME, steps_done
from flt_mol.training.run import train

__all__ = ["KilledTraining", "kill_trainings", "short_run"]

_AGAIN = 0.3


@dataclass(frozen=True)
class KilledTraining:
    """One training that was killed, once or more often, and then ran to its end.

    Args:
        seconds: to each kill, from the beginning of its process' work.
        of: seconds that an undisturbed run took.
        steps: done at the point that was left by each kill, None where there was none.
        differing: files of the folder that are not those of an undisturbed run; none is the aim.
    """

    seconds: tuple[float, ...]
    of: float
    steps: tuple[int | None, ...]
    differing: tuple[str, ...]

    @property
    def identical(self) -> bool:
        """Whether weights and metrics are those of an undisturbed run, bit for bit."""
        return not self.differing


def kill_trainings(
    config: RunConfig, folder: Path, *, kills: int = 50, seed: int = 0
) -> Iterator[KilledTraining]:
    """Kill (SIGKILL) trainings at random moments, and give each the same settings again.

    Moments are spread over the time that an undisturbed run takes, validation and plots included.
    Some are killed again. Compared are all tensors of ``best.ckpt`` and ``last.ckpt``, their
    metrics, and ``metrics.csv``.

    Args:
        config: of the run; its output is not looked at.
        folder: an empty one to work in.
        kills: how many in all.
        seed: of the moments.
    """
    draw = random.Random(seed)
    _run(config, folder / "warm")
    whole = folder / "undisturbed"
    needed, _ = _run(config, whole)
    done = number = 0
    while done < kills:
        output = folder / f"killed{number}"
        number += 1
        seconds: list[float] = []
        steps: list[int | None] = []
        limit = needed * (done + draw.random()) / kills
        while done < kills and (not seconds or draw.random() < _AGAIN):
            ran, killed = _run(config, output, limit)
            if not killed:
                break
            seconds.append(ran)
            steps.append(_steps(output))
            limit = draw.uniform(0, needed)
            done += 1
        if seconds:
            if not (output / "last.ckpt").exists():
                _run(config, output)
            yield KilledTraining(tuple(seconds), needed, tuple(steps), _differing(whole, output))


def short_run(folder: Path, systems: int = 40, **training: Any) -> RunConfig:
    """A run of seconds that has all that is random: dropout, turned systems, shuffled batches.

    Args:
        folder: where its data go.
        systems: to train on, of `emt_adsorption`.
        training: further settings.
    """
    from ase.io import write

    from flt_mol.data import open_dataset, to_ase
    from flt_mol.data.recipes import recipe

    paths: dict[str, Path] = {}
    for split, count in (("train", systems), ("val_id", systems // 4)):
        source = open_dataset(recipe("emt_adsorption").path(split))
        paths[split] = folder / f"{split}.extxyz"
        write(paths[split], [to_ase(source[i]) for i in range(count)])
    model = EnergyConfig(
        embed_dim=16,
        num_heads=2,
        num_layers=2,
        ffn_dim=16,
        num_features=8,
        redraw_every=3,
        rpe=RPEConfig(learned_sigma=False),
        dropout=0.1,
        spectral=SpectralConfig(num_heads=2),
        pairs=PairConfig(cutoff=4.0, vector_dropout=0.5),
    )
    settings = {"epochs": 4, "batch_size": 4, "rotation": "z", "shift_images": True}
    return RunConfig(
        data=DataConfig(paths={split: str(path) for split, path in paths.items()}),
        model=model,
        training=TrainingConfig(**{**settings, **training}),
    )


def _work(config: RunConfig, ready: Any) -> None:
    ready.send(None)
    torch.set_num_threads(1)  # of this process, which ends with it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(config, console=Console(quiet=True))


def _run(config: RunConfig, output: Path, limit: float | None = None) -> tuple[float, bool]:
    """Train in a process of its own; how long, and whether it was killed at the limit."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    receiver, sender = context.Pipe(duplex=False)
    config = config.model_copy(update={"output": str(output)})
    process = context.Process(target=_work, args=(config, sender))
    process.start()
    receiver.recv()
    begun = time.perf_counter()
    process.join(limit)
    process.kill()
    process.join()
    seconds = time.perf_counter() - begun
    if process.exitcode not in (0, -9):
        raise RuntimeError(f"the training into {output} failed; its message is above")
    return seconds, process.exitcode == -9


def _steps(output: Path) -> int | None:
    if not (output / RESUME).exists():
        return None
    return steps_done(output / RESUME)


def _differing(one: Path, other: Path) -> tuple[str, ...]:
    names = [name for name in ("best.ckpt", "last.ckpt") if not _same(one / name, other / name)]
    log = "logs/csv/metrics.csv"
    if (one / log).read_bytes() != (other / log).read_bytes():
        names.append(log)
    if (other / RESUME).exists():
        names.append(RESUME)
    return tuple(names)


def _same(one: Path, other: Path) -> bool:
    if not other.exists():
        return False
    a, b = (torch.load(path, map_location="cpu", weights_only=True) for path in (one, other))
    weights, others = a["state_dict"], b["state_dict"]
    alike = weights.keys() == others.keys() and a["metrics"] == b["metrics"]
    return alike and all(torch.equal(weights[key], others[key]) for key in weights)
