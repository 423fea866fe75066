"""Processes that train together: how many, which one this is, and what they exchange."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import create_connection
from typing import Any, NamedTuple, TypeVar

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.utilities import rank_zero_only
from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]

T = TypeVar("T")
FOLDER = "FLT_MOL_RUN_FOLDER"  # of the run, in processes that its first one started
_LIMIT = 50.0  # s, for a process that torchrun should have started


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
        ValueError: others were started than asked for, or several by srun.
    """
    env = os.environ
    if env.keys() >= {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}:
        on_this = int(env.get("LOCAL_WORLD_SIZE", env["WORLD_SIZE"]))
        machines = int(env["WORLD_SIZE"]) // on_this
        for name, asked, there in (("devices", devices, on_this), ("nodes", nodes, machines)):
            if asked not in (1, there):
                raise ValueError(f"training.{name} is {asked}, and torchrun started {there}")
        return World(on_this, machines, int(env["RANK"]), torchrun=True)
    if nodes > 1:
        raise ValueError(f"training.nodes is {nodes}: start the run with torchrun (docs/train.md)")
    if devices > 1 and (tasks := int(env.get("SLURM_STEP_NUM_TASKS", 1))) > 1:
        hint = "start with torchrun, or sbatch without srun"
        raise ValueError(f"training.devices is {devices}, and srun started {tasks} tasks: {hint}")
    return World(devices)


class Environment(LightningEnvironment):
    """Tells Lightning that the processes of a world are there, whatever variables are set."""

    creates_processes_externally = True

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        rank_zero_only.rank = world.rank  # type: ignore[attr-defined]

    def local_rank(self) -> int:
        """Number of the process on its machine."""
        return self.world.rank % self.world.devices

    def node_rank(self) -> int:
        """Number of the machine."""
        return self.world.rank // self.world.devices

    def teardown(self) -> None:
        """Variables stay as they are."""


@contextmanager
def joined(world: World, folder: Path) -> Iterator[None]:
    """Processes, started if need be, which exchange values until the end of the block.

    Raises:
        ValueError: a process that does not come, or that ends before the others.
    """
    if world.size == 1:
        yield
        return
    env, others, place = os.environ, [], ("127.0.0.1", 0)
    try:
        if world.torchrun:
            place = env["MASTER_ADDR"], int(env["MASTER_PORT"])
        server = world.is_first and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        if not server:
            _wait(lambda: _listens(place), _LIMIT)
        store = TCPStore(*place, is_master=server, wait_for_workers=False)
        if not world.torchrun:
            others = [_start(rank, world, store.port, folder) for rank in range(1, world.size)]
        store.set(str(world.rank), "")
        ranks, limit = [str(rank) for rank in range(world.size)], math.inf if others else _LIMIT
        _wait(lambda: store.check(ranks), limit, others)
        gpu = torch.cuda.is_available() and distributed.is_nccl_available()
        backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
        distributed.init_process_group(backend, None, None, world.size, world.rank, store)
        yield
    except BaseException as error:
        lost = isinstance(error, RuntimeError) and "gloo" in str(error)
        if FOLDER in env and (lost or not isinstance(error, RuntimeError)):
            raise SystemExit(1) from None  # the first process says it
        if lost:
            raise ValueError("another process of this run has ended, see its message") from error
        raise
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()
        for other in others:
            with suppress(subprocess.TimeoutExpired):
                other.wait(5)
            other.kill()


def _start(rank: int, world: World, port: int, folder: Path) -> subprocess.Popen[bytes]:
    """The same command, with torchrun's variables."""
    size, address = str(world.size), "127.0.0.1"
    given = {"RANK": str(rank), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    given |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, FOLDER: str(folder.absolute())}
    return subprocess.Popen([sys.executable, *sys.orig_argv[1:]], env=os.environ | given)


def _listens(place: tuple[str, int]) -> bool:
    with suppress(OSError), create_connection(place, 1):
        return True
    return False


def _wait(ready: Callable[[], bool], limit: float, others: Iterable[Any] = ()) -> None:
    """Poll: torch's own waits do not end by signals."""
    end = time.monotonic() + limit
    while not ready():
        if time.monotonic() > end or any(other.poll() is not None for other in others):
            raise ValueError(f"another process has ended, or did not come within {_LIMIT:g} s")
        time.sleep(0.1)


def together() -> None:
    """Wait until all processes come here; a signal ends the wait."""
    if distributed.is_initialized():
        work = distributed.all_reduce(torch.zeros(1), async_op=True)
        _wait(work.is_completed, math.inf)
        work.wait()


def gathered(value: T) -> list[T]:
    """The value of each process, in order of rank; all have to call it."""
    if not distributed.is_initialized():
        return [value]
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values
