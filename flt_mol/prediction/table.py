"""Energies of structures in files, and the files that they are written to."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray

from flt_mol.data import StructuresDataset, to_ase
from flt_mol.files import check_suffix, some, temporary_path, write_rows
from flt_mol.prediction.energies import open_quietly, predict_structures
from flt_mol.prediction.members import load_members
from flt_mol.structures import Structures

SUFFIXES = (".csv", ".json", ".extxyz")
"""Of the files that `write_predictions` writes."""


@dataclass(frozen=True)
class Prediction:
    """The energy of one structure of a file.

    Args:
        name: the structure's sid; of files without sids, file name and frame; both are also added
            to sids that repeat.
        energy: eV; of an ensemble, the mean.
        file: the file that it was read from.
        std: of an ensemble, the standard deviation of its members (ddof = 1), eV; else None.
        frame: which record of the file, from 0.
        further: other outputs by name, as asked for: see `predict_files`.
    """

    name: str
    energy: float
    file: str
    std: float | None = None
    frame: int = 0
    further: dict[str, NDArray[np.float32]] = field(default_factory=dict, repr=False, compare=False)


def predict_files(
    model: Any,
    files: str | Path | Sequence[str | Path] | StructuresDataset,
    batch_size: int = 32,
    *,
    outputs: Sequence[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> list[Prediction]:
    """Energies of all structures of `files`, in order: LMDB, and all that ASE reads.

    Args:
        model: as of `load_members`.
        files: one path or several; a file may hold many frames. Or the data set of them, with
            options of `flt_mol.data.open_dataset`.
        batch_size: structures per call of the model, across files.
        outputs: of the model, to be kept too: "forces" (N, 3), eV/Å, "displacement" (N, 3), Å,
            "system_embeddings" (C,); of an ensemble, the means.
        progress: called with (structures done, structures in all) after each batch.

    Raises:
        ValueError: a `batch_size` below 1; files that cannot be read, and invalid records in them,
            before anything is predicted; an energy that is not finite.

    Warns:
        UserWarning: as `flt_mol.predict`, and sids that repeat.
    """
    members = load_members(model)
    opened: Any = files
    if not isinstance(opened, StructuresDataset):
        opened = open_quietly(files, check=members.check)
    opened.read_through()
    sids: list[str] = []
    further: dict[str, list[NDArray[np.float32]]] = {name: [] for name in outputs}

    def collect(batch: Structures, each: list[Any]) -> None:
        sids.extend(map(str, batch.sid))
        for name, values in further.items():
            mean = torch.stack([out[name] for out in each]).mean(0).cpu().numpy()
            per_system = name == "system_embeddings"
            values += [*mean] if per_system else np.split(mean, batch.ptr[1:-1].tolist())

    report = None if progress is None else lambda done: progress(done, len(opened))
    asked = {"embeddings": True} if "system_embeddings" in further else {}
    found = predict_structures(
        members, opened, batch_size, progress=report, collect=collect, **asked
    )
    rows = [(sid, *opened.place(i)) for i, sid in enumerate(sids)]
    mean = found.mean if members.ensemble else found
    std = found.std.tolist() if members.ensemble else [None] * len(rows)
    others = [{name: each[i] for name, each in further.items()} for i in range(len(rows))]
    columns = zip(_names(rows), mean.tolist(), rows, std, others, strict=True)
    return [
        Prediction(name, energy, str(path), deviation, frame, other)
        for name, energy, (_, path, frame), deviation, other in columns
    ]


def _names(rows: Sequence[tuple[str, Path, int]]) -> list[str]:
    """Sids of rows (sid, file, frame); where they repeat with #frame, file name, path or row."""
    names, inside = [sid for sid, _, _ in rows], Counter(row[:2] for row in rows)
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if not repeated:
        return names
    warnings.warn(f"sids that repeat get their frame or file: {some(repeated)}", stacklevel=3)
    names = short = [f"{x}#{frame}" if inside[x, file] > 1 else x for x, file, frame in rows]
    files = [file for _, file, _ in rows]
    for parts in ([file.name for file in files], files, range(len(rows))):
        counts, each = Counter(names), zip(names, parts, short, strict=True)
        names = [f"{part}:{base}" if counts[name] > 1 else name for name, part, base in each]
    return names


