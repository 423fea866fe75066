#!/usr/bin/env python
"""Makes the data set emt_relaxations: relaxations of emt_adsorption → frames → LMDB files.

One system of each slab of emt_adsorption is relaxed again, as it was there, and some frames are
kept with their energies and forces: the S2EF task. The slab's other systems give one frame each
whose atoms are displaced: at random, and the adsorbate stretched or moved as a whole. Where a model
of adsorption energies is given, it relaxes systems of training; those that it misjudges most give
frames of these paths instead, labelled by EMT: active learning.

The records depend on emt_adsorption, the seed and the model alone, given the versions of ASE, NumPy
and PyTorch and one kind of processor. It takes some ten minutes on two cores.
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

from flt_mol.data import from_ase
from flt_mol.data.recipes import recipe
from flt_mol.prediction.relaxation import relax_structures

Array = NDArray[Any]

SOURCE = "emt_adsorption"
SLABS = {  # split → its slabs in a split of emt_adsorption
    "train": ("train", 0, 820),
    "tuning": ("val_id", 0, 40),
    "val_id": ("val_id", 40, 100),
    "val_ood_cat": ("val_ood_cat", 0, 80),
}
ALONG_PATH = 1  # frames between the first and the last
NOISE = (0.05, 0.25)  # Å, range of the standard deviation of displacements along each axis
STRETCH = (0.8, 2.0)  # range of factors of a bond of the adsorbate
LIFT = (-0.4, 1.5)  # Å, range of an adsorbate's move along z
SLIDE = 0.5  # Å, standard deviation of its move along x and y
LARGEST_FORCE = 15.0  # eV/Å, of displaced frames; beyond, displacements shrink
ATTEMPTS = 20
WALKED_SLABS, WALK_STEPS = 720, 80  # slabs with one relaxation by the model, its steps at most
MISJUDGED = 400  # of these relaxations are kept
DISPLACED, WALK = -1, -2  # instead of the step of a relaxation by EMT

FIELDS = {
    "pos": "float32 (N, 3), Å, positions of this frame, not wrapped, multiples of 2^-12",
    "force": "float16 (N, 3), eV/Å, 0 on fixed atoms",
    "cell": "float32 (3, 3), Å, rows are the lattice vectors",
    "pbc": "bool (3,), all True as in OC20",
    "atomic_numbers": "uint8 (N,), metal atoms first, adsorbate last",
    "tags": "uint8 (N,), 0 below the surface and fixed, 1 surface and free, 2 adsorbate",
    "fixed": "uint8 (N,), 1 exactly where the tag is 0",
    "natoms": "int, N",
    "sid": "int, name of the system in emt_adsorption, which has its adsorbate, facet and slab",
    "fid": "int, number of the frame in its system, in the order of the relaxation",
    "step": "int, of the relaxation; -1 where atoms were displaced, -2 in a model's relaxation",
    "y": "float, eV, EMT energy of pos: the target",
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


def chosen_slabs(split: str) -> list[list[dict[str, Any]]]:
    """The records of each slab, in order of sid."""
    name, first, last = SLABS[split]
    dataset = recipe(SOURCE).open(name)
    slabs: dict[int, list[dict[str, Any]]] = {}
    for i in range(len(dataset)):
        record = dataset.record(i)
        slabs.setdefault(record["slab"], []).append(record)
    return list(slabs.values())[first:last]


def frames_of(seed: int, records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The frames of one slab, with their fields; a pure function.

    Another adsorbate is relaxed from slab to slab.
    """
    relaxed = records[0]["slab"] % len(records)
    found = []
    for number, record in enumerate(records):
        rng = source.generator(seed, int(record["sid"]))
        frames = _relaxation(record, rng) if number == relaxed else [_displaced(record, rng)]
        found += _with_fields(record, frames)
    return found


