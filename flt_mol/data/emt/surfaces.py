"""Adsorption systems of effective medium theory: alloy slabs, adsorbates, relaxation.

Everything here is one system at a time, a pure function of its arguments and of the generator it
is given; `flt_mol.data.emt.dataset` makes a data set of it. Energies come from ASE's EMT with its
default cutoff (Jacobsen, Stoltze and Nørskov, Surf. Sci. 366, 394, 1996). EMT's parameters of H,
C, N and O are "not for any serious use": the surfaces of potential energy are smooth and
many-body, but they are no chemistry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from ase import Atoms
from ase.build import bulk, fcc100, fcc110, fcc111, molecule
from ase.calculators.emt import EMT
from ase.constraints import FixAtoms
from ase.data import covalent_radii
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar

from flt_mol.data.emt.relax import relax

METALS = ("Al", "Ni", "Cu", "Pd", "Ag", "Pt", "Au")
FACETS: dict[str, Any] = {"111": fcc111, "100": fcc100, "110": fcc110}
VACUUM = 7.0
"""Empty space below and above the clean slab, Å."""
GRID = 2.0**-12
"""Positions are multiples of this, Å: exact in float32, and they compress well."""

Array = NDArray[Any]

_G2_NAME = {"CHO": "HCO", "CH2": "CH2_s3B1d", "CH2O": "H2CO"}
_BOND = 1.25  # times the sum of covalent radii, in real gas-phase geometries


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
    """Lattice constant of an fcc metal where its EMT energy is least, Å.

    Example:
        >>> round(lattice_constant("Cu"), 2)
        3.59
    """

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
    """Pairs of atoms that are bonded in the real gas-phase geometry.

    Example:
        >>> adsorbate_bonds("H2O")
        ((0, 1), (0, 2))
    """
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