def write_embeddings(predictions: Sequence[Prediction], path: str | Path) -> Path:
    """Write "system_embeddings" as `.npz`: `sid` (S,), text, `embeddings` (S, C) float32."""
    rows = [p.further["system_embeddings"] for p in predictions]
    with temporary_path(path) as temporary, temporary.open("wb") as file:
        np.savez(file, sid=np.array([p.name for p in predictions]), embeddings=np.array(rows))
    return Path(path)


def write_predictions(
    predictions: Iterable[Prediction], path: str | Path, files: StructuresDataset | None = None
) -> Path:
    """Write `.csv` or `.json` (sid, energy, std, file; eV), or `.extxyz` (the structures).

    `std` is there for ensembles only. Numbers read back as the same float64. In `.extxyz` the
    energies are `energy_predicted` and `energy_predicted_std` in ``atoms.info``: not `energy`,
    which ASE takes for the total energy of these positions, nor `y_relaxed`, a target. Predictions
    with "forces" have these and their energy as ASE's own, too; those with "displacement" are
    written at the predicted relaxed positions. The file appears whole, or not at all.

    Args:
        predictions: as of `predict_files`.
        path: the file.
        files: for `.extxyz`, the structures that were predicted, in their order; if not given, the
            files that `predictions` name are read again.

    Raises:
        ValueError: another suffix; predictions that do not belong to the structures.
    """
    path, predictions = Path(path), list(predictions)
    suffix = check_suffix(path, SUFFIXES)
    is_ensemble = any(p.std is not None for p in predictions)
    columns = ["sid", "energy", *(["std"] if is_ensemble else []), "file"]
    rows = [{name: {**vars(p), "sid": p.name}[name] for name in columns} for p in predictions]
    if suffix == ".csv":
        return write_rows(path, [columns, *(list(row.values()) for row in rows)])
    with (
        temporary_path(path) as temporary,
        temporary.open("w", encoding="utf-8", errors="backslashreplace") as f,
    ):
        if suffix == ".extxyz":
            paths = list(dict.fromkeys(p.file for p in predictions))
            _write_extxyz(predictions, f, files or open_quietly(paths, "all"))
        else:
            json.dump(rows, f, indent=1, allow_nan=False)
    return path


def _write_extxyz(predictions: list[Prediction], f: IO[str], files: StructuresDataset) -> None:
    from ase.calculators.singlepoint import SinglePointCalculator
    from ase.io.extxyz import write_extxyz

    waiting = iter(predictions)
    prediction = next(waiting, None)
    for i in range(len(files)):
        path, frame = files.place(i)
        if prediction is None or (str(path), frame) != (prediction.file, prediction.frame):
            continue
        atoms: Any = to_ase(files[i])
        positions = files.record(i).get("pos")
        if positions is not None:  # as stored: structures are float32, and moved to the origin
            atoms.positions = positions
        atoms.info = {"sid": prediction.name, "energy_predicted": prediction.energy}
        if prediction.std is not None:
            atoms.info["energy_predicted_std"] = prediction.std
        if (forces := prediction.further.get("forces")) is not None:
            atoms.calc = SinglePointCalculator(atoms, energy=prediction.energy, forces=forces)
        if (displacement := prediction.further.get("displacement")) is not None:
            atoms.positions = atoms.positions + displacement
        write_extxyz(f, [atoms], write_results=forces is not None)
        prediction = next(waiting, None)
    if prediction is not None:
        raise ValueError(f"no structure in the files, or not in this order, for {prediction}")
