"""A checkpoint evaluated on the splits of its run, or on other data."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import Subset

from flt_mol.data import open_dataset
from flt_mol.data.recipes import find_recipe, skipped_message
from flt_mol.data.tags import tagger_of
from flt_mol.evaluation.report import notes
from flt_mol.evaluation.splits import SplitResult, evaluate_splits
from flt_mol.evaluation.summary import constant_maes, stated_maes, summarise
from flt_mol.files import shipped_folder, some
from flt_mol.models.checkpoint import find_checkpoint, read_checkpoint
from flt_mol.prediction.energies import MeanModel
from flt_mol.prediction.members import load_members

HELD_OUT = "held_out"
"""Name of the systems held out of training where that of the validation split is taken."""


def evaluate_checkpoint(
    checkpoint: str | Path | Sequence[str | Path],
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
    name of its validation split (`HELD_OUT` where the data set has a split of that name),
    and its splits for evaluation.

    Args:
        checkpoint: file, folder of a run or an export, or name of a shipped model; several are an
            ensemble, of which the mean is evaluated, on the data of the first.
        data: name or folder of a data set, or a path of records; None takes those of the run.
        splits: names; without any those of the run, or every validation split.
        held_out: only the systems that training held out, known by their sids.
        energy: name of the stored target; None takes that of the run.
        skip_bad: skip invalid records.
        batch_size: systems per call.
        device: of the model.
        progress: as of `evaluate_splits`.

    Returns:
        The summary, see `summarise`, and the results by split.

    Raises:
        ValueError: no such checkpoint, data or split; records without targets or invalid ones,
            before anything is evaluated; held-out systems that are not found.

    Warns:
        UserWarning: systems with sids of the training data; skipped records.
    """
    members = load_members(checkpoint, device)
    first: Any = members.models[0]
    model = MeanModel(members) if members.ensemble else first
    path = find_checkpoint(members.given[0])
    run = _Run(path, data)
    options = {
        "require_energy": True,
        "energy": energy or run.energy,
        "on_error": "skip" if skip_bad else "raise",
        "check": members.check,
        "forces": "forces" in first.config.outputs,
        "tag_slab": run.tagger,
    }
    sources = run.open(splits, held_out, options)
    further: dict[str, dict[str, Any]] = defaultdict(dict)
    for split, source in sources.items():
        if getattr(source, "skipped", ()):
            further["skipped"][split] = len(source.skipped)
            warnings.warn(skipped_message(source), stacklevel=2)
    results = evaluate_splits(model, sources, batch_size, progress=progress, members=members)
    for split, result in results.items():
        if isinstance(sources[split], Subset):
            further["held_out"][split] = result.path
        columns = dict(result.columns)
        for name, sids in (("trained_on", run.trained), ("held_out", run.held_out)):
            if sids:
                columns[name] = tuple("yes" if str(x) in sids else "no" for x in result.sid)
        results[split] = replace(result, columns=columns)
        if count := columns.get("trained_on", ()).count("yes"):
            further["trained_on"][split] = count
    baselines = {} if held_out else stated_maes(run.recipe, results)
    if not baselines:
        if (median := model.trained_on.get("energy_median")) is not None:
            baselines["constant"] = constant_maes(results, median)
        baselines["own median"] = constant_maes(results)
    summary = summarise(
        results,
        baselines,
        checkpoint=", ".join(members.labels),
        checkpoint_file=str(path.resolve()),
        energy=options["energy"],
        **further,
    )
    for text in notes(summary)["trained_on"]:
        warnings.warn(text, stacklevel=2)
    return summary, results


def evaluation_folder(checkpoint: str | Path) -> Path:
    """Where the results of a checkpoint go: `evaluation` in the run's folder.

    Shipped models lie where one should not write, and an export is a folder to be given away.
    """
    path = find_checkpoint(checkpoint)
    if shipped_folder("models") in path.parents:
        return Path("runs") / f"{path.parent.name}-evaluation"
    if path.name == "model.safetensors":
        folder = path.parent.resolve()
        return folder.with_name(f"{folder.name}-evaluation")
    return path.parent / "evaluation"


class _Run:
    """The run of a checkpoint, and its splits that can be evaluated, or those of other `data`."""

    def __init__(self, path: Path, data: str | Path | None) -> None:
        content = read_checkpoint(path)
        config: Mapping[str, Any] = content["config"].get("data") or {}
        self.tagger = tagger_of(config)
        self.path, self.train = path, str(config.get("train") or "train")
        self.trained, self.held_out = (
            frozenset(map(str, content["systems"].get(x) or ())) for x in ("trained", "held_out")
        )
        source = config.get("name") if data is None else data
        recipe = None if source is None else find_recipe(source)
        own = data is None or recipe is None or recipe.name == config.get("name")
        self.energy = str((own and config.get("energy")) or "y_relaxed")
        paths = (config.get("paths") or {}) if data is None else {}
        known: dict[str, Callable[..., Any]] = {x: partial(open_dataset, paths[x]) for x in paths}
        if recipe is not None:
            known = {**{x: partial(recipe.open, x) for x in recipe.splits}, **known}
        elif data is not None:
            file = Path(data).resolve()
            name = file.parent.name if file.name == "data.lmdb" else file.stem
            known[name] = partial(open_dataset, data)
        if not known:
            raise ValueError(f"{path} does not state what it was trained on: give --data")
        self.listed = [x for x in (own and config.get("evaluation")) or () if x in known]
        self.part = ""  # the name of what was held out of the training split
        if data is None and config.get("validation_fraction"):
            name = str(config.get("validation") or HELD_OUT)
            self.part = HELD_OUT if name in known else name
            known = {self.part: known[self.train], **known}
        self.known = known
        self.recipe = None if paths else recipe

    def open(
        self, splits: Sequence[str], only_held_out: bool, options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The splits to evaluate, opened and read through."""
        for name in splits:
            if name not in self.known:
                raise ValueError(f"no split '{name}'; there are: {', '.join(self.known)}")
        names = [self.part, *(() if only_held_out else self.listed)]
        if not self.part:
            names = self.listed or [x for x in self.known if x.startswith("val")] or [*self.known]
        elif self.train in names:
            names.remove(self.train)
        sources: dict[str, Any] = {}
        for name in splits or names:
            source = self.known[name](**options)
            if only_held_out or name == self.part:
                source = self._held_out_of(source)
            else:
                source.read_through()
            if len(source):
                sources[name] = source
        if not sources:
            raise ValueError(f"none of the {len(self.held_out)} systems held out was found")
        return sources

    def _held_out_of(self, source: Any) -> Subset[Any]:
        if not self.held_out:
            raise ValueError(f"{self.path} lists no systems held out of training: give --data")
        sids = enumerate(str(sid) for batch in source.batches() for sid in batch.sid)
        found = {i: sid for i, sid in sids if sid in self.held_out}
        if missing := sorted(self.held_out.difference(found.values())):
            text = f"{len(missing)} of {len(self.held_out)} held-out systems are not in"
            warnings.warn(f"{text} {source.path} (sid {some(missing)})", stacklevel=2)
        return Subset(source, list(found))
