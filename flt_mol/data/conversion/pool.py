"""Chunks worked on by several processes, which say what happened and end with their parent."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import connection, get_context, parent_process, resource_tracker
from typing import Any

from flt_mol.data.conversion.job import Job

__all__ = ["Pool", "available_cores"]


def available_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Pool:
    """Runs a method of a job on many arguments, on several processes; a context manager.

    Args:
        job: sent to each process once.
        workers: processes; 1 for none beside this one.
    """

    def __init__(self, job: Job, workers: int) -> None:
        self.job = job
        self.workers = workers
        self._executor: ProcessPoolExecutor | None = None
        self._told: set[str] = set()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.job.close()
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)

    def each(self, method: str, arguments: Sequence[Any]) -> Iterator[Any]:
        """Calls the method with each argument; yields the arguments, in order, as they are done.

        Raises:
            ChildProcessError: a process was killed.
            Exception: what the method raises.
        """
        if self.workers == 1 or len(arguments) < 2:
            for argument in arguments:
                getattr(self.job, method)(argument)
                yield argument
            return
        try:
            yield from self._spread(method, arguments)
        except BrokenProcessPool as error:
            raise ChildProcessError(
                f"a worker process ended without a word while converting {self.job.source.path}: "
                "most likely the system killed it for want of memory. Run it again with fewer "
                f"workers (workers=1 needs no processes); what is done is kept in "
                f"{self.job.work.path}. A script that calls this needs the guard "
                'if __name__ == "__main__":'
            ) from error

    def _spread(self, method: str, arguments: Sequence[Any]) -> Iterator[Any]:
        if self._executor is None:
            # spawn: a forked child would share the parent's threads, locks and open files
            self._executor = ProcessPoolExecutor(
                self.workers, get_context("spawn"), initializer=_begin, initargs=(self.job,)
            )
        with _interrupts_held():  # the first submit starts the processes
            futures = [self._executor.submit(_run, method, argument) for argument in arguments]
        for argument, future in zip(arguments, futures, strict=True):
            for text in future.result():
                if text not in self._told:
                    self._told.add(text)
                    warnings.warn(text, UserWarning, stacklevel=2)
            yield argument


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Keeps Ctrl-C for later, and for good from processes that are started: it is the parent's.

    They would print a traceback each if it came while they import what they need.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # it lets interrupts through again when it starts by itself
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_job: Job | None = None  # in a worker process: what it was begun for


def _begin(job: Job) -> None:
    """Prepares a worker: Ctrl-C is the parent's business, and its end is the worker's."""
    global _job
    _job = job
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _run(method: str, argument: Any) -> list[str]:
    """Calls the job's method; returns the warnings that came up."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        getattr(_job, method)(argument)
    return [str(warning.message) for warning in caught if warning.category is UserWarning]
