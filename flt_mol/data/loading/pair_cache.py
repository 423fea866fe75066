"""Neighbour pairs of a whole data set on disk, to be found once and read in every epoch.

A cache is a folder with flat arrays, `receiver`, `sender` (within their system), `shift` (P, 3) and
`offsets` (n + 1,), the first pair of each system, and `header.json`, which says what they are. Its
name is made of what the pairs depend on: a data set that has changed, or another cutoff, gets a
folder of its own.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flt_mol.data.dataset import StructuresDataset
from flt_mol.functional.neighbors import NeighborPairs
from flt_mol.structures import Structures

__all__ = ["PairCache", "cache_name", "write_cache"]

FORMAT = 1
_WIDTHS = {"receiver": 1, "sender": 1, "shift": 3, "offsets": 1}
_WIDER = {"<u2": "<u4", "<u4": "<i8", "<i1": "<i2", "<i2": "<i8"}
_BLOCK = 2**24


class PairCache:
    """The pairs of every system of a data set, mapped into memory.

    Can be pickled and forked; the pairs stay on disk, and processes share them.

    Args:
        path: its folder, as :func:`write_cache` makes it.

    Attributes:
        path: its folder.
        cutoff: Å.

    Raises:
        ValueError: there is none, it is damaged, or of another version.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        header = self._header()
        self.cutoff = float(header["cutoff"])
        self._receiver, self._sender, self._shift, offsets = (
            self._map(name, header["arrays"][name], width) for name, width in _WIDTHS.items()
        )
        self._offsets = np.array(offsets, np.int64)
        if zlib.crc32(self._offsets.tobytes()) != header["offsets_crc32"]:
            raise ValueError(f"{self.path} is damaged: its offsets have changed")

    def __reduce__(self) -> tuple[type[PairCache], tuple[Path]]:
        return PairCache, (self.path,)

    def __len__(self) -> int:
        """Number of systems."""
        return len(self._offsets) - 1

    def counts(self) -> NDArray[np.int64]:
        """(n,) pairs of each system."""
        return np.diff(self._offsets)

    def attach(self, structures: Structures, indices: Sequence[int]) -> Structures:
        """`structures`, which are systems `indices` of the data set, with their pairs.

        The same pairs, in the same order, as ``structures.with_pairs(cutoff)`` finds.

        Raises:
            ValueError: pairs beyond the atoms of a system.
        """
        chosen = np.asarray(indices, np.int64)
        first, last = self._offsets[chosen], self._offsets[chosen + 1]
        spans = [slice(a, b) for a, b in zip(first.tolist(), last.tolist(), strict=True)]
        receiver, sender, shift = (
            np.concatenate([array[span] for span in spans], dtype=np.int64)
            for array in (self._receiver, self._sender, self._shift)
        )
        start, size = (
            np.repeat(x.cpu().numpy(), last - first)
            for x in (structures.ptr[:-1], structures.natoms)
        )
        if ((receiver >= size) | (sender >= size)).any():
            raise ValueError(
                f"{self.path} does not belong to this data set, or is damaged: it has pairs of "
                "atoms that are not there; delete it, and it is made again"
            )
        pairs = (receiver + start, sender + start, shift.reshape(-1, 3))
        return replace(
            structures,
            pairs=NeighborPairs(*(torch.from_numpy(x) for x in pairs)),
            cutoff=self.cutoff,
        )

    def _header(self) -> dict[str, Any]:
        try:
            stored = json.loads((self.path / "header.json").read_text(encoding="utf-8"))
            header, checksum = stored["header"], stored["crc32"]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{self.path} is no cache of pairs: {error}") from error
        if checksum != zlib.crc32(_text(header)) or header["format"] != FORMAT:
            raise ValueError(f"{self.path} is damaged, or of another version")
        return dict(header)

    def _map(self, name: str, array: dict[str, Any], width: int) -> NDArray[Any]:
        file, kind, rows = self.path / name, np.dtype(array["dtype"]), int(array["rows"])
        found = file.stat().st_size if file.is_file() else None
        expected = rows * width * kind.itemsize
        if found != expected:
            raise ValueError(f"{file} is damaged: {found} bytes, expected {expected}")
        shape = (rows, width) if width > 1 else (rows,)
        if rows == 0:
            return np.zeros(shape, kind)
        # As a plain array: slices of a memmap are slow to make.
        return np.asarray(np.memmap(file, kind, mode="r", shape=shape))


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
        stored = {"header": header, "crc32": zlib.crc32(_text(header))}
        (work / "header.json").write_text(json.dumps(stored), encoding="utf-8")
        _publish(work, path)
    except OSError as error:
        raise ValueError(f"the cache of pairs {path} could not be written: {error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def cache_name(dataset: Any, natoms: NDArray[np.int64], cutoff: float) -> str:
    """The name of a data set's cache: its own, the cutoff, and a digest of its state.

    For data sets on disk that is names, sizes and times of change of their files, the atoms of
    each system, and which records were skipped; for others all numbers that pairs depend on.
    """
    digest = hashlib.blake2b(digest_size=8)
    digest.update(f"{FORMAT} {float(cutoff)!r} {len(natoms)} ".encode())
    digest.update(np.asarray(natoms, "<i8").tobytes())
    files = _files(dataset)
    for file in files:
        status = file.stat()
        digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    if files:
        digest.update("\n".join(dataset.skipped).encode())
    else:
        for i in range(len(dataset)):
            system = dataset[i]
            for tensor in (system.positions, system.cell, system.pbc, system.ptr):
                digest.update(f"{tensor.dtype} ".encode() + tensor.cpu().numpy().tobytes())
    stem = dataset.path.stem if files else "systems"
    return f"{stem}-{cutoff:g}A-{digest.hexdigest()}"


def _files(dataset: Any) -> list[Path]:
    """The files that a data set reads; none if it is not on disk."""
    if not isinstance(dataset, StructuresDataset):
        return []
    files: list[Path] = []
    for part in getattr(dataset, "parts", [dataset]):
        path = Path(getattr(part, "file", part.path))
        inside = sorted(path.rglob("*")) if path.is_dir() else [path]
        found = [p for p in inside if p.is_file() and not p.name.endswith(("-lock", "lock.mdb"))]
        if not found:
            return []
        files += found
    return files


def _write_arrays(folder: Path, batches: Iterable[Structures]) -> dict[str, Any]:
    """Fill the files; returns what the header says of them."""
    kinds = {"receiver": "<u2", "sender": "<u2", "shift": "<i1"}
    for name in kinds:
        (folder / name).touch()
    counts = [np.zeros(1, np.int64)]
    for structures in batches:
        columns, count = _columns(structures)
        counts.append(count)
        for name, values in columns.items():
            kinds[name] = _append(folder / name, values, kinds[name])
    offsets = np.concatenate(counts).cumsum()
    kinds["offsets"] = _append(folder / "offsets", offsets, "<i8")
    rows = dict.fromkeys(kinds, int(offsets[-1])) | {"offsets": len(offsets)}
    return {
        "arrays": {name: {"dtype": kinds[name], "rows": rows[name]} for name in kinds},
        "offsets_crc32": zlib.crc32(offsets.tobytes()),
    }


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


def _text(header: dict[str, Any]) -> bytes:
    return json.dumps(header, sort_keys=True).encode()
