"""The child that reads files: one JSON line with a path in, one with what happened out.

It runs with little memory, and under an audit hook that notes whatever a reader has no business
to do: run a program, load a class that a pickle names, connect, write, rename or remove.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import warnings
from pathlib import Path
from typing import Any

MEMORY = 3 << 30  # bytes of address space
CPU_SECONDS = 20  # for one file
_GROWTH = 1 << 20  # kB of memory that one small file may take
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_FORBIDDEN = {
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.fork",
    "os.forkpty",
    "os.remove",
    "os.rename",
    "os.mkdir",
    "os.rmdir",
    "os.kill",
    "os.putenv",
    "os.symlink",
    "os.link",
    "os.truncate",
    "shutil.rmtree",
    "subprocess.Popen",
    "socket.connect",
    "socket.bind",
    "webbrowser.open",
    "pty.spawn",
    "pickle.find_class",
}
_seen: list[str] = []


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if event in _FORBIDDEN:
        _seen.append(f"{event} {args!r:.200}")
    elif event == "open" and isinstance(args[2], int) and args[2] & _WRITES:
        _seen.append(f"open to write {args[0]!r}")


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _allow(seconds: int) -> None:
    """So many seconds of the processor from now on; then the process ends."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + seconds, limit))


def examine(path: str) -> dict[str, Any]:
    """Open and read all that a file holds.

    Returns:
        count (None if it could not be opened), read (systems that came out), errors (messages of
        ValueErrors), warnings, fault (None, or what else happened).
    """
    _seen.clear()
    result: dict[str, Any] = {"count": None, "read": 0, "errors": [], "fault": None}
    before = _peak()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            _read(path, result)
        except ValueError as error:
            result["errors"].append(str(error))
        except BaseException as error:
            result["fault"] = _describe(error)
    result["warnings"] = [str(warning.message) for warning in caught]
    if _seen:
        result["fault"] = f"ran: {_seen[0]}"
    elif _peak() - before > _GROWTH:
        result["fault"] = f"memory: {(_peak() - before) >> 10} MB"
    return result


def _read(path: str, result: dict[str, Any]) -> None:
    from flt_mol.data import inspect, open_dataset

    dataset = open_dataset(path)
    result["count"] = len(dataset)
    for index in range(len(dataset)):
        try:
            dataset[index]
            result["read"] += 1
            record = dataset.record(index)
            for name in record:
                record[name]
        except ValueError as error:
            result["errors"].append(str(error))
    for read in (
        (lambda: dataset.batch(range(len(dataset))), dataset.natoms)
        if hasattr(dataset, "batch")
        else ()
    ):
        try:
            read()
        except ValueError as error:
            result["errors"].append(str(error))
    summary = inspect.summarise(dataset)
    inspect.render(summary)
    json.dumps(summary, allow_nan=False)
    if summary["count"] != len(dataset):
        raise AssertionError(f"inspect counts {summary['count']} of {len(dataset)} records")


def _describe(error: BaseException) -> str:
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    where = ""
    if place is not None:
        where = f" ({Path(place.tb_frame.f_code.co_filename).name}:{place.tb_lineno})"
    return f"{type(error).__name__}: {error!s:.200}{where}"


def main() -> None:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    import ase.db
    import ase.io  # noqa: F401

    import flt_mol.data.inspect  # noqa: F401

    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.addaudithook(_hook)
    answers.write("ready\n")
    for line in sys.stdin:
        _allow(CPU_SECONDS)
        try:
            answer = json.dumps(examine(json.loads(line)))
        except BaseException as error:
            answer = json.dumps({"fault": f"reader: {error!r}"})
        answers.write(answer + "\n")


if __name__ == "__main__":
    main()
