"""Neighbour pairs of a whole data set on disk, to be found once and read in every epoch.

A cache is a folder with flat arrays: `receiver`, `sender` (within their system), `shift` (P, 3),
`offsets` (n + 1,), the first pair of each system, and `checksums` (n, 2), of its pairs and of the
geometry they were searched in; and with `header.json`, which says what they are. Its name is made
of what the pairs depend on: a data set that has changed, or another cutoff, gets a folder of its
own. Checksums are compared whenever pairs are read: wrong ones are never used.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flt_mol.data.dataset import StructuresDataset
from flt_mol.functional.neighbors import NeighborPairs
from flt_mol.structures import Structures

__all__ = [
    "FORMAT",
    "PAIRS",
    "WIDTHS",
    "PairCache",
    "cache_name",
    "checksum",
    "checksums_of_geometry",
    "header_crc32",
]

FORMAT = 2
PAIRS = ("receiver", "sender", "shift")
_TABLES = ("offsets", "checksums")
WIDTHS = {"receiver": 1, "sender": 1, "shift": 3, "offsets": 1, "checksums": 2}
_SAMPLED = 64


class PairCache:
    """The pairs of every system of a data set, mapped into memory.

    Can be pickled and forked; the pairs stay on disk, and processes share them.

    Args:
        path: its folder, as :func:`flt_mol.data.cached_pairs` makes it.

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
        arrays = {name: self._map(name, header["arrays"][name]) for name in WIDTHS}
        for name in _TABLES:
            if zlib.crc32(arrays[name].data) != header["crc32"][name]:
                raise ValueError(f"{self.path} is damaged: its {name} have changed")
        self._pairs = tuple(arrays[name] for name in PAIRS)
        # In memory: they are looked up at random.
        self._offsets, self._checksums = (arrays[name].copy() for name in _TABLES)

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
            ValueError: pairs that have changed on disk, or of other positions, cell or pbc than
                those of `structures`; not one index of the data set for each system.
        """
        chosen = np.asarray(indices, np.int64)
        if len(chosen) != len(structures) or ((chosen < 0) | (chosen >= len(self))).any():
            raise ValueError(
                f"{self.path} holds pairs of {len(self)} systems, and {len(structures)} were asked "
                f"for by indices {chosen.tolist()}: give each its index, from 0"
            )
        first, last = self._offsets[chosen], self._offsets[chosen + 1]
        spans = [slice(a, b) for a, b in zip(first.tolist(), last.tolist(), strict=True)]
        parts = [[array[span] for span in spans] for array in self._pairs]
        found = np.array([checksum(*x) for x in zip(*parts, strict=True)], np.uint32)
        self._compare(
            chosen, np.stack([found, checksums_of_geometry(structures)], axis=1), structures
        )
        receiver, sender, shift = (np.concatenate(x, dtype=np.int64) for x in parts)
        start = np.repeat(structures.ptr[:-1].cpu().numpy(), last - first)
        pairs = (receiver + start, sender + start, shift)
        return replace(
            structures,
            pairs=NeighborPairs(*(torch.from_numpy(x) for x in pairs)),
            cutoff=self.cutoff,
        )

    def _compare(
        self, chosen: NDArray[np.int64], found: NDArray[np.uint32], structures: Structures
    ) -> None:
        wrong = found != self._checksums[chosen]
        if not wrong.any():
            return
        at = int(wrong.any(axis=1).argmax())
        what = (
            "is damaged: the pairs of sid {} have changed"
            if wrong[at, 0]
            else "is the cache of another data set: positions, cell or pbc of sid {} are not those "
            "that its pairs were searched in"
        )
        raise ValueError(
            f"{self.path} {what.format(structures.sid[at])}; delete this folder, and it is made "
            "again when the loader is"
        )

    def _header(self) -> dict[str, Any]:
        try:
            stored = json.loads((self.path / "header.json").read_text(encoding="utf-8"))
            header, expected = stored["header"], stored["crc32"]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{self.path} is no cache of pairs: {error}") from error
        if expected != header_crc32(header) or header["format"] != FORMAT:
            raise ValueError(f"{self.path} is damaged, or of another version")
        return dict(header)

    def _map(self, name: str, array: dict[str, Any]) -> NDArray[Any]:
        file, kind, rows = self.path / name, np.dtype(array["dtype"]), int(array["rows"])
        width = WIDTHS[name]
        found = file.stat().st_size if file.is_file() else None
        expected = rows * width * kind.itemsize
        if found != expected:
            raise ValueError(f"{file} is damaged: {found} bytes, expected {expected}")
        shape = (rows, width) if width > 1 else (rows,)
        if rows == 0:
            return np.zeros(shape, kind)
        # As a plain array: slices of a memmap are slow to make.
        return np.asarray(np.memmap(file, kind, mode="r", shape=shape))


def cache_name(dataset: Any, natoms: NDArray[np.int64], cutoff: float) -> str:
    """The name of a data set's cache: its own, the cutoff, and a digest of its state.

    For data sets on disk that is names, sizes and times of change of their files, the atoms of
    each system, which records were skipped, and all numbers that pairs depend on of 64 systems,
    spread evenly; for others these of all systems.
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
        sampled = np.linspace(0, len(dataset) - 1, min(_SAMPLED, len(dataset))).astype(np.int64)
        systems: Iterable[Structures] = [dataset.batch(sampled.tolist())] if len(sampled) else []
    else:
        systems = (dataset[i] for i in range(len(dataset)))
    for system in systems:
        for array in (*_geometry(system), system.ptr.cpu().numpy()):
            digest.update(array.tobytes())
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


def _geometry(structures: Structures) -> tuple[NDArray[Any], ...]:
    """Positions, cell and pbc. As float64, which holds float32 exactly: the same in any batch."""
    positions, cell = (
        x.cpu().numpy().astype("<f8", order="C") for x in (structures.positions, structures.cell)
    )
    return positions, cell, structures.pbc.cpu().numpy()


def checksums_of_geometry(structures: Structures) -> NDArray[np.uint32]:
    """(B,) checksums of what the pairs of each system depend on."""
    positions, *others = _geometry(structures)
    ptr = structures.ptr.tolist()
    rows = (positions[a:b] for a, b in pairwise(ptr))
    return np.array([checksum(*x) for x in zip(rows, *others, strict=True)], np.uint32)


def checksum(*buffers: Any) -> int:
    """Of several buffers, one after the other."""
    value = 0
    for buffer in buffers:
        value = zlib.crc32(buffer, value)
    return value


def header_crc32(header: dict[str, Any]) -> int:
    """What the header is checked by."""
    return zlib.crc32(json.dumps(header, sort_keys=True).encode())
