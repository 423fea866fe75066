"""Processes that train together: how many, which one this is, and what they exchange."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import create_connection
from typing import Any, NamedTuple, TypeVar

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.utilities import rank_zero_only
from torch import distributed
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

T = TypeVar("T")
_LIMIT = 50.0  # s, for a process that another program should have started
_STARTED = "FLT_MOL_PROCESS"  # rank, port and folder, for a process that the first one starts
_TORCHRUN = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


class World(NamedTuple):
    """Processes on `nodes` machines, `devices` on each, of which this is number `rank`.

    Their `starter` is torchrun or srun, or else the first one, which gives others its `folder`.
    """

    devices: int = 1
    nodes: int = 1
    rank: int = 0
    starter: str = ""
    folder: str = ""
    address: str = "127.0.0.1"
    port: int = 0

    @property
    def size(self) -> int:
        """Processes in all."""
        return self.devices * self.nodes

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0


def world_of(devices: int, nodes: int) -> World:
    """The processes of a run: those that torchrun or srun started, else `devices` on this machine.

    What SLURM allots to a job does not count. Tasks of an srun are one run if it is on as many
    devices, and a run each if it is on one.

    Raises:
        ValueError: others were started than asked for.
    """
    env, asked = os.environ, devices * nodes
    if env.keys() >= _TORCHRUN:
        there = int(env["WORLD_SIZE"])
        on_this = int(env.get("LOCAL_WORLD_SIZE", there))
        machines, rank, starter = there // on_this, int(env["RANK"]), "torchrun"
        address, port = env["MASTER_ADDR"], env["MASTER_PORT"]
        fits = devices in (1, on_this) and nodes in (1, machines)
    elif asked > 1 and (there := int(env.get("SLURM_STEP_NUM_TASKS", 1))) > 1:
        on_this, machines, rank, starter = devices, nodes, int(env["SLURM_PROCID"]), "srun"
        hosts = env.get("SLURM_STEP_NODELIST", "")
        address = SLURMEnvironment.resolve_root_node_address(hosts) if nodes > 1 else "127.0.0.1"
        step = 10 * int(env.get("SLURM_JOB_ID", 0)) + int(env.get("SLURM_STEP_ID", 0))
        port = env.get("MASTER_PORT", str(15_000 + step % 10_000))
        fits = there == asked and int(env.get("SLURM_STEP_NUM_NODES", 1)) == nodes
    elif nodes > 1:
        raise ValueError(f"training.nodes is {nodes}: start the run with torchrun (docs/train.md)")
    else:
        started = env.get(_STARTED, "0:0:") if devices > 1 else "0:0:"
        number, port, folder = started.split(":", 2)
        return World(devices, 1, int(number), "", folder, port=int(port))
    if not fits:
        raise ValueError(
            f"training.devices is {devices} and training.nodes {nodes}, but {starter} started "
            f"{there} processes: start one for each device, or give devices that fit"
        )
    return World(on_this, machines, rank, starter, "", address, int(port))


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
    """Processes meet, and exchange values until the end of the block; signals end any wait.

    Raises:
        ValueError: a process that does not come, or that ends before the others.
    """
    if world.size == 1 or distributed.is_initialized():
        yield
        return
    others: list[subprocess.Popen[bytes]] = []
    try:
        store = _store(world)
        if not world.starter and world.is_first:
            command = [sys.executable, *sys.orig_argv[1:]]
            for rank in range(1, world.size):
                variables = {_STARTED: f"{rank}:{store.port}:{folder.absolute()}"}
                others.append(subprocess.Popen(command, env=os.environ | variables))
        _meet(store, world, others)
        gpu = torch.cuda.is_available() and distributed.is_nccl_available()
        backend, own = "cpu:gloo,cuda:nccl" if gpu else "gloo", PrefixStore("", store)
        distributed.init_process_group(backend, store=own, rank=world.rank, world_size=world.size)
        yield
    except RuntimeError as error:
        if not (isinstance(error, distributed.DistError) or "gloo" in str(error)):
            raise
        if world.folder:
            raise SystemExit(1) from None  # the first process says what is wrong
        raise ValueError("another process of this run has ended, see its message") from error
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()
        for end in (subprocess.Popen.terminate, subprocess.Popen.kill):
            for other in others:
                with suppress(subprocess.TimeoutExpired):
                    other.wait(5)
                end(other)


def _store(world: World) -> TCPStore:
    """What the first process holds and the others reach."""
    address, port = world.address, world.port
    server = world.is_first and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    end = time.monotonic() + _LIMIT
    while not server:
        try:
            create_connection((address, port), 1).close()
            break
        except OSError as error:
            _check_time(world, end, f"0 ({address}:{port})", error)
    try:
        return TCPStore(address, port, None, server, wait_for_workers=False)
    except distributed.DistNetworkError as error:
        raise ValueError(f"port {port} cannot be used: set MASTER_PORT to a free one") from error


def _meet(store: TCPStore, world: World, others: Sequence[subprocess.Popen[bytes]]) -> None:
    store.set(f"here/{world.rank}", "")
    end = time.monotonic() + _LIMIT
    while absent := [r for r in range(world.size) if not store.check([f"here/{r}"])]:
        for rank, other in enumerate(others, 1):
            if other.poll() is not None:
                raise ValueError(f"process {rank} has ended with status {other.returncode}")
        _check_time(world, end if world.starter else math.inf, absent)


def _check_time(world: World, end: float, absent: object, error: Exception | None = None) -> None:
    if time.monotonic() > end:
        of = f"of {world.size} {world.starter or 'own'} processes"
        raise ValueError(f"{of} number {absent} did not come within {_LIMIT:g} s") from error
    time.sleep(0.1)


def together() -> None:
    """Wait until all processes come here; a signal ends the wait."""
    if distributed.is_initialized():
        work = distributed.all_reduce(torch.zeros(1), async_op=True)
        while not work.is_completed():
            time.sleep(0.05)
        work.wait()


def gathered(value: T) -> list[T]:
    """The value of each process, in order of rank; all have to call it."""
    if not distributed.is_initialized():
        return [value]
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values
