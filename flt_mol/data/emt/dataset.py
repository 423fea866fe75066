"""Makes the data set `emt_adsorption`: plan → relaxed systems → LMDB files → card."""

from __future__ import annotations

import pickle
import shutil
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

from flt_mol.data.emt import card, plan
from flt_mol.data.emt.run import run_slabs

Record = dict[str, Any]

_ARRAYS: dict[str, type[np.generic]] = {
    "pos": np.float32,
    "pos_relaxed": np.float32,
    "cell": np.float32,
    "pbc": np.bool_,
    "atomic_numbers": np.uint8,
    "tags": np.uint8,
    "fixed": np.uint8,
}
_VALUES = ("sid", "natoms", "y_init", "y_relaxed", "adsorbate", "facet", "slab")


def generate(
    output: Path | str,
    *,
    seed: int = 0,
    num_slabs: int = plan.NUM_SLABS,
    workers: int = 2,
    work: Path | str | None = None,
    progress: bool = True,
) -> Path:
    """Makes the EMT adsorption data set in folder `output`.

    Writes one LMDB file a split, `dataset.yaml` and the tables of `README.md`; text by hand
    around the tables stays. Killed at any moment and started again with the same arguments, it
    goes on with the slab it was at. The records depend on `seed` and `num_slabs` alone, given
    versions of ASE and NumPy and one kind of processor (elsewhere, rounding differs in the last
    digits).

    Args:
        output: folder, made if missing.
        seed: of every random draw.
        num_slabs: slabs of all splits together; each gives about three systems.
        workers: processes.
        work: folder for unfinished work, kept at the end. Default: `output`/work, removed at the
            end.
        progress: whether to show a progress bar.

    Returns:
        `output`.

    Raises:
        ValueError: `num_slabs` or `workers` out of range, or too few slabs to have a system in
            each split; `work` begun with another seed or other versions.
    """
    output = Path(output)
    folder = output / "work" if work is None else Path(work)
    slabs = plan.slab_ids(num_slabs)
    chunks = run_slabs(folder, slabs, seed=seed, workers=workers, progress=progress)
    output.mkdir(parents=True, exist_ok=True)
    splits = split_records(chunks)
    empty = [split for split, records in splits.items() if not records]
    if empty:
        raise ValueError(
            f"every placement was dropped, no system in {', '.join(empty)}; "
            f"raise num_slabs = {num_slabs}"
        )
    for split, records in splits.items():
        write_lmdb(output / f"{split}.lmdb", records)
    card.write(output, splits, chunks, seed=seed, num_slabs=num_slabs)
    if work is None:
        shutil.rmtree(folder)
    return output


def split_records(chunks: Sequence[Mapping[str, Any]]) -> dict[str, list[Record]]:
    """Records of each split as arrays and plain values, in order of sid."""
    splits: dict[str, list[Record]] = {split: [] for split in plan.SPLITS}
    for chunk in sorted(chunks, key=lambda chunk: chunk["slab"]):
        splits[chunk["split"]] += [to_record(system) for system in chunk["records"]]
    return splits


def to_record(system: Mapping[str, Any]) -> Record:
    """A system as it is stored: arrays column by column, which compresses better.

    Fields: pos and pos_relaxed (N, 3), cell (3, 3) float32, Å; pbc (3,) bool; atomic_numbers,
    tags, fixed (N,) uint8; sid, natoms, slab int; y_init, y_relaxed float, eV; adsorbate, facet
    str.
    """
    arrays = {
        name: np.asfortranarray(np.array(system[name], dtype=dtype))
        for name, dtype in _ARRAYS.items()
    }
    return arrays | {name: system[name] for name in _VALUES}


def encode(record: Record) -> bytes:
    """The bytes of one record: a pickle of protocol 4, compressed by zlib."""
    return zlib.compress(pickle.dumps(record, protocol=4), level=9)


def write_lmdb(path: Path, records: Sequence[Record]) -> None:
    """One LMDB file: keys b"0", b"1", … and b"length", values by `encode`; no lock file beside.

    It is written under another name first, compactly, and renamed.
    """
    values = {str(i).encode(): encode(record) for i, record in enumerate(records)}
    values[b"length"] = pickle.dumps(len(records), protocol=4)
    loose, compact = path.with_suffix(".loose.tmp"), path.with_suffix(".tmp")
    for leftover in (loose, compact):
        leftover.unlink(missing_ok=True)
    room = 4 * sum(len(value) + 4096 for value in values.values())
    with lmdb.open(str(loose), subdir=False, map_size=room, lock=False) as environment:
        with environment.begin(write=True) as transaction:
            # in LMDB's own order the pages fill up
            for key in sorted(values):
                transaction.put(key, values[key], append=True)
        environment.copy(str(compact), compact=True)
    loose.unlink()
    compact.replace(path)