def walks(
    model: str, seed: int, slabs: Sequence[Sequence[Mapping[str, Any]]]
) -> dict[int, list[dict[str, Any]]]:
    """By sid, the last frame and one before of a model's relaxations, where it is most wrong.

    It relaxes one system of each slab, the one after that which EMT relaxes; those are kept
    whose energy at the end differs most from EMT's. Frames with large forces are skipped.
    """
    chosen = [own[(own[0]["slab"] + 1) % len(own)] for own in slabs if len(own) > 1]
    starts = (from_ase(_atoms(record), sid=record["sid"]) for record in chosen)
    found = []
    for record, path in zip(chosen, relax_structures(model, starts, steps=WALK_STEPS), strict=True):
        atoms = _atoms(record)
        rng = source.generator(seed, int(record["sid"]))
        before = int(rng.integers(len(path) // 2, len(path)))  # where it goes astray
        steps = sorted({before, len(path) - 1})
        frames = [_frame(atoms, path[step].positions) for step in steps]
        energy = frames[-1]["y"] - _of_slab_and_gas(record)
        error = abs(path[-1].get_potential_energy() - energy)
        small = [x for x in frames if np.abs(x["force"]).max() <= LARGEST_FORCE]
        found.append((error, record["sid"], _with_fields(record, small, step=WALK)))
    found.sort(key=lambda walk: -walk[0])
    return {sid: frames for _, sid, frames in found[:MISJUDGED]}


def _with_fields(
    record: Mapping[str, Any], frames: Sequence[Mapping[str, Any]], **further: int
) -> list[dict[str, Any]]:
    """Frames with the fields of their system, without adsorption energies that are far off."""
    kept = {name: record[name] for name in FIELDS if name in record and name != "pos"} | further
    numbered = [{**kept, **frame, "fid": fid} for fid, frame in enumerate(frames)]
    clean = _of_slab_and_gas(record)
    return [frame for frame in numbered if abs(frame["y"] - clean) <= source.MAX_ENERGY]


def _of_slab_and_gas(record: Mapping[str, Any]) -> float:
    """E(relaxed clean slab) + Σ gas references, eV: what adsorption energies count from."""
    return float(source.energy(_atoms(record)) - record["y_init"])


def _atoms(record: Mapping[str, Any]) -> Atoms:
    """The initial structure."""
    return Atoms(
        numbers=record["atomic_numbers"],
        tags=record["tags"],
        positions=record["pos"].astype(np.float64),
        cell=record["cell"].astype(np.float64),
        pbc=True,
        constraint=FixAtoms(mask=record["fixed"].astype(bool)),
    )


def _relaxation(record: Mapping[str, Any], rng: np.random.Generator) -> list[dict[str, Any]]:
    """The first frame of a relaxation, the last, and random ones between."""
    atoms = _atoms(record)
    path = [atoms.positions.copy()]

    def keep(positions: Array) -> None:
        path.append(positions.copy())

    source.relax(atoms, fmax=source.FMAX, steps=source.STEPS, stop=keep)
    between = rng.permutation(np.arange(1, len(path) - 1))[:ALONG_PATH]
    steps = [0, *sorted(int(step) for step in between), len(path) - 1]
    return [{**_frame(atoms, path[step]), "step": step} for step in steps]


def _displaced(record: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """A frame off the path, by less where atoms came too close.

    It starts between the initial and the relaxed structure; free atoms are displaced at random,
    and by `_adsorbate_shift`.
    """
    atoms = _atoms(record)
    path = record["pos_relaxed"].astype(np.float64) - atoms.positions
    start = atoms.positions + rng.random() * path
    free = record["fixed"][:, None] == 0
    shift = rng.normal(0.0, rng.uniform(*NOISE), start.shape) * free
    shift[record["tags"] == 2] += _adsorbate_shift(record, start[record["tags"] == 2], rng)
    for attempt in range(ATTEMPTS):
        frame = _frame(atoms, start + shift * 0.9**attempt)
        if np.abs(frame["force"]).max() <= LARGEST_FORCE:
            break
    return {**frame, "step": DISPLACED}


def _adsorbate_shift(
    record: Mapping[str, Any], positions: Array, rng: np.random.Generator
) -> Array:
    """One of three at random: none, a move as a whole, a bond stretched or compressed."""
    bonds = source.adsorbate_bonds(record["adsorbate"])
    kind = int(rng.integers(3 if bonds else 2))
    if kind == 0:
        return np.zeros_like(positions)
    if kind == 1:
        return np.array([*rng.normal(0.0, SLIDE, 2), rng.uniform(*LIFT)])
    stay, go = rng.permutation(bonds[int(rng.integers(len(bonds)))])
    moving = {int(go)}
    for _ in positions:  # the atoms that hang on it, other than by this bond
        near = {b for bond in bonds for b in bond if moving & {*bond} and {*bond} != {stay, go}}
        moving |= near
    stretch = rng.uniform(*STRETCH) - 1.0
    shift = np.zeros_like(positions)
    shift[sorted(moving)] = stretch * (positions[go] - positions[stay])
    return shift


def _frame(atoms: Atoms, positions: Array) -> dict[str, Any]:
    """Energy and forces of positions on the grid, which float32 holds exactly."""
    there = atoms.copy()
    there.set_positions(source.on_grid(positions), apply_constraint=False)
    there.calc = EMT()
    return {
        "pos": np.asfortranarray(there.positions.astype(np.float32)),
        "force": np.asfortranarray(there.get_forces().astype(np.float16)),
        "y": float(there.get_potential_energy()),
    }


def describe(
    output: Path, splits: Mapping[str, Sequence[Mapping[str, Any]]], weights: str | None
) -> dict[str, Any]:
    """All of `dataset.yaml` as plain values; `weights` is the hash of the model's."""
    return {
        "name": "emt_relaxations",
        "version": "1.2",
        "title": "Frames of relaxations on fcc alloy surfaces with forces, by effective medium "
        "theory",
        "task": "S2EF: structure to energy and forces",
        **{key: source.HEAD[key] for key in ("source", "licence", "citation")},
        "generator": {
            "command": "python datasets/emt_relaxations/make.py FOLDER --model WEIGHTS",
            "sha256_of_weights": weights,
            "ase": ase.__version__,
            "numpy": np.__version__,
            "calculator": "ase.calculators.emt.EMT, asap_cutoff False",
        },
        "units": {"length": "Å", "energy": "eV", "force": "eV/Å"},
        "energy": "total energy E(frame) of EMT, which ASE counts from bulk metals",
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
    parser.add_argument("--slabs", type=int, help="at most so many of each split")
    parser.add_argument("--model", type=Path, help="weights that relax systems of training")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    splits = {}
    # spawn: a forked child would share the parent's thread pools
    with get_context("spawn").Pool(given.workers) as pool:
        for split in SLABS:
            slabs = chosen_slabs(split)[: given.slabs]
            parts = pool.imap(partial(frames_of, given.seed), slabs, chunksize=4)
            frames = [frame for part in parts for frame in part]
            if given.model and split == "train":
                walked = walks(str(given.model), given.seed, slabs[:WALKED_SLABS])
                frames = [frame for frame in frames if frame["sid"] not in walked]
                frames += [frame for own in walked.values() for frame in own]
            splits[split] = frames
            print(f"{split}: {len(splits[split])} frames of {len(slabs)} slabs", flush=True)
            source.write_lmdb(given.output / f"{split}.lmdb", splits[split])
    weights = given.model and hashlib.sha256(given.model.read_bytes()).hexdigest()
    text = yaml.safe_dump(
        describe(given.output, splits, weights), sort_keys=False, allow_unicode=True, width=100
    )
    (given.output / "dataset.yaml").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
