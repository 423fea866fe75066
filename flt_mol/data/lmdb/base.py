"""What data sets in one LMDB file have in common."""

from __future__ import annotations

import os
from abc import abstractmethod
from pathlib import Path
from typing import Any

from flt_mol.data.dataset import Notes, StructuresDataset
from flt_mol.data.lmdb.file import Environment, stamp
from flt_mol.data.options import ReadOptions

__all__ = ["LmdbFileDataset", "data_file"]


def data_file(path: Path) -> Path:
    """The file itself: `data.mdb` of LMDB's folder form, and where a link leads."""
    inside = path / "data.mdb"
    # Unlike Path.resolve, this does not mind a loop of links.
    return Path(os.path.realpath(inside if inside.is_file() else path))


class LmdbFileDataset(StructuresDataset):
    """Records of one LMDB file, opened by whoever reads, once per process, and not written to.

    It can be pickled, forked, and opened twice. Subclasses give `_read_index` and `number`.

    Args:
        path: the file, or the folder with `data.mdb` in it.
        options: how records are read.
        notes: shared by the parts of a larger data set.
        prefix: put before the number of a record, where one without sid is named by it.

    Raises:
        ValueError: a file that is no LMDB file, is truncated, or holds no records; where targets
            are required, a file without them.

    Warns:
        UserWarning: the file announces more or fewer records than are found; defaults taken for
            missing fields; each once.
    """

    def __init__(
        self,
        path: str | Path,
        options: ReadOptions | None = None,
        *,
        notes: Notes | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__(path, options, notes=notes)
        self.file = data_file(self.path)
        self.prefix = prefix
        self._environment: Environment | None = None
        try:
            self._stamp = stamp(self.file)
            self._read_index()
        except ValueError as error:
            if str(self.path) in str(error):
                raise
            raise ValueError(f"{self.path}: {error}") from error
        self._check()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_environment": None}

    @abstractmethod
    def _read_index(self) -> None:
        """Find out which records there are."""

    @abstractmethod
    def number(self, index: int) -> int:
        """The number under which the file holds system `index`."""

    def default_sid(self, index: int) -> int | str:
        """The number, for a record without sid."""
        number = self.number(index)
        return f"{self.prefix}{number}" if self.prefix else number

    def _open(self) -> Environment:
        environment = self._environment
        if environment is None or not environment.usable:
            changed = stamp(self.file) != self._stamp
        else:
            changed = environment.overwritten
        if changed:
            raise ValueError(f"{self.path} has changed since it was opened; open it anew")
        if environment is None or not environment.usable:
            environment = self._environment = Environment.of(self.file)
        return environment

    def _compare(self, announced: int | str | None, count: int, gaps: str | None) -> None:
        """Warn where the file says that it holds more or fewer records, or has gaps."""
        kinds: dict[str, str] = {}
        if announced is not None and announced != count:
            kinds[f"length {self.file}"] = (
                f"{self.file.name} says that it holds {announced} records, {count} are stored "
                f"({count} are read)"
            )
        if gaps is not None:
            kinds[f"gaps {self.file}"] = f"{gaps} ({count} are read)"
        self.notes.add(kinds)
