"""Energies of structures in files, and the files that they are written to."""

from __future__ import annotations

import csv
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any

from flt_mol.data import StructuresDataset, open_dataset, to_ase
from flt_mol.data.recipes import skipped_message
from flt_mol.files import temporary_path
from flt_mol.prediction.energies import predict_structures
from flt_mol.prediction.members import load_members
from flt_mol.structures import Structures

SUFFIXES = (".csv", ".json", ".extxyz")
"""Of the files that :func:`write_predictions` writes."""

_SHOWN = 5
_READ = 64  # structures read together


@dataclass(frozen=True)
class Prediction:
    """The energy of one structure of a file.

    Args:
        name: the structure's sid; of files without sids, file name and frame.
        energy: eV; of an ensemble, the mean.
        file: the file that it was read from, as given.
        spread: of an ensemble, the standard deviation of its members (ddof = 1), eV; else None.
    """

    name: str
    energy: float
    file: str
    spread: float | None = None


class StructureFiles:
    """The structures of several files, in order: LMDB, and all that ASE reads; targets are ignored.

    Args:
        files: one path or several; a file may hold many frames.
        skip_bad: skip invalid records, with a warning that counts and names them.
        prepare: applied to each structure when it is read, such as tagging a slab; a ValueError of
            it makes an invalid record.
        check: of structures, as of :func:`flt_mol.data.open_dataset`.
        layer_numbers: as of :func:`flt_mol.data.open_dataset`.

    Raises:
        ValueError: the first file that cannot be read.

    Warns:
        UserWarning: skipped records, and what reading the files warns of.
    """

    def __init__(
        self,
        files: str | Path | Sequence[str | Path],
        *,
        skip_bad: bool = False,
        prepare: Callable[[Structures], Structures] | None = None,
        check: Callable[[Structures], None] | None = None,
        layer_numbers: bool = False,
    ) -> None:
        self.paths = [files] if isinstance(files, str | Path) else list(files)
        self.prepare, self.skip_bad = prepare, skip_bad
        self.unprepared: dict[str, None] = {}
        self.datasets: list[StructuresDataset] = []
        for path in self.paths:
            dataset = open_dataset(
                path,
                ignore_energy=True,
                on_error="skip" if skip_bad else "raise",
                check=check,
                layer_numbers=layer_numbers,
            )
            self.datasets.append(dataset)
            if dataset.skipped:
                warnings.warn(skipped_message(dataset), UserWarning, stacklevel=3)

    def __len__(self) -> int:
        return sum(len(dataset) for dataset in self.datasets)

    def __iter__(self) -> Iterator[tuple[Structures, StructuresDataset, int]]:
        """Each structure, as it is predicted, with its data set and its place there."""
        for dataset in self.datasets:
            for start in range(0, len(dataset), _READ):
                rows = range(start, min(start + _READ, len(dataset)))
                batch = dataset.batch(rows)
                for b, row in enumerate(rows):
                    try:
                        one = self.prepare(batch[b]) if self.prepare else batch[b]
                    except ValueError as error:
                        if not self.skip_bad:
                            raise
                        self.unprepared[str(error)] = None
                    else:
                        yield one, dataset, row


