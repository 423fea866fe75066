"""Conversions killed at random moments, and whether another run then makes the same file."""

from __future__ import annotations

import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flt_mol.data import open_dataset
from flt_mol.data.conversion import convert
from flt_mol.data.lmdb.write import write_lmdb

__all__ = ["KilledConversion", "kill_conversions", "write_records"]

_CHUNK = 8
_PROGRAM = f"""import sys
from flt_mol.data import open_dataset
from flt_mol.data.conversion import convert
source, workers = open_dataset(sys.argv[1]), int(sys.argv[3])
told = []
def begun(*_):
    if not told:
        told.append(print("begun", flush=True))
# Workers take seconds to be there, and most kills would come before.
if workers == 1:
    begun()
convert(source, sys.argv[2], workers=workers, chunk_size={_CHUNK}, progress=begun)"""


@dataclass(frozen=True)
class KilledConversion:
    """One run that was killed, and the one after it.

    Args:
        seconds: to the kill, from its beginning, imports apart, or from the first chunk of workers.
        of: seconds that an undisturbed run took.
        workers: processes.
        kept: finished chunks that it left.
        identical: whether the next run made the file of an undisturbed run.
    """

    seconds: float
    of: float
    workers: int
    kept: int
    identical: bool


def kill_conversions(
    source: Path, folder: Path, *, kills: int = 20, seed: int = 0, suffix: str = ".lmdb"
) -> Iterator[KilledConversion]:
    """Kill (SIGKILL) conversions, each with its workers, and run each again to the end.

    The moments are spread over the time that an undisturbed run takes; one that comes too late is
    drawn again, earlier. One and two workers take turns.

    Args:
        source: the records.
        folder: an empty one to work in.
        kills: how many.
        seed: of the moments.
        suffix: of the kind of file.
    """
    draw = random.Random(seed)
    whole = [folder / f"undisturbed{workers}{suffix}" for workers in (1, 2)]
    needed = [_run(source, output, workers)[0] for workers, output in enumerate(whole, start=1)]
    wanted = whole[0].read_bytes()
    for kill in range(kills):
        output, workers = folder / f"killed{kill}{suffix}", 1 + kill % 2
        seconds, killed = needed[workers - 1] * (kill + draw.random()) / kills, False
        while not killed:
            output.unlink(missing_ok=True)
            ran, killed = _run(source, output, workers, seconds)
            seconds = draw.uniform(0, min(ran, seconds))
        work = output.with_name(f".{output.name}.convert")
        kept = len([path for path in work.glob("chunk-*") if path.suffix != ".tmp"])
        if work.exists() or not output.exists():
            convert(open_dataset(source), output, workers=1, chunk_size=_CHUNK)
        identical = output.read_bytes() == wanted and not work.exists()
        yield KilledConversion(ran, needed[workers - 1], workers, kept, identical)


def _run(
    source: Path, output: Path, workers: int, limit: float | None = None
) -> tuple[float, bool]:
    """Converts in a process of its own; how long, and whether it was killed at the limit."""
    command = [sys.executable, "-W", "ignore", "-c", _PROGRAM, str(source), str(output)]
    with subprocess.Popen(
        [*command, str(workers)], stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        if process.stdout is not None:
            process.stdout.readline()
        begun = time.monotonic()
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
    return time.monotonic() - begun, process.returncode == -signal.SIGKILL


def write_records(path: Path, count: int, *, atoms: int = 80, seed: int = 0) -> None:
    """An LMDB file of random records with all of OC20's fields, and a graph.

    Args:
        path: the file.
        count: records.
        atoms: in each, Å apart.
        seed: of positions, elements and energies.
    """
    write_lmdb(path, ((b"%d" % i, _record(i, atoms, seed)) for i in range(count)))


def _record(sid: int, n: int, seed: int) -> bytes:
    rng = np.random.default_rng([seed, sid])
    pos = rng.uniform(0, 12, (n, 3)).astype(np.float32)
    record = {
        "pos": pos,
        "pos_relaxed": pos + rng.normal(0, 0.1, (n, 3)).astype(np.float32),
        "cell": np.diag([12.0, 12.0, 30.0]).astype(np.float32)[None],
        "atomic_numbers": rng.integers(1, 80, n).astype(np.float32),
        "tags": rng.integers(0, 3, n),
        "fixed": rng.integers(0, 2, n).astype(np.float32),
        "natoms": n,
        "sid": sid,
        "y_init": float(rng.normal()),
        "y_relaxed": float(rng.normal()),
        "force": rng.normal(size=(n, 3)).astype(np.float32),
        "edge_index": rng.integers(0, n, (2, 40 * n)),
        "cell_offsets": rng.integers(-1, 2, (40 * n, 3)),
    }
    return pickle.dumps(record, protocol=4)
