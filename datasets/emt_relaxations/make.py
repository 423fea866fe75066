#!/usr/bin/env python
"""Makes the data set emt_relaxations: relaxations of emt_adsorption → frames → LMDB files.

One system of each slab of emt_adsorption is relaxed again, as it was there, and some frames are
kept with their energies and forces: the S2EF task. One more has its atoms displaced at random.

The records depend on emt_adsorption and the seed alone, given the versions of ASE and NumPy in
`dataset.yaml` and one kind of processor. It takes some five minutes on two cores.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import ase
import numpy as np
import yaml
from ase import Atoms
from ase.calculators.emt import EMT
from ase.constraints import FixAtoms
from numpy.typing import NDArray

from flt_mol.data.recipes import recipe

Array = NDArray[Any]

SOURCE = "emt_adsorption"
SYSTEMS = {"train": 780, "val_id": 80, "val_ood_cat": 80}  # one of each slab
ALONG_PATH = 1  # frames between the first and the last
RATTLED = 2  # frames with displaced atoms
NOISE = (0.05, 0.2)  # Å, range of the standard deviation of displacements along each axis
LARGEST_FORCE = 15.0  # eV/Å, of frames with displaced atoms; beyond, displacements shrink
ATTEMPTS = 20

FIELDS = {
    "pos": "float32 (N, 3), Å, positions of this frame, not wrapped, multiples of 2^-12",
    "force": "float16 (N, 3), eV/Å, of all atoms, fixed ones too, as EMT gives them",
    "cell": "float32 (3, 3), Å, rows are the lattice vectors",
    "pbc": "bool (3,), all True as in OC20",
    "atomic_numbers": "uint8 (N,), metal atoms first, adsorbate last",
    "tags": "uint8 (N,), 0 below the surface and fixed, 1 surface and free, 2 adsorbate",
    "fixed": "uint8 (N,), 1 exactly where the tag is 0",
    "natoms": "int, N",
    "sid": "int, name of the system in emt_adsorption",
    "fid": "int, number of the frame in its system, in the order of the relaxation",
    "step": "int, of the relaxation; -1 where atoms were displaced from such a frame",
    "y": "float, eV, adsorption energy of pos: the target",
    "adsorbate": "str, its name",
    "facet": "str, 111, 100 or 110",
    "slab": "int, of emt_adsorption",
}


def _of_source() -> Any:
    """The functions that made emt_adsorption."""
    file = Path(__file__).resolve().parents[1] / SOURCE / "make.py"
    spec = importlib.util.spec_from_file_location("make_emt_adsorption", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


source = _of_source()


def chosen_records(split: str) -> list[dict[str, Any]]:
    """One system of each slab, another adsorbate from slab to slab, in order of sid."""
    dataset = recipe(SOURCE).open(split)
    slabs: dict[int, list[dict[str, Any]]] = {}
    for i in range(len(dataset)):
        record = dataset.record(i)
        slabs.setdefault(record["slab"], []).append(record)
    picked = [records[slab % len(records)] for slab, records in slabs.items()]
    return picked[: SYSTEMS[split]]


def frames_of(seed: int, record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The frames of one system, with their fields; a pure function."""
    atoms = Atoms(
        numbers=record["atomic_numbers"],
        positions=record["pos"].astype(np.float64),
        cell=record["cell"].astype(np.float64),
        pbc=True,
        constraint=FixAtoms(mask=record["fixed"].astype(bool)),
    )
    rng = source.generator(seed, int(record["sid"]))
    reference = source.energy(atoms) - record["y_init"]
    path = [atoms.positions.copy()]

    def keep(positions: Array) -> None:
        path.append(positions.copy())

    source.relax(atoms, fmax=source.FMAX, steps=source.STEPS, stop=keep)
    between = rng.permutation(np.arange(1, len(path) - 1))[:ALONG_PATH]
    steps = [0, *sorted(int(step) for step in between), len(path) - 1]
    found = [(step, _frame(atoms, path[step], reference)) for step in steps]
    free = record["fixed"] == 0
    for _ in range(RATTLED):
        start = path[int(rng.integers(len(path)))]
        found.append((-1, _rattled(atoms, start, free, reference, rng)))
    kept = {name: record[name] for name in FIELDS if name in record and name != "pos"}
    return [
        {**kept, **frame, "fid": fid, "step": step}
        for fid, (step, frame) in enumerate(found)
        if abs(frame["y"]) <= source.MAX_ENERGY
    ]


