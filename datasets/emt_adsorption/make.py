#!/usr/bin/env python
"""Makes the data set emt_adsorption: plan → relaxed systems → LMDB files → dataset.yaml.

Alloy slabs with adsorbates, relaxed in ASE's effective medium theory (EMT: Jacobsen, Stoltze and
Nørskov, Surf. Sci. 366, 394, 1996). EMT's parameters of H, C, N and O are "not for any serious
use": the surfaces of potential energy are smooth and many-body, but they are no chemistry.

The records depend on the seed and the number of slabs alone, given the versions of ASE and NumPy in
`dataset.yaml` and one kind of processor (elsewhere, rounding differs in the last digits). It takes
some 20 to 30 minutes on two cores; stopped and started again, it resumes with the slab it was at.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pickle
import shutil
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import combinations
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import ase
import lmdb
import numpy as np
import yaml
from ase import Atoms
from ase.build import bulk, fcc100, fcc110, fcc111, molecule
from ase.calculators.emt import EMT
from ase.constraints import FixAtoms
from ase.data import chemical_symbols, covalent_radii
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar

Array = NDArray[Any]
Stop = Callable[[Array], "str | None"]  # positions (N, 3) → a reason to stop relaxing, or None

SPLITS = ("train", "val_id", "val_ood_ads", "val_ood_cat", "val_ood_both")
NUM_SLABS = 1500
_SPLIT_STRIDE = 100_000

METALS = ("Al", "Ni", "Cu", "Pd", "Ag", "Pt", "Au")
HELD_OUT_PAIRS = (("Cu", "Pt"), ("Ag", "Pd"), ("Al", "Ni"))
# No slab of train, val_id or val_ood_ads holds both metals of a pair; all others do.
FACETS: dict[str, Any] = {"111": fcc111, "100": fcc100, "110": fcc110}
VACUUM = 7.0  # Å, empty below and above the clean slab
STRAIN = 0.04
_ALLOY_SHARE = (0.15, 0.45, 0.40)  # of slabs with 1, 2, 3 elements
_WIDTHS, _WIDTH_SHARE = (2, 3, 4), (0.5, 0.35, 0.15)
_MAX_METAL_ATOMS = 48
_SLAB_ATTEMPTS = 20

TRAINED_ADSORBATES = (
    *("H", "C", "O", "CO", "CH", "NH", "NO", "CN", "N2"),
    *("CH2", "NH2", "H2O", "CHO", "CO2", "CH3", "NH3"),
)
HELD_OUT_ADSORBATES = ("N", "OH", "HCN", "CH2O")
ADSORBATES_PER_SLAB = 4
TRIES = 6  # placements of one adsorbate on one slab until one is kept
_G2_NAME = {"CHO": "HCO", "CH2": "CH2_s3B1d", "CH2O": "H2CO"}
_BOND = 1.25  # times the sum of covalent radii, in real gas-phase geometries

GRID = 2.0**-12  # Å; positions are multiples of it: exact in float32, and they compress well
SLAB_FMAX, FMAX = 0.01, 0.05  # eV/Å
STEPS = 300
MAX_STEP = 0.1  # Å, of one atom
_MEMORY = 20
_FIRST_STEP = 1.0 / 70.0  # Å²/eV, the inverse curvature that ASE's BFGS starts from
_HALVINGS = 4

MAX_ENERGY = 10.0  # eV, of |y_init| and |y_relaxed|, as in OC20
BOND_SLACK = 0.8  # Å: a bond of the adsorbate holds up to the sum of covalent radii plus this
DESORBED = 1.5  # times a covalent sum, within which an atom of the adsorbate must be
SUBSURFACE = 0.5  # Å below the mean height of the top layer, at most
RECONSTRUCTED = 1.0  # Å, largest move of a slab atom
RULES = {  # in the order in which they are asked; the first that applies is counted
    "energy_init_out_of_range": f"y_init beyond ±{MAX_ENERGY:g} eV or not finite",
    "dissociated": "a bond of the adsorbate became longer than the sum of covalent radii + "
    f"{BOND_SLACK:g} Å at any step",
    "not_converged": "force limit not reached within the step limit, or values not finite",
    "energy_out_of_range": f"y_relaxed beyond ±{MAX_ENERGY:g} eV or not finite",
    "desorbed": f"no adsorbate atom within {DESORBED:g} × the sum of covalent radii of a slab atom",
    "subsurface": f"an adsorbate atom more than {SUBSURFACE:g} Å below the mean height of the "
    "top layer",
    "reconstructed": f"a slab atom moved more than {RECONSTRUCTED:g} Å from the clean slab's",
}


def relax(atoms: Atoms, *, fmax: float, steps: int, stop: Stop | None = None) -> str:
    """Relaxes `atoms` in place with ASE's EMT; atoms under `FixAtoms` stay where they are.

    Nocedal's two-loop L-BFGS (Math. Comp. 35, 773, 1980) with a backtracking line search, so
    the energy falls with every step and the path stays in its valley. It needs scalar products
    only: the result does not depend on a number of threads.

    Args:
        atoms: relaxed in place; its calculator is taken away at the end.
        fmax: converged once every free atom's force is below, eV/Å.
        steps: most steps.
        stop: asked after each step.

    Returns:
        "converged", "not_converged" (steps used up, or energy or forces not finite), or what
        `stop` gave.
    """
    free = np.ones(len(atoms), dtype=bool)
    for constraint in atoms.constraints:
        if isinstance(constraint, FixAtoms):
            free[constraint.index] = False
    atoms.calc = EMT()
    try:
        with np.errstate(all="ignore"):
            return _minimise(atoms, free, fmax, steps, stop)
    finally:
        atoms.calc = None


def _minimise(atoms: Atoms, free: Array, fmax: float, steps: int, stop: Stop | None) -> str:
    energy, forces = _evaluate(atoms, free)
    pairs: deque[tuple[Array, Array, float]] = deque(maxlen=_MEMORY)
    for _ in range(steps):
        if not (np.isfinite(energy) and np.isfinite(forces).all()):
            return "not_converged"
        if float(np.linalg.norm(forces, axis=1).max(initial=0.0)) < fmax:
            return "converged"
        direction = _direction(forces, pairs)
        if float((direction * forces).sum()) <= 0.0:
            pairs.clear()
            direction = forces * _FIRST_STEP
        longest = float(np.linalg.norm(direction, axis=1).max())
        direction = direction * min(1.0, MAX_STEP / longest)
        energy, change, step = _line_search(atoms, free, energy, forces, direction)
        curvature = float((step * change).sum())
        if curvature > 1e-10:
            pairs.append((step, change, 1.0 / curvature))
        forces = forces - change
        reason = None if stop is None else stop(atoms.positions)
        if reason is not None:
            return reason
    converged = float(np.linalg.norm(forces, axis=1).max(initial=0.0)) < fmax
    return "converged" if converged else "not_converged"


def _evaluate(atoms: Atoms, free: Array) -> tuple[float, Array]:
    """Energy, eV, and the forces on the free atoms, eV/Å."""
    energy = float(atoms.get_potential_energy())
    return energy, np.array(atoms.get_forces(apply_constraint=False))[free]


def _direction(forces: Array, pairs: Iterable[tuple[Array, Array, float]]) -> Array:
    """−H⁻¹ ∇E by the two-loop recursion over (step, gradient change, 1 / their product)."""
    pairs = list(pairs)
    if not pairs:
        return forces * _FIRST_STEP
    q = forces.copy()
    weights = []
    for step, change, inverse in reversed(pairs):
        weights.append(inverse * float((step * q).sum()))
        q -= weights[-1] * change
    _, change, inverse = pairs[-1]
    q *= 1.0 / (inverse * float((change * change).sum()))
    for (step, change, inverse), weight in zip(pairs, reversed(weights), strict=True):
        q += step * (weight - inverse * float((change * q).sum()))
    return q


def _line_search(
    atoms: Atoms, free: Array, energy: float, forces: Array, direction: Array
) -> tuple[float, Array, Array]:
    """Halves `direction` until the energy falls (Armijo), moves there.

    Returns the energy, the change of the gradient, and the step. EMT's neighbour cutoff leaves
    jumps of some 1e-5 eV, so that after the last halving the step is taken all the same.
    """
    start = atoms.positions[free]
    slope = float((direction * forces).sum())
    for halving in range(_HALVINGS + 1):
        step = direction * 0.5**halving
        atoms.positions[free] = start + step
        new_energy, new_forces = _evaluate(atoms, free)
        if new_energy <= energy - 1e-4 * slope * 0.5**halving:
            break
    return new_energy, forces - new_forces, step


@dataclass(frozen=True)
class Slab:
    """A clean, relaxed slab.

    Args:
        atoms: metal atoms with tags 0 (fixed) and 1 (free), positions on the grid, Å.
        energy: EMT energy of exactly these positions, eV.
        facet: "111", "100" or "110".
        layers: number of atomic layers.
        outcome: "converged" or why not.
        displacement: largest distance an atom moved while relaxing, Å.
    """

    atoms: Atoms
    energy: float
    facet: str
    layers: int
    outcome: str
    displacement: float


@cache
def lattice_constant(metal: str) -> float:
    """Lattice constant of an fcc metal where its EMT energy is least, Å."""

    def energy_of(a: float) -> float:
        return energy(bulk(metal, "fcc", a=a))

    return float(minimize_scalar(energy_of, bounds=(3.2, 4.4), method="bounded").x)


@cache
def gas_references() -> dict[str, float]:
    """Energy of one atom of each adsorbate element in its gas reference, eV.

    As in OC20: H from H2, N from N2, O from H2O − H2, C from CO − O, each molecule relaxed in EMT.
    """
    molecules = {}
    for name in ("H2", "N2", "H2O", "CO"):
        atoms = molecule(name)
        relax(atoms, fmax=1e-3, steps=500)
        molecules[name] = energy(atoms)
    hydrogen = 0.5 * molecules["H2"]
    oxygen = molecules["H2O"] - molecules["H2"]
    return {
        "H": hydrogen,
        "C": molecules["CO"] - oxygen,
        "N": 0.5 * molecules["N2"],
        "O": oxygen,
    }


def energy(atoms: Atoms) -> float:
    """EMT energy of `atoms`, eV; `atoms` is left as it is."""
    copy = atoms.copy()
    copy.calc = EMT()
    with np.errstate(all="ignore"):
        return float(copy.get_potential_energy())


def on_grid(positions: Array) -> Array:
    """Positions rounded to multiples of `GRID`, so that float32 holds them exactly."""
    return np.asarray(np.round(np.asarray(positions) / GRID) * GRID, dtype=np.float64)


def draw_symbols(elements: Sequence[str], count: int, rng: np.random.Generator) -> list[str]:
    """`count` random elements with uniformly drawn fractions; each of `elements` occurs."""
    while True:
        fractions = rng.dirichlet(np.ones(len(elements)))
        symbols = [str(s) for s in rng.choice(elements, size=count, p=fractions)]
        if set(symbols) == set(elements):
            return symbols


def build_slab(
    facet: str,
    size: tuple[int, int, int],
    symbols: Sequence[str],
    strain: float,
) -> Atoms:
    """An ideal fcc slab, positions on the grid, cell exact in float32.

    The lattice constant is the mean over `symbols` of the metals' own, times (1 + `strain`). The
    lower half of the layers, rounded down, has tag 0 and is fixed; the others have tag 1.
    """
    a = float(np.mean([lattice_constant(s) for s in symbols])) * (1.0 + strain)
    slab: Atoms = FACETS[facet]("Cu", size=size, a=a, vacuum=VACUUM, periodic=True)
    slab.set_chemical_symbols(list(symbols))
    layer = slab.get_tags()  # ASE counts layers from 1 at the top
    fixed = layer > size[2] - size[2] // 2
    slab.set_tags(np.where(fixed, 0, 1))
    slab.set_constraint(FixAtoms(mask=fixed))
    slab.set_cell(slab.cell.array.astype(np.float32).astype(np.float64))
    slab.set_positions(on_grid(slab.positions), apply_constraint=False)
    return slab


def relax_slab(slab: Atoms, facet: str, layers: int, *, fmax: float, steps: int) -> Slab:
    """Relaxes an ideal slab, which is left as it is."""
    atoms = slab.copy()
    outcome = relax(atoms, fmax=fmax, steps=steps)
    atoms.set_positions(on_grid(atoms.positions), apply_constraint=False)
    moved = float(np.linalg.norm(atoms.positions - slab.positions, axis=1).max())
    return Slab(atoms, energy(atoms), facet, layers, outcome, moved)


def gas_geometry(name: str) -> Atoms:
    """Real gas-phase geometry (G2 set) of an adsorbate by its name in the data set, no cell."""
    if name in ("H", "C", "N", "O"):
        return Atoms(name, positions=[(0.0, 0.0, 0.0)])
    atoms: Atoms = molecule(_G2_NAME.get(name, name))
    return atoms


@cache
def adsorbate_bonds(name: str) -> tuple[tuple[int, int], ...]:
    """Pairs of atoms that are bonded in the real gas-phase geometry."""
    atoms = gas_geometry(name)
    radii = covalent_radii[atoms.numbers]
    bonded = atoms.get_all_distances() < _BOND * (radii[:, None] + radii)
    return tuple((int(i), int(j)) for i, j in zip(*np.nonzero(np.triu(bonded, 1)), strict=True))


@cache
def _relaxed_geometry(name: str) -> Atoms:
    atoms = gas_geometry(name)
    relax(atoms, fmax=0.01, steps=500)
    return atoms


def adsorbate_geometry(name: str) -> Atoms:
    """The adsorbate's own geometry in EMT: relaxed from the real one, centred, without a cell."""
    atoms: Atoms = _relaxed_geometry(name).copy()
    atoms.positions -= atoms.positions.mean(0)
    return atoms


