"""Other models as rows of our tables: they see periodic images and train like ours.

Each maps `Structures` to the dict that `EnergyModel` gives. Pairs are ours, one for each image, so
neither torch-cluster nor torch-sparse is needed; what PyTorch Geometric does with pairs is its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch
from ase.data import atomic_numbers
from torch import Tensor, nn

from flt_mol.functional import NeighborPairs, sum_per_system
from flt_mol.models.energy import Normalizer
from flt_mol.nn import EnergyHead
from flt_mol.nn.embedding import AtomEmbedding
from flt_mol.structures import Structures

NUM_ELEMENTS = 119  # rows 0 to 118 of a table of elements


class Graph(NamedTuple):
    """Pairs sorted by receiver; edges (2, P), sender first; r_i − r_j − T·cell and its length."""

    pairs: NeighborPairs
    edges: Tensor
    vectors: Tensor
    distances: Tensor


class Rival(nn.Module):
    """What all have in common: pairs, both energies, normalisers."""

    package: str | None = None  # that is no dependency of ours

    def __init__(self, width: int, cutoff: float) -> None:
        super().__init__()
        self.width, self.cutoff = width, float(cutoff)
        self.normalizer, self.normalizer_initial = Normalizer(), Normalizer()

    def forward(self, structures: Structures) -> dict[str, Tensor]:
        """Structures of B systems to ``energy`` and ``energy_initial``, (B,) float32 eV."""
        if structures.pairs is None or structures.cutoff != self.cutoff:
            structures = structures.with_pairs(self.cutoff)
        pairs = structures.pairs
        assert pairs is not None
        vectors = pairs.vectors(structures.positions, structures.cell, structures.ptr).float()
        edges = torch.stack([pairs.index_j, pairs.index_i])
        graph = Graph(pairs, edges, vectors, torch.linalg.vector_norm(vectors, dim=-1))
        out = self.outputs(structures, graph)
        return {
            "energy": self.normalizer.denormalize(out[:, 0]),
            "energy_initial": self.normalizer_initial.denormalize(out[:, 1]),
        }

    def outputs(self, structures: Structures, graph: Graph) -> Tensor:
        """(B, 2), both energies, normalised."""
        raise NotImplementedError


class TagSum(nn.Module):
    """Σ_i w[tag_i] e_i over the atoms of each system: (N, K) → (B, K)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(EnergyHead.INITIAL_TAG_WEIGHTS))

    def forward(self, each: Tensor, structures: Structures) -> Tensor:
        """Sum over atoms."""
        return sum_per_system(self.weight[structures.tags][:, None] * each, structures.ptr)


class GivenGraph(nn.Module):
    """Stands where a package searches for neighbours, and returns those set in `now`."""

    now: tuple[Tensor, ...] = ()

    def forward(self, *_: Any) -> tuple[Tensor, ...]:
        """What was set, once."""
        graph, self.now = self.now, ()
        return graph


