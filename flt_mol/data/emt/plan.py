"""The plan of the EMT data set: splits, what is held out, and each slab's own random draws."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np
from ase import Atoms

from flt_mol.data.emt.surfaces import METALS, build_slab, draw_symbols

SPLITS = ("train", "val_id", "val_ood_ads", "val_ood_cat", "val_ood_both")
TRAINED_ADSORBATES = (
    *("H", "C", "O", "CO", "CH", "NH", "NO", "CN", "N2"),
    *("CH2", "NH2", "H2O", "CHO", "CO2", "CH3", "NH3"),
)
HELD_OUT_ADSORBATES = ("N", "OH", "HCN", "CH2O")
HELD_OUT_PAIRS = (("Cu", "Pt"), ("Ag", "Pd"), ("Al", "Ni"))
"""No slab of train, val_id or val_ood_ads holds both metals of a pair; all others do."""

ADSORBATES_PER_SLAB = 4
TRIES = 6
"""Placements that are tried for one adsorbate on one slab until one is kept."""
SLAB_FMAX, FMAX = 0.01, 0.05
STEPS = 300
STRAIN = 0.04
NUM_SLABS = 1500

_ALLOY_SHARE = (0.15, 0.45, 0.40)  # of slabs with 1, 2, 3 elements
_WIDTHS, _WIDTH_SHARE = (2, 3, 4), (0.5, 0.35, 0.15)
_MAX_METAL_ATOMS = 48
_SPLIT_STRIDE = 100_000


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

    Example:
        >>> slab_ids(6)
        [0, 1, 100000, 200000, 300000, 400000]
    """
    if not len(SPLITS) <= num_slabs <= _SPLIT_STRIDE:
        raise ValueError(f"num_slabs is {num_slabs}; it must be {len(SPLITS)} to {_SPLIT_STRIDE}")
    validation = max(1, num_slabs // 12)
    counts = [num_slabs - validation * (len(SPLITS) - 1)] + [validation] * (len(SPLITS) - 1)
    return [s * _SPLIT_STRIDE + i for s, count in enumerate(counts) for i in range(count)]


def split_of(slab: int) -> str:
    """The split that a slab belongs to by its number.

    Example:
        >>> split_of(300007)
        'val_ood_cat'
    """
    return SPLITS[slab // _SPLIT_STRIDE]


def generator(seed: int, *key: int) -> np.random.Generator:
    """Generator of its own for one slab or one system: a function of `seed` and `key` alone."""
    return np.random.default_rng(np.random.SeedSequence(entropy=seed, spawn_key=key))


def is_held_out_alloy(elements: frozenset[str] | set[str]) -> bool:
    """Whether a set of metals holds both metals of a held-out pair."""
    return any(set(pair) <= elements for pair in HELD_OUT_PAIRS)


def element_sets(count: int, *, held_out: bool) -> list[tuple[str, ...]]:
    """All sets of `count` metals that are held out, or all that are not.

    Example:
        >>> element_sets(2, held_out=True)
        [('Al', 'Ni'), ('Cu', 'Pt'), ('Pd', 'Ag')]
    """
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