def _rattled(
    atoms: Atoms, start: Array, free: Array, reference: float, rng: np.random.Generator
) -> dict[str, Any]:
    """Free atoms displaced from `start`, by less where atoms came too close."""
    noise = rng.uniform(*NOISE)
    for attempt in range(ATTEMPTS):
        shift = rng.normal(0.0, noise * 0.9**attempt, start.shape) * free[:, None]
        frame = _frame(atoms, start + shift, reference)
        if np.abs(frame["force"]).max() <= LARGEST_FORCE:
            break
    return frame


def _frame(atoms: Atoms, positions: Array, reference: float) -> dict[str, Any]:
    """Energy and forces of positions on the grid, which float32 holds exactly."""
    there = atoms.copy()
    there.set_positions(source.on_grid(positions), apply_constraint=False)
    there.calc = EMT()
    return {
        "pos": np.asfortranarray(there.positions.astype(np.float32)),
        "force": np.asfortranarray(there.get_forces(apply_constraint=False).astype(np.float16)),
        "y": float(there.get_potential_energy()) - reference,
    }


def describe(output: Path, splits: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """All of `dataset.yaml` as plain values."""
    return {
        "name": "emt_relaxations",
        "version": "1.0",
        "title": "Frames of relaxations on fcc alloy surfaces with forces, by effective medium "
        "theory",
        "task": "S2EF: structure to energy and forces",
        **{key: source.HEAD[key] for key in ("source", "licence", "citation")},
        "generator": {
            "command": "python datasets/emt_relaxations/make.py FOLDER",
            "ase": ase.__version__,
            "numpy": np.__version__,
            "calculator": "ase.calculators.emt.EMT, asap_cutoff False",
        },
        "units": {"length": "Å", "energy": "eV", "force": "eV/Å"},
        "energy": "E(frame) − E(relaxed clean slab) − Σ gas references, as in emt_adsorption",
        "fields": FIELDS,
        "tag_rule": "half",
        "elements": recipe(SOURCE).metadata["elements"],
        "splits": {s: _describe_split(output / f"{s}.lmdb", r) for s, r in splits.items()},
    }


def _describe_split(file: Path, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    content = file.read_bytes()
    free = [record["force"][record["fixed"] == 0].astype(np.float64) for record in records]
    forces = np.concatenate(free)
    return {
        "file": file.name,
        "count": len(records),
        "systems": len({record["sid"] for record in records}),
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "sha256_of_content": source.content_digest(records),
        "free_atoms": len(forces),
        "mean_force_eV_per_angstrom": round(float(np.linalg.norm(forces, axis=1).mean()), 4),
        "mean_force_component_eV_per_angstrom": round(float(np.abs(forces).mean()), 4),
        "energy_std_eV": round(float(np.std([record["y"] for record in records])), 4),
    }


def main() -> None:
    """Make the LMDB files and `dataset.yaml` in a folder."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("output", type=Path, metavar="FOLDER")
    parser.add_argument("--seed", type=int, default=0, help="of frames and displacements")
    parser.add_argument("--systems", type=int, help="at most so many of each split")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    splits = {}
    # spawn: a forked child would share the parent's thread pools
    with get_context("spawn").Pool(given.workers) as pool:
        for split in SYSTEMS:
            records = chosen_records(split)[: given.systems]
            parts = pool.imap(partial(frames_of, given.seed), records, chunksize=4)
            splits[split] = [frame for part in parts for frame in part]
            print(f"{split}: {len(splits[split])} frames of {len(records)} systems", flush=True)
            source.write_lmdb(given.output / f"{split}.lmdb", splits[split])
    text = yaml.safe_dump(
        describe(given.output, splits), sort_keys=False, allow_unicode=True, width=100
    )
    (given.output / "dataset.yaml").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