class KindEmbedding(AtomEmbedding):
    """Our embedding for packages that take one index per atom, see `kinds_of`."""

    def forward(self, kinds: Tensor, tags: Tensor | None = None) -> Tensor:
        """Kinds (N,) to features (N, C)."""
        return super().forward(kinds % NUM_ELEMENTS, kinds // NUM_ELEMENTS)

    def reset_parameters(self) -> None:
        """What packages call on their own tables; ours are drawn already."""


def kinds_of(structures: Structures) -> Tensor:
    """One index for each element and tag, (N,)."""
    return structures.atomic_numbers + NUM_ELEMENTS * structures.tags


def _pyg(name: str) -> Any:
    return import_module(f"torch_geometric.nn.models.{name}")


class SchNet(Rival):
    """PyG's SchNet blocks between our embedding of elements and tags and our weighted read-out."""

    def __init__(
        self, width: int = 64, cutoff: float = 5.0, num_blocks: int = 3, num_gaussians: int = 32
    ) -> None:
        super().__init__(width, cutoff)
        schnet = _pyg("schnet")
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
        return self.head(x, structures.tags, structures.ptr)  # type: ignore[no-any-return]


class SchNetPackaged(Rival):
    """PyG's SchNet as it comes: every atom counts alike in the sum, tags are kinds of elements."""

    def __init__(
        self, width: int = 64, cutoff: float = 5.0, num_blocks: int = 3, num_gaussians: int = 32
    ) -> None:
        super().__init__(width, cutoff)
        self.graph = GivenGraph()
        self.net = _pyg("schnet").SchNet(
            hidden_channels=width, num_filters=width, num_interactions=num_blocks,
            num_gaussians=num_gaussians, cutoff=cutoff, interaction_graph=self.graph,
        )  # fmt: skip
        self.net.embedding = nn.Embedding(3 * NUM_ELEMENTS, width)
        self.net.lin2 = nn.Linear(width // 2, 2)

    def outputs(self, structures: Structures, graph: Graph) -> Tensor:
        """(B, 2), both energies, normalised."""
        self.graph.now = graph.edges, graph.distances
        return self.net(kinds_of(structures), structures.positions, structures.system)  # type: ignore[no-any-return]


class ViSNet(Rival):
    """PyG's ViSNet: scalars and vectors of atoms, equivariant, with attention.

    Energies of atoms are summed with a weight per tag as ours are; images of an atom itself are
    neighbours like others, where the package drops them.
    """

    def __init__(
        self, width: int = 32, cutoff: float = 5.0, num_blocks: int = 2, num_gaussians: int = 32,
        num_heads: int = 4, lmax: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(width, cutoff)
        visnet = _pyg("visnet")
        self.net = visnet.ViSNetBlock(
            lmax=lmax, num_heads=num_heads, num_layers=num_blocks, hidden_channels=width,
            num_rbf=num_gaussians, cutoff=cutoff,
        )  # fmt: skip
        self.net.distance = self.graph = GivenGraph()
        self.net.embedding = KindEmbedding(width)
        self.net.neighbor_embedding.embedding = KindEmbedding(width)
        self.net.neighbor_embedding = _ImageNeighbors(self.net.neighbor_embedding)
        self.atom_energies = nn.ModuleList(visnet.EquivariantScalar(width) for _ in range(2))
        self.readout = TagSum()

    def outputs(self, structures: Structures, graph: Graph) -> Tensor:
        """(B, 2), both energies, normalised."""
        loops = torch.arange(structures.num_atoms, device=graph.edges.device).expand(2, -1)
        # The package would drop images of an atom itself when it normalises vectors.
        units = -graph.vectors / graph.distances[:, None]
        self.graph.now = (
            torch.cat([graph.edges, loops], 1),
            torch.cat([graph.distances, graph.distances.new_zeros(loops.shape[1])]),
            torch.cat([units, units.new_zeros(loops.shape[1], 3)]),
        )
        x, vectors = self.net(kinds_of(structures), structures.positions, structures.system)
        heads: list[Any] = list(self.atom_energies)
        each = torch.cat([head.pre_reduce(x, vectors) for head in heads], 1)
        return self.readout(each, structures)  # type: ignore[no-any-return]


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
        return self.inner.combine(torch.cat([x, near], 1))  # type: ignore[no-any-return]


class DimeNetPlusPlus(Rival):
    """PyG's DimeNet++: messages along pairs, with distances and angles of triplets k → j → i."""

    def __init__(
        self, width: int = 64, cutoff: float = 5.0, num_blocks: int = 2, num_radial: int = 6,
        num_spherical: int = 3,
    ) -> None:  # fmt: skip
        super().__init__(width, cutoff)
        self.net = _pyg("dimenet").DimeNetPlusPlus(
            hidden_channels=width, out_channels=2, num_blocks=num_blocks, int_emb_size=width // 2,
            basis_emb_size=8, out_emb_channels=width, num_spherical=num_spherical,
            num_radial=num_radial, cutoff=cutoff, num_output_layers=1,
        )  # fmt: skip
        self.net.emb.emb = KindEmbedding(width)
        self.readout = TagSum()

    def outputs(self, structures: Structures, graph: Graph) -> Tensor:
        """(B, 2), both energies, normalised."""
        net, (sender, receiver) = self.net, graph.edges
        first, second = triplets(graph.pairs, structures.num_atoms)
        to, via = graph.vectors[first], graph.vectors[second]
        cross = torch.linalg.vector_norm(torch.linalg.cross(to, via), dim=-1)
        angle = torch.atan2(cross, (to * via).sum(-1))
        radial = net.rbf(graph.distances)
        spherical = net.sbf(graph.distances, angle, second)
        message = net.emb(kinds_of(structures), radial, receiver, sender)
        each: Any = 0.0
        for block, output in zip([None, *net.interaction_blocks], net.output_blocks, strict=True):
            if block is not None:
                message = block(message, radial, spherical, second, first)
            each = each + output(message, radial, receiver, num_nodes=structures.num_atoms)
        return self.readout(each, structures)  # type: ignore[no-any-return]


def triplets(pairs: NeighborPairs, num_atoms: int) -> tuple[Tensor, Tensor]:
    """For each way k → j → i the pair (i, j) and the pair (j, k): two (Q,) int64.

    The way back, where k is i itself and not another image of it, is not one.
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


class PaiNN(Rival):
    """PaiNN (Schütt, Unke, Gastegger, ICML 2021): scalars and vectors of atoms, equivariant.

    Our embedding and read-out, so that only the blocks differ from SchNet's.
    """

    def __init__(
        self, width: int = 64, cutoff: float = 5.0, num_blocks: int = 3, num_basis: int = 20
    ) -> None:
        super().__init__(width, cutoff)
        self.embedding = AtomEmbedding(width)
        self.frequencies = nn.Buffer(torch.arange(1, num_basis + 1) * (torch.pi / cutoff))
        self.blocks = nn.ModuleList(PaiNNBlock(width, num_basis) for _ in range(num_blocks))
        self.head = EnergyHead(width, num_outputs=2, norm=False)

    def outputs(self, structures: Structures, graph: Graph) -> Tensor:
        """(B, 2), both energies, normalised."""
        x = self.embedding(structures.atomic_numbers, structures.tags)
        vectors = x.new_zeros(len(x), 3, self.width)
        distance = graph.distances[:, None]
        window = 0.5 * (torch.cos(distance * (torch.pi / self.cutoff)) + 1)
        waves = torch.sin(distance * self.frequencies) / distance
        for block in self.blocks:
            x, vectors = block(x, vectors, graph.edges, -graph.vectors / distance, waves, window)
        return self.head(x, structures.tags, structures.ptr)  # type: ignore[no-any-return]


class PaiNNBlock(nn.Module):
    """A message and an update (Eq. 7 to 10): s (N, C) and v (N, 3, C) to the same.

    From neighbours j with unit vectors u: s += Σ φ₁(s_j) w₁(d); v += Σ v_j φ₂(s_j) w₂(d) +
    u φ₃(s_j) w₃(d). From the atom itself, with Uv and Vv: v += a₁ Uv; s += a₂ ⟨Uv, Vv⟩ + a₃.
    """

    def __init__(self, width: int, num_basis: int) -> None:
        super().__init__()
        self.message = nn.Sequential(
            nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 3 * width)
        )
        self.filters = nn.Linear(num_basis, 3 * width)
        self.mix = nn.Linear(width, 2 * width, bias=False)
        self.update = nn.Sequential(
            nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, 3 * width)
        )

    def forward(
        self, x: Tensor, vectors: Tensor, edges: Tensor, units: Tensor, waves: Tensor,
        window: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Units (P, 3) towards the sender, waves (P, num_basis) and window (P, 1) of distances."""
        sender, receiver = edges
        sent = self.message(x)[sender] * (self.filters(waves) * window)
        scalar, old, new = sent.chunk(3, dim=1)
        turned = vectors[sender] * old[:, None] + units[:, :, None] * new[:, None]
        x = x.index_add(0, receiver, scalar)
        vectors = vectors.index_add(0, receiver, turned)
        left, right = self.mix(vectors).chunk(2, dim=-1)
        # The square root has no gradient at 0, where vectors of single atoms are.
        length = (right.square().sum(1) + 1e-8).sqrt()
        kept, dot, free = self.update(torch.cat([x, length], 1)).chunk(3, dim=1)
        return x + free + dot * (left * right).sum(1), vectors + kept[:, None] * left


class MACE(Rival):
    """MACE (Batatia et al., NeurIPS 2022) of mace-torch: products of up to ν equivariant sums.

    Our embedding and read-out, as for PaiNN. Settings are the package's defaults, but for harmonics
    up to ℓ = 2 instead of 3, which takes 3 to 4 times as long.

    Args:
        width: channels: scalars, and as many vectors where `vectors`.
        correlation: ν.
        elements: symbols of the elements that occur; each has its own weights in every block.
        neighbors: mean pairs per atom, by which sums over neighbours are divided.
    """

    package = "mace"

    def __init__(
        self, width: int = 48, cutoff: float = 5.0, num_blocks: int = 2, max_ell: int = 2,
        correlation: int = 3, vectors: bool = True, *, elements: Sequence[str], neighbors: float,
    ) -> None:  # fmt: skip
        super().__init__(width, cutoff)
        channels = f"{width}x0e + {width}x1o" if vectors else f"{width}x0e"
        with torch.serialization.safe_globals([slice]):  # of e3nn's table of constants
            mace, o3 = import_module("mace.modules"), import_module("e3nn.o3")
        numbers = [atomic_numbers[symbol] for symbol in elements]
        block = mace.RealAgnosticResidualInteractionBlock
        self.net = mace.MACE(
            r_max=cutoff, num_bessel=8, num_polynomial_cutoff=5, max_ell=max_ell,
            interaction_cls=block, interaction_cls_first=block, num_interactions=num_blocks,
            num_elements=len(numbers), hidden_irreps=o3.Irreps(channels),
            MLP_irreps=o3.Irreps("1x0e"), atomic_energies=torch.zeros(len(numbers)).numpy(),
            avg_num_neighbors=neighbors, atomic_numbers=numbers, correlation=correlation,
            gate=None,
        )  # fmt: skip
        del self.net.node_embedding, self.net.readouts
        kinds = torch.full((NUM_ELEMENTS,), -1)
        kinds[numbers] = torch.arange(len(numbers))
        self.kinds = nn.Buffer(kinds)
        self.embedding = AtomEmbedding(width)
        self.head = EnergyHead(width, num_outputs=2, norm=False)

    def outputs(self, structures: Structures, graph: Graph) -> Tensor:
        """(B, 2), both energies, normalised."""
        net, edges = self.net, graph.edges
        x = self.embedding(structures.atomic_numbers, structures.tags)
        kinds = self.kinds[structures.atomic_numbers]
        kinds = nn.functional.one_hot(kinds, len(net.atomic_numbers)).to(x.dtype)
        harmonics = net.spherical_harmonics(graph.vectors)
        radial, _ = net.radial_embedding(graph.distances[:, None], kinds, edges, net.atomic_numbers)
        for interaction, product in zip(net.interactions, net.products, strict=True):
            sums, kept = interaction(kinds, x, harmonics, radial, edges)
            x = product(sums, kept, kinds)
        return self.head(x, structures.tags, structures.ptr)  # type: ignore[no-any-return]


RIVALS: dict[str, type[Rival]] = {
    "mace": MACE,
    "painn": PaiNN,
    "schnet": SchNet,
    "schnet_packaged": SchNetPackaged,
    "visnet": ViSNet,
    "dimenet++": DimeNetPlusPlus,
}
