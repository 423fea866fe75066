"""What was measured, one line of JSON for each trained model."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["Results", "fingerprint"]


def fingerprint(*parts: Any) -> str:
    """Twelve hexadecimal digits that change with any setting in `parts`, which are plain data.

    Example:
        >>> fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
        True
        >>> fingerprint({"a": 1}) == fingerprint({"a": 1.5})
        False
    """
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class Results:
    """A file of JSON lines, to which several processes may append, and any may be killed.

    A line is one write, so it is there or not; if a crash tears one all the same, it is left out on
    reading, and the next line starts afresh.

    Args:
        path: the file; it and its folders are made with the first line.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     results = Results(Path(folder) / "results.jsonl")
        ...     results.append({"row": "ours", "seed": 0})
        ...     results.read()
        [{'row': 'ours', 'seed': 0}]
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def read(self) -> list[dict[str, Any]]:
        """All whole lines, in order; none where there is no file."""
        return [record for _, record in self._numbered()]

    def _numbered(self) -> list[tuple[int, dict[str, Any]]]:
        """With the numbers that an editor gives to lines."""
        if not self.path.exists():
            return []
        found = []
        for number, line in enumerate(self.path.read_bytes().split(b"\n"), 1):
            try:
                record = json.loads(line)
            except ValueError:  # torn, or empty
                continue
            if isinstance(record, dict):
                found.append((number, record))
        return found

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a line.

        Raises:
            ValueError: numbers that are not finite.
        """
        line = json.dumps(dict(record), allow_nan=False).encode() + b"\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            if file.tell() and (file.seek(-1, os.SEEK_END), file.read())[1] != b"\n":
                line = b"\n" + line
            file.write(line)

    def find(self, **values: Any) -> list[dict[str, Any]]:
        """Lines in which these names have these values; of several of one seed the last.

        Raises:
            ValueError: such a line without a whole number as its seed, naming file and line.
        """
        found = {}
        for number, record in self._numbered():
            if any(record.get(name) != value for name, value in values.items()):
                continue
            seed = record.get("seed")
            if type(seed) is not int:
                raise ValueError(
                    f"{self.path}, line {number}: seed is {seed!r}, expected a whole number; mend "
                    "the line or take it out"
                )
            found[seed] = record
        return [found[seed] for seed in sorted(found)]
