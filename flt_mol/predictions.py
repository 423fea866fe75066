"""The table of predicted energies, and its files."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from flt_mol.files import temporary_path
from flt_mol.outputs import writing

__all__ = ["Prediction", "write_predictions"]


@dataclass(frozen=True)
class Prediction:
    """The energy of one structure of a file.

    Args:
        name: the structure's sid, as stored; of files without sids, file name and frame.
        energy: eV.
        file: the file that it was read from, as given.
    """

    name: str
    energy: float
    file: str


def write_predictions(predictions: Iterable[Prediction], path: str | Path) -> Path:
    """Write `.csv` (columns sid,energy,file) or `.json` (a list of such objects), eV.

    The file appears whole, or not at all; numbers read back as the same float64.

    Raises:
        ValueError: another suffix.
        OSError: what the system said, naming `path`.
    """
    path = Path(path)
    rows = [{"sid": p.name, "energy": p.energy, "file": p.file} for p in predictions]
    suffix = path.suffix.lower()
    if suffix not in (".csv", ".json"):
        raise ValueError(f"cannot write predictions to {path}: use a name ending in .csv or .json")
    with (
        writing(path),
        temporary_path(path) as temporary,
        # A file's name may hold bytes that are no UTF-8.
        temporary.open("w", newline="", encoding="utf-8", errors="backslashreplace") as f,
    ):
        if suffix == ".json":
            json.dump(rows, f, indent=1, allow_nan=False)
            f.write("\n")
        else:
            writer = csv.DictWriter(f, ["sid", "energy", "file"], lineterminator="\n")
            writer.writeheader()
            writer.writerows({**row, "energy": repr(row["energy"])} for row in rows)
    return path
