"""Processes that train together: how many, which one this is, and what they exchange."""

from __future__ import annotations

import os
from typing import Any, NamedTuple, TypeVar

from torch import distributed

T = TypeVar("T")


class World(NamedTuple):
    """Processes on `nodes` machines, `devices` on each, of which this is number `rank`."""

    devices: int = 1
    nodes: int = 1
    rank: int = 0
    torchrun: bool = False

    @property
    def size(self) -> int:
        """Processes in all."""
        return self.devices * self.nodes

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0


def world_of(devices: int, nodes: int) -> World:
    """The processes of a run: those that torchrun started, or else `devices` on this machine.

    Raises:
        ValueError: torchrun started others than asked for, or several machines without it.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        on_this = int(os.environ["LOCAL_WORLD_SIZE"])
        machines = int(os.environ["WORLD_SIZE"]) // on_this
        for name, asked, there in (("devices", devices, on_this), ("nodes", nodes, machines)):
            if asked not in (1, there):
                raise ValueError(f"training.{name} is {asked}, and torchrun started {there}")
        return World(on_this, machines, int(os.environ["RANK"]), torchrun=True)
    if nodes > 1:
        raise ValueError(f"training.nodes is {nodes}: start the run with torchrun (docs/train.md)")
    # Lightning starts the same command for every further device, with this variable.
    return World(devices, 1, int(os.environ.get("LOCAL_RANK", 0)) if devices > 1 else 0)


def gathered(value: T) -> list[T]:
    """The value of each process, in order of rank; all have to call it."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return [value]
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values
