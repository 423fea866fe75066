"""Runs the EMT plan slab by slab on several processes; a killed run goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import ase
import numpy as np
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from flt_mol.data.emt.systems import make_slab_systems
from flt_mol.files import temporary_path

_FORMAT = 1  # raise it when the same seed no longer gives the same systems


@dataclass(frozen=True)
class _Job:
    """Makes one slab's chunk; a class so that spawned workers can unpickle it."""

    work: Path
    seed: int

    def __call__(self, slab: int) -> int:
        with temporary_path(chunk_path(self.work, slab)) as temporary:
            temporary.write_text(json.dumps(make_slab_systems(self.seed, slab)), encoding="utf-8")
        return slab


def chunk_path(work: Path, slab: int) -> Path:
    """File of one slab's systems in the work folder."""
    return work / f"slab-{slab:06d}.json"


def run_slabs(
    work: Path, slabs: Sequence[int], *, seed: int, workers: int, progress: bool
) -> list[dict[str, Any]]:
    """Systems of every slab of `slabs`, in that order; see `make_slab_systems`.

    Each finished slab is one file in `work`, written under another name first; slabs whose file
    is there and whole are not made again. The result does not depend on `workers`, on the order
    of the work or on interruptions.

    Raises:
        ValueError: `work` was begun with another seed or other versions, or `workers` < 1.
    """
    if workers < 1:
        raise ValueError(f"workers is {workers}; it must be at least 1")
    work.mkdir(parents=True, exist_ok=True)
    _check_begun(work, seed)
    missing = [slab for slab in slabs if read_chunk(work, slab) is None]
    with _bar(len(slabs), progress) as bar:
        task = bar.add_task("EMT slabs", total=len(slabs), completed=len(slabs) - len(missing))
        for _ in _each(_Job(work, seed), missing, workers):
            bar.advance(task)
    chunks = [read_chunk(work, slab) for slab in slabs]
    return [chunk for chunk in chunks if chunk is not None]


def read_chunk(work: Path, slab: int) -> dict[str, Any] | None:
    """One slab's systems from the work folder; None where the file is missing or not whole."""
    try:
        chunk: dict[str, Any] = json.loads(chunk_path(work, slab).read_text(encoding="utf-8"))
    except (FileNotFoundError, UnicodeDecodeError, json.JSONDecodeError):
        return None
    return chunk


def _each(job: _Job, slabs: Sequence[int], workers: int) -> Iterator[int]:
    """Runs `job` on each slab; yields as they finish."""
    if workers == 1 or len(slabs) <= 1:
        yield from map(job, slabs)
        return
    # spawn: a forked child would share the parent's thread pools
    with get_context("spawn").Pool(min(workers, len(slabs))) as pool:
        yield from pool.imap_unordered(job, slabs)


def _check_begun(work: Path, seed: int) -> None:
    """Writes what the work folder is for, or compares it with what it was begun for."""
    wanted = {
        "format": _FORMAT,
        "seed": seed,
        "ase": ase.__version__,
        "numpy": np.__version__,
    }
    path = work / "plan.json"
    if not path.exists():
        path.write_text(json.dumps(wanted, indent=1) + "\n", encoding="utf-8")
        return
    begun = json.loads(path.read_text(encoding="utf-8"))
    for key, value in wanted.items():
        if begun.get(key) != value:
            raise ValueError(
                f"{path}: this run was begun with {key} = {begun.get(key)!r}, now it is {value!r}; "
                "remove the folder or choose another"
            )


@contextmanager
def _bar(total: int, enabled: bool) -> Iterator[Progress]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, disable=not enabled or total == 0) as bar:
        yield bar
