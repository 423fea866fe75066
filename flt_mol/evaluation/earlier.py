"""Results of earlier evaluations: the same one is written anew, another one is kept."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import chain, count
from pathlib import Path
from typing import Any

__all__ = ["RESULTS", "free_folder", "replaced"]

RESULTS = "results.json"
_SAME = ("checkpoint_file", "predictions", "targets", "energy", "held_out")


def free_folder(folder: Path, summary: Mapping[str, Any]) -> Path:
    """`folder`, FOLDER-2, …: the first without results, or with those of the same evaluation.

    The same is one of the same checkpoint's file on the same splits, files and target.

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
    if _subject(before) == _subject(summary):
        return ""
    named = before.get("checkpoint") or before.get("predictions") or "something else"
    splits = before.get("splits")
    return f"{named} on {', '.join(splits)}" if isinstance(splits, Mapping) else str(named)


def _read(folder: Path) -> dict[str, Any]:
    try:
        content = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _subject(summary: Mapping[str, Any]) -> dict[str, Any]:
    """What was evaluated."""
    splits = summary.get("splits")
    splits = splits if isinstance(splits, Mapping) else {}
    paths = {name: one.get("path") for name, one in splits.items() if isinstance(one, Mapping)}
    return {"splits": paths, **{name: summary.get(name) for name in _SAME}}
