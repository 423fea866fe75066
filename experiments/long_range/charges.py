"""Random charged particles whose energy is known, and reaches as far as Coulomb's law does."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from torch import Tensor

from flt_mol.functional import neighbor_pairs
from flt_mol.structures import Structures

COULOMB = 14.399645  # e²/4πε₀ in eV·Å
POSITIVE, NEGATIVE = 11, 17  # atomic numbers that stand for the two charges
_STRENGTHS = ((1.5, 0.5), (0.5, 1.0))  # of the repulsion, eV: ++, +−, −−
_NEAREST = 2.0  # Å, between particles


@dataclass(frozen=True)
class Charges:
    """Systems of 12 to 30 charges ±q, as many of each, at random places no nearer than 2 Å.

    Energies are Coulomb's law (Ewald sums for periodic systems) and a short repulsion that depends
    on both kinds. Open systems lie in a ball of diameter `size`, periodic ones in a cube.
    """

    periodic: bool = False
    size: float = 20.0  # Å
    charge: float = 0.5  # e
    reach: float = 4.0  # Å, of the repulsion
    train: int = 800
    test: int = 200
    seed: int = 0

    def load(self, split: str) -> list[Structures]:
        """The systems of "train" or "test", each with its energy in eV."""
        generator = np.random.default_rng([self.seed, ("train", "test").index(split)])
        count = self.train if split == "train" else self.test
        return [self._one(generator, number) for number in range(count)]

    def _one(self, generator: np.random.Generator, number: int) -> Structures:
        signs = np.repeat([1, -1], generator.integers(6, 16))
        positions = torch.from_numpy(self._places(generator, len(signs)))
        cell = torch.eye(3, dtype=torch.float64) * (self.size if self.periodic else 0.0)
        charges = torch.from_numpy(self.charge * signs)
        far = (
            ewald_energy(charges, positions, cell)
            if self.periodic
            else coulomb_energy(charges, positions)
        )
        near = short_energy(torch.from_numpy(signs), positions, cell, self.periodic, self.reach)
        numbers = np.where(signs > 0, POSITIVE, NEGATIVE)
        return Structures.single(
            numbers, positions, cell=cell, pbc=self.periodic, sid=number, energy=far + near
        )

    def _places(self, generator: np.random.Generator, count: int) -> np.ndarray:
        """Random sequential addition, rounded to what float32 holds."""
        found = np.empty((0, 3))
        for _ in range(10_000):
            if len(found) == count:
                return found
            place = np.round(generator.uniform(-0.5, 0.5, 3) * self.size * 4096) / 4096
            if not self.periodic and np.linalg.norm(place) > self.size / 2:
                continue
            apart = found - place
            if self.periodic:
                apart -= self.size * np.round(apart / self.size)
            if (np.linalg.norm(apart, axis=1) >= _NEAREST).all():
                found = np.vstack([found, place])
        raise ValueError(f"{count} particles 2 Å apart do not fit into {self.size} Å")


def coulomb_energy(charges: Tensor, positions: Tensor, within: float = math.inf) -> float:
    """Energy of an open system, Σ_{i<j} k q_i q_j / r_ij, eV; of pairs `within` Å only.

    Examples:
        >>> dimer = torch.tensor([[0.0, 0, 0], [0, 0, 2]])
        >>> round(coulomb_energy(torch.tensor([1.0, -1.0]), dimer), 4)
        -7.1998
    """
    i, j = torch.triu_indices(len(charges), len(charges), 1)
    distance = (positions[i] - positions[j]).double().norm(dim=-1)
    terms = charges[i].double() * charges[j] / distance
    return COULOMB * float(terms[distance <= within].sum())


def ewald_energy(charges: Tensor, positions: Tensor, cell: Tensor, accuracy: float = 1e-8) -> float:
    r"""Coulomb energy per cell of a neutral periodic system, eV, with conducting surroundings.

    k [½ Σ' q_i q_j erfc(αr)/r + (2π/V) Σ_{k≠0} exp(−k²/4α²)/k² |Σ_j q_j exp(ik·r_j)|²
    − α/√π Σ q_i²]  (Ewald, Annalen der Physik 369 (1921) 253).

    Examples:
        >>> salt = torch.tensor([[0.0, 0, 0], [1, 1, 1]])  # CsCl, edge 2 Å
        >>> energy = ewald_energy(torch.tensor([1.0, -1.0]), salt, 2 * torch.eye(3))
        >>> round(energy / COULOMB * 3**0.5, 6)
        -1.762675
    """
    charges, positions, cell = charges.double(), positions.double(), cell.double()
    volume = float(cell.det().abs())
    alpha = math.sqrt(math.pi) * math.pow(len(charges) / volume**2, 1 / 6)
    depth = math.sqrt(-math.log(accuracy))
    (i, j), distance = _pairs(positions, cell, True, depth / alpha)
    real = 0.5 * float((charges[i] * charges[j] * torch.erfc(alpha * distance) / distance).sum())
    waves = _wave_sum(charges, positions, cell, alpha, 2 * alpha * depth) * 2 * math.pi / volume
    own = alpha / math.sqrt(math.pi) * float(charges.square().sum())
    return COULOMB * (real + waves - own)


def _wave_sum(
    charges: Tensor, positions: Tensor, cell: Tensor, alpha: float, cutoff: float
) -> float:
    """Σ_{0 < |k| ≤ cutoff} exp(−k²/4α²)/k² |S(k)|², k in radians/Å."""
    reciprocal = 2 * math.pi * torch.linalg.inv(cell).T
    most = [math.floor(cutoff * row.norm().item() / (2 * math.pi)) for row in cell]
    integers = torch.tensor(list(product(*(range(-m, m + 1) for m in most))), dtype=torch.float64)
    k = integers @ reciprocal
    square = k.square().sum(-1)
    inside = (square > 0) & (square <= cutoff**2)
    k, square = k[inside], square[inside]
    phase = k @ positions.T
    factor = (phase.cos() @ charges).square() + (phase.sin() @ charges).square()
    return float((torch.exp(-square / (4 * alpha**2)) / square * factor).sum())


def short_energy(
    signs: Tensor, positions: Tensor, cell: Tensor, periodic: bool, reach: float
) -> float:
    """Σ_{pairs} ε_{ab} (1 − r/reach)³ within `reach`, eV; ε is 1.5 (++), 0.5 (+−) or 1 (−−).

    Examples:
        >>> dimer, none = torch.tensor([[0.0, 0, 0], [0, 0, 2]]), torch.zeros(3, 3)
        >>> round(short_energy(torch.tensor([1, 1]), dimer, none, False, 4.0), 4)
        0.1875
    """
    (i, j), distance = _pairs(positions, cell, periodic, reach)
    kinds = (signs < 0).long()
    strength = torch.tensor(_STRENGTHS, dtype=torch.float64)[kinds[i], kinds[j]]
    return 0.5 * float((strength * (1 - distance / reach) ** 3).sum())


def _pairs(
    positions: Tensor, cell: Tensor, periodic: bool, cutoff: float
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Both atoms of each pair within the cutoff, both ways, and their distances."""
    ptr, pbc = torch.tensor([0, len(positions)]), torch.full((1, 3), periodic)
    found = neighbor_pairs(positions, cell[None], pbc, ptr, cutoff)
    return (found.index_i, found.index_j), found.vectors(positions, cell[None], ptr).norm(dim=-1)
