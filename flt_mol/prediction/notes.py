"""What the predicted structures were like, for one warning of each kind."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from flt_mol.data.cells import heights
from flt_mol.evaluation.elements import check_elements, unseen_message
from flt_mol.functional.neighbors import neighbor_pairs
from flt_mol.prediction.members import Members
from flt_mol.structures import Structures

__all__ = ["SUMMED_UP", "Seen"]

SUMMED_UP = {"tags", "cell"}
"""Kinds of the loaders' notes that :class:`Seen` sums up."""
_NARROW = 4.0  # Å; the narrowest slabs of the shipped data set are wider
_CLOSE = 0.5  # Å; the shortest bond there is, that of H2, has 0.74
_LARGER = 2  # times the atoms of the largest training system


@dataclass
class Seen:
    """Systems counted and named by what deserves a warning."""

    count: int = 0
    untagged: list[int | str] = field(default_factory=list)
    without_cell: list[int | str] = field(default_factory=list)
    unfixed: list[int | str] = field(default_factory=list)
    narrow: list[int | str] = field(default_factory=list)
    close: list[int | str] = field(default_factory=list)
    elements: set[int] = field(default_factory=set)
    trained_up_to: float = math.inf
    large: list[int | str] = field(default_factory=list)

    @classmethod
    def of(cls, members: Members) -> Seen:
        """None so far, for models whose checkpoints may say how large their systems were."""
        known = [getattr(model, "trained_on", None) for _, model in members]
        sizes = [said.get("most_atoms") for said in known if isinstance(said, dict)]
        return cls(trained_up_to=min((size for size in sizes if size), default=math.inf))

    def add(self, batch: Structures) -> None:
        """Look at the systems of a batch."""
        tags, system, cell = batch.tags.cpu(), batch.system.cpu(), batch.cell.cpu()
        tagged = torch.zeros(len(batch), dtype=torch.bool)
        tagged[system[tags != 0]] = True
        no_cell = ~cell.flatten(1).any(dim=1)
        fixed = torch.zeros(len(batch), dtype=torch.bool)
        fixed[system[batch.fixed.cpu()]] = True
        slab = torch.zeros_like(fixed)
        slab[system[tags == 0]] = True
        for b in torch.nonzero(~tagged & (batch.natoms.cpu() > 0)).flatten().tolist():
            self.untagged.append(batch.sid[b])
        for b in torch.nonzero(no_cell).flatten().tolist():
            self.without_cell.append(batch.sid[b])
        for b in torch.nonzero(slab & tagged & ~fixed).flatten().tolist():
            self.unfixed.append(batch.sid[b])
        for sid, vectors, periodic in zip(batch.sid, cell.numpy(), batch.pbc.cpu(), strict=True):
            if periodic.any() and heights(vectors[periodic.numpy()]).min() < _NARROW:
                self.narrow.append(sid)
        self.close += [batch.sid[b] for b in _with_close_atoms(batch)]
        for sid, atoms in zip(batch.sid, batch.natoms.tolist(), strict=True):
            if atoms > _LARGER * self.trained_up_to:
                self.large.append(sid)
        self.count += len(batch)
        self.elements.update(batch.atomic_numbers.tolist())

    def messages(self, members: Members) -> Iterator[tuple[str, str]]:
        """Warnings for these models, kind and text; that of elements is a kind by itself."""
        if self.untagged:
            rule = "" if members.surface is None else f", surface={members.surface!r}"
            yield (
                "tags",
                f"all tags are 0 in {self._some(self.untagged)}: the model takes every atom for "
                "one below the surface. Set tags (0 below the surface, 1 surface, 2 adsorbate), "
                f"in ASE with atoms.set_tags(...) or flt_mol.data.tag_slab(atoms{rule}), in the "
                "command with --tag-slab; .traj and .extxyz keep them",
            )
        if self.without_cell:
            yield (
                "cell",
                f"no cell in {self._some(self.without_cell)}: taken as not periodic. .traj and "
                ".extxyz keep the cell and pbc",
            )
        if self.unfixed and members.move_atoms:
            yield (
                "fixed",
                f"no atom is fixed in {self._some(self.unfixed)}: this model moves free atoms, and "
                "takes the slab's lower layers for free, too. Fix those that the training data "
                "has fixed, in ASE with FixAtoms or flt_mol.data.tag_slab(atoms, fix=True)",
            )
        if self.narrow and not all(getattr(model, "sees_images", True) for _, model in members):
            yield (
                "narrow",
                f"cells narrower than {_NARROW:g} Å in {self._some(self.narrow)}: this model does "
                "not see periodic images, so a supercell would get another energy per atom; "
                "repeat them, as in the data that it was trained on",
            )
        if self.close:
            yield (
                "close",
                f"atoms less than {_CLOSE:g} Å apart, periodic images included, in "
                f"{self._some(self.close)}: is an atom there twice, such as at both ends of the "
                "cell, or are lengths not in Å? Their energies mean nothing",
            )
        if self.large:
            yield (
                "large",
                f"more than {_LARGER} times as many atoms as the largest system trained on, which "
                f"had {self.trained_up_to:g}, in {self._some(self.large)}: errors grow with size "
                "there; where a smaller cell says the same, take it",
            )
        yield from self._unseen(members)

    def _unseen(self, members: Members) -> Iterator[tuple[str, str]]:
        unseen = {label: check_elements(model, self.elements) for label, model in members}
        symbols = list(dict.fromkeys(s for found in unseen.values() for s in found))
        if not symbols:
            return
        text = unseen_message(symbols)
        if any(found != symbols for found in unseen.values()):
            told = "; ".join(f"{k}: {', '.join(found)}" for k, found in unseen.items() if found)
            text = f"{text} (by member: {told})"
        yield f"elements {', '.join(symbols)}", text

    def _some(self, sids: list[int | str]) -> str:
        named = ", ".join(str(sid) for sid in sids[:3]) + (", …" if len(sids) > 3 else "")
        return f"{len(sids)} of {self.count} structures ({named})"


def _with_close_atoms(batch: Structures) -> list[int]:
    """The systems with two atoms, or images of atoms, in nearly one place."""
    positions, cell, pbc = (x.detach().cpu() for x in (batch.positions, batch.cell, batch.pbc))
    try:
        pairs = neighbor_pairs(positions, cell, pbc, batch.ptr.cpu(), _CLOSE)
    except ValueError:  # a model that took such numbers is not to be asked further
        return []
    found: list[int] = torch.unique(batch.system.cpu()[pairs.index_i]).tolist()
    return found
