"""Random charged particles whose energy is known, and reaches as far as Coulomb's law does."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flt_mol.functional.neighbors import neighbor_pairs, pair_lengths
from flt_mol.structures import Structures

__all__ = ["COULOMB", "Clusters", "coulomb_energy", "ewald_energy", "short_energy"]

COULOMB = 14.399645
"""e²/4πε₀ in eV·Å."""

POSITIVE, NEGATIVE = 11, 17
"""Atomic numbers that stand for the two charges."""

_STRENGTHS = {(1, 1): 1.5, (1, -1): 0.5, (-1, -1): 1.0}
_NEAREST = 2.0  # Å, between particles
_TRIES = 10_000


@dataclass(frozen=True)
class Clusters:
    """Systems of charges ±q, as many of each, at random places no nearer than 2 Å.

    Energies are those of Coulomb's law and a repulsion that depends on both kinds and ends at
    `reach`. Open systems lie in a ball of diameter `size`, periodic ones in a cube of that edge
    and are neutral, as Ewald sums want them. Made from the seed in seconds.

    Attributes:
        periodic: whether images count.
        size: Å.
        fewest: particles of a system, at least.
        most: at most; both even.
        charge: q, e.
        screening: Å, λ of q q'/r · exp(−r/λ), for open systems; None for no screening.
        reach: Å, of the repulsion.
        train: systems in the split "train".
        test: systems in the split "test".
        seed: of all of it.

    Raises:
        ValueError: odd numbers of particles, or screening in periodic systems.
    """

    periodic: bool = False
    size: float = 20.0
    fewest: int = 12
    most: int = 30
    charge: float = 0.5
    screening: float | None = None
    reach: float = 4.0
    train: int = 800
    test: int = 200
    seed: int = 0

    splits = ("train", "test")

    def __post_init__(self) -> None:
        if self.fewest % 2 or self.most % 2 or not 0 < self.fewest <= self.most:
            raise ValueError(
                f"fewest is {self.fewest} and most {self.most}, expected even numbers, ascending: "
                "there are as many of one charge as of the other"
            )
        if self.periodic and self.screening is not None:
            raise ValueError("screening is for open systems; leave it None in periodic ones")

    def load(self, split: str) -> list[Structures]:
        """The systems of "train" or "test", each with its energy in eV."""
        generator = np.random.default_rng([self.seed, self.splits.index(split)])
        count = self.train if split == "train" else self.test
        return [self._one(generator, number) for number in range(count)]

    def _one(self, generator: np.random.Generator, number: int) -> Structures:
        pairs_of_charges = generator.integers(self.fewest // 2, self.most // 2 + 1)
        signs = np.repeat([1, -1], pairs_of_charges)
        positions = self._places(generator, len(signs))
        cell = np.eye(3) * (self.size if self.periodic else 0.0)
        charges = torch.from_numpy(self.charge * signs)
        where = torch.from_numpy(positions), torch.from_numpy(cell), self.periodic
        far = (
            ewald_energy(charges, *where[:2])
            if self.periodic
            else coulomb_energy(charges, where[0], self.screening)
        )
        return Structures.single(
            np.where(signs > 0, POSITIVE, NEGATIVE),
            positions,
            cell=cell,
            pbc=self.periodic,
            sid=number,
            energy=far + short_energy(torch.from_numpy(signs), *where, self.reach),
        )

    def _places(self, generator: np.random.Generator, count: int) -> NDArray[np.float64]:
        """Random sequential addition, rounded to what float32 holds."""
        found = np.empty((0, 3))
        for _ in range(_TRIES):
            if len(found) == count:
                return found
            place = generator.uniform(-0.5, 0.5, 3) * self.size
            place = np.round(place * 4096) / 4096
            if not self.periodic and np.linalg.norm(place) > self.size / 2:
                continue
            apart = found - place
            if self.periodic:
                apart -= self.size * np.round(apart / self.size)
            if (np.linalg.norm(apart, axis=1) >= _NEAREST).all():
                found = np.vstack([found, place])
        raise ValueError(f"{count} particles 2 Å apart do not fit into {self.size} Å: enlarge size")


def coulomb_energy(
    charges: Tensor,
    positions: Tensor,
    screening: float | None = None,
    within: float = math.inf,
) -> float:
    """Energy of an open system, Σ_{i<j} k q_i q_j / r_ij · exp(−r_ij/λ), eV.

    Args:
        charges: (N,), e.
        positions: (N, 3), Å.
        screening: λ, Å; None for 1/r.
        within: Å; pairs that are farther apart are left out.

    Example:
        >>> dimer = torch.tensor([[0.0, 0, 0], [0, 0, 2]])
        >>> round(coulomb_energy(torch.tensor([1.0, -1.0]), dimer), 4)
        -7.1998
    """
    i, j = torch.triu_indices(len(charges), len(charges), 1)
    distance = (positions[i] - positions[j]).double().norm(dim=-1)
    terms = charges[i].double() * charges[j] / distance
    if screening is not None:
        terms = terms * torch.exp(-distance / screening)
    return COULOMB * float(terms[distance <= within].sum())


def ewald_energy(charges: Tensor, positions: Tensor, cell: Tensor, accuracy: float = 1e-8) -> float:
    r"""Coulomb energy per cell of a neutral periodic system, eV, with conducting surroundings.

    k [½ Σ' q_i q_j erfc(αr)/r + (2π/V) Σ_{k≠0} exp(−k²/4α²)/k² \|Σ_j q_j exp(ik·r_j)\|²
    − α/√π Σ q_i²], with α chosen so that both sums take about the same number of terms.

    Args:
        charges: (N,), e, with sum 0.
        positions: (N, 3), Å.
        cell: (3, 3), Å, rows are lattice vectors.
        accuracy: of the sums that are cut off, roughly relative.

    Raises:
        ValueError: charges that do not add up to 0.

    References:
        Ewald, Annalen der Physik 369 (1921) 253.

    Example:
        >>> salt = torch.tensor([[0.0, 0, 0], [1, 1, 1]])  # CsCl, edge 2 Å
        >>> energy = ewald_energy(torch.tensor([1.0, -1.0]), salt, 2 * torch.eye(3))
        >>> round(energy / COULOMB * 3**0.5, 6)
        -1.762675
    """
    if abs(charges.sum().item()) > 1e-6:
        raise ValueError(
            f"charges add up to {charges.sum().item():g} e: the energy of a periodic system that "
            "is not neutral is infinite"
        )
    charges, positions, cell = charges.double(), positions.double(), cell.double()
    volume = float(cell.det().abs())
    alpha = math.sqrt(math.pi) * math.pow(len(charges) / volume**2, 1 / 6)
    depth = math.sqrt(-math.log(accuracy))
    real = _near_sum(charges, positions, cell, alpha, depth / alpha)
    waves = _wave_sum(charges, positions, cell, alpha, 2 * alpha * depth) * 2 * math.pi / volume
    itself = alpha / math.sqrt(math.pi) * float(charges.square().sum())
    return COULOMB * (real + waves - itself)


def _near_sum(
    charges: Tensor, positions: Tensor, cell: Tensor, alpha: float, cutoff: float
) -> float:
    pairs, distance = _pairs(positions, cell, True, cutoff)
    terms = charges[pairs[0]] * charges[pairs[1]] * torch.erfc(alpha * distance) / distance
    return 0.5 * float(terms.sum())


def _wave_sum(
    charges: Tensor, positions: Tensor, cell: Tensor, alpha: float, cutoff: float
) -> float:
    """Σ_{0 < |k| ≤ cutoff} exp(−k²/4α²)/k² |S(k)|², k in radians/Å."""
    reciprocal = 2 * math.pi * torch.linalg.inv(cell).T
    most = [math.floor(cutoff * row.norm().item() / (2 * math.pi)) for row in cell]
    integers = torch.tensor(list(product(*(range(-m, m + 1) for m in most))), dtype=torch.float64)
    k = integers @ reciprocal
    square = k.square().sum(-1)
    k, square = (
        k[(square > 0) & (square <= cutoff**2)],
        square[(square > 0) & (square <= cutoff**2)],
    )
    phase = k @ positions.T
    factor = (phase.cos() @ charges).square() + (phase.sin() @ charges).square()
    terms = torch.exp(-square / (4 * alpha**2)) / square * factor
    return float(terms.sum())


def short_energy(
    signs: Tensor, positions: Tensor, cell: Tensor, periodic: bool, reach: float
) -> float:
    """Σ_{pairs} ε_{ab} (1 − r/reach)³ within `reach`, eV; ε is 1.5 (++), 0.5 (+−) or 1 (−−).

    Example:
        >>> dimer, none = torch.tensor([[0.0, 0, 0], [0, 0, 2]]), torch.zeros(3, 3)
        >>> round(short_energy(torch.tensor([1, 1]), dimer, none, False, 4.0), 4)
        0.1875
    """
    pairs, distance = _pairs(positions, cell, periodic, reach)
    table = torch.zeros(2, 2, dtype=torch.float64)
    for (a, b), strength in _STRENGTHS.items():
        table[int(a < 0), int(b < 0)] = table[int(b < 0), int(a < 0)] = strength
    kinds = (signs < 0).long()
    terms = table[kinds[pairs[0]], kinds[pairs[1]]] * (1 - distance / reach) ** 3
    return 0.5 * float(terms.sum())


def _pairs(
    positions: Tensor, cell: Tensor, periodic: bool, cutoff: float
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Both atoms of each pair within the cutoff, both ways, and their distances."""
    ptr = torch.tensor([0, len(positions)])
    pbc = torch.full((1, 3), periodic)
    found = neighbor_pairs(positions, cell[None], pbc, ptr, cutoff)
    vectors = found.vectors(positions, cell[None], ptr)
    return (found.index_i, found.index_j), pair_lengths(vectors)