def random_rotation(rng: np.random.Generator) -> Array:
    """(3, 3) rotation, uniform over all rotations, from a random unit quaternion."""
    w, x, y, z = (q := rng.normal(size=4)) / np.linalg.norm(q)
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
            [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
            [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
        ]
    )


def contact_height(slab: Atoms, adsorbate: Atoms, factor: float) -> float:
    """Least height z to add to `adsorbate`, coming from above, before it touches `slab`, Å.

    Two atoms touch where their distance is `factor` times the sum of their covalent radii;
    periodic images of the slab within two cells count.
    """
    steps = np.array([(i, j, 0) for i in range(-2, 3) for j in range(-2, 3)])
    images = (slab.positions[None] + (steps @ slab.cell.array)[:, None]).reshape(-1, 3)
    radii = np.tile(covalent_radii[slab.numbers], len(steps))
    reach = factor * (radii[None] + covalent_radii[adsorbate.numbers][:, None])
    apart = images[None] - adsorbate.positions[:, None]
    vertical = reach**2 - apart[..., 0] ** 2 - apart[..., 1] ** 2
    touching = vertical > 0
    return float((apart[..., 2][touching] + np.sqrt(vertical[touching])).max())


def place_adsorbate(
    slab: Slab, name: str, rng: np.random.Generator, contact: tuple[float, float] = (1.1, 1.5)
) -> Atoms:
    """The slab with one adsorbate at a random site, height and rotation; positions on the grid.

    The adsorbate comes down until one of its atoms touches a slab atom at a factor drawn from
    `contact` times the sum of covalent radii. Its atoms come last, with tag 2.
    """
    adsorbate = adsorbate_geometry(name)
    adsorbate.positions = adsorbate.positions @ random_rotation(rng).T
    adsorbate.positions += rng.random(2) @ slab.atoms.cell.array[:2]
    adsorbate.positions[:, 2] += contact_height(slab.atoms, adsorbate, rng.uniform(*contact))
    adsorbate.set_tags(2)
    system: Atoms = slab.atoms.copy()
    system.set_constraint()
    system += adsorbate
    system.set_positions(on_grid(system.positions))
    system.set_constraint(FixAtoms(mask=system.get_tags() == 0))
    return system


