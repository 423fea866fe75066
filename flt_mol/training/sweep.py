"""Runs that differ in a few settings: every combination, one after the other."""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from rich.console import Console

from flt_mol.files import temporary_path
from flt_mol.training.checkpoint_file import read_checkpoint
from flt_mol.training.config import load_run_config
from flt_mol.training.finding import SWEEP_TABLE
from flt_mol.training.folders import LAST, check_run_folder
from flt_mol.training.overrides import split_paths
from flt_mol.training.run import best_line, run_settings, settled, train
from flt_mol.training.run_files import run_name

__all__ = ["SweepRun", "combinations", "sweep"]

_ODD = re.compile(r"[^\w.=,+-]+")


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep.

    Args:
        name: of its folder.
        folder: in that of the sweep.
        settings: its values of the overrides that give several.
        best: metrics of its best epoch.
    """

    name: str
    folder: Path
    settings: dict[str, str]
    best: dict[str, float]


def combinations(overrides: Sequence[str]) -> list[tuple[list[str], dict[str, str]]]:
    """Overrides of each run, and of these the values of those that give several, by key.

    Raises:
        ValueError: an override that cannot be read, or whose values are not countable.

    Example:
        >>> [changed for _, changed in combinations(["training.seed=0,1", "training.epochs=3"])]
        [{'training.seed': '0'}, {'training.seed': '1'}]
    """
    parser = OverridesParser.create()
    rest, _ = split_paths(overrides)
    choices: list[list[tuple[str, str, str | None]]] = []
    for text in overrides:
        if text not in rest:  # a path is never several
            choices.append([(text, "", None)])
            continue
        try:
            override = parser.parse_override(text)
            if not override.is_sweep_override():
                choices.append([(text, "", None)])
                continue
            key = override.get_key_element()
            values = list(override.sweep_string_iterator())
        except (HydraException, NotImplementedError, ValueError, TypeError) as error:
            reason = str(error).split("\n")[0]
            raise ValueError(
                f"'{text}' cannot be read ({reason}); several values are written KEY=A,B or "
                "KEY=range(0,5)"
            ) from None
        choices.append([(f"{key}={value}", key, value) for value in values])
    out = []
    for chosen in itertools.product(*choices):
        changed = {key: value for _, key, value in chosen if value is not None}
        out.append(([text for text, _, _ in chosen], changed))
    return out


def sweep(
    name_or_path: str, overrides: Sequence[str] = (), console: Console | None = None
) -> list[SweepRun]:
    """Train every combination, each in a folder of its own, and write ``sweep.csv`` beside them.

    All settings are checked before the first run begins. When the same sweep is given again,
    finished runs are kept and one that was broken off goes on.

    Args:
        name_or_path: as of :func:`~flt_mol.training.config.load_run_config`.
        overrides: Hydra's, of which some give several values: ``training.learning_rate=1e-3,2e-3``.
            ``output`` is the folder of the sweep; without it, runs/NAME-sweep.
        console: where progress goes.

    Raises:
        ValueError: as of one run; no override with several values, two runs with one name, or one
            whose folder holds a run of other settings.

    Returns:
        The runs, those with the lowest validation MAE first.
    """
    console = console or Console()
    chosen = combinations(overrides)
    if len(chosen) < 2:
        raise ValueError(
            "a sweep needs an override with several values, as training.seed=0,1; paths, as of "
            "data and output, are taken as they are"
        )
    configs = [load_run_config(name_or_path, texts) for texts, _ in chosen]
    folder = Path(configs[0].output or f"runs/{run_name(name_or_path)}-sweep")
    names = [_name(changed) for _, changed in chosen]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two runs of the sweep would be called {twice}: give each value once")
    for config, name in zip(configs, names, strict=True):
        check_run_folder(str(folder / name), run_settings(settled(config)))
    runs = []
    for number, (config, name, (_, changed)) in enumerate(
        zip(configs, names, chosen, strict=True), start=1
    ):
        console.print(f"== run {number} of {len(names)}: {name}")
        path = folder / name
        if (path / LAST).exists():
            best = read_checkpoint(path / "best.ckpt")["metrics"]
            console.print(f"finished before; {best_line(best, config.data.validation)}")
        else:
            best = train(replace(config, output=str(path)), name, console).best
        runs.append(SweepRun(name, path, changed, best))
        runs.sort(key=lambda run: run.best["val/mae"])
        _write(runs, folder / SWEEP_TABLE)
    return runs


def _name(changed: dict[str, str]) -> str:
    """As a folder: keys without their group, where that is clear."""
    parts = (f"{key.rpartition('.')[2]}={value}" for key, value in changed.items())
    return _ODD.sub("_", ",".join(parts))


def _write(runs: Sequence[SweepRun], path: Path) -> None:
    metrics = sorted({key for run in runs for key in run.best})
    with temporary_path(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as f:
        writer = csv.writer(f, lineterminator="\n")
        writer.writerow(["run", *runs[0].settings, *metrics])
        for run in runs:
            values = [repr(run.best[key]) if key in run.best else "" for key in metrics]
            writer.writerow([run.name, *run.settings.values(), *values])
