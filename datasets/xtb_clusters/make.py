#!/usr/bin/env python
"""Makes the data set xtb_clusters: clusters of molecules → GFN2-xTB energies → flat files.

A system depends on the seed, its split and its number alone, given one kind of processor and the
versions in `dataset.yaml`. It needs `tblite` and takes some 40 minutes of one core. Each system is
a line in the cache once it is done: stopped and started again, the script resumes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache, partial
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from ase import Atoms
from ase.build import molecule
from ase.calculators.calculator import CalculationFailed
from ase.data.vdw_alvarez import vdw_radii
from ase.optimize import BFGS
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor

from flt_mol.data.flat import write_flat
from flt_mol.structures import Structures

Array = NDArray[Any]

SPLITS = {  # systems of each
    "train": 4400, "val_id": 300, "val_ood_mol": 300, "val_ood_size": 60, "val_far": 300,
    "test": 300,
}  # fmt: skip
POLAR = ("LiF", "NaF", "NaCl", "CH3CN", "CH3NO2")
TRAINED = (
    *POLAR,
    *("H2O", "NH3", "CH3OH", "HCOOH", "H2CO", "HCN", "HF"),
    *("HCl", "SH2", "SO2", "CO2", "N2O"),
)
HELD_OUT = ("CH3COOH", "CH3CONH2", "CH3CHO", "H3CNH2", "CH3Cl", "CH3SH", "H2O2", "COF2")
SIZES = {2: 0.40, 3: 0.28, 4: 0.16, 5: 0.09, 6: 0.05, 7: 0.02}  # molecules → share
LARGE = (8, 12)
CONTACT = (0.75, 1.1)  # nearest atoms, in units of the sum of van der Waals radii (Alvarez)
LOOSE_SHARE = 1 / 8  # of train, val_id, test
GAP, FAR_GAP = (5.0, 12.0), (6.0, 15.0)  # Å between nearest atoms of loose molecules; val_far
EVALUATIONS = 60  # of the energy, in a relaxation at most
GTOL = {False: 0.02, True: 0.002}  # eV/Å, of close and of loose systems
GRID = 2.0**-10  # Å; positions are multiples of it, exact in float32


def generator(seed: int, split: str, index: int) -> np.random.Generator:
    """Generator of one system: a function of the seed, the split and the number alone."""
    key = (list(SPLITS).index(split), index)
    return np.random.default_rng(np.random.SeedSequence(entropy=seed, spawn_key=key))


def calculator() -> Any:
    """GFN2-xTB as an ASE calculator."""
    from tblite.ase import TBLite

    return TBLite(method="GFN2-xTB", verbosity=0)


def energy(numbers: Array, positions: Array) -> float:
    """GFN2-xTB energy, eV."""
    return float(Atoms(numbers, positions, calculator=calculator()).get_potential_energy())


@cache
def relaxed_molecule(name: str) -> tuple[Atoms, float]:
    """A molecule of ASE's g2 (and NaF), relaxed and centred, and its energy, eV."""
    atoms = Atoms("NaF", [(0, 0, 0), (0, 0, 1.93)]) if name == "NaF" else molecule(name)
    atoms.calc = calculator()
    BFGS(atoms, logfile=None).run(fmax=0.005, steps=200)
    atoms.calc = None
    atoms.positions -= atoms.positions.mean(0)
    return atoms, energy(atoms.numbers, atoms.positions)


def relax(atoms: Atoms, sizes: Sequence[int], *, held: bool) -> tuple[Array, int]:
    """Positions where the energy of rigid molecules is least, and how often it was asked for.

    L-BFGS over a move (Å) and a quaternion for each molecule; the chain rule takes the gradient of
    the atoms to them. Moves of `held` systems are 0: molecules only turn.
    """
    atoms.calc = calculator()
    owner = torch.repeat_interleave(torch.tensor(sizes))
    start = torch.tensor(atoms.positions)
    centre = torch.stack([part.mean(0) for part in start.split(list(sizes))])[owner]

    def placed(values: Tensor) -> Tensor:
        move, turn = values.reshape(-1, 7).split([3, 4], dim=1)
        rotation = _rotations(turn)[owner]
        moved = centre if held else centre + move[owner]
        return moved + (rotation @ (start - centre)[:, :, None])[:, :, 0]

    def asked(values: Array) -> tuple[float, Array]:
        given = torch.as_tensor(values).requires_grad_()
        positions = placed(given)
        atoms.positions = positions.detach().numpy()
        (gradient,) = torch.autograd.grad(positions, given, -torch.as_tensor(atoms.get_forces()))
        return float(atoms.get_potential_energy()), gradient.numpy()

    begin = np.tile([0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0], len(sizes))
    options = {"maxfun": EVALUATIONS, "gtol": GTOL[held], "ftol": 1e-12}
    found = minimize(asked, begin, jac=True, method="L-BFGS-B", options=options)
    return placed(torch.as_tensor(found.x)).numpy(), int(found.nfev)