def adsorption_energy(system: Atoms, slab: Slab) -> float:
    """E(system) − E(clean relaxed slab) − Σ gas references of the adsorbate's atoms, eV."""
    reference = gas_references()
    gas = sum(reference[atom.symbol] for atom in system if atom.tag == 2)
    return energy(system) - slab.energy - gas


def dissociation_check(name: str, system: Atoms) -> Callable[[Array], str | None]:
    """A `stop` for `relax`: "dissociated" once a bond of adsorbate `name` is broken.

    The adsorbate's atoms are the last of `system` and are not wrapped while relaxing.
    """
    bonds = np.array(adsorbate_bonds(name), dtype=np.int64).reshape(-1, 2)
    bonds = bonds + int((system.get_tags() != 2).sum())
    longest = covalent_radii[system.numbers[bonds]].sum(1) + BOND_SLACK

    def check(positions: Array) -> str | None:
        length = np.linalg.norm(positions[bonds[:, 0]] - positions[bonds[:, 1]], axis=1)
        return "dissociated" if bool((length > longest).any()) else None

    return check


def out_of_range(energy: float) -> bool:
    """Whether an adsorption energy, eV, is too large or not finite."""
    return not abs(energy) <= MAX_ENERGY


def is_desorbed(system: Atoms) -> bool:
    """Whether no adsorbate atom is near a slab atom, by the nearest periodic image."""
    tags = system.get_tags()
    adsorbate, metal = np.flatnonzero(tags == 2), np.flatnonzero(tags != 2)
    distances = system.get_all_distances(mic=True)[np.ix_(adsorbate, metal)]
    radii = covalent_radii[system.numbers]
    return not bool((distances <= DESORBED * (radii[adsorbate][:, None] + radii[metal])).any())


