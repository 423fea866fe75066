"""Data sets by name, folder or file: which splits are meant, and what opponents reach on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flt_mol.data.opening import open_dataset
from flt_mol.data.recipes import Recipe, find_recipe
from flt_mol.data.schema import OnError
from flt_mol.structures import Structures

Baselines = dict[str, dict[str, float]]


def open_splits(
    data: str | Path | None,
    splits: Sequence[str] | None,
    trained_on: Mapping[str, Any],
    on_error: OnError = "raise",
    energy: str | None = None,
    check: Callable[[Structures], None] | None = None,
) -> tuple[dict[str, Any], Baselines]:
    """The splits to evaluate on, opened, and the MAEs (eV) of the data set's baselines.

    Args:
        data: name or folder of a data set, or a path of records; None takes `trained_on`.
        splits: names; None takes those of `trained_on` that there are, or every validation split.
        trained_on: the `data` part of a run's configuration.
        on_error: what to do with bad records, as of :func:`flt_mol.data.open_dataset`.
        energy: name under which the targets are stored; None takes that of `trained_on`, or
            "y_relaxed" of a data set with a recipe of its own.
        check: of systems, as of :func:`flt_mol.data.open_dataset`.

    Raises:
        ValueError: unknown data or split, or records without targets.
    """
    options: dict[str, Any] = {"require_energy": True, "on_error": on_error, "check": check}
    options["energy"] = energy or trained_on.get("energy") or "y_relaxed"
    own_paths: Mapping[str, str] = {}
    expected: Sequence[str] = ()
    if data is None:
        data, own_paths = trained_on.get("name"), trained_on.get("paths") or {}
        # A run names splits that its data set may lack; only those asked for here must be there.
        expected = trained_on.get("evaluation") or ()
        if data is None and not own_paths:
            raise ValueError("the checkpoint does not say what it was trained on: give --data")
    found = None if data is None else find_recipe(data)
    if data is not None and found is None:
        if splits:
            raise ValueError(f"{data} is a file or folder of records and has no splits")
        return {_label(Path(data)): open_dataset(data, **options)}, {}
    if found is not None and data != trained_on.get("name"):
        options["energy"] = energy or "y_relaxed"
    known = (*own_paths, *(() if found is None else found.splits))
    names = list(splits or [name for name in expected if name in known])
    names = names or _validation(found, own_paths)
    if not splits and found is not None:
        _refuse_missing(found, names, own_paths)
    opened = {}
    for name in names:
        if name in own_paths:
            opened[name] = open_dataset(own_paths[name], **options)
        elif found is not None:
            opened[name] = found.open(name, **options)
        else:
            raise ValueError(f"no split '{name}'; there are: {', '.join(own_paths)}")
    return opened, {} if own_paths or found is None else baseline_maes(found, opened)


def _refuse_missing(found: Recipe, names: Sequence[str], own_paths: Mapping[str, str]) -> None:
    """Tell of all splits at once that nobody named and that lie nowhere."""
    missing = [name for name in names if name not in own_paths and found.find(name) is None]
    if not missing:
        return
    some = [name for name in names if name not in missing]
    here = "; or take what is here: " if some else ""
    here += " ".join(f"--split {name}" for name in some)
    there_is = "is no file of split" if len(missing) == 1 else "are no files of splits"
    raise ValueError(
        f"there {there_is} {', '.join(missing)} of data set {found.name}; "
        f"{found.how_to_get(missing)}{here}"
    )


def baseline_maes(found: Recipe, splits: Mapping[str, Any]) -> Baselines:
    """{baseline: {split: MAE in eV}} as the data set's recipe gives them."""
    out: Baselines = {}
    for split, methods in (found.metadata.get("baselines") or {}).items():
        for method, metrics in methods.items():
            if split in splits:
                out.setdefault(method, {})[split] = float(metrics["mae"])
    return out


def _validation(found: Recipe | None, own_paths: Mapping[str, str]) -> list[str]:
    names = list(own_paths) if found is None else list(found.splits)
    return [name for name in names if name.startswith("val")] or names


def _label(path: Path) -> str:
    """The name a file of records goes by: its folder's when it is only called data.lmdb."""
    path = path.resolve()
    return path.parent.name if path.name == "data.lmdb" else path.stem
