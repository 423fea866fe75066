"""Energies of random charges: pairs alone, and with a global part beside. Train, and print.

Charges are so dilute that a particle has about one neighbour within the cutoff of 4.5 Å.
Each model that is done is a line in results.jsonl; all of it takes about nine minutes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from common.loop import Settings, evaluate, seeded, train
from common.results import Results, markdown_table, mean_sd
from common.timing import flushed_denormals
from flt_mol.models import EnergyConfig, EnergyModel
from long_range.charges import Charges, coulomb_energy

CUTOFF, BLOCKS = 4.5, 2
_BASE: dict[str, Any] = {
    "embed_dim": 32, "num_heads": 4, "num_layers": BLOCKS, "ffn_dim": 64, "num_features": 32,
    "attention": "none", "rpe": None, "readout": "sum", "head_norm": False,
    "pairs": {"cutoff": CUTOFF, "num_basis": 24, "density": False},
}  # fmt: skip
# Wider in space and coarser than for slabs: what is near is the pairs' business.
_SPECTRAL = {"num_heads": 4, "k_max": 0.2, "sigma_max": 4.0, "num_basis": 8}
_CHARGED = {**_SPECTRAL, "charges": 16}
_RPE = {
    "spectrum": {"name": "gaussian", "num_terms": 16, "sigma_max": 12.0},
    "frequencies": {"name": "gaussian", "num_frequencies": 32, "sigma": [0.015, 0.15]},
}
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "pairs": ("pairs only", {}),
    # Sees all particles, but not where they are: what a global part gives without distances.
    "pairs_performer": ("pairs + attention, no positions", {"attention": "linear"}),
    "pairs_attention": ("pairs + FLT attention", {"attention": "linear", "rpe": _RPE}),
    "pairs_spectral": ("pairs + spectral filter", {"spectral": _SPECTRAL}),
    "pairs_charges": ("pairs + spectral filter + charges", {"spectral": _CHARGED}),
    "pairs_both": ("pairs + both", {"spectral": _SPECTRAL, "attention": "linear", "rpe": _RPE}),
}
KINDS = {"open clusters": Charges(), "periodic boxes": Charges(periodic=True, size=16.0)}


def measure(kind: str, name: str, seed: int, settings: Settings) -> dict[str, Any]:
    """Train and evaluate one model; its line of results."""
    corpus, config = (
        KINDS[kind],
        EnergyConfig.model_validate({"seed": seed, **_BASE, **ROWS[name][1]}),
    )
    splits = {
        split: [s.with_pairs(CUTOFF) for s in corpus.load(split)] for split in ("train", "test")
    }
    with flushed_denormals(), seeded(seed):
        model, seconds, _ = train(lambda: EnergyModel(config), splits["train"], settings, seed)
        found = evaluate(model, splits["test"], "relaxed")
    return {
        "kind": kind, "row": name, "seed": seed, "epochs": settings.epochs,
        "weights": sum(p.numel() for n, p in model.named_parameters() if "embedding" not in n),
        "seconds_per_epoch": round(seconds, 3), "mae": found["energy"]["mae"],
    }  # fmt: skip


def reach_of_energies(corpus: Charges, distance: float) -> tuple[float, float]:
    """Standard deviation of open systems' energies, and of their part beyond `distance`, eV."""
    every, far = [], []
    for system in corpus.load("test"):
        charges = (2.0 * (system.atomic_numbers == 11) - 1) * corpus.charge
        whole = coulomb_energy(charges, system.positions)
        far.append(whole - coulomb_energy(charges, system.positions, within=distance))
        assert system.energy is not None
        every.append(system.energy.item())
    return stdev(every), stdev(far)


def table(results: Results, epochs: int) -> str:
    """MAE of every row on both kinds of systems, and over that of pairs alone."""
    cells: list[list[object]] = []
    for name, (label, _) in ROWS.items():
        row: list[object] = [label]
        for kind in KINDS:
            found, base = (
                [r["mae"] for r in results.latest(kind=kind, row=n, epochs=epochs)]
                for n in (name, "pairs")
            )
            ratio = f"{fmean(found) / fmean(base):.2f}" if found and base else "–"
            row += [mean_sd(found, 3), len(found), ratio]
        cells.append(row)
    head = ["row"]
    for kind in KINDS:
        head += [f"MAE (eV), {kind}", "seeds", "/ pairs only"]
    text = ""
    for distance in (CUTOFF, CUTOFF * BLOCKS):
        whole, beyond = reach_of_energies(KINDS["open clusters"], distance)
        text += f"\nStandard deviation of energies {whole:.2f} eV, "
        text += f"of their part beyond {distance:g} Å {beyond:.2f} eV."
    return f"{markdown_table(head, cells)}\n{text}"


def main() -> None:
    """Parse the command line, train what is missing, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results.jsonl")
    parser.add_argument("--render", action="store_true", help="only print the table")
    given = parser.parse_args()
    results = Results(given.results)
    settings = Settings("relaxed", given.epochs, batch_size=24, learning_rate=5e-3)
    jobs = [(kind, row, seed) for kind in KINDS for seed in given.seeds for row in given.rows]
    for kind, row, seed in [] if given.render else jobs:
        if not results.read(kind=kind, row=row, seed=seed, epochs=given.epochs):
            record = measure(kind, row, seed, settings)
            results.append(record)
            print(f"{kind}, {row}, seed {seed}: MAE {record['mae']:.3f} eV", flush=True)
    print(f"\n{table(results, given.epochs)}")


if __name__ == "__main__":
    main()
