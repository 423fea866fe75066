"""Results of earlier evaluations: the same one is written anew, another one is kept."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import chain, count
from pathlib import Path
from typing import Any

from flt_mol.files import natural_key
from flt_mol.outputs import counted

__all__ = ["RESULTS", "free_folder", "neighbours", "replaced"]

RESULTS = "results.json"
_SAME = ("checkpoint_file", "predictions_file", "targets_file", "energy")


def free_folder(folder: Path, summary: Mapping[str, Any]) -> Path:
    """`folder`, FOLDER-2, …: the first without results, or with those of the same evaluation.

    The same is one of the same checkpoint's file on the same systems of the same files, and of the
    same target, wherever the command was given and however the files were named in it.

    Args:
        folder: the first choice.
        summary: of :func:`~flt_mol.evaluation.summary.summarise`.
    """
    numbered = (folder.with_name(f"{folder.name}-{number}") for number in count(2))
    return next(place for place in chain([folder], numbered) if _may_take(place, summary))


def _may_take(folder: Path, summary: Mapping[str, Any]) -> bool:
    if not (folder / RESULTS).exists():
        return folder.is_dir() or not folder.exists()
    return _subject(_read(folder)) == _subject(summary)


def replaced(folder: Path, summary: Mapping[str, Any]) -> str:
    """Whose results, of another evaluation, a folder holds; empty where it holds none."""
    if not (folder / RESULTS).exists():
        return ""
    before = _read(folder)
    return "" if _subject(before) == _subject(summary) else _told(before)


def neighbours(folder: Path) -> list[str]:
    """What other evaluations there are beside a folder that :func:`free_folder` gave, and where."""
    stem = re.sub(r"-[0-9]+$", "", folder.name)
    numbered = re.compile(rf"{re.escape(stem)}(-[0-9]+)?")
    found = [file.parent for file in folder.parent.glob(f"*/{RESULTS}")]
    others = [one for one in found if numbered.fullmatch(one.name) and one.name != folder.name]
    return [f"{one}: {_told(_read(one))}" for one in sorted(others, key=natural_key)]


def _told(summary: Mapping[str, Any]) -> str:
    """What was evaluated on what, for people.

    Example:
        >>> _told({"checkpoint": "runs/a", "splits": {"val": {"count": 2, "path": "mine.extxyz"}}})
        'runs/a on val (2 systems, mine.extxyz)'
    """
    named = str(summary.get("checkpoint") or summary.get("predictions") or "something else")
    splits = summary.get("splits")
    if not isinstance(splits, Mapping) or not all(isinstance(x, Mapping) for x in splits.values()):
        return named
    counts = [x["count"] for x in splits.values() if isinstance(x.get("count"), int | float)]
    inside = [counted(int(sum(counts)), "system")] if counts else []
    inside += [str(x["path"]) for x in splits.values() if x.get("path") and len(splits) == 1]
    more = f" ({', '.join(inside)})" if inside else ""
    return f"{named} on {', '.join(splits)}{more}"


def _read(folder: Path) -> dict[str, Any]:
    try:
        content = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _subject(summary: Mapping[str, Any]) -> dict[str, Any]:
    """What was evaluated, the same from whatever folder."""
    splits, evaluated, held = (
        value if isinstance(value, Mapping) else {}
        for value in (summary.get(name) for name in ("splits", "evaluated", "held_out"))
    )
    systems = {
        name: [one.get("count"), evaluated.get(name), name in held]
        for name, one in splits.items()
        if isinstance(one, Mapping)
    }
    return {"splits": systems, **{name: summary.get(name) for name in _SAME}}
