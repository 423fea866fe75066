"""The table of predicted energies, and its files."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flt_mol.files import temporary_path
from flt_mol.outputs import writing

if TYPE_CHECKING:
    from flt_mol.prediction.files import StructureFiles

__all__ = ["SUFFIXES", "Prediction", "write_predictions"]

SUFFIXES = (".csv", ".json", ".extxyz")


@dataclass(frozen=True)
class Prediction:
    """The energy of one structure of a file.

    Args:
        name: the structure's sid, as stored; of files without sids, file name and frame.
        energy: eV; of an ensemble, the mean.
        file: the file that it was read from, as given.
        spread: of an ensemble, the standard deviation of its members (ddof = 1), eV; else None.
    """

    name: str
    energy: float
    file: str
    spread: float | None = None


def write_predictions(
    predictions: Iterable[Prediction], path: str | Path, files: StructureFiles | None = None
) -> Path:
    """Write `.csv` or `.json` (sid, energy, spread, file; eV), or `.extxyz` (the structures).

    Columns of `.csv` are the names of the objects in the list of `.json`; `spread` is there for
    ensembles only. `.extxyz`: see :func:`flt_mol.predict.write_extxyz`. The file appears whole, or
    not at all; numbers read back as the same float64.

    Args:
        predictions: as of :func:`flt_mol.predict.predict_files`.
        path: the file.
        files: for `.extxyz`, the structures that were predicted; if not given, the files that
            `predictions` name are read again.

    Raises:
        ValueError: another suffix.
        OSError: what the system said, naming `path`.
    """
    path = Path(path)
    predictions = list(predictions)
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        names = " or ".join(SUFFIXES)
        raise ValueError(f"cannot write predictions to {path}: use a name ending in {names}")
    if suffix == ".extxyz":
        from flt_mol.prediction.frames import write_extxyz

        return write_extxyz(predictions, path, files)
    columns = ["sid", "energy", "spread", "file"]
    if all(p.spread is None for p in predictions):
        columns.remove("spread")
    with (
        writing(path),
        temporary_path(path) as temporary,
        # A file's name may hold bytes that are no UTF-8.
        temporary.open("w", newline="", encoding="utf-8", errors="backslashreplace") as f,
    ):
        if suffix == ".json":
            json.dump([_row(p, columns) for p in predictions], f, indent=1, allow_nan=False)
            f.write("\n")
        else:
            writer = csv.DictWriter(f, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(_exact(_row(p, columns)) for p in predictions)
    return path


def _row(prediction: Prediction, columns: Iterable[str]) -> dict[str, Any]:
    values = {
        "sid": prediction.name,
        "energy": prediction.energy,
        "spread": prediction.spread,
        "file": prediction.file,
    }
    return {name: values[name] for name in columns}


def _exact(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: repr(v) if isinstance(v, float) else v for name, v in row.items()}
