"""Models of PyTorch Geometric, made to see periodic images and trained like ours.

Each maps `Structures` to the dict that `EnergyModel` gives. Pairs are ours, one for each image, so
neither torch-cluster nor torch-sparse is needed; what the packages do with pairs is theirs.
torch_geometric itself is imported where a model is built.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flt_mol.analysis.accuracy.rival import (
    NUM_KINDS,
    Graph,
    HandedGraph,
    KindEmbedding,
    Rival,
    TagSum,
    kinds_of,
    pyg_model,
)
from flt_mol.functional.neighbors import NeighborPairs
from flt_mol.nn.embedding import AtomEmbedding
from flt_mol.nn.heads import EnergyHead
from flt_mol.structures import Structures

__all__ = ["RIVALS", "DimeNetPlusPlus", "SchNet", "SchNetPackaged", "ViSNet", "triplets"]


class SchNet(Rival):
    """PyG's SchNet blocks between our embedding of elements and tags and our weighted read-out.

    As an adsorption energy wants it: atoms of the slab count less than those of the adsorbate,
    which SchNet as packaged has to find out by itself. Features are read out as they are, like
    those of our rows with local filters: with a norm before it SchNet's errors are larger.

    Args:
        width: features and filters.
        cutoff: Å.
        num_blocks: interaction blocks.
        num_gaussians: of the distance.
    """

    def __init__(
        self, width: int = 64, cutoff: float = 5.0, num_blocks: int = 3, num_gaussians: int = 32
    ) -> None:
        super().__init__(width, cutoff)
        schnet = pyg_model("schnet")
        self.embedding = AtomEmbedding(width)
        self.smearing = schnet.GaussianSmearing(0.0, cutoff, num_gaussians)
        self.blocks = nn.ModuleList(
            schnet.InteractionBlock(width, num_gaussians, width, cutoff) for _ in range(num_blocks)
        )
        self.head = EnergyHead(width, num_outputs=2, norm=False)

    def outputs(self, structures: Structures, graph: Graph) -> Tensor:
        """(B, 2), both energies, normalised."""
        x = self.embedding(structures.atomic_numbers, structures.tags)
        smeared = self.smearing(graph.distances)
        for block in self.blocks:
            x = x + block(x, graph.edges, graph.distances, smeared)
        out: Tensor = self.head(x, structures.tags, structures.ptr)
        return out


class SchNetPackaged(Rival):
    """PyG's SchNet as it comes: every atom counts alike in the sum, tags are kinds of elements.

    Its last layer gives two numbers instead of one; its table of elements has a row for each
    element and tag.

    Args:
        width: features and filters.
        cutoff: Å.
        num_blocks: interaction blocks.
        num_gaussians: of the distance.
    """

    def __init__(
        self, width: int = 64, cutoff: float = 5.0, num_blocks: int = 3, num_gaussians: int = 32
    ) -> None:
        super().__init__(width, cutoff)
        self.graph = HandedGraph()
        self.net = pyg_model("schnet").SchNet(
            hidden_channels=width,
            num_filters=width,
            num_interactions=num_blocks,
            num_gaussians=num_gaussians,
            cutoff=cutoff,
            interaction_graph=self.graph,
        )
        self.net.embedding = nn.Embedding(NUM_KINDS, width)
        self.net.lin2 = nn.Linear(width // 2, 2)

    def outputs(self, structures: Structures, graph: Graph) -> Tensor:
        """(B, 2), both energies, normalised."""
        self.graph.now = graph.edges, graph.distances
        out: Tensor = self.net(kinds_of(structures), structures.positions, structures.system)
        return out


class ViSNet(Rival):
    """PyG's ViSNet: scalars and vectors (or l ≤ 2 tensors) of atoms, equivariant, with attention.

    Its own gated read-out gives energies of atoms, which are summed with a weight per tag as ours
    are. Images of an atom itself are neighbours like others, where the package drops them.

    Args:
        width: hidden channels; a multiple of `num_heads`.
        cutoff: Å.
        num_blocks: layers.
        num_gaussians: of the distance.
        num_heads: of its attention.
        lmax: 1 or 2.
    """

    def __init__(
        self,
        width: int = 32,
        cutoff: float = 5.0,
        num_blocks: int = 2,
        num_gaussians: int = 32,
        num_heads: int = 4,
        lmax: int = 1,
    ) -> None:
        super().__init__(width, cutoff)
        visnet = pyg_model("visnet")
        self.net = visnet.ViSNetBlock(
            lmax=lmax,
            num_heads=num_heads,
            num_layers=num_blocks,
            hidden_channels=width,
            num_rbf=num_gaussians,
            cutoff=cutoff,
        )
        self.net.distance = self.graph = HandedGraph()
        self.net.embedding = KindEmbedding(width)
        self.net.neighbor_embedding.embedding = KindEmbedding(width)
        self.net.neighbor_embedding = _ImageNeighbors(self.net.neighbor_embedding)
        self.atom_energies = nn.ModuleList(visnet.EquivariantScalar(width) for _ in range(2))
        self.readout = TagSum()

    def outputs(self, structures: Structures, graph: Graph) -> Tensor:
        """(B, 2), both energies, normalised."""
        loops = torch.arange(structures.num_atoms, device=graph.edges.device).expand(2, -1)
        # The package would leave out images of an atom itself when it makes vectors unit vectors.
        units = -graph.vectors / graph.distances[:, None]
        self.graph.now = (
            torch.cat([graph.edges, loops], 1),
            torch.cat([graph.distances, graph.distances.new_zeros(loops.shape[1])]),
            torch.cat([units, units.new_zeros(loops.shape[1], 3)]),
        )
        x, vectors = self.net(kinds_of(structures), structures.positions, structures.system)
        heads: list[Any] = list(self.atom_energies)
        each = torch.cat([head.pre_reduce(x, vectors) for head in heads], 1)
        out: Tensor = self.readout(each, structures)
        return out


class DimeNetPlusPlus(Rival):
    """PyG's DimeNet++: messages along pairs, told apart by distances and angles.

    Triplets k → j → i are made of pairs that know their images; k may be another image of i.
    Time goes with pairs times neighbours: an order of magnitude above the others.

    Args:
        width: hidden channels.
        cutoff: Å.
        num_blocks: interaction blocks.
        num_radial: Bessel functions.
        num_spherical: spherical harmonics.
    """

    def __init__(
        self,
        width: int = 64,
        cutoff: float = 5.0,
        num_blocks: int = 2,
        num_radial: int = 6,
        num_spherical: int = 3,
    ) -> None:
        super().__init__(width, cutoff)
        self.net = pyg_model("dimenet").DimeNetPlusPlus(
            hidden_channels=width,
            out_channels=2,
            num_blocks=num_blocks,
            int_emb_size=width // 2,
            basis_emb_size=8,
            out_emb_channels=width,
            num_spherical=num_spherical,
            num_radial=num_radial,
            cutoff=cutoff,
            num_output_layers=1,
        )
        self.net.emb.emb = KindEmbedding(width)
        self.readout = TagSum()

    def outputs(self, structures: Structures, graph: Graph) -> Tensor:
        """(B, 2), both energies, normalised."""
        net, (sender, receiver) = self.net, graph.edges
        first, second = triplets(graph.pairs, structures.num_atoms)
        to, via = graph.vectors[first], graph.vectors[second]
        angle = torch.atan2(torch.linalg.vector_norm(torch.linalg.cross(to, via), dim=-1),
                            (to * via).sum(-1))  # fmt: skip
        radial = net.rbf(graph.distances)
        spherical = net.sbf(graph.distances, angle, second)
        message = net.emb(kinds_of(structures), radial, receiver, sender)
        each = 0.0
        for block, output in zip([None, *net.interaction_blocks], net.output_blocks, strict=True):
            if block is not None:
                message = block(message, radial, spherical, second, first)
            each = each + output(message, radial, receiver, num_nodes=structures.num_atoms)
        out: Tensor = self.readout(each, structures)
        return out


RIVALS: dict[str, type[Rival]] = {
    "schnet": SchNet,
    "schnet_packaged": SchNetPackaged,
    "visnet": ViSNet,
    "dimenet++": DimeNetPlusPlus,
}


def triplets(pairs: NeighborPairs, num_atoms: int) -> tuple[Tensor, Tensor]:
    """For each way k → j → i, the pair (i, j) and the pair (j, k): two (Q,) int64.

    The way back, where k is i itself and not another image of it, is left out.
    """
    degree = torch.bincount(pairs.index_i, minlength=num_atoms)
    start = degree.cumsum(0) - degree  # pairs are sorted by receiver
    counts = degree[pairs.index_j]
    first = torch.repeat_interleave(counts)
    place = torch.arange(len(first), device=first.device) - (counts.cumsum(0) - counts)[first]
    second = start[pairs.index_j[first]] + place
    back = pairs.index_j[second] == pairs.index_i[first]
    back &= (pairs.shift[second] + pairs.shift[first] == 0).all(-1)
    return first[~back], second[~back]


class _ImageNeighbors(nn.Module):
    """ViSNet's first look at neighbours, with images of the atom itself, without the atom."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(
        self, kinds: Tensor, x: Tensor, edges: Tensor, distances: Tensor, smeared: Tensor
    ) -> Tensor:
        window = self.inner.cutoff(distances) * (distances > 0)
        filters = self.inner.distance_proj(smeared) * window[:, None]
        near = self.inner.propagate(edges, x=self.inner.embedding(kinds), W=filters)
        out: Tensor = self.inner.combine(torch.cat([x, near], 1))
        return out
