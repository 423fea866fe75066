"""A validation split that is held out of the training split."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flt_mol.files import temporary_path
from flt_mol.training.config import RunConfig
from flt_mol.training.run_data import chosen, load_split

__all__ = ["load_splits", "write_sids"]


def load_splits(config: RunConfig) -> tuple[Any, Any]:
    """The training and the validation split of a run, as :func:`load_split` gives them.

    With ``data.validation_fraction`` the second is a random share of the first, of at least one
    system, by ``training.seed``: the same systems whenever the run is made again. What belongs
    together, as frames of one trajectory, is not kept together; ``flt-mol data split --group-by``
    does that.

    Raises:
        ValueError: as of :func:`load_split`, or nothing left to train on.
    """
    data = config.data
    whole = load_split(config, data.train)
    if data.validation_fraction is None:
        return whole, load_split(config, data.validation)
    count = max(1, round(data.validation_fraction * len(whole)))
    if count >= len(whole):
        raise ValueError(
            f"split '{data.train}' has {len(whole)} systems, and data.validation_fraction="
            f"{data.validation_fraction:g} leaves none to train on"
        )
    order = np.random.default_rng(config.training.seed % 2**63).permutation(len(whole))
    held, kept = sorted(order[:count].tolist()), sorted(order[count:].tolist())
    return chosen(whole, kept), chosen(whole, held)


def write_sids(path: Path, sids: Sequence[str]) -> Path:
    """A CSV file with the column sid: which systems were held out."""
    with temporary_path(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as f:
        rows = csv.writer(f, lineterminator="\n")
        rows.writerow(["sid"])
        rows.writerows([sid] for sid in sids)
    return path
