"""A checkpoint evaluated on the splits of its run, or on other data."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
    model: Any = load_model(path, map_location=device)
    run = _Run(path, read_checkpoint(path), data, held_out)
    options = {
        "require_energy": True,
        "energy": energy or run.energy,
        "on_error": "skip" if skip_bad else "raise",
        "check": getattr(model, "check", None),
    }
    sources = run.open(list(splits), options)
    skipped = {split: len(x.skipped) for split, x in sources.items() if getattr(x, "skipped", ())}
    for split in skipped:
        warnings.warn(skipped_message(sources[split]), UserWarning, stacklevel=2)
    results = evaluate_splits(model, sources, batch_size, progress=progress, keep_worst=WORST)
    results = {split: run.with_columns(result) for split, result in results.items()}
    baselines = run.baselines(sources)
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
        energy=options["energy"],
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
    """The run of a checkpoint, and the data that it is evaluated on: its own, or other `data`."""

    def __init__(
        self, path: Path, content: Mapping[str, Any], data: str | Path | None, held_out: bool
    ) -> None:
        config: Mapping[str, Any] = content.get("config", {}).get("data") or {}
        systems = content.get("systems") or {}
        self.path, self.config, self.only_held_out = path, config, held_out
        self.trained, self.held_out = (
            frozenset(map(str, systems.get(x) or ())) for x in ("trained", "held_out")
        )
        self.paths: Mapping[str, str] = (config.get("paths") or {}) if data is None else {}
        self.data = config.get("name") if data is None else data
        if self.data is None and not self.paths:
            raise ValueError(f"{path} does not say what it was trained on: give --data")
        if held_out and not self.held_out:
            raise ValueError(f"{path} knows no systems that its training held out")
        self.recipe: Recipe | None = None if self.data is None else find_recipe(self.data)
        own = data in (None, config.get("name")) or self.recipe is None
        self.energy = str((own and config.get("energy")) or "y_relaxed")
        self.train = str(config.get("train") or "train")
        self.known = [*self.paths, *(self.recipe.splits if self.recipe else ())]
        self.part = ""  # the name of the held-out part of the training split
        if data is None and config.get("validation_fraction"):
            name = str(config.get("validation") or HELD_OUT)
            self.part = HELD_OUT if name in self.known else name
            self.known.insert(0, self.part)

    def open(self, splits: list[str], options: Mapping[str, Any]) -> dict[str, Any]:
        """The splits to evaluate, opened and read through."""
        if not self.known:
            if splits:
                raise ValueError(f"{self.data} is a file or folder of records and has no splits")
            path = Path(self.data or "").resolve()
            label = path.parent.name if path.name == "data.lmdb" else path.stem
            sources: dict[str, Any] = {label: open_dataset(self.data, **options)}
        else:
            names = self._names(splits)
            sources = {
                x: self._open_split(self.train if x == self.part else x, options) for x in names
            }
        for split, source in sources.items():
            if self.only_held_out or split == self.part:
                sources[split] = self._rows(source)
            else:
                source.read_through()
        sources = {split: source for split, source in sources.items() if len(source)}
        if not sources:
            raise ValueError(f"none of the {len(self.held_out)} systems held out is in {self.data}")
        return sources

    def _open_split(self, name: str, options: Mapping[str, Any]) -> Any:
        if self.recipe is None or name in self.paths:
            return open_dataset(self.paths[name], **options)
        return self.recipe.open(name, **options)

    def _names(self, splits: list[str]) -> list[str]:
        for name in splits:
            if name not in self.known:
                raise ValueError(f"no split '{name}'; there are: {', '.join(self.known)}")
        further = [x for x in self.config.get("evaluation") or () if x in self.known]
        if splits:
            return list(dict.fromkeys(splits))
        if self.part:
            further = [] if self.only_held_out else further
            return [self.part, *(x for x in further if x != self.train)]
        found = self.recipe
        names = further if found is None or found.name == self.config.get("name") else []
        return names or [name for name in self.known if name.startswith("val")] or self.known

    def _rows(self, source: Any) -> Subset[Any]:
        """The systems of `source` that training held out."""
        if not self.held_out:
            raise ValueError(f"{self.path} does not say what was held out: give --data FILE")
        rows, seen = list[int](), set[str]()
        for start in range(0, len(source), _READ):
            batch = source.batch(range(start, min(start + _READ, len(source))))
            found = [(i, x) for i, x in enumerate(map(str, batch.sid), start) if x in self.held_out]
            rows += [row for row, _ in found]
            seen.update(sid for _, sid in found)
        if missing := sorted(self.held_out - seen):
            text = f"{len(missing)} of {len(self.held_out)} held-out systems are not in"
            warnings.warn(f"{text} {source.path} ({some_sids(missing)})", UserWarning, stacklevel=2)
        return Subset(source, rows)

    def with_columns(self, result: SplitResult) -> SplitResult:
        """The result with the columns "trained_on" and "held_out", as far as they are known."""
        columns = dict(result.columns)
        for name, sids in (("trained_on", self.trained), ("held_out", self.held_out)):
            if sids:
                columns[name] = tuple("yes" if str(x) in sids else "no" for x in result.sid)
        return replace(result, columns=columns)

    def baselines(self, splits: Mapping[str, Any]) -> dict[str, dict[str, float]]:
        """{baseline: {split: MAE in eV}} as the data set's recipe gives them, of whole splits."""
        found: dict[str, dict[str, float]] = {}
        if self.recipe is not None and not self.paths and not self.only_held_out:
            for split, methods in (self.recipe.metadata.get("baselines") or {}).items():
                for method, metrics in methods.items() if split in splits else ():
                    found.setdefault(method, {})[split] = float(metrics["mae"])
        return found
