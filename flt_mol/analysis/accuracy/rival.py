"""What models of PyTorch Geometric need to be rows of our tables."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from flt_mol.functional.groups import sum_per_system
from flt_mol.functional.neighbors import NeighborPairs, pair_lengths
from flt_mol.models.energy import Normalizer
from flt_mol.nn.embedding import MAX_ATOMIC_NUMBER, NUM_TAGS, AtomEmbedding
from flt_mol.nn.heads import EnergyHead
from flt_mol.structures import Structures

__all__ = ["Graph", "HandedGraph", "KindEmbedding", "Rival", "TagSum", "kinds_of", "pyg_model"]

NUM_KINDS = NUM_TAGS * (MAX_ATOMIC_NUMBER + 1)


class Graph(NamedTuple):
    """Pairs of a batch as PyTorch Geometric writes them: from sender to receiver.

    Attributes:
        pairs: sorted by receiver.
        edges: (2, P) int64, sender j above receiver i.
        vectors: (P, 3), Å, r_i − r_j − T·cell.
        distances: (P,), Å.
    """

    pairs: NeighborPairs
    edges: Tensor
    vectors: Tensor
    distances: Tensor


class Rival(nn.Module):
    """What all have in common: pairs, both energies, normalisers.

    Args:
        width: features of an atom.
        cutoff: Å.
    """

    sees_images: ClassVar[bool] = True
    rotation_invariant: ClassVar[bool] = True

    def __init__(self, width: int = 64, cutoff: float = 5.0) -> None:
        super().__init__()
        self.width = width
        self.cutoff = float(cutoff)
        self.normalizer = Normalizer()
        self.normalizer_initial = Normalizer()

    def forward(self, structures: Structures) -> dict[str, Tensor]:
        """Structures of B systems to ``energy`` and ``energy_initial``, (B,) float32 eV."""
        if structures.pairs is None or structures.cutoff != self.cutoff:
            structures = structures.with_pairs(self.cutoff)
        pairs = structures.pairs
        assert pairs is not None
        vectors = pairs.vectors(structures.positions, structures.cell, structures.ptr).float()
        edges = torch.stack([pairs.index_j, pairs.index_i])
        out = self.outputs(structures, Graph(pairs, edges, vectors, pair_lengths(vectors)))
        return {
            "energy": self.normalizer.denormalize(out[:, 0]),
            "energy_initial": self.normalizer_initial.denormalize(out[:, 1]),
        }

    def outputs(self, structures: Structures, graph: Graph) -> Tensor:
        """(B, 2), both energies, normalised."""
        raise NotImplementedError


class TagSum(nn.Module):
    """Σ_i w[tag_i] e_i over the atoms of each system."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(EnergyHead.INITIAL_TAG_WEIGHTS))

    def forward(self, each: Tensor, structures: Structures) -> Tensor:
        """Of atoms (N, K) to systems (B, K)."""
        return sum_per_system(self.weight[structures.tags][:, None] * each, structures.ptr)


class HandedGraph(nn.Module):
    """Stands where a package searches neighbours, and gives those that were handed over."""

    now: tuple[Tensor, ...] = ()

    def forward(self, *_: Any) -> tuple[Tensor, ...]:
        """What was handed over, once."""
        graph, self.now = self.now, ()
        return graph


class KindEmbedding(AtomEmbedding):
    """Our embedding where a package has room for one index only, see `kinds_of`."""

    def forward(self, kinds: Tensor, tags: Tensor | None = None) -> Tensor:
        """Kinds (N,) to features (N, C)."""
        elements = MAX_ATOMIC_NUMBER + 1
        return super().forward(kinds % elements, kinds // elements)

    def reset_parameters(self) -> None:
        """What packages call on their own tables; ours are drawn already."""


def kinds_of(structures: Structures) -> Tensor:
    """One index for each element and tag, (N,)."""
    return structures.atomic_numbers + (MAX_ATOMIC_NUMBER + 1) * structures.tags


def pyg_model(name: str) -> Any:
    """A module of ``torch_geometric.nn.models``.

    Raises:
        ImportError: the package is missing, with what to install.
    """
    from importlib import import_module

    try:
        return import_module(f"torch_geometric.nn.models.{name}")
    except ImportError as error:
        raise ImportError(
            f"it is a model of PyTorch Geometric: pip install 'flt_mol[pyg]' ({error})"
        ) from error
