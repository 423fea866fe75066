"""A model of energies and forces: dynamics, relaxations, and two routes to the relaxed energy.

Systems are of val_ood_cat of emt_adsorption, alloys that no training split holds. Each part is a
line in results.jsonl; all of them take about ten minutes on one core.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from ase import Atoms, units
from ase.calculators.emt import EMT
from ase.md.verlet import VelocityVerlet
from ase.optimize import BFGS

from common.results import Results, markdown_table
from flt_mol import FLTCalculator, predict
from flt_mol.data import to_ase
from flt_mol.data.recipes import recipe
from flt_mol.prediction.relaxation import largest_force, relax_structures

SPLIT = "val_ood_cat"
FMAX, STEPS = 0.05, 300
TEMPERATURE, TIMESTEP = 300.0, 1.0  # K, fs
NEAR = 0.05  # eV
AVERAGED = 50  # steps at both ends of a trajectory, which drift is the difference of


def systems(count: int, which: str = "earlier") -> list[Any]:
    """Initial structures of the split: evenly spaced, or "fresh", which are drawn from the others.

    Fresh systems were relaxed once, when model and data were settled.
    """
    dataset = recipe("emt_adsorption").open(SPLIT)
    rows = np.linspace(0, len(dataset) - 1, count).round().astype(int)
    if which == "fresh":
        others = np.setdiff1d(np.arange(len(dataset)), rows)
        rows = np.sort(np.random.default_rng(0).choice(others, count, replace=False))
    return [dataset[int(row)] for row in rows]


def numerical_gradient(model: str, count: int, step: float = 0.02) -> dict[str, float]:
    """Largest difference of forces from energies at r ± h and r ± 2h, eV/Å, of some coordinates.

    The error of this rule is of order h⁴; energies are float32.
    """
    worst, rng = 0.0, np.random.default_rng(0)
    for atoms in map(to_ase, systems(count)):
        atoms.calc = FLTCalculator(model)
        forces = atoms.get_forces(apply_constraint=False)
        for atom in rng.choice(len(atoms), 3, replace=False):
            axis, slope = int(rng.integers(3)), 0.0
            for steps, weight in ((1, 8), (-1, -8), (2, -1), (-2, 1)):
                moved = atoms.copy()
                moved.positions[atom, axis] += steps * step
                moved.calc = atoms.calc
                slope += weight * moved.get_potential_energy() / (12 * step)
            worst = max(worst, float(abs(forces[atom, axis] + slope)))
    return {"systems": count, "worst": worst}


def dynamics(model: str, count: int, steps: int) -> list[dict[str, float]]:
    """Constant energy from relaxed structures at twice the temperature: drift, meV/atom."""
    found = []
    relaxed = relax_structures(model, systems(count), fmax=FMAX, steps=STEPS)
    for number, one in enumerate(relaxed):
        atoms = one[-1].copy()
        atoms.calc = FLTCalculator(model)
        width = np.sqrt(units.kB * 2 * TEMPERATURE * atoms.get_masses())[:, None]
        atoms.set_momenta(width * np.random.default_rng(number).normal(size=(len(atoms), 3)))
        run = VelocityVerlet(atoms, TIMESTEP * units.fs)
        total = [atoms.get_total_energy() for _ in run.irun(steps)]
        per_atom = 1000 * np.array(total) / len(atoms)
        drift = per_atom[-AVERAGED:].mean() - per_atom[:AVERAGED].mean()
        found.append(
            {
                "sid": str(one[0].info["sid"]), "atoms": len(atoms), "steps": steps,
                "drift": float(drift), "deviation": float(per_atom.std()),
                "temperature": float(atoms.get_temperature()),
            }
        )  # fmt: skip
    return found


def relaxations(model: str, direct: str, structures: Sequence[Any]) -> list[dict[str, Any]]:
    """Adsorption energies, eV, of each system: EMT's relaxed one, the model's, and the direct one.

    The model's, too, counts from its own energy of the clean slab, that of the start without the
    adsorbate, and EMT's of the gas. "further" is EMT's after it went on from the model's end.
    """
    starts = [to_ase(one) for one in structures]
    slabs = [start[start.get_tags() != 2] for start in starts]
    predicted = predict(starts, direct), predict(slabs, model)
    by_model = relax_structures(model, structures, fmax=FMAX, steps=STEPS)
    found = []
    for structure, start, slab, one, energy, clean in zip(
        structures, starts, slabs, by_model, *predicted, strict=True
    ):
        reference = emt(start) - float(structure.energy_initial)  # of clean slab and gas
        gas = reference - emt(slab)
        end = one[-1].copy()
        at_end = emt(end) - reference
        found.append(
            {
                "sid": str(one[0].info["sid"]), "target": float(structure.energy),
                "emt_steps": relax(start), "emt": emt(start) - reference,
                "model": one[-1].get_potential_energy() - float(clean) - gas,
                "model_steps": len(one) - 1, "converged": largest_force(one[-1]) < FMAX,
                "direct": float(energy), "emt_at_end": at_end,
                "further_steps": relax(end), "further": emt(end) - reference,
            }
        )  # fmt: skip
    return found


def emt(atoms: Atoms) -> float:
    """EMT's energy, eV."""
    atoms.calc = EMT()
    return float(atoms.get_potential_energy())


