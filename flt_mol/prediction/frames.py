"""Predicted structures as extended XYZ."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from flt_mol.data.conversion import write_frame
from flt_mol.files import temporary_path
from flt_mol.outputs import writing
from flt_mol.prediction.files import StructureFiles
from flt_mol.prediction.table import Prediction

__all__ = ["ENERGY", "SPREAD", "write_extxyz"]

ENERGY = "energy_predicted"
SPREAD = "energy_predicted_spread"
_EXPECTED = "give those of all structures of the files, in order, read in the same way"


def write_extxyz(
    predictions: Iterable[Prediction], path: str | Path, files: StructureFiles | None = None
) -> Path:
    """Write the structures with the predicted energies in their comment lines.

    `energy_predicted`, eV, and for ensembles `energy_predicted_spread`, are in ``atoms.info`` when
    ASE reads the file. They are not under `energy`, which ASE hands to a calculator as the total
    energy of these positions, while ours is an adsorption energy, after relaxation; nor under
    `y_relaxed`, so that no prediction is taken for a target. Kept are sid, cell, pbc, tags (as they
    were predicted with), fixed atoms, positions with all digits, and those further values that
    extxyz can hold; targets are not.

    Args:
        predictions: of all structures of `files`, in their order.
        path: the file; it appears whole, or not at all.
        files: the structures; if not given, the files that `predictions` name are read again.

    Raises:
        ValueError: predictions that do not belong to the structures, naming the first.
        OSError: what the system said, naming `path`.
    """
    path, predictions = Path(path), list(predictions)
    if files is None:
        files = StructureFiles(list(dict.fromkeys(p.file for p in predictions)))
    with (
        writing(path),
        temporary_path(path) as temporary,
        temporary.open("w", encoding="utf-8") as f,
    ):
        rest = iter(predictions)
        for _, structure, where in files.records():
            prediction = next(rest, None)
            if prediction is None or prediction.name != str(structure.sid[0]):
                told = "missing" if prediction is None else f"of {prediction.name}"
                raise ValueError(
                    f"{where}, sid {structure.sid[0]}: the prediction in its place is {told}; "
                    f"{_EXPECTED}"
                )
            values = {ENERGY: (prediction.energy,)}
            if prediction.spread is not None:
                values[SPREAD] = (prediction.spread,)
            info = {**structure.info, **values}
            write_frame(f, replace(structure, energy=None, energy_initial=None, info=info))
        if (one := next(rest, None)) is not None:
            raise ValueError(f"no structure is left for the prediction of {one.name}; {_EXPECTED}")
    return path
