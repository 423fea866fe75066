"""Points of a benchmark, each in a process of its own, none of which can eat the machine's memory.

A point is a function of plain arguments that returns plain data. It runs in a fresh interpreter,
which has its threads and its allocator's settings from the start, and which the system refuses
memory beyond a limit: what would need more is reported as stopped, and the others go on.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = [
    "ALLOCATORS",
    "EXPLAINED",
    "Setting",
    "describe_machine",
    "huge_pages",
    "out_of_memory",
    "peak_rss",
    "run_point",
]

ALLOCATORS: dict[str, dict[str, str]] = {
    # What the C library does by itself: large blocks go back to the system when they are freed.
    "default": {},
    # Freed memory stays with the process, so that no page is touched for the first time again.
    "keep": {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)},
    # The C library asks Linux for pages of 2 MB instead of 4 kB (madvise), from glibc 2.35 on.
    # THP_MEM_ALLOC_ENABLE=1 asks for torch's own tensors only, which took more page faults.
    "huge": {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
}
EXPLAINED: dict[str, str] = {
    "default": "the C library as it is",
    "keep": "freed memory stays with the process",
    "huge": "transparent huge pages, of 2 MB, where Linux grants them",
}
_HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"
# What an allocator is set by: never inherited, so that "default" is that.
_ALLOCATING = ("MALLOC_", "GLIBC_TUNABLES", "THP_MEM_ALLOC_ENABLE")
_SHOWN = ("MALLOC_", "LD_PRELOAD", "GLIBC_TUNABLES", "THP_MEM_ALLOC_ENABLE", "OMP_", "MKL_", "KMP_")


class Setting(NamedTuple):
    """What a point runs under.

    Attributes:
        threads: of torch's operators.
        allocator: a name in `ALLOCATORS`.
        limit_gb: 10⁹ bytes of memory; None for no limit.
    """

    threads: int = 1
    allocator: str = "default"
    limit_gb: float | None = 20.0


def run_point(target: str, arguments: Mapping[str, Any], setting: Setting) -> dict[str, Any]:
    """Run ``module:function(**arguments)`` in a fresh process.

    Args:
        target: as "flt_mol.analysis.speed.lengths:measure".
        arguments: plain data.
        setting: threads, allocator, limit.

    Returns:
        ``result``, what the function returned, or ``stopped``, why there is none; and
        ``environment``, the variables that allocators and threads look at.

    Raises:
        RuntimeError: the function failed, other than by a lack of memory.
    """
    environment = _environment(setting)
    order = {"target": target, "arguments": dict(arguments), **setting._asdict()}
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps(order),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    shown = {key: value for key, value in environment.items() if key.startswith(_SHOWN)}
    if done.returncode < 0 and setting.limit_gb is not None:
        # Libraries that do not look whether they were given memory.
        reason = f"ended by signal {-done.returncode} within {setting.limit_gb:g} GB"
        return {"stopped": reason, "environment": shown}
    if done.returncode:
        raise RuntimeError(f"{target} failed with {dict(arguments)}:\n{done.stderr[-4000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**answer, "environment": shown}


def _environment(setting: Setting) -> dict[str, str]:
    if setting.allocator not in ALLOCATORS:
        known = ", ".join(ALLOCATORS)
        raise ValueError(f"allocator is {setting.allocator!r}, expected one of {known}")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(_ALLOCATING)}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(setting.threads))
    return {**kept, **threads, **ALLOCATORS[setting.allocator]}


def out_of_memory(error: BaseException) -> bool:
    """Whether this is how Python or torch say that there is no memory left."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError)
        and any(words in str(error) for words in ("allocate memory", "bad_alloc", "out of memory"))
    )


def peak_rss() -> int | None:
    """Most bytes of memory that this process had at once, as Linux counts; None elsewhere."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            line = next(line for line in file if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return None
    return int(line.split()[1]) * 1024


def huge_pages() -> str | None:
    """When Linux gives huge pages: "always", "madvise", which is when asked, or "never".

    None where that is not known.
    """
    try:
        with open(_HUGE_PAGES, encoding="ascii") as file:
            return next(word[1:-1] for word in file.read().split() if word.startswith("["))
    except (OSError, StopIteration):
        return None


def describe_machine() -> dict[str, Any]:
    """Processor, its number of cores, versions, and when there are huge pages."""
    import torch

    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            model = next(line.split(":")[1].strip() for line in file if "model name" in line)
    except (OSError, StopIteration):
        pass
    return {"processor": model, "cores": os.cpu_count(), "torch": torch.__version__,
            "python": platform.python_version(), "system": platform.system(),
            "huge_pages": huge_pages()}  # fmt: skip


def _limit_memory(limit_gb: float | None) -> None:
    """Writable memory of this process, which glibc's arenas and threads' stacks count among."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    if limit_gb is not None:
        most = round(limit_gb * 1e9)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def _answer(order: dict[str, Any]) -> dict[str, Any]:
    _limit_memory(order["limit_gb"])
    import torch

    torch.set_num_threads(order["threads"])
    module, _, name = order["target"].partition(":")
    function = getattr(importlib.import_module(module), name)
    try:
        return {"result": function(**order["arguments"]), "machine": describe_machine()}
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        return {"stopped": f"needs more than {order['limit_gb']:g} GB"}


if __name__ == "__main__":
    print("\n" + json.dumps(_answer(json.load(sys.stdin)), allow_nan=False))