def is_subsurface(system: Atoms, layers: int) -> bool:
    """Whether an adsorbate atom went below the top layer of the slab."""
    heights, tags = system.positions[:, 2], system.get_tags()
    metal = np.sort(heights[tags != 2])
    top = float(metal[-(len(metal) // layers) :].mean())
    return bool((heights[tags == 2] < top - SUBSURFACE).any())


def is_reconstructed(system: Atoms, clean: Atoms) -> bool:
    """Whether a slab atom of `system` is far from its place in the relaxed clean slab."""
    moved = np.linalg.norm(system.positions[: len(clean)] - clean.positions, axis=1)
    return bool((moved > RECONSTRUCTED).any())


def verdict(system: Atoms, slab: Slab, y_relaxed: float, outcome: str) -> str | None:
    """Reason to drop a relaxed system, one of `REASONS`, or None to keep it.

    Args:
        system: slab and adsorbate after relaxation.
        slab: the clean slab.
        y_relaxed: adsorption energy of `system`, eV.
        outcome: what `relax` returned.
    """
    if outcome != "converged":
        return outcome
    if out_of_range(y_relaxed):
        return "energy_out_of_range"
    if is_desorbed(system):
        return "desorbed"
    if is_subsurface(system, slab.layers):
        return "subsurface"
    return "reconstructed" if is_reconstructed(system, slab.atoms) else None


@dataclass(frozen=True)
class SlabDraw:
    """One slab to build: everything random about it.

    Args:
        facet: "111", "100" or "110".
        size: cells along the two surface vectors, and layers.
        symbols: element of each atom, in ASE's order.
        strain: relative change of the composition's mean lattice constant.
    """

    facet: str
    size: tuple[int, int, int]
    symbols: tuple[str, ...]
    strain: float

    def build(self) -> Atoms:
        """The ideal slab."""
        return build_slab(self.facet, self.size, self.symbols, self.strain)


def slab_ids(num_slabs: int) -> list[int]:
    """Slabs of the whole data set: one in twelve for each validation split, the rest for train.

    A slab's number tells its split and does not depend on `num_slabs`.

    Raises:
        ValueError: fewer slabs than splits.
    """
    if not len(SPLITS) <= num_slabs <= _SPLIT_STRIDE:
        raise ValueError(f"num_slabs is {num_slabs}; it must be {len(SPLITS)} to {_SPLIT_STRIDE}")
    validation = max(1, num_slabs // 12)
    counts = [num_slabs - validation * (len(SPLITS) - 1)] + [validation] * (len(SPLITS) - 1)
    return [s * _SPLIT_STRIDE + i for s, count in enumerate(counts) for i in range(count)]


def split_of(slab: int) -> str:
    """The split that a slab belongs to by its number."""
    return SPLITS[slab // _SPLIT_STRIDE]


def generator(seed: int, *key: int) -> np.random.Generator:
    """Generator of its own for one slab or one system: a function of `seed` and `key` alone."""
    return np.random.default_rng(np.random.SeedSequence(entropy=seed, spawn_key=key))


def is_held_out_alloy(elements: frozenset[str] | set[str]) -> bool:
    """Whether a set of metals holds both metals of a held-out pair."""
    return any(set(pair) <= elements for pair in HELD_OUT_PAIRS)


def element_sets(count: int, *, held_out: bool) -> list[tuple[str, ...]]:
    """All sets of `count` metals that are held out, or all that are not."""
    sets = combinations(METALS, count)
    return [elements for elements in sets if is_held_out_alloy(set(elements)) == held_out]


def draw_slab(split: str, rng: np.random.Generator) -> SlabDraw:
    """A random slab that `split` may hold."""
    held_out = split in ("val_ood_cat", "val_ood_both")
    share = np.array([p if element_sets(n, held_out=held_out) else 0.0 for n, p in _counts()])
    count = int(rng.choice((1, 2, 3), p=share / share.sum()))
    candidates = element_sets(count, held_out=held_out)
    elements = candidates[int(rng.integers(len(candidates)))]
    facet = str(rng.choice(("111", "100", "110")))
    size = _draw_size(facet, rng)
    symbols = draw_symbols(elements, size[0] * size[1] * size[2], rng)
    return SlabDraw(facet, size, tuple(symbols), float(rng.uniform(-STRAIN, STRAIN)))


def draw_adsorbates(split: str, rng: np.random.Generator) -> list[str]:
    """Different adsorbates to try on one slab of `split`, in random order."""
    held_out = split in ("val_ood_ads", "val_ood_both")
    names = HELD_OUT_ADSORBATES if held_out else TRAINED_ADSORBATES
    return [str(name) for name in rng.permutation(names)[:ADSORBATES_PER_SLAB]]


def _counts() -> list[tuple[int, float]]:
    return list(enumerate(_ALLOY_SHARE, start=1))


def _draw_size(facet: str, rng: np.random.Generator) -> tuple[int, int, int]:
    # two layers of the open 110 facet are 1.3 Å thick: no slab
    layers = (3, 4) if facet == "110" else (2, 3, 4)
    while True:
        nx, ny = (int(n) for n in rng.choice(_WIDTHS, size=2, p=_WIDTH_SHARE))
        nz = int(rng.choice(layers))
        if nx * ny * nz <= _MAX_METAL_ATOMS:
            return nx, ny, nz


def make_slab_systems(seed: int, slab: int) -> dict[str, Any]:
    """Draws, relaxes and filters the systems of slab number `slab`; a pure function.

    Returns:
        slab, split, facet, layers, elements; how many placements were `tried`, how many `dropped`
        (reason → count), how many draws of the slab itself (`slabs_dropped`); `records`: systems
        with the data set's fields as lists.

    Raises:
        RuntimeError: no stable slab in 20 draws.
    """
    split = split_of(slab)
    dropped: Counter[str] = Counter()
    clean, rng, attempt = _clean_slab(seed, slab, split)
    records, tried = [], 0
    for k, name in enumerate(draw_adsorbates(split, rng)):
        for attempted in range(TRIES):
            tried += 1
            system_rng = generator(seed, slab, attempt, k, attempted)
            record, reason = make_system(clean, name, system_rng)
            if reason is None:
                records.append({**record, "sid": slab * 10 + k, "slab": slab})
                break
            dropped[reason] += 1
    symbols = clean.atoms.get_chemical_symbols()
    return {
        "slab": slab,
        "split": split,
        "facet": clean.facet,
        "layers": clean.layers,
        "elements": sorted(set(symbols)),
        "slabs_dropped": attempt,
        "tried": tried,
        "dropped": dict(dropped),
        "records": records,
    }


def _clean_slab(seed: int, slab: int, split: str) -> tuple[Slab, np.random.Generator, int]:
    """A stable relaxed slab, its generator, and how many draws before it were dropped."""
    for attempt in range(_SLAB_ATTEMPTS):
        rng = generator(seed, slab, attempt)
        draw = draw_slab(split, rng)
        clean = relax_slab(draw.build(), draw.facet, draw.size[2], fmax=SLAB_FMAX, steps=STEPS)
        stable = clean.displacement <= RECONSTRUCTED
        if clean.outcome == "converged" and stable:
            return clean, rng, attempt
    raise RuntimeError(f"slab {slab} of seed {seed}: no stable slab in {_SLAB_ATTEMPTS} draws")


def make_system(
    slab: Slab, name: str, rng: np.random.Generator
) -> tuple[dict[str, Any], str | None]:
    """One placement of one adsorbate: its record and None, or {} and why it is dropped.

    Energies belong to the stored positions exactly: both start and end are on the grid.
    """
    system = place_adsorbate(slab, name, rng)
    y_init = adsorption_energy(system, slab)
    if out_of_range(y_init):
        return {}, "energy_init_out_of_range"
    start = system.positions.copy()
    stop = dissociation_check(name, system)
    outcome = relax(system, fmax=FMAX, steps=STEPS, stop=stop)
    if outcome != "converged":
        return {}, outcome
    system.set_positions(on_grid(system.positions), apply_constraint=False)
    y_relaxed = adsorption_energy(system, slab)
    reason = verdict(system, slab, y_relaxed, outcome)
    if reason is not None:
        return {}, reason
    tags = system.get_tags()
    return {
        "pos": start.tolist(),
        "pos_relaxed": system.positions.tolist(),
        "cell": system.cell.array.tolist(),
        "pbc": [True, True, True],
        "atomic_numbers": system.numbers.tolist(),
        "tags": tags.tolist(),
        "fixed": (tags == 0).astype(int).tolist(),
        "natoms": len(system),
        "y_init": y_init,
        "y_relaxed": y_relaxed,
        "adsorbate": name,
        "facet": slab.facet,
    }, None


_FORMAT = 1  # raise it when the same seed no longer gives the same systems
_ARRAYS: dict[str, type[np.generic]] = {
    "pos": np.float32,
    "pos_relaxed": np.float32,
    "cell": np.float32,
    "pbc": np.bool_,
    "atomic_numbers": np.uint8,
    "tags": np.uint8,
    "fixed": np.uint8,
}
_VALUES = ("sid", "natoms", "y_init", "y_relaxed", "adsorbate", "facet", "slab")


def run_slabs(work: Path, slabs: Sequence[int], seed: int, workers: int) -> list[dict[str, Any]]:
    """Systems of every slab of `slabs`, in that order; see `make_slab_systems`.

    Each finished slab is a file in `work`; those that are there are not made again.
    """
    work.mkdir(parents=True, exist_ok=True)
    wanted = {"format": _FORMAT, "seed": seed, "ase": ase.__version__, "numpy": np.__version__}
    begun = work / "plan.json"
    if not begun.exists():
        begun.write_text(json.dumps(wanted), encoding="utf-8")
    if json.loads(begun.read_text(encoding="utf-8")) != wanted:
        raise ValueError(f"{work} was begun with another seed or other versions: remove it")
    missing = [slab for slab in slabs if not _slab_file(work, slab).exists()]
    # spawn: a forked child would share the parent's thread pools
    with get_context("spawn").Pool(workers) as pool:
        for done, slab in enumerate(pool.imap_unordered(partial(_make, work, seed), missing), 1):
            print(f"\r{done} of {len(missing)} slabs, slab {slab}", end="", flush=True)
    print()
    return [json.loads(_slab_file(work, slab).read_text(encoding="utf-8")) for slab in slabs]


def _slab_file(work: Path, slab: int) -> Path:
    return work / f"slab-{slab:06d}.json"


def _make(work: Path, seed: int, slab: int) -> int:
    file = _slab_file(work, slab)
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(make_slab_systems(seed, slab)), encoding="utf-8")
    temporary.replace(file)
    return slab


def split_records(chunks: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Records of each split as arrays and plain values, in order of sid."""
    splits: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
    for chunk in sorted(chunks, key=lambda chunk: chunk["slab"]):
        splits[chunk["split"]] += [to_record(system) for system in chunk["records"]]
    return splits


def to_record(system: Mapping[str, Any]) -> dict[str, Any]:
    """A system as it is stored: arrays column by column, which compresses better."""
    arrays = {
        name: np.asfortranarray(np.array(system[name], dtype=dtype))
        for name, dtype in _ARRAYS.items()
    }
    return arrays | {name: system[name] for name in _VALUES}


def encode(record: Mapping[str, Any]) -> bytes:
    """The bytes of one record: a pickle of protocol 4, compressed by zlib."""
    return zlib.compress(pickle.dumps(record, protocol=4), level=9)


def write_lmdb(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """One LMDB file: keys b"0", b"1", … and b"length", values by `encode`; no lock file beside."""
    values = {str(i).encode(): encode(record) for i, record in enumerate(records)}
    values[b"length"] = pickle.dumps(len(records), protocol=4)
    loose, compact = path.with_suffix(".loose.tmp"), path.with_suffix(".tmp")
    for leftover in (loose, compact):
        leftover.unlink(missing_ok=True)
    room = 4 * sum(len(value) + 4096 for value in values.values())
    with lmdb.open(str(loose), subdir=False, map_size=room, lock=False) as environment:
        with environment.begin(write=True) as transaction:
            # in LMDB's own order the pages fill up
            for key in sorted(values):
                transaction.put(key, values[key], append=True)
        environment.copy(str(compact), compact=True)
    loose.unlink()
    compact.replace(path)


HEAD = {
    "name": "emt_adsorption",
    "version": "1.0",
    "title": "Relaxed adsorption energies on fcc alloy surfaces, by effective medium theory",
    "task": "IS2RE: initial structure to relaxed adsorption energy",
    "source": "computed by flt_mol with ASE's EMT calculator",
    "licence": "CC-BY-4.0",
    "citation": [
        "K. W. Jacobsen, P. Stoltze, J. K. Nørskov, A semi-empirical effective medium theory for "
        "metals and alloys, Surf. Sci. 366, 394 (1996), doi 10.1016/0039-6028(96)00816-3",
        "A. Hjorth Larsen et al., The atomic simulation environment, J. Phys.: Condens. Matter "
        "29, 273002 (2017), doi 10.1088/1361-648X/aa680e",
    ],
}
FIELDS = {
    "pos": "float32 (N, 3), Å, initial positions, multiples of 2^-12",
    "pos_relaxed": "float32 (N, 3), Å, relaxed positions, not wrapped, multiples of 2^-12",
    "cell": "float32 (3, 3), Å, rows are the lattice vectors",
    "pbc": "bool (3,), all True as in OC20",
    "atomic_numbers": "uint8 (N,), metal atoms first, adsorbate last",
    "tags": "uint8 (N,), 0 below the surface and fixed, 1 surface and free, 2 adsorbate",
    "fixed": "uint8 (N,), 1 exactly where the tag is 0",
    "sid": "int, name of the system, unique over all splits: 10 × slab + number",
    "natoms": "int, N",
    "y_init": "float, eV, adsorption energy of pos",
    "y_relaxed": "float, eV, adsorption energy of pos_relaxed: the target",
    "adsorbate": "str, its name",
    "facet": "str, 111, 100 or 110",
    "slab": "int, systems with the same number share the clean slab",
}


def describe(
    output: Path,
    splits: Mapping[str, Sequence[Mapping[str, Any]]],
    chunks: Sequence[Mapping[str, Any]],
    seed: int,
    num_slabs: int,
) -> dict[str, Any]:
    """All of `dataset.yaml` as plain values."""
    energies = np.array([record["y_relaxed"] for record in splits["train"]])
    numbers = {int(z) for records in splits.values() for r in records for z in r["atomic_numbers"]}
    return {
        **HEAD,
        "generator": {
            "command": f"python datasets/emt_adsorption/make.py FOLDER --seed {seed}",
            "seed": seed,
            "num_slabs": num_slabs,
            "ase": ase.__version__,
            "numpy": np.__version__,
            "calculator": "ase.calculators.emt.EMT, asap_cutoff False",
            "fmax_eV_per_angstrom": {"system": FMAX, "clean_slab": SLAB_FMAX},
            "steps": STEPS,
        },
        "units": {"length": "Å", "energy": "eV"},
        "energy": "E(slab + adsorbate) − E(relaxed clean slab) − Σ gas references of its atoms",
        "gas_references_eV_per_atom": {
            "rule": "H = H2/2, N = N2/2, O = H2O − H2, C = CO − O; molecules relaxed in EMT",
            **{symbol: round(value, 8) for symbol, value in gas_references().items()},
        },
        "fields": FIELDS,
        "tag_rule": "half",
        "elements": [chemical_symbols[z] for z in sorted(numbers)],
        "adsorbates": {"trained": list(TRAINED_ADSORBATES), "held_out": list(HELD_OUT_ADSORBATES)},
        "alloys": {
            "held_out_pairs": [list(pair) for pair in HELD_OUT_PAIRS],
            "rule": "slabs with both metals of a pair are in val_ood_cat and val_ood_both only, "
            "all slabs there are such",
        },
        "splits": {s: _describe_split(output / f"{s}.lmdb", r) for s, r in splits.items()},
        "normalizer": {"mean": float(energies.mean()), "std": float(energies.std())},
        "filters": _describe_filters(chunks),
        "baselines": _baselines(splits),
    }


def content_digest(records: Sequence[Mapping[str, Any]]) -> str:
    """sha256 of all fields of all records: the same wherever the same records are stored."""
    digest = hashlib.sha256()
    for record in records:
        for name, value in sorted(record.items()):
            content = value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode()
            digest.update(name.encode() + b"=" + content + b";")
    return digest.hexdigest()


def _describe_split(file: Path, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    content = file.read_bytes()
    return {
        "file": file.name,
        "count": len(records),
        "slabs": len({record["slab"] for record in records}),
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "sha256_of_content": content_digest(records),
    }


def _describe_filters(chunks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    dropped: Counter[str] = Counter()
    for chunk in chunks:
        dropped.update(chunk["dropped"])
    return {
        "placements_tried": sum(chunk["tried"] for chunk in chunks),
        "kept": sum(len(chunk["records"]) for chunk in chunks),
        "dropped": {r: {"rule": rule, "count": dropped[r]} for r, rule in RULES.items()},
        "clean_slabs_dropped": {
            "rule": "not converged, or an atom moved more than "
            f"{RECONSTRUCTED:g} Å from the ideal lattice; drawn again",
            "count": sum(chunk["slabs_dropped"] for chunk in chunks),
        },
    }


def _baselines(
    splits: Mapping[str, Sequence[Mapping[str, Any]]],
) -> dict[str, dict[str, dict[str, float]]]:
    """Split → baseline → mae (eV) and fraction of errors below 0.02 eV, fitted on train.

    "constant" is the median energy; "composition" least squares on the count of each element in the
    adsorbate and its fraction in the slab.
    """
    energies = {s: np.array([r["y_relaxed"] for r in records]) for s, records in splits.items()}
    designs = {s: np.stack([_composition(r) for r in records]) for s, records in splits.items()}
    weights = np.linalg.lstsq(designs["train"], energies["train"], rcond=None)[0]
    weights[~designs["train"].any(axis=0)] = 0.0
    result = {}
    for split, target in energies.items():
        errors = {
            "constant": np.abs(np.median(energies["train"]) - target),
            "composition": np.abs(designs[split] @ weights - target),
        }
        result[split] = {
            name: {"mae": round(float(e.mean()), 6), "ewt": round(float((e < 0.02).mean()), 6)}
            for name, e in errors.items()
        }
    return result


def _composition(record: Mapping[str, Any]) -> Array:
    counts = np.zeros((2, 119))
    np.add.at(counts, ((record["tags"] != 2).astype(int), record["atomic_numbers"]), 1.0)
    return np.concatenate([[1.0], counts[0], counts[1] / counts[1].sum()])


def main() -> None:
    """Make the LMDB files and `dataset.yaml` in a folder."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("output", type=Path, metavar="FOLDER")
    parser.add_argument("--seed", type=int, default=0, help="of slabs, sites and splits")
    parser.add_argument("--num-slabs", type=int, default=NUM_SLABS, help="of all splits together")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    given = parser.parse_args()
    work = given.output / "work"
    chunks = run_slabs(work, slab_ids(given.num_slabs), given.seed, given.workers)
    splits = split_records(chunks)
    empty = [split for split, records in splits.items() if not records]
    if empty:
        parser.error(f"no system in {', '.join(empty)}: raise --num-slabs = {given.num_slabs}")
    for split, records in splits.items():
        write_lmdb(given.output / f"{split}.lmdb", records)
    metadata = describe(given.output, splits, chunks, given.seed, given.num_slabs)
    text = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True, width=100)
    (given.output / "dataset.yaml").write_text(text, encoding="utf-8")
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
