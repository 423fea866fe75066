"""Processes that train together: how many, which one this is, and what they exchange."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from torch import distributed

__all__ = ["World", "followed_folder", "gathered", "shown_folder", "world_of"]

T = TypeVar("T")
_FOLDER = "FLT_MOL_RUN_FOLDER"
_TORCHRUN = "TORCHELASTIC_RUN_ID"


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

    def seed(self, seed: int) -> int:
        """Of what a process draws for its own systems: `seed` itself on the first one."""
        if self.is_first:
            return seed
        words = np.random.SeedSequence([abs(seed), self.rank]).generate_state(1, np.uint64)
        return int(words[0] >> np.uint64(1))


def world_of(devices: int, nodes: int) -> World:
    """The processes of a run: those that torchrun started, or else `devices` on this machine."""
    if _TORCHRUN in os.environ:
        on_this = int(os.environ["LOCAL_WORLD_SIZE"])
        machines = int(os.environ["WORLD_SIZE"]) // on_this
        for name, asked, there in (("devices", devices, on_this), ("nodes", nodes, machines)):
            if asked not in (1, there):
                raise ValueError(f"training.{name} is {asked}, and torchrun started {there}")
        return World(on_this, machines, int(os.environ["RANK"]))
    if nodes > 1:
        raise ValueError(f"training.nodes is {nodes}: start the run with torchrun (docs/train.md)")
    # Lightning starts the same command for every further device, with this variable.
    return World(devices, 1, int(os.environ.get("LOCAL_RANK", 0)) if devices > 1 else 0)


@contextmanager
def shown_folder(folder: Path) -> Iterator[None]:
    """Processes that Lightning starts meanwhile find the folder of the run in their environment."""
    before = dict(os.environ)
    os.environ[_FOLDER] = str(folder.absolute())
    try:
        yield
    finally:  # of what Lightning added, too
        os.environ.clear()
        os.environ.update(before)


def followed_folder(output: str | None) -> Path:
    """The folder of the run in which the first process writes."""
    folder = os.environ.get(_FOLDER) or output
    if folder is None:
        raise ValueError("torchrun needs output=FOLDER, the same for all processes")
    return Path(folder)


def gathered(value: T) -> list[T]:
    """The value of each process, in order of rank; all have to call it."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return [value]
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values
