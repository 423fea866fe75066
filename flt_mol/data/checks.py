"""What is read without an error and is most likely not what was meant: one warning of each kind."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from flt_mol.files import some
from flt_mol.functional.neighbors import neighbor_pairs, pair_lengths
from flt_mol.structures import Structures

LARGEST_ENERGY = 10.0
"""eV; OC20's makers dropped adsorption energies beyond it."""

_CLOSEST = 0.5  # Å; the shortest bond, that of H2, is 0.74 Å
_SEARCHED = 2.0  # Å; the search divides space into cells of that size: smaller ones take longer

_TAGS = (
    "all tags are {tags} in {which}: no slab and adsorbate to tell apart, which changes energies; "
    "predict with --tag-slab, set data.tag_slab=true in a run, or use flt_mol.data.tag_slab"
)
_CELL = "no cell in {which}: taken as not periodic. .traj and .extxyz keep the cell and pbc"
_CLOSE = (
    "atoms less than 0.5 Å apart, periodic images included, in {which}: an atom may be "
    "duplicated, or lengths not in Å; energies are meaningless"
)
_ENERGIES = (
    "energies beyond ±10 eV{beside} in {which}: no adsorption energies; subtract references (data "
    "convert --references), drop these (--max-abs-energy 10, --drop SID,…), or train on total "
    "energies with data.reference=composition"
)


class Unusual:
    """Systems that are most likely not what was meant, of all batches that were added.

    Kinds: tags all alike, no cell, atoms within 0.5 Å of each other, energies beyond ±10 eV; and
    those that are given.
    """

    def __init__(self) -> None:
        self.systems = 0
        self._sids: dict[str, list[int | str]] = {}
        self._tags: set[int] = set()
        self._energies: list[tuple[int | str, float]] = []
        self._beside = ""

    def add(self, batch: Structures, further: Mapping[str, Tensor] | None = None) -> None:
        """Look at the structures of a batch, on any device.

        `further` is text of a warning, with {which} for the structures → (B,) bool.
        """
        batch = batch.to("cpu")
        self.systems += len(batch)
        for text, mask in {**self._masks(batch), **(further or {})}.items():
            sids = [batch.sid[b] for b in torch.nonzero(mask).flatten().tolist()]
            self._sids.setdefault(text, []).extend(sids)

    def add_energies(
        self, batch: Structures, reference: Callable[[Structures], Tensor | None] | None = None
    ) -> None:
        """Look at the targets of a batch, as far as it has them.

        `reference` gives energies (B,), eV, of the elements, which are subtracted first; or None.
        """
        if batch.energy is None:
            return
        found = None if reference is None else reference(batch)
        self._beside = "" if found is None else " from the sum of their elements' energies"
        values = batch.energy if found is None else batch.energy - found
        self._energies += zip(batch.sid, values.tolist(), strict=True)

    def _masks(self, batch: Structures) -> dict[str, Tensor]:
        lowest, highest = (
            torch.zeros_like(batch.natoms).scatter_reduce(
                0, batch.system, batch.tags, end, include_self=False
            )
            for end in ("amin", "amax")
        )
        alike = (lowest == highest) & (batch.natoms > 0)
        self._tags.update(lowest[alike].tolist())
        pairs = neighbor_pairs(batch.positions, batch.cell, batch.pbc, batch.ptr, _SEARCHED)
        vectors = pairs.vectors(batch.positions, batch.cell, batch.ptr)
        near = pairs.index_i[pair_lengths(vectors) < _CLOSEST]
        return {
            _TAGS: alike,
            _CELL: ~batch.cell.flatten(1).any(dim=1),
            _CLOSE: with_atom(batch, near),
        }

    def far(self) -> list[tuple[int | str, float]]:
        """Sids and energies that are no adsorption energies, farthest from the median first."""
        middle = float(np.median([energy for _, energy in self._energies] or [0.0]))
        far = [item for item in self._energies if abs(item[1]) > LARGEST_ENERGY]
        return sorted(far, key=lambda item: -abs(item[1] - middle))

    def messages(self) -> list[str]:
        """A text of each kind that was found."""
        texts = {text: list(map(str, sids)) for text, sids in self._sids.items() if sids}
        if far := self.far():
            texts[_ENERGIES] = [f"{sid}: {energy:.6g} eV" for sid, energy in far]
        known = {"tags": " or ".join(map(str, sorted(self._tags))), "beside": self._beside}
        return [
            text.format(which=f"{len(x)} of {self.systems} structures ({first})", **known)
            for text, x in texts.items()
            for first in [some([*dict.fromkeys(x)], 3)]
        ]

    def warn(self, stacklevel: int = 2) -> None:
        """Issue `messages` as warnings."""
        for text in self.messages():
            warnings.warn(text, stacklevel=stacklevel + 1)


def with_atom(batch: Structures, atoms: Tensor) -> Tensor:
    """(B,) bool, whether a system has one of `atoms`, rows or a mask (N,), on the CPU."""
    found = torch.zeros(len(batch), dtype=torch.bool)
    found[batch.system[atoms]] = True
    return found
