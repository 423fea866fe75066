"""What a constant, a composition and pair potentials reach on a data set of molecules.

All are fitted on train. "constant" is the median. The others are ridge regressions on counts of
elements ("composition"); on these and, for each pair of elements, Gaussians of distances below
5 Å ("pairs"); on all this and, for each pair of elements, Σ 1/r over all pairs ("Coulomb").
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))

from common.results import markdown_table
from flt_mol.data.recipes import recipe
from flt_mol.structures import Structures

Array = NDArray[Any]
NAMES = ("composition", "pairs", "Coulomb")
CUTOFF, NUM_GAUSSIANS, RIDGE = 5.0, 12, 1e-3


def features(system: Structures, elements: Array) -> list[Array]:
    """Of one molecule: counts of elements and 1; Gaussians by pair; Σ 1/r by pair."""
    kind = np.searchsorted(elements, system.atomic_numbers.numpy())
    positions, n = system.positions.double().numpy(), len(elements)
    i, j = np.triu_indices(len(kind), 1)
    pair = np.minimum(kind[i], kind[j]) * n + np.maximum(kind[i], kind[j])
    distance = np.linalg.norm(positions[i] - positions[j], axis=1)
    window = 0.5 * (1 + np.cos(np.pi * np.minimum(distance / CUTOFF, 1.0)))
    centres = np.linspace(1.0, CUTOFF, NUM_GAUSSIANS)
    bumps = np.exp(-(((distance[:, None] - centres) / 0.4) ** 2)) * window[:, None]
    near, coulomb = np.zeros((n * n, NUM_GAUSSIANS)), np.zeros(n * n)
    np.add.at(near, pair, bumps)
    np.add.at(coulomb, pair, 1.0 / distance)
    return [np.append(np.bincount(kind, minlength=n), 1.0), near.ravel(), coulomb]


def errors(
    designs: dict[str, Sequence[Sequence[Array]]], targets: dict[str, Array]
) -> dict[str, dict[str, float]]:
    """Baseline → split → MAE (eV)."""
    median = np.median(targets["train"])
    found = {"constant": {s: float(np.abs(y - median).mean()) for s, y in targets.items()}}
    for count, name in enumerate(NAMES, start=1):
        rows = {s: np.stack([np.concatenate(x[:count]) for x in d]) for s, d in designs.items()}
        train = rows["train"]
        square = train.T @ train + RIDGE * np.eye(train.shape[1])
        weights = np.linalg.solve(square, train.T @ targets["train"])
        found[name] = {s: float(np.abs(rows[s] @ weights - y).mean()) for s, y in targets.items()}
    return found


def main() -> None:
    """Print a table for each energy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="xtb_clusters", help="name or folder of a data set")
    source = recipe(parser.parse_args().data)
    batches = {}
    for split in source.splits:
        dataset = source.open(split, require_energy=True)
        batches[split] = dataset.batch(range(len(dataset)))
    elements = np.unique(np.concatenate([b.atomic_numbers.numpy() for b in batches.values()]))
    designs = {s: [features(x, elements) for x in batch] for s, batch in batches.items()}
    for name in ("energy_initial", "energy"):
        targets = {split: getattr(batch, name).numpy() for split, batch in batches.items()}
        table = errors(designs, targets)
        cells = [[k, *(f"{row[s]:.3f}" for s in targets)] for k, row in table.items()]
        print(markdown_table([f"{name}, MAE in eV", *targets], cells), end="\n\n")


if __name__ == "__main__":
    main()