def _rotations(quaternions: Tensor) -> Tensor:
    """(M, 3, 3) rotations of quaternions (M, 4) of any length."""
    w, x, y, z = (quaternions / quaternions.norm(dim=1, keepdim=True)).unbind(1)
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
        [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
        [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
    ]
    return torch.stack([torch.stack(row, -1) for row in rows], -2)


def draw_molecules(split: str, rng: np.random.Generator) -> tuple[list[str], bool]:
    """Names of the molecules of a system of `split`, and whether it is loose."""
    loose = split == "val_far" or (
        split in ("train", "val_id", "test") and rng.random() < LOOSE_SHARE
    )
    if loose:
        return [str(x) for x in rng.choice(POLAR, int(rng.integers(2, 4)))], True
    count = int(rng.choice(list(SIZES), p=list(SIZES.values())))
    if split == "val_ood_size":
        count = int(rng.integers(LARGE[0], LARGE[1] + 1))
    if split == "val_ood_mol":
        others = rng.choice((*TRAINED, *HELD_OUT), count - 1)
        return [str(x) for x in (rng.choice(HELD_OUT), *others)], False
    return [str(x) for x in rng.choice(TRAINED, count)], False


def place(split: str, names: Sequence[str], loose: bool, rng: np.random.Generator) -> Atoms:
    """Molecules, one after the other, turned at random, from a random direction until they touch.

    They touch where two atoms are a drawn fraction of the sum of their van der Waals radii apart;
    in loose systems, a drawn distance, uniform in its inverse.
    """
    system = Atoms()
    for name in names:
        added = relaxed_molecule(name)[0].copy()
        rotation = _rotations(torch.tensor(rng.normal(size=(1, 4))))[0].numpy()
        added.positions = added.positions @ rotation
        if loose:
            low, high = FAR_GAP if split == "val_far" else GAP
            reach: Any = 1.0 / rng.uniform(1.0 / high, 1.0 / low)
        else:
            radii = vdw_radii[system.numbers][:, None] + vdw_radii[added.numbers]
            reach = rng.uniform(*CONTACT) * radii
        direction = rng.normal(size=3)
        direction /= np.linalg.norm(direction)
        apart = added.positions - system.positions[:, None]
        along = apart @ direction
        inside = along**2 - (apart**2).sum(-1) + reach**2
        touching = inside > 0
        far = (np.sqrt(inside[touching]) - along[touching]).max(initial=0.0)
        added.positions += far * direction
        system += added
        system.positions -= system.positions.mean(0)
    system.positions = _on_grid(system.positions)
    return system


def _on_grid(positions: Array) -> Array:
    return np.asarray(np.round(positions / GRID) * GRID)


def make_system(seed: int, split: str, index: int) -> dict[str, Any]:
    """One system with its fields as plain values, or why there is none; a pure function."""
    rng = generator(seed, split, index)
    names, loose = draw_molecules(split, rng)
    atoms = place(split, names, loose, rng)
    numbers, start = atoms.numbers, atoms.positions.copy()
    reference = sum(relaxed_molecule(name)[1] for name in names)
    line: dict[str, Any] = {"split": split, "index": index, "molecules": names, "loose": loose}
    try:
        initial = energy(numbers, start) - reference
        sizes = [len(relaxed_molecule(name)[0]) for name in names]
        end, asked = relax(atoms, sizes, held=loose)
        relaxed = energy(numbers, end := _on_grid(end)) - reference
    except (CalculationFailed, RuntimeError) as error:
        return {**line, "failed": str(error)}
    pos, pos_relaxed = ((x / GRID).round().astype(int).tolist() for x in (start, end))
    return {
        **line, "asked": asked, "numbers": numbers.tolist(), "pos": pos,
        "pos_relaxed": pos_relaxed, "y_init": initial, "y_relaxed": relaxed,
    }  # fmt: skip


def wanted(fraction: float) -> list[tuple[str, int]]:
    """The first systems of each split, those of all splits in proportion at any time."""
    jobs = [(i / n, s, i) for s, n in SPLITS.items() for i in range(max(1, round(fraction * n)))]
    return [(split, index) for _, split, index in sorted(jobs)]


def run(cache: Path, seed: int, jobs: Sequence[tuple[str, int]], workers: int) -> None:
    """Make the systems that are not in the cache."""
    done = {(line["split"], line["index"]) for line in _lines(cache)}
    todo = [job for job in jobs if job not in done]
    cache.parent.mkdir(parents=True, exist_ok=True)
    with cache.open("a", encoding="utf-8") as file, get_context("spawn").Pool(workers) as pool:
        for line in pool.imap(partial(_make, seed), todo):
            file.write("\n" + json.dumps(line))  # after a line that was cut off, too
            file.flush()


def _make(seed: int, job: tuple[str, int]) -> dict[str, Any]:
    torch.set_num_threads(1)
    return make_system(seed, *job)


def _lines(cache: Path) -> list[dict[str, Any]]:
    """What the cache holds; a line that was cut off is not there."""
    found = []
    for text in cache.read_text(encoding="utf-8").splitlines() if cache.exists() else []:
        try:
            found.append(json.loads(text))
        except ValueError:
            continue
    return found


def structures_of(line: Mapping[str, Any]) -> Structures:
    """A line of the cache as a system; every atom is free and has tag 2."""
    start, end = (np.array(line[name]) * GRID for name in ("pos", "pos_relaxed"))
    return Structures.single(
        line["numbers"], start, tags=[2] * len(start), positions_relaxed=end,
        sid=list(SPLITS).index(line["split"]) * 100_000 + line["index"],
        energy=line["y_relaxed"], energy_initial=line["y_init"],
        info={"molecules": " ".join(line["molecules"]), "loose": line["loose"]},
    )  # fmt: skip


HEAD = {
    "name": "xtb_clusters",
    "version": "1.0",
    "title": "Clusters of small molecules, by GFN2-xTB",
    "task": "initial structure to the energy before and after relaxation of rigid molecules",
    "source": "computed by flt_mol with tblite",
    "licence": "CC-BY-4.0",
    "citation": [
        "C. Bannwarth, S. Ehlert, S. Grimme, GFN2-xTB, J. Chem. Theory Comput. 15, 1652 (2019), "
        "doi 10.1021/acs.jctc.8b01176",
        "L. A. Curtiss et al., J. Chem. Phys. 106, 1063 (1997), doi 10.1063/1.473182 (G2)",
    ],
    "units": {"length": "Å", "energy": "eV"},
    "energy": "E(system) − Σ E(relaxed molecules)",
    "reference": "zero",
    "elements": ["H", "Li", "C", "N", "O", "F", "Na", "S", "Cl"],
    "molecules": {"trained": list(TRAINED), "held_out": list(HELD_OUT), "polar": list(POLAR)},
}


def describe(
    folder: Path, lines: Sequence[Mapping[str, Any]], seed: int, fraction: float
) -> dict[str, Any]:
    """All of `dataset.yaml` as plain values."""
    splits = {}
    for split in SPLITS:
        file, every = folder / f"{split}.safetensors", [x for x in lines if x["split"] == split]
        kept = [x for x in every if "failed" not in x]
        splits[split] = {
            "file": file.name,
            "count": len(kept),
            "bytes": file.stat().st_size,
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
            "loose": sum(x["loose"] for x in kept),
            "stopped_early": sum(x["asked"] >= EVALUATIONS for x in kept),
            "no_self_consistency": len(every) - len(kept),
        }
    y = [x["y_relaxed"] for x in lines if x["split"] == "train" and "failed" not in x]
    packages = {name: version(name) for name in ("tblite", "ase", "numpy", "scipy")}
    return {
        **HEAD,
        "generator": {"seed": seed, "fraction": fraction, **packages},
        "splits": splits,
        "normalizer": {"mean": float(np.mean(y)), "std": float(np.std(y))},
    }


def main() -> None:
    """Make the systems, the files and `dataset.yaml` in a folder."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("output", type=Path, metavar="FOLDER")
    parser.add_argument("--cache", type=Path, metavar="FILE", help="default: FOLDER/systems.jsonl")
    parser.add_argument("--fraction", type=float, default=1.0, help="of each split, its first")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1, help="processes")
    given = parser.parse_args()
    cache, jobs = given.cache or given.output / "systems.jsonl", wanted(given.fraction)
    given.output.mkdir(parents=True, exist_ok=True)
    run(cache, given.seed, jobs, given.workers)
    lines = sorted(_lines(cache), key=lambda line: (line["split"], line["index"]))
    lines = [line for line in lines if (line["split"], line["index"]) in set(jobs)]
    for split in SPLITS:
        kept = [structures_of(x) for x in lines if x["split"] == split and "failed" not in x]
        write_flat(kept, given.output / f"{split}.safetensors")
    content = describe(given.output, lines, given.seed, given.fraction)
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=100)
    (given.output / "dataset.yaml").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
