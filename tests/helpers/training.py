"""Runs of a second: a few slabs of five atoms, and a model with everything that is random."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ase.build import add_adsorbate, fcc111
from ase.constraints import FixAtoms
from ase.io import write
from rich.console import Console

from flt_mol.models.config import EnergyConfig
from flt_mol.training.config import RunConfig
from flt_mol.training.run import TrainingResult, train

SMALL: dict[str, Any] = {
    "embed_dim": 8,
    "num_heads": 2,
    "num_layers": 1,
    "ffn_dim": 8,
    "num_features": 8,
}
RANDOM: dict[str, Any] = {
    **SMALL,
    "redraw_every": 3,
    "dropout": 0.1,
    "rpe": {
        "spectrum": {"name": "gaussian", "num_terms": 4},
        "frequencies": {"name": "gaussian", "num_frequencies": 4, "learned_sigma": False},
    },
    "spectral": {"num_heads": 2, "k_max": 0.3},
    "pairs": {"cutoff": 3.5, "num_basis": 8, "vector_dropout": 0.5},
}
ALL_OUTPUTS: dict[str, Any] = {
    **SMALL,
    "rpe": None,
    "pairs": {"cutoff": 3.5, "num_basis": 8},
    "outputs": ["energy", "energy_initial", "displacement"],
    "recycles": 2,
    "feedback": "positions",
}


def relaxations(
    path: Path, count: int, first: int = 0, lacking: Mapping[int, str] | None = None
) -> Path:
    """Slabs whose adatom moves by 0.3 Å, with energies before and after; lowest layer fixed.

    lacking: number of a system → the target that it does not have.
    """
    frames = []
    for i in range(first, first + count):
        slab = fcc111(("Cu", "Ag", "Au")[i % 3], (2, 1, 2), vacuum=6.0)
        add_adsorbate(slab, "O", 1.2 + 0.02 * i, "fcc")
        slab.set_tags([0, 0, 1, 1, 2])
        slab.set_constraint(FixAtoms([0, 1]))
        relaxed = slab.positions.copy()
        relaxed[4, 2] += 0.3
        slab.set_array("pos_relaxed", relaxed)
        slab.info = {"y_relaxed": 0.1 * i, "y_init": 1.0 + 0.2 * i, "sid": f"slab-{i}"}
        name = (lacking or {}).get(i)
        if name is not None:
            del (slab.arrays if name == "pos_relaxed" else slab.info)[name]
        frames.append(slab)
    write(path, frames)
    return path


def tiny_run(
    folder: Path,
    systems: int = 5,
    validation: int = 2,
    *,
    model: Mapping[str, Any] = SMALL,
    lacking: Mapping[int, str] | None = None,
    data: Mapping[str, Any] | None = None,
    loss: Mapping[str, Any] | None = None,
    finetune: Mapping[str, Any] | None = None,
    **training: Any,
) -> RunConfig:
    """A run whose data lie in `folder`, and whose output is `folder`/run."""
    paths = {
        "train": str(relaxations(folder / "train.extxyz", systems, lacking=lacking)),
        "val": str(relaxations(folder / "val.extxyz", validation, first=systems)),
    }
    if (data or {}).get("validation_fraction"):
        del paths["val"]
    settings = {"epochs": 2, "batch_size": 2, "learning_rate": 1e-3, "loggers": ["csv"]}
    return RunConfig.model_validate(
        {
            "data": {"paths": paths, "validation": "val", **(data or {})},
            "model": EnergyConfig.model_validate(model).model_dump(),
            "training": {**settings, "accelerator": "cpu", **training},
            "loss": loss or {},
            "finetune": finetune or {},
            "output": str(folder / "run"),
        }
    )


def go(config: RunConfig, output: Path | None = None, console: Console | None = None) -> Any:
    """Train; elements of the validation split may be new."""
    if output is not None:
        config = config.model_copy(update={"output": str(output)})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="elements never trained on")
        result: TrainingResult = train(config, console=console or Console(quiet=True))
    return result
