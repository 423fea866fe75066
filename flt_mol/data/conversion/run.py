"""Any data set to compact LMDB files, `.aselmdb` or extxyz, so that nothing is lost on the way.

The records are encoded in chunks, each a file in a work folder beside the output. A run that was
killed is started again with the same command, and makes the chunks that are missing. The output is
put together under another name, read back, and compared with the source record by record; then it
gets its name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flt_mol.data.conversion.assemble import (
    Summary,
    full_disk,
    pieces,
    put_in_place,
    put_together,
    whole,
)
from flt_mol.data.conversion.job import Job
from flt_mol.data.conversion.plan import (
    check_place,
    check_room,
    choose_kind,
    make_plan,
    pick,
    refuse_existing,
    source_state,
)
from flt_mol.data.conversion.pool import Pool, available_cores
from flt_mol.data.conversion.work import WorkFolder
from flt_mol.data.dataset import StructuresDataset
from flt_mol.data.options import OnError

__all__ = ["ConvertResult", "Progress", "convert"]

Progress = Callable[[int, int | None], None]
_CHUNK = 512
_PAYS = 2048  # records for each process


@dataclass(frozen=True)
class ConvertResult:
    """What a conversion did.

    Args:
        output: file or folder.
        kind: "lmdb", "aselmdb" or "extxyz".
        systems: how many it holds.
        bytes: of all its files.
        skipped: one message for each record that was left out.
        left_out: names of stored fields that were left out.
        seconds: of this run.
    """

    output: Path
    kind: str
    systems: int
    bytes: int
    skipped: tuple[str, ...]
    left_out: tuple[str, ...]
    seconds: float

    @property
    def bytes_per_system(self) -> float:
        """Mean size of a system in the output."""
        return self.bytes / self.systems


def convert(
    source: StructuresDataset,
    output: str | Path,
    *,
    kind: str | None = None,
    indices: Sequence[int] | None = None,
    workers: int | None = None,
    on_error: OnError = "raise",
    forces: bool = False,
    shard_size: int | None = None,
    overwrite: bool = False,
    chunk_size: int = _CHUNK,
    progress: Progress | None = None,
) -> ConvertResult:
    """Writes systems of `source` to another kind of file, from which the same systems are read.

    `open_dataset(output)` gives the same `Structures`, bit for bit, in the same order, with the
    sids that `source` gives them. Targets that `source` reads under other names are stored under
    OC20's, so that they are found without naming them; further plain values are kept. Graphs,
    large further arrays, and forces unless asked for, are left out.

    Killed at any moment and run again, it goes on with the chunk it was at, unless the source, the
    options or versions have changed since; the output is the same, byte for byte. It does not
    depend on `workers` or `chunk_size`.

    Args:
        source: the records.
        output: the file; with `shard_size`, a folder of files data.0000.lmdb, data.0001.lmdb, …
        kind: "lmdb" (compact), "aselmdb" or "extxyz"; None goes by the suffix of `output`.
        indices: which systems, in which order; None for all.
        workers: processes; None for one on each core, as far as there are 2048 records for each;
            1 for none beside this one.
        on_error: "raise": a bad record ends it; the chunks that are done are kept. "skip": bad
            records are left out and listed.
        forces: keep forces.
        shard_size: systems per file.
        overwrite: replace an output that exists, when the new one is complete.
        chunk_size: systems that are lost at most, for each worker, when it is killed.
        progress: called with records done and all: each counts once when it is encoded, and once
            when it is compared.

    Raises:
        ValueError: a bad record, or one that this kind of file cannot hold exactly, naming it and
            the field; an output that exists, or lies in its source, or that somebody else is
            writing; options that do not fit.
        OSError: not enough room on the disk, before it begins or later; the work is kept.
        ChildProcessError: a worker was killed.
    """
    begun, output = time.perf_counter(), Path(output)
    if workers is not None and workers < 1:
        raise ValueError(f"workers is {workers}, expected at least 1, or None for all cores")
    if chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}, expected at least 1")
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error is {on_error!r}, expected 'raise' or 'skip'")
    kind = choose_kind(output, kind, shard_size, forces)
    chosen = pick(source, indices)
    check_place(source, output)
    folder = output.with_name(f".{output.name}.convert")
    job = Job(
        source, chosen, kind, WorkFolder(folder), folder / output.name, shard_size, chunk_size,
        on_error == "skip", forces,
    )  # fmt: skip
    job.work.plan = make_plan(job)
    with job.work.locked(), full_disk(output, job.work):
        done = _finished(job, output, overwrite)
        if done is None:
            job.work.begin()
            check_room(job, output)
            with Pool(job, _workers(workers, len(chosen), len(job))) as pool:
                done = _work(pool, _Counter(progress, 2 * len(chosen)))
            job.work.set_done(done)
        put_in_place(job.target, output, folder / "replaced")
        job.work.remove()
    return ConvertResult(
        output, kind, done["systems"], done["bytes"], tuple(done["skipped"]),
        tuple(done["left_out"]), time.perf_counter() - begun,
    )  # fmt: skip


def _workers(given: int | None, records: int, chunks: int) -> int:
    """Processes: on its own, no more than pay for the seconds that each takes to be there."""
    wanted = min(available_cores(), records // _PAYS) if given is None else given
    return max(1, min(wanted, chunks))


class _Counter:
    """Tells how many records are done."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self.progress = progress
        self.total = total
        self.done = 0

    def add(self, count: int) -> None:
        self.done += count
        if self.progress is not None:
            self.progress(self.done, self.total)


