"""Where errors are large: metrics of systems that share an adsorbate, element, size or facet."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flt_mol.evaluation.collecting import SplitResult
from flt_mol.evaluation.intervals import bootstrap_intervals
from flt_mol.evaluation.metrics import metrics_of

__all__ = ["KINDS", "breakdowns", "size_bin"]

KINDS = ("adsorbate", "element", "size", "facet")

_LAST_OF_BIN = (10, 20, 30, 40, 50, 75, 100, 150, 200)  # atoms

Groups = dict[str, list[int]]


def breakdowns(result: SplitResult) -> dict[str, list[dict[str, Any]]]:
    """Metrics of groups of systems, for each kind of group that is known.

    "adsorbate", "size" (atoms, in bins that are the same for all data) and "facet" put each system
    into one group; "element" into that of each of its elements. Systems of which the property is
    unknown are in none. Sizes ascend; of the others the group with the largest MAE is first.

    Returns:
        {kind: [{"group", "count", "mae" (eV), "mae_interval" [low, high], "ewt" (fraction)}, …]}.

    Example:
        >>> result = SplitResult((1, 2), np.array([0.0, 1.0]), np.array([0.5, 1.0]), {},
        ...     columns={"natoms": (9, 30)})
        >>> [(row["group"], row["mae"]) for row in breakdowns(result)["size"]]
        [('1–10', 0.5), ('21–30', 0.0)]
    """
    out = {}
    for kind in KINDS:
        groups = _groups(result, kind)
        if groups:
            rows = [_row(name, result, np.array(places)) for name, places in groups.items()]
            out[kind] = rows if kind == "size" else sorted(rows, key=lambda row: -row["mae"])
    return out


def size_bin(natoms: int) -> str:
    """The bin of a number of atoms, such as "21–30", or "201 or more".

    Example:
        >>> size_bin(20), size_bin(21), size_bin(500)
        ('11–20', '21–30', '201 or more')
    """
    first = 1
    for last in _LAST_OF_BIN:
        if natoms <= last:
            return f"{first}–{last}"
        first = last + 1
    return f"{first} or more"


def _groups(result: SplitResult, kind: str) -> Groups:
    """{name: indices of its systems}, sizes ascending, others by name."""
    column = {"element": "elements", "size": "natoms"}.get(kind, kind)
    values = result.columns.get(column, ())
    if kind == "size":
        known = sorted((n, i) for i, n in enumerate(values) if n is not None)
        named = [(size_bin(n), i) for n, i in known]
    elif kind == "element":
        named = sorted((s, i) for i, text in enumerate(values) for s in (text or "").split())
    else:
        named = sorted((str(v), i) for i, v in enumerate(values) if v is not None)
    groups: Groups = {}
    for name, i in named:
        groups.setdefault(name, []).append(i)
    return groups


def _row(name: str, result: SplitResult, places: NDArray[np.int64]) -> dict[str, Any]:
    metrics = metrics_of(result.prediction[places], result.target[places])
    intervals = bootstrap_intervals(result.error[places])
    row = {"group": name, "count": metrics["count"], "mae": metrics["mae"]}
    return {**row, "mae_interval": list(intervals["mae"]), "ewt": metrics["ewt"]}
