"""A checkpoint evaluated on the splits of its run, or on other data."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import Subset

from flt_mol.data import open_dataset
from flt_mol.data.recipes import Recipe, find_recipe, skipped_message
from flt_mol.evaluation.report import notes
from flt_mol.evaluation.splits import SplitResult, evaluate_splits
from flt_mol.evaluation.summary import WORST, constant_maes, summarise
from flt_mol.evaluation.tables import some_sids
from flt_mol.files import shipped_folder
from flt_mol.models.checkpoint import find_checkpoint, load_model, read_checkpoint

__all__ = ["HELD_OUT", "evaluate_checkpoint", "evaluation_folder"]

HELD_OUT = "held_out"
"""Name of the systems held out of training where that of the validation split is taken."""

_READ = 64  # systems read together


def evaluate_checkpoint(
    checkpoint: str | Path,
    data: str | Path | None = None,
    splits: Sequence[str] = (),
    *,
    held_out: bool = False,
    energy: str | None = None,
    skip_bad: bool = False,
    batch_size: int = 64,
    device: str = "cpu",
    progress: Callable[[str, int, int | None], None] | None = None,
) -> tuple[dict[str, Any], dict[str, SplitResult]]:
    """Errors of a checkpoint's model on the splits of its run, or on other data.

    Of a run with `data.validation_fraction` the systems that it held out are evaluated, under the
    name of its validation split (:data:`HELD_OUT` where the data set has a split of that name),
    and its splits for evaluation.

    Args:
        checkpoint: file, folder of a run or an export, or name of a shipped model.
        data: name or folder of a data set, or a path of records; None takes those of the run.
        splits: names; without any those of the run, or every validation split.
        held_out: only the systems that training held out, known by their sids.
        energy: name of the stored target; None takes that of the run.
        skip_bad: skip invalid records.
        batch_size: systems per call.
        device: of the model.
        progress: as of :func:`~flt_mol.evaluation.splits.evaluate_splits`.

    Returns:
        The summary, see :func:`~flt_mol.evaluation.summary.summarise`, and the results by split.

    Raises:
        ValueError: no such checkpoint, data or split; records without targets or invalid ones,
            before anything is evaluated; held-out systems that are not found.

    Warns:
        UserWarning: systems with sids of the training data; skipped records.
    """
    path = find_checkpoint(checkpoint)
    content = read_checkpoint(path)
    model: Any = load_model(path, map_location=device)
    run = _Run(path, content)
    options = {
        "require_energy": True,
        "on_error": "skip" if skip_bad else "raise",
        "check": getattr(model, "check", None),
    }
    sources, baselines = run.open(data, list(splits), held_out, energy, options)
    skipped = {split: len(x.skipped) for split, x in sources.items() if getattr(x, "skipped", ())}
    for split in skipped:
        warnings.warn(skipped_message(sources[split]), UserWarning, stacklevel=2)
    results = evaluate_splits(model, sources, batch_size, progress=progress, keep_worst=WORST)
    results = {split: run.with_columns(result) for split, result in results.items()}
    if not baselines:
        median = (getattr(model, "trained_on", None) or {}).get("energy_median")
        baselines = {} if median is None else {"constant": constant_maes(results, median)}
        baselines["own median"] = constant_maes(results)
    trained_on = {
        split: result.columns["trained_on"].count("yes")
        for split, result in results.items()
        if "yes" in result.columns.get("trained_on", ())
    }
    held = {split: results[split].path for split, x in sources.items() if isinstance(x, Subset)}
    further = {"skipped": skipped, "held_out": held, "trained_on": trained_on}
    summary = summarise(
        results,
        baselines,
        checkpoint=str(checkpoint),
        checkpoint_file=str(path.resolve()),
        energy=energy or run.energy(data),
        **{name: of_splits for name, of_splits in further.items() if of_splits},
    )
    for text in notes(summary)["trained_on"]:
        warnings.warn(text, UserWarning, stacklevel=2)
    return summary, results


def evaluation_folder(checkpoint: str | Path) -> Path:
    """Where the results of a checkpoint go: `evaluation` in the run's folder.

    Shipped models lie where one should not write, and an export is a folder to be given away.
    """
    path = find_checkpoint(checkpoint)
    if shipped_folder("models") in path.parents:
        return Path("runs") / f"{path.parent.name}-evaluation"
    if path.name == "model.safetensors" and path.with_name("config.json").is_file():
        folder = path.parent.resolve()
        return folder.with_name(f"{folder.name}-evaluation")
    return path.parent / "evaluation"


class _Run:
    """The run of a checkpoint: its data, and the sids that it trained on and held out."""

    def __init__(self, path: Path, content: Mapping[str, Any]) -> None:
        self.path = path
        self.data: Mapping[str, Any] = content.get("config", {}).get("data") or {}
        self.paths: Mapping[str, str] = self.data.get("paths") or {}
        systems = content.get("systems") or {}
        self.trained = frozenset(map(str, systems.get("trained") or ()))
        self.held_out = frozenset(map(str, systems.get("held_out") or ()))

    def energy(self, data: str | Path | None) -> str:
        """Name of the target that is stored in `data`; of other data sets the usual one."""
        own = data is None or data == self.data.get("name") or find_recipe(data) is None
        return str((own and self.data.get("energy")) or "y_relaxed")

    def open(
        self,
        data: str | Path | None,
        splits: list[str],
        held_out: bool,
        energy: str | None,
        options: Mapping[str, Any],
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The splits to evaluate, opened and read through, and the data set's baselines."""
        own = data is None
        paths = self.paths if own else {}
        data = self.data.get("name") if own else data
        if own and data is None and not paths:
            raise ValueError(f"{self.path} does not say what it was trained on: give --data")
        if held_out and not self.held_out:
            raise ValueError(f"{self.path} knows no systems that its training held out")
        options = {**options, "energy": energy or self.energy(None if own else data)}
        found = None if data is None else find_recipe(data)
        if found is None and data is not None:
            if splits:
                raise ValueError(f"{data} is a file or folder of records and has no splits")
            sources: dict[str, Any] = {_label(Path(data)): open_dataset(data, **options)}
        else:
            part = self._part(found) if own and self.data.get("validation_fraction") else None
            names = self._names(found, paths, splits, part, held_out)
            opener = partial(_open_split, found, paths, options)
            sources = {
                x: self._rows(opener(self._train())) if x == part else opener(x) for x in names
            }
        for split, source in sources.items():
            if held_out and not isinstance(source, Subset):
                sources[split] = self._rows(source)
            elif not isinstance(source, Subset):
                source.read_through()
        sources = {x: source for x, source in sources.items() if len(source)}
        if not sources:
            raise ValueError(f"none of the {len(self.held_out)} systems held out is in {data}")
        whole = found is not None and not paths and not held_out
        return sources, _baselines(found, sources) if whole and found is not None else {}

    def _train(self) -> str:
        return str(self.data.get("train") or "train")

    def _part(self, found: Recipe | None) -> str:
        """The name of the held-out part of the training split."""
        name = str(self.data.get("validation") or HELD_OUT)
        return HELD_OUT if name in (*self.paths, *(found.splits if found else ())) else name

    def _names(
        self,
        found: Recipe | None,
        paths: Mapping[str, str],
        splits: list[str],
        part: str | None,
        held_out: bool,
    ) -> list[str]:
        known = [*([part] if part else []), *paths, *(found.splits if found else ())]
        if splits:
            for name in splits:
                if name not in known:
                    raise ValueError(f"no split '{name}'; there are: {', '.join(known)}")
            return list(dict.fromkeys(splits))
        if part and held_out:
            return [part]
        further = [x for x in self.data.get("evaluation") or () if x in known]
        if part:
            return [part, *(x for x in further if x != self._train())]
        names = further if found is None or found.name == self.data.get("name") else []
        names = names or [name for name in known if name.startswith("val")] or known
        missing = [x for x in names if found and x not in paths and found.find(x) is None]
        if missing and found is not None:
            here = " ".join(f"--split {x}" for x in names if x not in missing)
            raise ValueError(
                f"data set {found.name}: no file of {', '.join(missing)}; "
                f"{found.how_to_get(missing)}{f'; or take what is here: {here}' if here else ''}"
            )
        return names

    def _rows(self, source: Any) -> Subset[Any]:
        """The systems of `source` that training held out."""
        if not self.held_out:
            raise ValueError(
                f"{self.path} does not say which systems of {source.path} were held out of "
                "training: give --data FILE"
            )
        rows, seen = [], set()
        for start in range(0, len(source), _READ):
            batch = source.batch(range(start, min(start + _READ, len(source))))
            for row, sid in enumerate(map(str, batch.sid), start=start):
                if sid in self.held_out:
                    rows.append(row)
                    seen.add(sid)
        if missing := sorted(self.held_out - seen):
            text = (
                f"{len(missing)} of {len(self.held_out)} held-out systems are not in {source.path}"
            )
            warnings.warn(f"{text} ({some_sids(missing)})", UserWarning, stacklevel=2)
        return Subset(source, rows)

    def with_columns(self, result: SplitResult) -> SplitResult:
        """The result with the columns "trained_on" and "held_out", as far as they are known."""
        columns = dict(result.columns)
        for name, sids in (("trained_on", self.trained), ("held_out", self.held_out)):
            if sids:
                columns[name] = tuple("yes" if str(x) in sids else "no" for x in result.sid)
        return replace(result, columns=columns)


def _open_split(
    found: Recipe | None, paths: Mapping[str, str], options: Mapping[str, Any], name: str
) -> Any:
    if name in paths:
        return open_dataset(paths[name], **options)
    if found is None:
        raise ValueError(f"no split '{name}'; there are: {', '.join(paths)}")
    return found.open(name, **options)


def _baselines(found: Recipe, splits: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """{baseline: {split: MAE in eV}} as the data set's recipe gives them."""
    baselines: dict[str, dict[str, float]] = {}
    for split, methods in (found.metadata.get("baselines") or {}).items():
        for method, metrics in methods.items():
            if split in splits:
                baselines.setdefault(method, {})[split] = float(metrics["mae"])
    return baselines


def _label(path: Path) -> str:
    """The name of a file of records: its folder's when it is only called data.lmdb."""
    path = path.resolve()
    return path.parent.name if path.name == "data.lmdb" else path.stem
