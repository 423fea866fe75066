"""Processes that train together: how many, which one this is, and what they tell each other."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

__all__ = [
    "World",
    "followed_folder",
    "gathered",
    "largest",
    "shares",
    "shown_folder",
    "world_of",
]

T = TypeVar("T")
_FOLDER = "FLT_MOL_RUN_FOLDER"


class World(NamedTuple):
    """Processes on `nodes` machines, `devices` on each, of which this is number `rank`."""

    devices: int
    nodes: int
    rank: int

    @property
    def size(self) -> int:
        """Processes in all."""
        return self.devices * self.nodes

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    @property
    def is_watched(self) -> bool:
        """Whether the first process started this one, and is killed if this one fails."""
        return not self.is_first and "TORCHELASTIC_RUN_ID" not in os.environ

    def seed(self, seed: int) -> int:
        """Of what a process draws for its own systems: `seed` itself on the first one."""
        if self.is_first:
            return seed
        words = np.random.SeedSequence([abs(seed), self.rank]).generate_state(1, np.uint64)
        return int(words[0] >> np.uint64(1))


def world_of(devices: int, nodes: int) -> World:
    """The processes of a run: those that torchrun started, or else those that are asked for.

    Args:
        devices: `training.devices`.
        nodes: `training.nodes`.

    Raises:
        ValueError: torchrun started other numbers than are asked for.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        on_this = int(os.environ["LOCAL_WORLD_SIZE"])
        machines = int(os.environ["WORLD_SIZE"]) // on_this
        for name, asked, there in (("devices", devices, on_this), ("nodes", nodes, machines)):
            if asked not in (1, there):
                raise ValueError(
                    f"training.{name} is {asked}, and torchrun started {there}: leave it out, "
                    "or let them be the same"
                )
        return World(on_this, machines, int(os.environ["RANK"]))
    if nodes > 1:
        raise ValueError(
            f"training.nodes is {nodes}: start the processes of several machines with torchrun, on "
            "each of them; see docs/train.md"
        )
    # Lightning starts this command anew for every device, with this variable.
    return World(devices, 1, int(os.environ.get("LOCAL_RANK", 0)) if devices > 1 else 0)


@contextmanager
def shown_folder(folder: Path, world: World) -> Iterator[None]:
    """Processes that are started meanwhile find the folder of the run in their environment."""
    if world.size == 1:
        yield
        return
    before = dict(os.environ)
    os.environ[_FOLDER] = str(folder.absolute())
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def followed_folder(output: str | None) -> Path:
    """The folder of the run in which the first process writes.

    Raises:
        ValueError: nobody said which.
    """
    folder = os.environ.get(_FOLDER) or output
    if folder is None:
        raise ValueError(
            "with torchrun, give the folder of the run: output=FOLDER, the same for all processes"
        )
    return Path(folder)


def gathered(value: T) -> list[T]:
    """The value that each process has, in order of rank; all have to ask."""
    if not _are_several():
        return [value]
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def largest(values: Sequence[int], device: torch.device) -> list[int]:
    """The largest of each value among all processes; all have to ask, with as many values."""
    if not _are_several():
        return list(values)
    there = torch.tensor(values, device=device)
    torch.distributed.all_reduce(there, torch.distributed.ReduceOp.MAX)
    found: list[int] = there.tolist()
    return found


def shares(counts: torch.Tensor) -> torch.Tensor:
    """(k,) float32: W n_r / Σ n of k counts on rank r of W, 0 where there are none anywhere.

    Means over what a process has, times these, have the gradient, averaged over processes, of the
    means over what all have together. With one process they are 1.
    """
    if not _are_several():
        return torch.ones_like(counts, dtype=torch.float32)
    total = counts.clone()
    torch.distributed.all_reduce(total)
    return torch.distributed.get_world_size() * counts.float() / total.clamp(min=1)


def _are_several() -> bool:
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return there and torch.distributed.get_world_size() > 1
