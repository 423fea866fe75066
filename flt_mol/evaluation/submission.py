"""The file that OC20's public IS2RE leaderboard takes: energies of four test splits in one .npz."""

from __future__ import annotations

import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flt_mol.evaluation.tables import EnergyTable, some_sids
from flt_mol.files import readable, temporary_path

__all__ = ["SPLITS", "TEST_COUNTS", "check_submission", "energy_lines", "write_submission"]

SPLITS = ("id", "ood_ads", "ood_cat", "ood_both")
"""Of the leaderboard; each has the arrays ``{split}_ids`` and ``{split}_energy``."""

TEST_COUNTS = {"id": 24948, "ood_ads": 24930, "ood_cat": 24965, "ood_both": 24985}
"""Systems of OC20's test splits (Chanussot et al. 2021, ACS Catal. 11, 6059)."""

_FARTHEST = 50.0  # eV; OC20's adsorption energies lie within about 20

Expected = Mapping[str, Sequence[str]]


def write_submission(
    tables: Mapping[str, EnergyTable],
    path: str | Path,
    expected: Expected | None = None,
    counts: Mapping[str, int] | None = TEST_COUNTS,
) -> Path:
    """Write energies as a compressed .npz, after the checks of :func:`check_submission`.

    Args:
        tables: {"id", "ood_ads", "ood_cat", "ood_both": energies of the split}, in eV.
        path: where to write, ending in .npz.
        expected: {split: all of its sids}, where they are known.
        counts: {split: number of systems}, checked where `expected` says nothing.

    Raises:
        ValueError: a split too few or too many, or as :func:`check_submission`.
    """
    path = Path(path)
    if path.suffix.lower() != ".npz":
        raise ValueError(f"cannot write a submission to {path}: use a name ending in .npz")
    _same_names(tables, SPLITS, "the splits given")
    arrays: dict[str, NDArray[Any]] = {}
    for split in SPLITS:
        energies = tables[split].energies
        arrays[f"{split}_ids"] = np.array([sid for _, sid in energies], dtype=np.str_)
        arrays[f"{split}_energy"] = np.array(list(energies.values()), dtype=np.float64)
        _check_split(arrays, split, str(tables[split].path), expected, counts)
    with temporary_path(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    return path


def check_submission(
    path: str | Path,
    expected: Expected | None = None,
    counts: Mapping[str, int] | None = TEST_COUNTS,
) -> dict[str, NDArray[np.float64]]:
    """Check a submission: what the leaderboard would refuse, and what it would not notice.

    Arrays are those of the four splits and no others, one-dimensional and of equal length; ids are
    text and unique, energies are finite real numbers; every split is complete.

    Args:
        path: of the .npz file.
        expected: {split: all of its sids}, where they are known.
        counts: {split: number of systems}, checked where `expected` says nothing; None takes any.

    Returns:
        {split: (S,) energies, eV}.

    Raises:
        ValueError: naming the file, the array, and the ids that are wrong.
    """
    path = Path(path)
    with readable(path):
        opened = path.open("rb")
    try:
        with opened, np.load(opened, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (
        *(AttributeError, EOFError, OSError, RuntimeError, ValueError),
        *(zipfile.BadZipFile, zlib.error),
    ) as error:
        raise ValueError(f"{path} is not a readable .npz file: {error}") from error
    names = [f"{split}_{what}" for split in SPLITS for what in ("ids", "energy")]
    _same_names(arrays, names, f"the arrays of {path}")
    for split in SPLITS:
        _check_split(arrays, split, str(path), expected, counts)
    return {split: arrays[f"{split}_energy"].astype(np.float64) for split in SPLITS}


def energy_lines(energies: Mapping[str, NDArray[np.float64]]) -> list[str]:
    """A line for each split: systems, range and median, eV.

    Warns:
        UserWarning: splits with energies beyond ±50 eV, which no adsorption has.
    """
    lines = []
    for split, values in energies.items():
        if not len(values):
            continue
        low, high, median = values.min(), values.max(), float(np.median(values))
        lines.append(
            f"{split:<8}  {len(values):6d} systems, {low:.3f} to {high:.3f} eV, median {median:.3f}"
        )
        if beyond := int((np.abs(values) > _FARTHEST).sum()):
            warnings.warn(
                f"{split}: {beyond} of {len(values)} energies are beyond ±{_FARTHEST:g} eV (median "
                f"{median:.6g}): they may be in meV, or total energies",
                UserWarning,
                stacklevel=2,
            )
    return lines


def _same_names(found: Mapping[str, Any], wanted: Sequence[str], what: str) -> None:
    missing, surplus = [x for x in wanted if x not in found], [x for x in found if x not in wanted]
    parts = [f"lack {', '.join(missing)}"] if missing else []
    parts += [f"hold {', '.join(surplus)}, which do not belong there"] if surplus else []
    if parts:
        raise ValueError(f"{what} {' and '.join(parts)}")


def _check_split(
    arrays: Mapping[str, NDArray[Any]],
    split: str,
    where: str,
    expected: Expected | None,
    counts: Mapping[str, int] | None,
) -> None:
    ids, energy = arrays[f"{split}_ids"], arrays[f"{split}_energy"]
    for name, array, kind in (("ids", ids, "U"), ("energy", energy, "f")):
        if array.dtype.kind != kind or array.ndim != 1:
            raise ValueError(
                f"{where}: {split}_{name} is {array.dtype} of shape {array.shape}, expected "
                f"{'text' if kind == 'U' else 'float'} of shape (systems,)"
            )
    if len(ids) != len(energy):
        raise ValueError(f"{where}: {len(ids)} {split}_ids for {len(energy)} {split}_energy")
    sids: list[str] = ids.tolist()
    wrong = {
        "repeats": [sid for sid, count in Counter(sids).items() if count > 1],
        "has an empty id": [sid for sid in sids if not sid.strip()],
        "has no finite energy for": [sids[i] for i in np.flatnonzero(~np.isfinite(energy))],
    }
    if expected is not None:
        known, given = set(expected[split]), set(sids)
        wrong["lacks"] = [sid for sid in expected[split] if sid not in given]
        wrong["has, not of this split,"] = [sid for sid in sids if sid not in known]
    parts = [f"{what} {some_sids(found)}" for what, found in wrong.items() if found]
    if parts:
        raise ValueError(f"{where}: {split} {' and '.join(parts)}")
    if expected is None and counts is not None and len(sids) != counts[split]:
        raise ValueError(
            f"{where}: {split} has {len(sids)} systems, the test split has {counts[split]}; give "
            "--data or --ids to see which ids are wrong"
        )
