"""Writing a cache of neighbour pairs: under another name, and renamed when it is whole."""

from __future__ import annotations

import json
import shutil
import tempfile
import zlib
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flt_mol.data.loading.pair_cache import (
    FORMAT,
    PAIRS,
    WIDTHS,
    PairCache,
    checksum,
    checksums_of_geometry,
    header_crc32,
)
from flt_mol.structures import Structures

__all__ = ["write_cache"]

_WIDER = {"<u2": "<u4", "<u4": "<i8", "<i1": "<i2", "<i2": "<i8"}
_BLOCK = 2**24


def write_cache(path: Path, batches: Iterable[Structures], cutoff: float) -> None:
    """Write the pairs of all batches, in their order, as the cache `path`.

    Written under another name and renamed: whoever finds `path` finds it whole. Where another
    process was quicker, its cache stays; one that is damaged is replaced.

    Raises:
        ValueError: a folder that cannot be written to, or a full disk.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise ValueError(f"no cache of pairs can be made at {path}: {error}") from error
    try:
        header = _write_arrays(work, batches)
        header |= {"format": FORMAT, "cutoff": float(cutoff)}
        stored = {"header": header, "crc32": header_crc32(header)}
        (work / "header.json").write_text(json.dumps(stored), encoding="utf-8")
        _publish(work, path)
    except OSError as error:
        raise ValueError(f"the cache of pairs {path} could not be written: {error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write_arrays(folder: Path, batches: Iterable[Structures]) -> dict[str, Any]:
    """Fill the files; returns what the header says of them."""
    kinds = {"receiver": "<u2", "sender": "<u2", "shift": "<i1"}
    for name in kinds:
        (folder / name).touch()
    counts, geometries = [np.zeros(1, np.int64)], [np.zeros(0, np.uint32)]
    for structures in batches:
        columns, count = _columns(structures)
        counts.append(count)
        geometries.append(checksums_of_geometry(structures))
        for name, values in columns.items():
            kinds[name] = _append(folder / name, values, kinds[name])
    offsets = np.concatenate(counts).cumsum()
    # Only now: of the bytes as they are stored in the end.
    stored = _stored(folder, kinds, offsets)
    tables = {
        "offsets": offsets.astype("<i8"),
        "checksums": np.stack([stored, np.concatenate(geometries)], axis=1).astype("<u4"),
    }
    for name, table in tables.items():
        (folder / name).write_bytes(table.tobytes())
        kinds[name] = table.dtype.str
    rows = {name: len(tables[name]) if name in tables else int(offsets[-1]) for name in kinds}
    return {
        "arrays": {name: {"dtype": kinds[name], "rows": rows[name]} for name in kinds},
        "crc32": {name: zlib.crc32(table.tobytes()) for name, table in tables.items()},
    }


def _stored(folder: Path, kinds: dict[str, str], offsets: NDArray[np.int64]) -> NDArray[np.uint32]:
    """(n,) checksums of the pairs of each system, read from the files."""
    widths = [WIDTHS[name] * np.dtype(kinds[name]).itemsize for name in PAIRS]
    with ExitStack() as stack:
        files = [stack.enter_context((folder / name).open("rb")) for name in PAIRS]
        found = [
            checksum(*(file.read(count * width) for file, width in zip(files, widths, strict=True)))
            for count in np.diff(offsets).tolist()
        ]
    return np.array(found, np.uint32)


def _columns(structures: Structures) -> tuple[dict[str, NDArray[np.int64]], NDArray[np.int64]]:
    """Receivers, senders and shifts within each system, and the number of its pairs."""
    assert structures.pairs is not None
    index_i, index_j, shift = (x.numpy() for x in structures.pairs)
    ptr = structures.ptr.numpy()
    count = np.diff(np.searchsorted(index_i, ptr))
    start = np.repeat(ptr[:-1], count)
    return {"receiver": index_i - start, "sender": index_j - start, "shift": shift}, count


def _append(file: Path, values: NDArray[np.int64], kind: str) -> str:
    """Write values at the end, and everything before anew if they need a wider type: which."""
    wider = kind
    while values.size and not _holds(wider, values):
        wider = _WIDER[wider]
    if wider != kind:
        _rewrite(file, kind, wider)
    with file.open("ab") as out:
        out.write(values.astype(wider).tobytes())
    return wider


def _holds(kind: str, values: NDArray[np.int64]) -> bool:
    limits = np.iinfo(kind)
    return bool(limits.min <= values.min() and values.max() <= limits.max)


def _rewrite(file: Path, before: str, after: str) -> None:
    narrow = file.with_suffix(".narrow")
    file.rename(narrow)
    with narrow.open("rb") as source, file.open("wb") as target:
        while block := source.read(_BLOCK):
            target.write(np.frombuffer(block, before).astype(after).tobytes())
    narrow.unlink()


def _publish(work: Path, path: Path) -> None:
    """Give the finished folder its name, unless there is a whole one by that name by now."""
    try:
        work.rename(path)
    except OSError:
        try:
            PairCache(path)
        except ValueError:
            path.rename(work / "damaged")
            work.rename(path)
            shutil.rmtree(path / "damaged", ignore_errors=True)
