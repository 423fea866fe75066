"""The kinds of files that records are converted to: encoding, writing, reading back."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from flt_mol.data.dataset import Notes, StructuresDataset
from flt_mol.files import temporary_path
from flt_mol.structures import Structures

__all__ = ["KINDS", "Kind", "Silent"]


_SAME = {name: name for name in ("pos", "pos_relaxed", "cell")}


class Silent(Notes):
    """Notes that nobody hears: of a file that was just written and is read back."""

    def add(self, kinds: Mapping[str, str]) -> None:
        """Nothing."""


class Kind:
    """One kind of output.

    Attributes:
        suffix: of its files.
        exact: stored fields that come back with their float type, too, and their names then.
        force: what it calls forces; None where it holds none.
        shards: whether it may be split into several files of a folder.
        random_access: whether a record can be read without reading the others.
    """

    suffix: str
    exact: Mapping[str, str] = _SAME
    force: str | None = "force"
    shards = False
    random_access = True

    @abstractmethod
    def encode(
        self, record: Mapping[str, Any], structures: Structures, where: str, *, forces: bool
    ) -> bytes:
        """One record."""

    @abstractmethod
    def write(
        self, path: Path, payloads: Iterator[bytes], count: int, metadata: Mapping[str, Any]
    ) -> None:
        """A file of `count` encoded records."""

    @abstractmethod
    def open(self, path: Path) -> StructuresDataset:
        """The file with the ordinary reader, without its warnings."""


class _Compact(Kind):
    suffix = ".lmdb"
    shards = True

    def encode(
        self, record: Mapping[str, Any], structures: Structures, where: str, *, forces: bool
    ) -> bytes:
        from flt_mol.data.compact import encode

        return encode(record, where, forces=forces)

    def write(
        self, path: Path, payloads: Iterator[bytes], count: int, metadata: Mapping[str, Any]
    ) -> None:
        from flt_mol.data.compact.blocks import in_blocks
        from flt_mol.data.compact.writing import write_compact

        write_compact(path, in_blocks(payloads), count, metadata)

    def open(self, path: Path) -> StructuresDataset:
        from flt_mol.data.compact.dataset import CompactDataset

        return CompactDataset(path, notes=Silent(str(path)))


class _AseLmdb(Kind):
    suffix = ".aselmdb"
    force = "forces"

    def encode(
        self, record: Mapping[str, Any], structures: Structures, where: str, *, forces: bool
    ) -> bytes:
        from flt_mol.data.aselmdb.dataset import encode_row

        for name, (value,) in structures.info.items():
            if not _in_json(value):
                raise ValueError(
                    f"{where}, sid {structures.sid[0]}: {name} is a {type(value).__name__} that "
                    ".aselmdb does not keep as it is; convert to .lmdb, which does"
                )
        return encode_row(record, where, forces=forces)

    def write(
        self, path: Path, payloads: Iterator[bytes], count: int, metadata: Mapping[str, Any]
    ) -> None:
        from flt_mol.data.aselmdb.dataset import write_aselmdb

        write_aselmdb(path, payloads, count, metadata=metadata)

    def open(self, path: Path) -> StructuresDataset:
        from flt_mol.data.aselmdb.dataset import AseLmdbDataset

        return AseLmdbDataset(path, notes=Silent(str(path)))


class _ExtXyz(Kind):
    suffix = ".extxyz"
    exact: Mapping[str, str] = {}
    force = None
    random_access = False

    def encode(
        self, record: Mapping[str, Any], structures: Structures, where: str, *, forces: bool
    ) -> bytes:
        from flt_mol.data.conversion.extxyz import encode_frame

        return encode_frame(record, structures, where)

    def write(
        self, path: Path, payloads: Iterable[bytes], count: int, metadata: Mapping[str, Any]
    ) -> None:
        with temporary_path(path) as temporary, temporary.open("wb") as file:
            file.writelines(payloads)

    def open(self, path: Path) -> StructuresDataset:
        from flt_mol.data.ase.dataset import AseDataset

        return AseDataset(path, notes=Silent(str(path)))


def _in_json(value: Any) -> bool:
    """Whether JSON, in which there are no tuples, gives a value back with all its types."""
    if type(value) in (bool, int, float, str, complex):
        return True
    try:
        return repr(json.loads(json.dumps(value))) == repr(value)
    except (TypeError, ValueError, RecursionError):
        return False


KINDS: dict[str, Kind] = {"lmdb": _Compact(), "aselmdb": _AseLmdb(), "extxyz": _ExtXyz()}
