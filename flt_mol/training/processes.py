"""Processes that train together: how many, which one this is, and what they exchange."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from socket import create_connection
from typing import Any, NamedTuple, TypeVar

from lightning.pytorch.strategies import DDPStrategy
from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]

T = TypeVar("T")
FOLDER = "FLT_MOL_RUN_FOLDER"  # of the run, in processes that its first one started
SOON = 40.0  # s, for processes that start together


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

    What SLURM allots to a job does not count.

    Raises:
        ValueError: others were started than asked for, or several by srun; a variable that should
            be a number and is not.
    """
    env = os.environ
    if FOLDER in env:  # Lightning starts the same command for every further device
        return World(devices, 1, _number("LOCAL_RANK"))
    if env.keys() >= {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}:
        size = _number("WORLD_SIZE")
        on_this = _number("LOCAL_WORLD_SIZE", size)
        machines = size // on_this
        for name, asked, there in (("devices", devices, on_this), ("nodes", nodes, machines)):
            if asked not in (1, there):
                raise ValueError(f"training.{name} is {asked}, and torchrun started {there}")
        return World(on_this, machines, _number("RANK"), torchrun=True)
    if nodes > 1 or (devices > 1 and _number("SLURM_STEP_NUM_TASKS", 1) > 1):
        hint = "start with torchrun, or sbatch without srun on one node (docs/train.md)"
        raise ValueError(f"training.devices is {devices}, training.nodes is {nodes}: {hint}")
    return World(devices)


def _number(name: str, default: int = 0) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise ValueError(f"{name} is {text!r} in the environment, expected a whole number")
    return int(text)


class Strategy(DDPStrategy):
    """DDP in which a signal ends the wait for processes that load data."""

    def setup_environment(self) -> None:
        """Here the processes have been started."""
        self.store = meet(self.global_rank, self.world_size, "fit", 1800.0)
        super().setup_environment()


def meet(rank: int, size: int, place: str, limit: float = SOON) -> TCPStore:
    """Wait until all processes come to a `place`; torch's own waits do not end by signals.

    The store is to be kept while others may wait. A ValueError if one does not come in `limit` s.
    """
    env, start, store = os.environ, time.monotonic(), None
    host = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    server = rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    while store is None or not store.check([f"{place}{k}" for k in range(size)]):
        # The store of a first process that started this one is there, or that process has ended.
        most = SOON if store is None and FOLDER in env else limit
        if time.monotonic() > start + most:
            raise ValueError(f"not all of {size} processes came within {most:g} s")
        time.sleep(0.1)
        with suppress(OSError):
            if store is None and not server:
                create_connection(host, 1).close()
            store = store or TCPStore(
                *host, None, server, wait_for_workers=False, multi_tenant=True
            )
            store.set(f"{place}{rank}", "")
    return store


def gathered(value: T) -> list[T]:
    """The value of each process, in order of rank; all have to call it."""
    if not distributed.is_initialized():
        return [value]
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values
