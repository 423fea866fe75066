"""What a conversion is to do, checked before anything is written."""

from __future__ import annotations

import errno
import hashlib
import re
import secrets
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ase
import lmdb
import numpy as np

import flt_mol
from flt_mol.data.conversion.job import Job
from flt_mol.data.conversion.write import KINDS
from flt_mol.data.dataset import StructuresDataset

__all__ = [
    "check_place",
    "check_room",
    "choose_kind",
    "make_plan",
    "pick",
    "refuse_existing",
    "source_plan",
    "source_state",
]

_FORMAT = 1  # raise it when the same records no longer give the same bytes
_SAMPLE = 16  # records that are encoded to estimate the size of all
_COPIES = 3.2  # of each record: its chunk, and two while an LMDB file is made compact
_ROOM = 1 << 20  # bytes beyond the records
_SHARD = re.compile(r"data\.\d{4,}\.lmdb")


def choose_kind(output: Path, kind: str | None, shard_size: int | None, forces: bool) -> str:
    """The kind of output, named or by its suffix.

    Raises:
        ValueError: a kind that does not exist, or cannot be split or hold forces.
    """
    known = ", ".join(KINDS)
    if kind is None:
        kind = output.suffix.lower().removeprefix(".")
        kind = "lmdb" if not kind and shard_size is not None else kind
        if kind not in KINDS:
            raise ValueError(f"{output}: the suffix names no kind of file; give one of {known}")
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}, expected one of {known}")
    if shard_size is None and output.suffix.lower() != KINDS[kind].suffix:
        raise ValueError(f"{output}: files of kind {kind} end in {KINDS[kind].suffix}")
    if shard_size is not None and not KINDS[kind].shards:
        raise ValueError(f"shard_size is for kind lmdb, not {kind}")
    if shard_size is not None and shard_size < 1:
        raise ValueError(f"shard_size is {shard_size}, expected at least 1")
    if forces and KINDS[kind].force is None:
        raise ValueError(
            f"files of kind {kind} hold no forces; choose another, or leave "
            "forces out (forces=False; no --forces)"
        )
    return kind


def pick(source: StructuresDataset, indices: Sequence[int] | None) -> Sequence[int]:
    """The indices to convert, all from 0 to len(source) − 1.

    Raises:
        ValueError: none, or one that is not there.
    """
    count = len(source)
    if indices is None:
        chosen: Sequence[int] = range(count)
    else:
        chosen = [int(index) for index in indices]
        wrong = next((index for index in chosen if not -count <= index < count), None)
        if wrong is not None:
            raise ValueError(f"{source.path} has {count} systems and none of index {wrong}")
        chosen = [index % count for index in chosen]
    if not len(chosen):
        raise ValueError(f"{source.path}: no systems to convert")
    return chosen


def check_place(source: StructuresDataset, output: Path) -> None:
    """Refuses an output that would change its own source.

    Raises:
        ValueError: the output is the source, or lies in it, or would replace its folder.
    """
    if not source.path.exists():
        return
    given, made = source.path.resolve(), output.resolve()
    if made == given or given in made.parents:
        raise ValueError(f"{output} lies in its own source {source.path}; choose another place")
    if made in given.parents:
        raise ValueError(f"{output} holds its own source {source.path}; choose another place")


def refuse_existing(output: Path, *, overwrite: bool, folder: bool) -> None:
    """Refuses an output that is there, unless it may be overwritten and is of the same form.

    Raises:
        ValueError: with the mend.
    """
    if not (output.exists() or output.is_symlink()):
        return
    if not overwrite:
        raise ValueError(
            f"{output} exists already; choose another name, or overwrite it "
            "(overwrite=True, --overwrite)"
        )
    if output.is_dir() != folder:
        raise ValueError(f"{output} is a {'file' if folder else 'folder'}; remove it first")
    others = [e.name for e in output.iterdir() if not _SHARD.fullmatch(e.name)] if folder else []
    if others:
        raise ValueError(f"{output} holds {others[0]}, which is no part of it; remove it first")


def make_plan(job: Job) -> dict[str, Any]:
    """All that the bytes of the output depend on; finished work of another plan is of no use."""
    numbers = np.asarray(job.indices, dtype="<i8")
    return {
        "format": _FORMAT,
        "source": source_plan(job.source),
        "indices": [len(numbers), hashlib.sha256(numbers.tobytes()).hexdigest()],
        "kind": job.kind,
        "forces": job.forces,
        "shard_size": job.shard_size,
        "chunk_size": job.chunk_size,
    }


def source_plan(source: StructuresDataset) -> dict[str, Any]:
    """The source as it is now, as it is read, and who reads it."""
    return {
        "path": str(source.path.resolve()),
        "class": type(source).__qualname__,
        "count": len(source),
        "options": {k: v for k, v in asdict(source.options).items() if k != "check"},
        "files": source_state(source),
        "versions": {
            "flt_mol": flt_mol.__version__,
            "numpy": np.__version__,
            "ase": ase.__version__,
            "lmdb": lmdb.__version__,
            "zlib": zlib.ZLIB_RUNTIME_VERSION,
        },
    }


def source_state(source: StructuresDataset) -> list[list[Any]]:
    """Name, bytes and time of change of the source's files.

    A source without files is never the same again.
    """
    path = source.path
    if not path.exists():
        return [["in memory", secrets.token_hex(8), 0]]
    files = [path]
    if path.is_dir():
        files = [p for p in sorted(path.rglob("*")) if p.is_file() and not _is_lock(p.name)]
    status = [(file.relative_to(path.parent).as_posix(), file.stat()) for file in files]
    return [[name, found.st_size, found.st_mtime_ns] for name, found in status]


def _is_lock(name: str) -> bool:
    return name.startswith(".") or name.endswith(("-lock", "lock.mdb"))


def check_room(job: Job, output: Path) -> None:
    """Refuses to begin where the disk will not hold the work and the output.

    Raises:
        OSError: with the bytes needed, by the mean of some records, and those free.
    """
    step = max(1, len(job.indices) // _SAMPLE)
    sizes = []
    for index in job.indices[::step][:_SAMPLE]:
        try:
            sizes.append(len(job.encode(index)[0]))
        except ValueError:
            continue  # reported when its turn comes
    each = sum(sizes) / max(1, len(sizes))
    needed = int(_COPIES * each * len(job.indices)) + _ROOM - job.work.bytes()
    free = shutil.disk_usage(job.work.path).free
    if needed > free:
        raise OSError(
            errno.ENOSPC,
            f"about {needed:,} bytes are needed there while converting, {free:,} are free",
            str(output),
        )
