"""The end of a conversion: finished chunks are put together, and the output gets its name."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import lmdb

import flt_mol
from flt_mol.data.conversion.job import Job, Piece
from flt_mol.data.conversion.work import Chunk, WorkFolder, sync
from flt_mol.data.conversion.write import KINDS

__all__ = ["Summary", "full_disk", "pieces", "put_in_place", "put_together", "whole"]

_FULL = (errno.ENOSPC, errno.EDQUOT)
_COPIES = 3  # of the records in the work folder that LMDB may write


@dataclass(frozen=True)
class Summary:
    """A finished chunk without its contents: records, their bytes, and what was left out."""

    count: int
    bytes: int
    skipped: Mapping[int, str]
    left_out: Sequence[str]

    @staticmethod
    def of(chunk: Chunk) -> Summary:
        """What a chunk is like."""
        size = sum(len(payload) for payload in chunk.payloads)
        return Summary(len(chunk.payloads), size, chunk.skipped, chunk.left_out)


def whole(job: Job, number: int) -> Chunk:
    """A chunk that was found whole before, or written just now.

    Raises:
        OSError: it no longer is.
    """
    chunk = job.work.read_chunk(number)
    if chunk is None:
        raise OSError(errno.EIO, "was damaged just now", str(job.work.chunk_path(number)))
    return chunk


def put_together(job: Job, result: Mapping[str, Any]) -> list[Path]:
    """Writes all files of the output under their temporary names."""
    if job.target.is_dir():
        shutil.rmtree(job.target)
    payloads = (p for number in range(len(job)) for p in whole(job, number).payloads)
    metadata = {
        "source": job.source.path.name,
        "written_by": f"flt_mol {flt_mol.__version__}",
        "left_out": result["left_out"],
        "skipped": result["skipped"],
    }
    systems, size = result["systems"], job.shard_size or result["systems"]
    files = []
    for shard, start in enumerate(range(0, systems, size)):
        files.append(job.file(shard))
        files[-1].parent.mkdir(exist_ok=True)
        count = min(size, systems - start)
        KINDS[job.kind].write(files[-1], islice(payloads, count), count, metadata)
        sync(files[-1])
    sync(job.target.parent if job.shard_size is None else job.target)
    return files


def pieces(chunks: Sequence[Summary]) -> list[Piece]:
    """Where each chunk is in the output."""
    firsts = accumulate((chunk.count for chunk in chunks), initial=0)
    starts = list(accumulate((chunk.bytes for chunk in chunks), initial=0))
    return [
        Piece(number, frozenset(chunk.skipped), first, starts[number], starts[number + 1])
        for number, (chunk, first) in enumerate(zip(chunks, firsts, strict=False))
    ]


def put_in_place(target: Path, output: Path, replaced: Path) -> None:
    """Gives the output its name; a folder that is there is put aside until then."""
    if not target.exists():
        return
    if output.is_dir():
        output.rename(replaced)
    os.replace(target, output)
    sync(output.parent)


@contextmanager
def full_disk(output: Path, work: WorkFolder) -> Iterator[None]:
    """Says of a full disk which output it keeps from being written, and that nothing is lost."""
    try:
        yield
    except (OSError, lmdb.Error, ValueError) as error:
        if getattr(error, "filename", None) == str(output) or not _is_full(error, work):
            raise
        raise OSError(
            errno.ENOSPC,
            f"the disk is full; make room and run it again, what is done is kept in {work.path}",
            str(output),
        ) from error


def _is_full(error: Exception, work: WorkFolder) -> bool:
    if not (isinstance(error, lmdb.Error) or isinstance(error.__cause__, lmdb.Error)):
        return getattr(error, "errno", None) in _FULL
    if os.strerror(errno.ENOSPC) in str(error):
        return True
    # LMDB says so, too, of a page that was written in part; the file is removed by now
    written_in_part = os.strerror(errno.EIO) in str(error)
    return written_in_part and shutil.disk_usage(work.path).free < _COPIES * work.bytes()