def relax(atoms: Atoms) -> int:
    """Relax by the calculator that it has; the number of steps."""
    optimizer = BFGS(atoms, logfile=None)
    optimizer.run(fmax=FMAX, steps=STEPS)
    return int(optimizer.nsteps)


def relaxation_table(lines: Sequence[dict[str, Any]], direct: str) -> str:
    """Both roads to the relaxed adsorption energy, against EMT's, and how relaxations end."""
    of = {name: np.array([line[name] for line in lines]) for name in lines[0]}
    target = of["target"]
    rows = []
    for name, what in (
        ("direct", f"direct: {direct}, from the initial structure"),
        ("model", "relaxed by forces: the model's energy at the end"),
        ("emt_at_end", "relaxed by forces: EMT's energy at the end"),
        ("emt", "EMT relaxed by the same optimiser"),
    ):
        error = np.abs(of[name] - target)
        shares = [error < 0.02, np.abs(of[name] - of["emt"]) < NEAR]
        percent = [f"{100 * share.mean():.0f}" for share in shares]
        rows.append([what, f"{error.mean():.4f}", f"{np.median(error):.4f}", *percent])
    head = ["energy", "MAE (eV)", "median (eV)", "EwT (%)", "within 0.05 eV of EMT's (%)"]
    return markdown_table(head, rows)


def ending(line: dict[str, Any]) -> str:
    """How a relaxation ends, by EMT's energy there and where EMT goes from it."""
    off = line["emt_at_end"] - line["emt"]
    if abs(off) < NEAR:
        return "near EMT's end"
    passed = line["further"] - line["emt"] < NEAR
    return "lower" if off < 0 else "on the way there" if passed else "in a higher minimum"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--model", default="emt-forces", help="a checkpoint with forces")
    parser.add_argument("--direct", default="flt-small", help="an IS2RE checkpoint")
    parser.add_argument("--systems", type=int, default=50, help="to relax")
    parser.add_argument("--dynamics", type=int, default=4, help="systems of dynamics")
    parser.add_argument("--steps", type=int, default=1000, help="of dynamics, 1 fs each")
    parser.add_argument("--results", type=Path, default=Path(__file__).with_name("results.jsonl"))
    given = parser.parse_args()
    results = Results(given.results)
    gradient = numerical_gradient(given.model, min(5, given.systems))
    print(f"forces and numerical gradient differ by up to {gradient['worst']:.2e} eV/Å")
    results.append({"part": "gradient", **gradient})
    for line in dynamics(given.model, given.dynamics, given.steps):
        print("sid {sid}: {drift:+.4f} meV/atom, {temperature:.0f} K at the end".format(**line))
        results.append({"part": "dynamics", **line})
    for which in ("fresh", "earlier"):
        lines = relaxations(given.model, given.direct, systems(given.systems, which))
        for line in lines:
            results.append({"part": "relaxation", "systems": which, **line})
        steps = np.median([[line["model_steps"], line["emt_steps"]] for line in lines], axis=0)
        print(relaxation_table(lines, given.direct))
        print(f"{which}: {sum(line['converged'] for line in lines)} of {len(lines)} relaxations "
              f"converged; median steps {steps[0]:.0f}, EMT's own {steps[1]:.0f}; "
              f"{dict(Counter(map(ending, lines)))}")  # fmt: skip


if __name__ == "__main__":
    main()
