"""The file that OC20's public IS2RE leaderboard takes: energies of four test splits in one .npz."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flt_mol.data.tables import EnergyTable
from flt_mol.files import check_suffix, some, temporary_path

SPLITS = ("id", "ood_ads", "ood_cat", "ood_both")
"""Of the leaderboard; each has the arrays ``{split}_ids`` and ``{split}_energy``."""

TEST_COUNTS = {"id": 24948, "ood_ads": 24930, "ood_cat": 24965, "ood_both": 24985}
"""Systems of OC20's test splits (Chanussot et al. 2021, ACS Catal. 11, 6059)."""

_FARTHEST = 50.0  # eV; OC20's adsorption energies lie within about 20

Expected = Mapping[str, Sequence[str]]
Arrays = Mapping[str, NDArray[Any]]


def write_submission(
    tables: Mapping[str, EnergyTable], path: str | Path, expected: Expected | None = None
) -> Path:
    """Write energies as a compressed .npz, after the checks of `check_submission`.

    Args:
        tables: {"id", "ood_ads", "ood_cat", "ood_both": energies of the split}, in eV.
        path: where to write, ending in .npz.
        expected: as of `check_submission`.

    Raises:
        ValueError: a split too few or too many, or as `check_submission`.
    """
    path = Path(path)
    check_suffix(path, (".npz",))
    arrays: dict[str, NDArray[Any]] = {}
    for split, table in tables.items():
        arrays[f"{split}_ids"] = np.array([sid for _, sid in table.energies], dtype=np.str_)
        arrays[f"{split}_energy"] = np.array(list(table.energies.values()), dtype=np.float64)
    _check(arrays, {split: str(table.path) for split, table in tables.items()}, expected)
    with temporary_path(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    return path


def check_submission(
    path: str | Path, expected: Expected | None = None
) -> dict[str, NDArray[np.float64]]:
    """Check a submission: what the leaderboard would refuse, and what it would not notice.

    Arrays are those of the four splits and no others, one-dimensional and of equal length; ids are
    text and unique, energies are finite real numbers; every split is complete.

    Args:
        path: of the .npz file.
        expected: {split: all of its sids}; None expects `TEST_COUNTS` systems.

    Returns:
        {split: (S,) energies, eV}.

    Raises:
        ValueError: naming the file, the array, and the ids that are wrong.
    """
    try:
        with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except Exception as error:  # anything that foreign bytes come to
        found = "no .npz, or one of Python objects" if "pickle" in str(error) else error
        raise ValueError(f"{path} cannot be read as .npz: {found}") from error
    _check(arrays, dict.fromkeys(SPLITS, str(path)), expected)
    return {split: arrays[f"{split}_energy"].astype(np.float64) for split in SPLITS}


def energy_lines(energies: Mapping[str, NDArray[np.float64]]) -> list[str]:
    """A line for each split: systems, range and median, eV.

    Warns:
        UserWarning: splits with energies beyond ±50 eV, which no adsorption has.
    """
    lines = []
    for split, values in energies.items():
        counted = f"{split:<8}  {len(values):6d} systems"
        extent = f"{values.min():.3f} to {values.max():.3f} eV, median {np.median(values):.3f}"
        lines.append(f"{counted}, {extent}")
        if beyond := int((np.abs(values) > _FARTHEST).sum()):
            text = f"{split}: {beyond} of {len(values)} energies are beyond ±{_FARTHEST:g} eV"
            warnings.warn(f"{text}: meV, or total energies?", stacklevel=2)
    return lines


def _check(arrays: Arrays, where: Mapping[str, str], expected: Expected | None) -> None:
    """Check the arrays of all splits; `where` names the file of each."""
    wanted = {f"{split}_{what}" for split in SPLITS for what in ("ids", "energy")}
    if wrong := wanted.symmetric_difference(arrays):
        lacking, surplus = sorted(wrong & wanted), sorted(wrong - wanted)
        text = f"the arrays of {', '.join(dict.fromkeys(where.values()))}"
        raise ValueError(f"{text}: missing {lacking}, not expected {surplus}")
    for split in SPLITS:
        ids, energy = arrays[f"{split}_ids"], arrays[f"{split}_energy"]
        for name, array, kind in (("ids", ids, "U"), ("energy", energy, "f")):
            if array.dtype.kind != kind or array.ndim != 1 or len(array) != ids.size:
                raise ValueError(
                    f"{where[split]}: {split}_{name} is {array.dtype} of shape {array.shape}, "
                    f"expected {'text' if kind == 'U' else 'float'} of shape (systems,)"
                )
        sids: list[str] = ids.tolist()
        wrong_ids = {
            "repeats": [sid for sid, count in Counter(sids).items() if count > 1],
            "has an empty id": [sid for sid in sids if not sid.strip()],
            "has no finite energy for": [sids[i] for i in np.flatnonzero(~np.isfinite(energy))],
        }
        if expected is not None:
            known, given = set(expected[split]), set(sids)
            wrong_ids["lacks"] = [sid for sid in expected[split] if sid not in given]
            wrong_ids["has, not of this split,"] = [sid for sid in sids if sid not in known]
        parts = [f"{what} sid {some(found)}" for what, found in wrong_ids.items() if found]
        if parts:
            raise ValueError(f"{where[split]}: {split} {' and '.join(parts)}")
        if expected is None and len(sids) != TEST_COUNTS[split]:
            text = f"{where[split]}: {split} has {len(sids)} systems, the test split has"
            raise ValueError(f"{text} {TEST_COUNTS[split]}; other splits: --data or --ids")
