"""The local part of a block: radial sums and vector invariants over neighbour pairs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from flt_mol.functional.groups import at_least_float32, without_autocast
from flt_mol.functional.neighbors import NeighborPairs, pair_lengths
from flt_mol.functional.numerics import draw_normal, placed, seeded_generator
from flt_mol.functional.pairs import pair_filter
from flt_mol.nn._pair_checks import check_atoms, check_numbers, check_sizes, check_vectors
from flt_mol.nn._plain import applied, is_stack
from flt_mol.nn._remade import after_activation
from flt_mol.nn.layers import drawn_linear
from flt_mol.nn.radial import RadialBasis

_GAIN = 3**-0.5  # of linear maps: sums that nothing normalises shall not grow


class LocalGeometry(NamedTuple):
    """What local layers need to know of the pairs of a batch: made once, shared by all layers.

    Attributes:
        pairs: within the cutoff or beyond it; those beyond have no weight.
        vectors: (P, 3), Å, r_i − r_j − T·cell.
        distances: (P,), Å.
        basis: B (P, T), radial functions under the smooth cutoff, 0 from there on.
        directed: (3P, T'), B'_t(r) r̂_a, all pairs for a = x, then y, then z; None without vectors.
        receivers: (3P,) int64, i + a·N, in the order of `directed`; None without vectors.
        senders: (3P,) int64, j, likewise.
        symmetric: whether each pair's reverse is there, with the same row of `basis`.
    """

    pairs: NeighborPairs
    vectors: Tensor
    distances: Tensor
    basis: Tensor
    directed: Tensor | None = None
    receivers: Tensor | None = None
    senders: Tensor | None = None
    symmetric: bool = False


class LocalBasis(nn.Module):
    """Radial functions of all pairs, and their products with directions: `LocalGeometry`.

    Args:
        cutoff: Å.
        num_basis: T, Gaussians of the radial sums.
        vector_basis: T', Gaussians of the vectors; 0 for none. Few do: forces are smooth.
        pair_types: whether distances are transformed per pair of elements (`PairTypes`).
        generator: on CPU; None takes a seed from torch's global one.

    Raises:
        ValueError: settings that `RadialBasis` refuses.
    """

    def __init__(
        self,
        cutoff: float = 5.0,
        num_basis: int = 32,
        vector_basis: int = 0,
        pair_types: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        generator = seeded_generator(generator)
        self.cutoff = float(cutoff)
        self.radial = RadialBasis(cutoff, num_basis, pair_types, generator)
        self.vector_radial = RadialBasis(cutoff, vector_basis) if vector_basis else None

    def forward(
        self,
        pairs: NeighborPairs,
        vectors: Tensor,
        num_rows: int,
        atomic_numbers: Tensor | None = None,
    ) -> LocalGeometry:
        """Geometry of the pairs of N atoms.

        Args:
            pairs: sorted by receiver, as `neighbor_pairs` gives them, without self pairs.
            vectors: (P, 3), Å.
            num_rows: N.
            atomic_numbers: (N,), 1 to 118, needed if `pair_types`.

        Raises:
            ValueError: vectors or elements that do not belong to these pairs.
        """
        check_vectors(pairs, vectors, lengths=False)
        elements: tuple[Tensor, ...] = ()
        if atomic_numbers is not None:
            check_numbers(pairs, atomic_numbers, num_rows)
            elements = atomic_numbers[pairs.index_i], atomic_numbers[pairs.index_j]
        with without_autocast(vectors):
            vectors = at_least_float32(vectors)
            distances = pair_lengths(vectors)
            basis = self.radial(distances, *elements)
            # A transformation of distances may be another one for z_i at z_j than for z_j at z_i.
            both = self.radial.pair_types is None and _symmetric(pairs)
            if self.vector_radial is None:
                return LocalGeometry(pairs, vectors, distances, basis, symmetric=both)
            # An atom at the place of another has no direction: its vector is 0.
            unit = vectors / distances.masked_fill(distances == 0, 1.0)[:, None]
            radial = self.vector_radial(distances)
            directed = (unit.T[:, :, None] * radial).flatten(0, 1)
        receivers = torch.cat([pairs.index_i + axis * num_rows for axis in range(3)])
        senders = pairs.index_j.repeat(3)
        return LocalGeometry(pairs, vectors, distances, basis, directed, receivers, senders, both)


class LocalFilter(nn.Module):
    r"""out_i = o([m_i, \|V_i\|²/n_i, V_i·(M V_i)/n_i, x_i]): what is around an atom.

    m_ic = Σ_j F_c(r_ij) (U x_j)_c is the pair filter [1], V_ica = Σ_j G_c(r_ij) (W x_j)_c r̂_ij,a a
    vector per channel, as a force on atom i would be; squares and products of mixed channels
    (M is learned) tell angles apart, at the cost of a sum over pairs, not triplets. n = 1 + \|V\|²
    bounds them: the heavy tails of squares, where atoms begin far too close to each other, make
    for noisy training. F_c = κ Σ_t W_tc B_t and G are linear in the bases of `LocalBasis`, o is
    Linear ∘ SiLU ∘ Linear. κ = 5 (`RATE`) lets F learn faster: Adam's steps do not depend on how
    much a weight counts, and each W_tc sees few of the pairs.

    All sums are unnormalised and over periodic pairs: outputs are invariant to O(3), and the same
    in a supercell. F begins so small that the some forty neighbours of a metal's atom add up to
    about one, and o takes an eighth of the invariants: sums come first. Time
    O(P·(T·K + 3·T'·D)), memory O(P·(T + 3·T') + N·(C + K)).

    Args:
        channels: C.
        num_basis: T, as of the `LocalBasis`.
        vectors: D, vector channels; 0 for none.
        vector_basis: T', likewise.
        generator: on CPU, for all weights; None takes a seed from torch's global one.
        num_filters: K, channels of the radial sums; None is C.
        vector_dropout: probability that an invariant of vectors is 0 in training, so that nothing
            leans on single ones.

    Raises:
        ValueError: a size below 1, vectors without a basis, a probability outside [0, 1).

    References:
        [1] Schütt et al., "SchNet: A continuous-filter convolutional neural network", NeurIPS 2017,
        equation 3.
    """

    INITIAL_SCALE, INITIAL_VECTOR_SCALE, INITIAL_INVARIANTS, RATE = 0.2, 1.0, 0.125, 5.0

    def __init__(
        self,
        channels: int,
        num_basis: int = 32,
        vectors: int = 0,
        vector_basis: int = 0,
        generator: torch.Generator | None = None,
        *,
        num_filters: int | None = None,
        vector_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        filters = channels if num_filters is None else num_filters
        check_sizes(channels=channels, num_basis=num_basis, num_filters=filters)
        if vectors < 0 or (vectors and vector_basis < 1):
            raise ValueError(f"{vectors} vector channels need vector_basis ≥ 1, got {vector_basis}")
        if not 0 <= vector_dropout < 1:
            raise ValueError(f"vector_dropout is {vector_dropout}, expected 0 ≤ p < 1")
        generator = seeded_generator(generator)
        self.channels = channels
        self.num_filters = filters
        self.weight = _drawn(num_basis, filters, self.INITIAL_SCALE / self.RATE, generator)
        self.value = drawn_linear(channels, filters, False, generator, _GAIN)
        self.vectors = vectors
        if vectors:
            self.vector_weight = _drawn(vector_basis, vectors, self.INITIAL_VECTOR_SCALE, generator)
            self.vector_value = drawn_linear(channels, vectors, False, generator)
            self.vector_mix = drawn_linear(vectors, vectors, False, generator)
            self.vector_dropout = nn.Dropout(vector_dropout)
        width = filters + 2 * vectors
        first = drawn_linear(width + channels, channels, True, generator, _GAIN)
        with torch.no_grad():
            first.weight[:, filters:width] *= self.INITIAL_INVARIANTS
        last = drawn_linear(channels, channels, True, generator, _GAIN)
        self.out = nn.Sequential(first, nn.SiLU(), last)

    def forward(self, x: Tensor, local: LocalGeometry) -> Tensor:
        """Features (N, C) to features (N, C).

        Raises:
            ValueError: rows that do not belong to these pairs, a geometry without vectors.
        """
        pairs = local.pairs
        check_atoms(pairs, x, self.channels)
        value = self.value(x)
        filters = local.basis, self.RATE * self.weight
        summed = pair_filter(
            *(*filters, value, pairs.index_i, pairs.index_j, x.shape[0]), symmetric=local.symmetric
        )
        parts = [summed]
        if self.vectors:
            parts.append(self.vector_dropout(torch.cat(self.invariants(x, local), -1)))
        return self._read_out([part.to(value.dtype) for part in (*parts, x)])

    def _read_out(self, parts: list[Tensor]) -> Tensor:
        """Map [m, squares and products, x] by o; its first map needs no copy of them in one."""
        if not is_stack(self.out, nn.Linear, nn.SiLU, nn.Linear):
            out: Tensor = self.out(torch.cat(parts, -1))
            return out
        first, activation, last = self.out
        assert isinstance(first, nn.Linear)
        columns = first.weight.split([part.shape[-1] for part in parts], 1)
        hidden = linear(parts[-1], columns[-1], first.bias)
        for part, weight in zip(parts[:-1], columns, strict=False):
            hidden = torch.addmm(hidden, part, weight.T)
        return after_activation(hidden, activation, last)

    def invariants(self, x: Tensor, local: LocalGeometry) -> tuple[Tensor, Tensor]:
        r"""\|V_i\|²/n_i and V_i·(M V_i)/n_i, (N, D) each, at least float32."""
        if local.directed is None or local.receivers is None or local.senders is None:
            raise ValueError("this geometry has no vectors: LocalBasis(..., vector_basis=...)")
        value, rows = self.vector_value(x), x.shape[0]
        summed = pair_filter(
            local.directed, self.vector_weight, value, local.receivers, local.senders, 3 * rows
        )
        with without_autocast(summed):
            vectors = summed.view(3, rows, self.vectors)
            mixed = applied(self.vector_mix, vectors)
            square = vectors.square().sum(0)
            size = 1 + square
            return square / size, (vectors * mixed).sum(0) / size

    def extra_repr(self) -> str:
        """What `repr` shows."""
        return f"{self.channels}, num_filters={self.num_filters}, vectors={self.vectors}"


def _symmetric(pairs: NeighborPairs) -> bool:
    """Whether they are known to be: graphs know no numbers, and without gradients none asks."""
    known = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    return known and pairs.symmetric()


def _drawn(rows: int, columns: int, scale: float, generator: torch.Generator) -> nn.Parameter:
    start = draw_normal(rows, columns, generator=generator) * scale * rows**-0.5
    return nn.Parameter(placed(start))
