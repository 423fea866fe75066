"""The `dataset.yaml` of a data set that was split into files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from flt_mol.data.conversion.write import KINDS
from flt_mol.data.dataset import StructuresDataset
from flt_mol.data.tally import targets_apart

__all__ = ["recipe_text"]

_BATCH = 512


def recipe_text(
    name: str,
    source: StructuresDataset,
    folder: Path,
    kind: str,
    done: Mapping[str, Mapping[str, Any]],
    about: Mapping[str, Any],
) -> str:
    """The text of `dataset.yaml`."""
    import yaml
    from ase.data import chemical_symbols

    elements: set[int] = set()
    energies: dict[str, list[float]] = {}
    for split, entry in done.items():
        energies[split] = []
        dataset = KINDS[kind].open(folder / entry["output"])
        for start in range(0, len(dataset), _BATCH):
            part = range(start, min(start + _BATCH, len(dataset)))
            for batch in targets_apart(dataset, part, partial(_has_target, dataset)):
                elements |= set(batch.atomic_numbers.tolist())
                energies[split] += [] if batch.energy is None else batch.energy.tolist()
    first = next(iter(done))
    splits = {
        split: {
            "file": entry["output"],
            "count": entry["systems"],
            "bytes": entry["bytes"],
            "sha256": entry["sha256"],
        }
        for split, entry in done.items()
    }
    recipe: dict[str, Any] = {
        "name": name,
        "source": source.path.name,
        "split": {**about, "by": "flt_mol.data.conversion.split"},
        "units": {"length": "Å", "energy": "eV"},
        "elements": [chemical_symbols[z] for z in sorted(elements)],
        "splits": splits,
    }
    if (rule := _tag_rule(source.path)) is not None:
        recipe["tag_rule"] = rule
    if energies[first]:  # of the systems that have a target
        recipe["normalizer"] = _moments(energies[first])
    return yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True, width=100)


def _tag_rule(path: Path) -> str | int | None:
    """How the source's atoms are tagged, where the data set that it is a file of says so."""
    from flt_mol.data.catalog import recipe

    with suppress(ValueError):
        for folder in path.resolve().parents[:3] if path.exists() else ():
            if (folder / "dataset.yaml").is_file():
                rule: str | int | None = recipe(folder).metadata.get("tag_rule")
                return rule
    return None


def _has_target(dataset: StructuresDataset, index: int) -> bool:
    return dataset.record(index).get(dataset.options.energy) is not None


def _moments(energies: Sequence[float]) -> dict[str, float]:
    """Mean and standard deviation, eV, rounded once and so the same on every machine."""
    mean = math.fsum(energies) / len(energies)
    variance = math.fsum((e - mean) ** 2 for e in energies) / len(energies)
    return {"mean": mean, "std": math.sqrt(variance)}