def predict_files(
    model: Any,
    files: str | Path | Sequence[str | Path] | StructureFiles,
    batch_size: int = 32,
    *,
    skip_bad: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> list[Prediction]:
    """Energies of all structures of `files`, in order: LMDB, and all that ASE reads.

    Args:
        model: as of :func:`~flt_mol.prediction.members.load_members`.
        files: one path or several; a file may hold many frames. Or what they were opened as.
        batch_size: structures per call of the model, across files.
        skip_bad: skip invalid records, with a warning that counts and names them.
        progress: called with (structures done, structures in all) after each batch.

    Raises:
        ValueError: a `batch_size` below 1; files that cannot be read, and invalid records in them,
            before anything is predicted; an energy that is not finite.

    Warns:
        UserWarning: as :func:`flt_mol.predict`.
    """
    members = load_members(model)
    opened = files
    if not isinstance(opened, StructureFiles):
        opened = StructureFiles(opened, skip_bad=skip_bad, check=members.check)
    paths = {}
    for path, dataset in zip(opened.paths, opened.datasets, strict=True):
        dataset.read_through()
        paths[id(dataset)] = str(path)
    names: list[tuple[str, str]] = []

    def structures() -> Iterator[Structures]:
        for one, dataset, _ in opened:
            names.append((str(one.sid[0]), paths[id(dataset)]))
            yield one

    report = None if progress is None else lambda done: progress(done, len(opened))
    found = predict_structures(members, structures(), batch_size, progress=report)
    if opened.unprepared:
        reasons = [f"skipped {len(opened.unprepared)} structures:", *opened.unprepared]
        warnings.warn("\n  ".join(reasons[: _SHOWN + 1]), UserWarning, stacklevel=2)
    mean = found.mean if members.ensemble else found
    spread = found.spread.tolist() if members.ensemble else [None] * len(names)
    return [
        Prediction(name, energy, path, spread=deviation)
        for (name, path), energy, deviation in zip(names, mean.tolist(), spread, strict=True)
    ]


def write_predictions(
    predictions: Iterable[Prediction], path: str | Path, files: StructureFiles | None = None
) -> Path:
    """Write `.csv` or `.json` (sid, energy, spread, file; eV), or `.extxyz` (the structures).

    `spread` is there for ensembles only. Numbers read back as the same float64. In `.extxyz`
    the energies are `energy_predicted` and `energy_predicted_spread` in ``atoms.info``: not
    `energy`, which ASE takes for the total energy of these positions, nor `y_relaxed`, a target.
    The file appears whole, or not at all.

    Args:
        predictions: as of :func:`predict_files`.
        path: the file.
        files: for `.extxyz`, the structures that were predicted; if not given, the files that
            `predictions` name are read again.

    Raises:
        ValueError: another suffix; predictions that do not belong to the structures.
    """
    path, predictions = Path(path), list(predictions)
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        names = " or ".join(SUFFIXES)
        raise ValueError(f"cannot write predictions to {path}: use a name ending in {names}")
    is_ensemble = any(p.spread is not None for p in predictions)
    columns = ["sid", "energy", *(["spread"] if is_ensemble else []), "file"]
    rows = [{name: {**vars(p), "sid": p.name}[name] for name in columns} for p in predictions]
    with (
        temporary_path(path) as temporary,
        # A file's name may hold bytes that are not UTF-8.
        temporary.open("w", newline="", encoding="utf-8", errors="backslashreplace") as f,
    ):
        if suffix == ".extxyz":
            opened = files or StructureFiles(list(dict.fromkeys(p.file for p in predictions)))
            _write_extxyz(predictions, f, opened)
        elif suffix == ".json":
            json.dump(rows, f, indent=1, allow_nan=False)
        else:
            writer = csv.DictWriter(f, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    return path


def _write_extxyz(predictions: list[Prediction], f: IO[str], files: StructureFiles) -> None:
    from ase.io.extxyz import write_extxyz

    for prediction, item in zip_longest(predictions, files):
        if prediction is None or item is None or str(item[0].sid[0]) != prediction.name:
            sid = "none" if item is None else item[0].sid[0]
            raise ValueError(f"the predictions are of other structures: {prediction} at sid {sid}")
        structure, dataset, row = item
        atoms: Any = to_ase(structure)
        positions = dataset.record(row).get("pos")
        if positions is not None:  # as stored: structures are float32, and moved to the origin
            atoms.positions = positions
        atoms.info = {"sid": structure.sid[0], "energy_predicted": prediction.energy}
        if prediction.spread is not None:
            atoms.info["energy_predicted_spread"] = prediction.spread
        write_extxyz(f, [atoms], write_results=False)
