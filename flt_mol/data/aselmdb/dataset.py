"""`.aselmdb` files: rows of ASE's database in an LMDB, as newer sets of the OC20 family come.

Keys are ``1``, ``2``, … in ascii, with gaps where rows were deleted; values are JSON, compressed
by zlib. ``nextid`` holds the next key, ``deleted_ids`` those that are gone, ``metadata`` anything.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flt_mol.data.aselmdb.json_values import decode_json, dump, inflate, load
from flt_mol.data.aselmdb.rows import NAMES, Row, row_of
from flt_mol.data.lmdb.dataset import LmdbDataset
from flt_mol.data.lmdb.write import write_lmdb
from flt_mol.structures import Structures

__all__ = ["AseLmdbDataset", "encode_row", "write_aselmdb"]


class AseLmdbDataset(LmdbDataset):
    """Rows of one `.aselmdb` file as records of the OC20 schema.

    Numbers, positions, cell, pbc and tags are the row's; fixed are the atoms that its constraints
    hold; sid, y_relaxed, y_init, pos_relaxed and whatever else are looked up in the row's `data`,
    then in its `key_value_pairs`; a target of which the two hold different values is an error.
    The calculator's energy and forces are there as "energy" and "forces", and are not taken for
    the target, unless the option `energy` names "calculator".

    Objects other than arrays and numbers stay unread, and are an error where they are asked for.

    Args:
        path: the file, or the folder with `data.mdb` in it.
        options: how records are read.
        notes: shared by the parts of a larger data set.
        prefix: put before the key, where a row without sid is named by it.

    Raises:
        ValueError: as :class:`LmdbDataset`.

    Warns:
        UserWarning: `nextid` and `deleted_ids` disagree with the rows found; defaults taken for
            missing fields; each once.
    """

    def record(self, index: int) -> Row:  # type: ignore[override]
        """The stored fields of system `index`, by OC20's names.

        Raises:
            ValueError: a damaged row, naming file and key.
        """
        where = self.where(index)
        data = self._open().get(bytes(self._keys[index]))
        if data is None:
            raise ValueError(f"{where}: the record is gone; the file has changed, open it anew")
        return decode_row(data, where)

    def _at_once(self, indices: Sequence[int]) -> Structures | None:
        return None

    def metadata(self) -> Any:
        """What the file says of itself, None where it says nothing.

        Raises:
            ValueError: damaged metadata, naming the file.
        """
        data = self._open().get(b"metadata")
        try:
            return None if data is None else decode_json(load(inflate(data)))
        except ValueError as error:
            raise ValueError(f"{self.path}, key metadata: {error}") from error

    def _compare_counts(self, keys: Sequence[bytes]) -> None:
        """Warn where `nextid` and `deleted_ids` tell of more or fewer rows."""
        following, deleted = self._announced("nextid"), self._announced("deleted_ids")
        if following is None:
            super()._compare_counts(keys)
            return
        if type(following) is int and (deleted is None or isinstance(deleted, list)):
            announced: int | str = following - 1 - len(set(map(str, deleted or ())))
        else:
            announced = "an unreadable number of"
        if announced != len(keys):
            self.notes.add(
                {
                    f"length {self.file}": f"{self.file.name} says that it holds {announced} rows "
                    f"(nextid, deleted_ids), {len(keys)} are stored ({len(keys)} are read)"
                }
            )

    def _announced(self, name: str) -> Any:
        data = self._open().get(name.encode())
        try:
            return None if data is None else load(inflate(data))
        except ValueError:
            return "unreadable"


def decode_row(data: bytes, where: str) -> Row:
    """One stored row as a record.

    Args:
        data: JSON, plain or compressed by zlib.
        where: what to call it in errors, e.g. ``data.aselmdb, key 3``.

    Raises:
        ValueError: a damaged row, or one that is no row.
    """
    try:
        content = load(inflate(data))
    except ValueError as error:
        reason = str(error) or type(error).__name__
        raise ValueError(f"{where}: damaged row of {len(data)} bytes ({reason})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{where}: the row is a {type(content).__name__}, expected a JSON object")
    return Row(content, where)


def encode_row(record: Mapping[str, Any], where: str = "record", *, forces: bool = False) -> bytes:
    """A record of the OC20 schema as a row, the same bytes for the same record.

    Positions keep their float type, further fields their types; fixed atoms become `FixAtoms`; the
    graph is left out.

    Args:
        record: stored values by OC20's names.
        where: how errors name the record.
        forces: whether to keep the forces on the initial positions (`force`, `forces`), eV/Å.

    Raises:
        ValueError: a field that ASE's rows cannot hold, naming `where` and the field; a record
            that could not be read back.

    Example:
        >>> row = encode_row({"pos": [[0, 0, 0]], "atomic_numbers": [29], "sid": 7})
        >>> decode_row(row, "example")["sid"]
        7
    """
    row = row_of(record, where, forces=forces)
    try:
        text = dump(row)
    except (TypeError, ValueError):
        for field, value in row.pop("data").items():
            _must_dump(field, value, where)
        for column, value in row.items():
            _must_dump(NAMES.get(column, column), value, where)
        raise
    # ASE's rows have a random name; here it is made of what the row holds.
    name = hashlib.blake2b(text, digest_size=16).hexdigest()
    return zlib.compress(text[:-1] + f',"unique_id":"{name}"}}'.encode())


def _must_dump(field: str, value: Any, where: str) -> None:
    try:
        dump(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {field} {error}") from error


def write_aselmdb(
    path: str | Path,
    rows: Iterable[bytes],
    count: int | None = None,
    *,
    metadata: Mapping[str, Any] | None = None,
) -> int:
    """Write rows under the keys 1, 2, …; the same bytes for the same rows.

    The file has its name only when it is whole.

    Args:
        path: the file; overwritten.
        rows: as :func:`encode_row` makes them.
        count: how many there must be, if known.
        metadata: kept under the key `metadata`.

    Returns:
        How many rows were written.

    Raises:
        ValueError: no rows, or not `count` of them; the file is as it was before.
    """
    written = 0

    def items() -> Iterable[tuple[bytes, bytes]]:
        nonlocal written
        for row in rows:
            written += 1
            yield str(written).encode(), row
        if not written or count not in (None, written):
            raise ValueError(f"{path}: {written} rows to write, expected {count or 'some'}")
        yield b"nextid", zlib.compress(dump(written + 1))
        if metadata is not None:
            yield b"metadata", zlib.compress(dump(metadata))

    write_lmdb(path, items())
    return written
