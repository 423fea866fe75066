"""Where the trajectories of a folder lie: in it, or one in each of its subfolders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from flt_mol.data.ase.files import holds_structures, records_of
from flt_mol.files import natural_key

__all__ = ["Found", "repeated_sids", "search"]

_SHOWN = 5


@dataclass(frozen=True)
class Found:
    """A trajectory.

    Args:
        path: its file, or the subfolder where it cannot be told which file it is.
        name: what it is called, None for by its file.
        reason: why it cannot be read.
    """

    path: Path
    name: str | None = None
    reason: str | None = None


def search(folder: Path) -> tuple[list[Found], list[str]]:
    """The trajectories of a folder, in the order of the numbers in their names.

    If none lies directly in it, its subfolders are searched (not theirs), and each trajectory is
    called by its subfolder. Of several files of structures in a subfolder, such as `init.xyz`
    beside `relax.traj`, that of several frames is the trajectory.

    Returns:
        Trajectories, and the names of what was passed over.
    """
    entries = [entry for entry in sorted(folder.iterdir(), key=natural_key) if entry.name[0] != "."]
    inside = _files(entries)
    if inside:
        return [Found(path) for path in inside], [e.name for e in entries if e not in inside]
    found: list[Found] = []
    others: list[str] = []
    for entry in entries:
        one = _only(entry) if entry.is_dir() else None
        if one is None:
            others.append(entry.name)
        else:
            found.append(one)
    return found, others


def _files(entries: list[Path]) -> list[Path]:
    return [entry for entry in entries if entry.is_file() and holds_structures(entry)]


def _only(folder: Path) -> Found | None:
    """The one trajectory of a subfolder, None where there is none."""
    files = _files(sorted(folder.iterdir(), key=natural_key))
    if len(files) > 1:
        files = [file for file in files if _may_be_trajectory(file)] or files
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        reason = (
            f"{folder} holds {len(files)} files that may be its trajectory, expected one: {names}; "
            "move the others away, or read that folder by itself, where files have their own names"
        )
        return Found(folder, folder.name, reason)
    return Found(files[0], folder.name) if files else None


def _may_be_trajectory(path: Path) -> bool:
    """Whether a file has several frames, or cannot be read."""
    try:
        return len(list(islice(records_of(path), 2))) > 1
    except ValueError:
        return True


def repeated_sids(found: Sequence[Found], sids: Sequence[Any]) -> dict[str, str]:
    """A warning of trajectories with one sid, such as x.traj and x.extxyz."""
    counts = Counter(map(str, sids))
    several = [sid for sid, count in counts.items() if count > 1]
    if not several:
        return {}
    names = [
        one.path.name if one.name is None else one.name
        for one, sid in zip(found, sids, strict=True)
        if str(sid) == several[0]
    ]
    shown = ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
    more = f" (and so have those of {len(several) - 1} more sids)" if len(several) > 1 else ""
    return {
        "repeated sids": f"several trajectories have the sid {several[0]}: {shown}{more}; rename "
        "them, or keep one of each"
    }