def _finished(job: Job, output: Path, overwrite: bool) -> dict[str, Any] | None:
    """The result of a run that was killed when only the output's name was missing, or less."""
    done = job.work.done()
    if done is not None and len(done["skipped"]) > len(job.source.skipped) and not job.skip:
        done = None
    in_place = done is not None and not job.target.exists() and _size(output) == done["bytes"]
    if not in_place:
        refuse_existing(output, overwrite=overwrite, folder=job.shard_size is not None)
        if not job.target.exists():
            return None
    return done


def _size(output: Path) -> int:
    files = output.iterdir() if output.is_dir() else [output]
    return sum(file.stat().st_size for file in files if file.is_file())


def _work(pool: Pool, counter: _Counter) -> dict[str, Any]:
    """Encodes, puts together, compares; what it did."""
    job = pool.job
    chunks = _make_chunks(pool, counter)
    skipped = [text for chunk in chunks for text in chunk.skipped.values()]
    result = {
        "systems": sum(chunk.count for chunk in chunks),
        "skipped": [*job.source.skipped, *skipped],
        "left_out": sorted({name for chunk in chunks for name in chunk.left_out}),
    }
    if not result["systems"]:
        few = len(job.indices) < len(job.source)
        which = f"each of the {len(job.indices)} records chosen" if few else "every record"
        raise ValueError(f"{job.source.path}: {which} is bad; the first: {skipped[0]}")
    files = put_together(job, result)
    for piece in pool.each("check", pieces(chunks)):
        counter.add(len(job.chunk(piece.number)))
    job.close()
    if job.source.path.exists() and source_state(job.source) != job.work.plan["source"]["files"]:
        raise ValueError(f"{job.source.path} was changed while it was converted; run it again")
    return {**result, "bytes": sum(file.stat().st_size for file in files)}


def _make_chunks(pool: Pool, counter: _Counter) -> list[Summary]:
    """Makes the chunks that are missing; what all are like."""
    job, found = pool.job, {}
    for number in range(len(job)):
        chunk = job.work.read_chunk(number)
        if chunk is not None and (job.skip or not chunk.skipped):
            found[number] = Summary.of(chunk)
            counter.add(len(job.chunk(number)))
    missing = [number for number in range(len(job)) if number not in found]
    for number in pool.each("make", missing):
        found[number] = Summary.of(whole(job, number))
        counter.add(len(job.chunk(number)))
    return [found[number] for number in range(len(job))]
