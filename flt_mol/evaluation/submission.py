"""The file that OC20's public IS2RE leaderboard takes: energies of four test splits in one .npz."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flt_mol.evaluation.energy_tables import EnergyTable
from flt_mol.files import temporary_path

__all__ = ["SPLITS", "TEST_COUNTS", "check_submission", "write_submission"]

SPLITS = ("id", "ood_ads", "ood_cat", "ood_both")
"""Of the leaderboard; each has the arrays ``{split}_ids`` and ``{split}_energy``."""

TEST_COUNTS = {"id": 24948, "ood_ads": 24930, "ood_cat": 24965, "ood_both": 24985}
"""Systems of OC20's test splits (Chanussot et al. 2021, ACS Catal. 11, 6059)."""

_SHOWN = 5
_KINDS = {
    "O": "pickled objects",
    "U": "text",
    "S": "bytes",
    "b": "booleans",
    "c": "complex numbers",
}
_KINDS |= {"i": "whole numbers", "u": "whole numbers", "f": "numbers", "M": "dates", "m": "times"}

Arrays = Mapping[str, NDArray[Any]]
Expected = Mapping[str, Sequence[str]]


def write_submission(
    tables: Mapping[str, EnergyTable],
    path: str | Path,
    expected: Expected | None = None,
    counts: Mapping[str, int] | None = TEST_COUNTS,
) -> Path:
    """Write energies as a compressed .npz, after the checks of :func:`check_submission`.

    Args:
        tables: {"id", "ood_ads", "ood_cat", "ood_both": energies of the split}, in eV; ids that
            were repeated with the same energy are dropped there already.
        path: where to write, ending in .npz.
        expected: {split: all of its sids}, where they are known.
        counts: {split: number of systems}, looked at where `expected` says nothing.

    Raises:
        ValueError: a split too few or too many, or as :func:`check_submission`.
    """
    _same_names(list(tables), SPLITS, "the splits given")
    arrays: dict[str, NDArray[Any]] = {}
    for split in SPLITS:
        energies = tables[split].energies
        sids: dict[str, str] = {}
        for of_split, sid in energies:
            other = sids.setdefault(sid, of_split)
            if other != of_split:
                raise ValueError(
                    f"{tables[split].path}: sid {sid} is in {other} and in {of_split}; give a "
                    "file with one split"
                )
        arrays[f"{split}_ids"] = np.array(list(sids), dtype=np.str_)
        arrays[f"{split}_energy"] = np.array(list(energies.values()), dtype=np.float64)
    places = {split: str(table.path) for split, table in tables.items()}
    for split in SPLITS:
        _check_split(arrays, split, places[split], expected, counts)
    path = Path(path)
    if path.suffix.lower() != ".npz":
        raise ValueError(f"cannot write a submission to {path}: use a name ending in .npz")
    with temporary_path(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    return path


def check_submission(
    path: str | Path,
    expected: Expected | None = None,
    counts: Mapping[str, int] | None = TEST_COUNTS,
) -> dict[str, int]:
    """Check a submission: what the leaderboard would refuse, and what it would not notice.

    Arrays are those of the four splits and no others, one-dimensional and of equal length; ids are
    text and unique, energies are finite real numbers; every split is complete.

    Args:
        path: of the .npz file. Objects in it are refused, not unpickled.
        expected: {split: all of its sids}, where they are known.
        counts: {split: number of systems}, looked at where `expected` says nothing; None takes any.

    Returns:
        {split: number of systems}.

    Raises:
        ValueError: naming the file, the array, and the ids that are wrong.
    """
    arrays = _load(Path(path))
    names = [f"{split}_{what}" for split in SPLITS for what in ("ids", "energy")]
    _same_names(list(arrays), names, f"the arrays of {path}")
    for split in SPLITS:
        _check_split(arrays, split, str(path), expected, counts)
    return {split: len(arrays[f"{split}_ids"]) for split in SPLITS}


def _load(path: Path) -> dict[str, NDArray[Any]]:
    try:
        if not zipfile.is_zipfile(path):
            path.open("rb").close()  # whether it is there at all
            raise ValueError(f"{path} is no .npz file: write it with flt-mol submission make")
        found: dict[str, NDArray[Any]] = {}
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            for name in file.files:
                try:
                    found[name] = file[name]
                except ValueError as error:
                    raise ValueError(f"{path}: array {name} cannot be read: {error}") from error
                if not isinstance(found[name], np.ndarray):
                    raise ValueError(f"{path}: {name} is no array")
        return found
    except FileNotFoundError as error:
        raise ValueError(f"{path} does not exist (looked in {path.absolute().parent})") from error
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error, RuntimeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _same_names(found: list[str], wanted: Sequence[str], what: str) -> None:
    missing = [name for name in wanted if name not in found]
    surplus = [name for name in found if name not in wanted]
    if missing or surplus:
        parts = [f"lack {', '.join(missing)}"] if missing else []
        parts += [f"hold {', '.join(surplus)}, which do not belong there"] if surplus else []
        raise ValueError(f"{what} {' and '.join(parts)}")


def _check_split(
    arrays: Arrays,
    split: str,
    where: str,
    expected: Expected | None,
    counts: Mapping[str, int] | None,
) -> None:
    ids, energy = arrays[f"{split}_ids"], arrays[f"{split}_energy"]
    for name, array, kinds, wanted in (
        (f"{split}_ids", ids, "U", "text"),
        (f"{split}_energy", energy, "f", "real numbers with a fraction (float)"),
    ):
        if array.dtype.kind not in kinds:
            kind = _KINDS.get(array.dtype.kind, str(array.dtype))
            raise ValueError(f"{where}: {name} holds {kind}, expected {wanted}")
        if array.ndim != 1:
            raise ValueError(f"{where}: {name} has shape {array.shape}, expected (systems,)")
    if len(ids) != len(energy):
        raise ValueError(
            f"{where}: {split}_ids has {len(ids)} entries, {split}_energy {len(energy)}"
        )
    sids: list[str] = ids.tolist()
    _refuse_repeated(sids, energy, f"{where}: {split}_ids")
    bad = [sids[i] for i in np.flatnonzero(~np.isfinite(energy))]
    if bad:
        raise ValueError(f"{where}: {split}_energy is not finite for {_some(bad)}")
    _refuse_incomplete(sids, split, where, expected, counts)


def _refuse_repeated(sids: list[str], energy: NDArray[Any], what: str) -> None:
    first: dict[str, int] = {}
    repeated: list[str] = []
    different: list[str] = []
    for i, sid in enumerate(sids):
        j = first.setdefault(sid, i)
        if j != i:
            (repeated if energy[i] == energy[j] else different).append(sid)
    if different:
        raise ValueError(f"{what} repeats {_some(different)} with different energies")
    if repeated:
        raise ValueError(
            f"{what} repeats {_some(repeated)} with the same energy: make the file anew with "
            "flt-mol submission make, which drops repetitions"
        )
    empty = [i for i, sid in enumerate(sids) if not sid.strip()]
    if empty:
        raise ValueError(f"{what}: the id in row {empty[0]} is empty")


def _refuse_incomplete(
    sids: list[str],
    split: str,
    where: str,
    expected: Expected | None,
    counts: Mapping[str, int] | None,
) -> None:
    if expected is not None:
        here, there = set(sids), set(expected[split])
        missing = [sid for sid in expected[split] if sid not in here]
        surplus = [sid for sid in sids if sid not in there]
        if missing or surplus:
            parts = [f"lacks {_some(missing)}"] if missing else []
            parts += [f"has {_some(surplus)}, not of this split"] if surplus else []
            raise ValueError(f"{where}: {split} {' and '.join(parts)}")
    elif counts is not None and len(sids) != counts[split]:
        raise ValueError(
            f"{where}: {split} has {len(sids)} systems (sid {', '.join(sids[:2])}, …), and the "
            f"test split has {counts[split]}; give --data or --ids to see which ids are wrong"
        )


def _some(sids: Sequence[str]) -> str:
    shown = ", ".join(map(str, sids[:_SHOWN]))
    more = f" and {len(sids) - _SHOWN} more" if len(sids) > _SHOWN else ""
    return f"sid {shown}{more}"
