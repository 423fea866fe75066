"""Work in a process of its own that is killed (SIGKILL) at a moment, and moments to kill it at."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.forkserver import ensure_running
from typing import Any
from unittest.mock import patch


def run(work: Callable[..., None], *arguments: Any, limit: float | None = None) -> float | None:
    """Run ``work(*arguments)`` in a new process; None if it was killed after `limit` seconds.

    `work` and its module's imports are loaded once, in a server that forks, and before the clock
    starts. `work` has to be a function at the top of a module that can be imported.

    Returns:
        Seconds that the whole work took.

    Raises:
        RuntimeError: the work failed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([work.__module__])
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path))):
        ensure_running()  # the server finds what it loads by its environment alone
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_begin, args=(sender, work, arguments))
    process.start()
    receiver.recv()
    begun = time.perf_counter()
    process.join(limit)
    process.kill()
    process.join()
    if process.exitcode == -signal.SIGKILL:
        return None
    if process.exitcode != 0:
        raise RuntimeError(f"{work.__name__}{arguments} failed; its message is above")
    return time.perf_counter() - begun


def moments(kills: int, seconds: float, seed: int) -> Iterator[float]:
    """One random moment in each of `kills` equal parts of `seconds`, in order."""
    draw = random.Random(seed)
    for kill in range(kills):
        yield seconds * (kill + draw.random()) / kills


def _begin(sender: Any, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    sender.send(None)
    work(*arguments)
