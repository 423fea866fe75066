"""What files of text announce, which ASE would believe: atoms and columns that are not there."""

from __future__ import annotations

import io
import re
from itertools import islice
from pathlib import Path
from typing import IO, Any

__all__ = ["check_counts", "check_frames", "open_text"]

_DIGITS = 30
_COLUMNS = 1000  # of a frame without atoms


def check_counts(path: Path) -> None:
    """A POSCAR or XDATCAR of more atoms than bytes would take all memory.

    Of elements without a number of atoms, ASE would leave the atoms out without a word.

    Raises:
        ValueError: with the numbers.
    """
    with open_text(path) as file:
        words = [re.split("[!#]", line)[0].split() for line in islice(file, 5, 7)]
    counts = [[word for word in line if word.isdecimal()] for line in words]
    total = sum(int(word) for line in counts for word in line)
    if total > path.stat().st_size:
        raise ValueError(f"{total} atoms are announced in {path.stat().st_size} bytes")
    if len(words) == 2 and not counts[0] and len(counts[1]) != len(words[0]):
        raise ValueError(
            f"line 6 names {len(words[0])} elements, line 7 gives {len(counts[1])} numbers of atoms"
        )


def check_frames(path: Path, most: int, columns: bool) -> None:
    """Frames of more atoms than bytes: ASE would count lines beyond the end for ever.

    With `columns`, too, of more columns than there is room for in the line of the first atom: ASE
    would make a type of them all.

    Raises:
        ValueError: with the line.
    """
    with open_text(path) as file:
        number = 1
        for line in file:
            if not line.strip().isdecimal():
                return
            count = int(line[:_DIGITS])
            if count > most:
                raise ValueError(f"line {number} announces {count} atoms, more than the file has")
            lines = list(islice(file, min(count + 1, 2)))
            if columns and lines and "Properties" in lines[0]:
                announced, room = _columns(lines[0].strip()), len(lines[-1]) if count else 0
                if announced > max(room, _COLUMNS):
                    raise ValueError(
                        f"line {number + 1} announces {announced} columns, more than the line of "
                        "an atom has"
                    )
            number += 1 + len(lines) + sum(1 for _ in islice(file, max(count - 1, 0)))


def _columns(comment: str) -> int:
    """How many columns the comment of a frame announces, 0 where ASE cannot say."""
    from ase.io.extxyz import key_val_str_to_dict

    try:
        announced = str(key_val_str_to_dict(comment)["Properties"]).split(":")[2::3]
        return sum(max(int(n), 0) for n in announced)
    except Exception:  # left to ASE, which reads the line in the same way
        return 0


def open_text(path: Path) -> IO[str]:
    """The file as text, unpacked if its name says that it is compressed."""
    from ase.io.formats import open_with_compression

    binary: Any = open_with_compression(str(path), "rb")
    return io.TextIOWrapper(binary, errors="replace")
