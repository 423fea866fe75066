"""What is done to each chunk of a conversion: it is encoded, and its output compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flt_mol.data.conversion.record import Prepared, difference, left_out
from flt_mol.data.conversion.sizes import refuse_large
from flt_mol.data.conversion.work import Chunk, WorkFolder
from flt_mol.data.conversion.write import KINDS
from flt_mol.data.dataset import StructuresDataset
from flt_mol.data.fields import Fields
from flt_mol.structures import Structures

__all__ = ["Job", "Piece"]


@dataclass(frozen=True)
class Piece:
    """A chunk in the output.

    Args:
        number: of the chunk.
        skipped: places in the chunk that are left out.
        first: index of its first record in the output.
        start: bytes of the records before it.
        stop: bytes with its own records.
    """

    number: int
    skipped: frozenset[int]
    first: int
    start: int
    stop: int


@dataclass
class Job:
    """One conversion, as those who work on it need to know it; can be sent to other processes.

    Args:
        source: the records.
        indices: those to convert, in order.
        kind: name of the output's kind.
        work: the work folder.
        target: the output under its temporary name, file or folder.
        shard_size: records per file of a folder; None for one file.
        chunk_size: records per chunk.
        skip: whether bad records are left out.
        forces: whether forces are kept.
    """

    source: StructuresDataset
    indices: Sequence[int]
    kind: str
    work: WorkFolder
    target: Path
    shard_size: int | None
    chunk_size: int
    skip: bool
    forces: bool
    _opened: dict[int, StructuresDataset] = field(default_factory=dict)

    def __len__(self) -> int:
        """Number of chunks."""
        return -(-len(self.indices) // self.chunk_size)

    def chunk(self, number: int) -> Sequence[int]:
        """The source's indices of a chunk."""
        return self.indices[number * self.chunk_size : (number + 1) * self.chunk_size]

    def file(self, shard: int) -> Path:
        """A file of the output."""
        if self.shard_size is None:
            return self.target
        return self.target / f"data.{shard:04d}{KINDS[self.kind].suffix}"

    def encode(self, index: int) -> tuple[bytes, set[str]]:
        """A record encoded, and the names of its fields that have no place in the output.

        Raises:
            ValueError: a bad record, or one that this kind of file cannot hold.
        """
        record, structures = self._system(index)
        kind, where = KINDS[self.kind], self.source.where(index)
        refuse_large(structures, where)
        payload = kind.encode(record, structures, where, forces=self.forces)
        return payload, left_out(record, structures, self.source.options, self.forces)

    def make(self, number: int) -> None:
        """Encodes a chunk into the work folder.

        Raises:
            ValueError: a bad record, unless those are skipped.
        """
        payloads: list[bytes] = []
        dropped: set[str] = set()
        skipped: dict[int, str] = {}
        for place, index in enumerate(self.chunk(number)):
            try:
                payload, names = self.encode(index)
            except ValueError as error:
                if not self.skip:
                    raise
                skipped[place] = str(error)
            else:
                payloads.append(payload)
                dropped |= names
        self.work.write_chunk(number, Chunk(payloads, skipped, sorted(dropped)))

    def check(self, piece: Piece) -> None:
        """Compares a chunk of the output with the source.

        Raises:
            ValueError: a record that is not in the output as it was stored, naming the field.
        """
        kind, places = KINDS[self.kind], enumerate(self.chunk(piece.number))
        kept = [index for place, index in places if place not in piece.skipped]
        for index, (stored, found) in zip(kept, self._read_back(piece, len(kept)), strict=True):
            record, structures = self._system(index)
            where, sid = self.source.where(index), structures.sid[0]
            given, came_back = (Fields(r, where, sid) for r in (record, stored))
            exact = {**kind.exact, **({"force": kind.force} if self.forces and kind.force else {})}
            name = difference(given, structures, came_back, found, exact)
            if name is not None:
                given.fail(
                    name,
                    f"is not the same in the {self.kind} file as in the source; nothing was put "
                    "in place. This is an error of flt_mol: please report it with the record",
                )

    def close(self) -> None:
        """Lets go of the output's files."""
        self._opened.clear()

    def _system(self, index: int) -> tuple[Prepared, Structures]:
        record = self.source.record(index)
        structures = self.source.convert(index, record)
        return Prepared(record, structures, self.source.options), structures

    def _read_back(
        self, piece: Piece, count: int
    ) -> Iterator[tuple[Mapping[str, Any], Structures]]:
        """Records and systems of a part of the output, by the ordinary reader."""
        if not KINDS[self.kind].random_access:
            yield from self._read_cut(piece) if count else ()
            return
        for index in range(piece.first, piece.first + count):
            shard, inside = divmod(index, self.shard_size or index + 1)
            if shard not in self._opened:
                self._opened = {shard: KINDS[self.kind].open(self.file(shard))}
            yield _item(self._opened[shard], inside)

    def _read_cut(self, piece: Piece) -> Iterator[tuple[Mapping[str, Any], Structures]]:
        """The same, where a file is read as a whole: the piece is cut out into a file first."""
        kind = KINDS[self.kind]
        cut = self.work.path / f"check-{piece.number:08d}{kind.suffix}"
        try:
            with self.file(0).open("rb") as file:
                file.seek(piece.start)
                cut.write_bytes(file.read(piece.stop - piece.start))
            dataset = kind.open(cut)
        finally:
            cut.unlink(missing_ok=True)
        yield from (_item(dataset, index) for index in range(len(dataset)))


def _item(dataset: StructuresDataset, index: int) -> tuple[Mapping[str, Any], Structures]:
    record = dataset.record(index)
    return record, dataset.convert(index, record)
