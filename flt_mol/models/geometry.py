"""Where atoms are, as a model's blocks need it: made once a recycle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from flt_mol.functional._shortest_vectors import MOST_CANDIDATES
from flt_mol.functional.images import log_sum_over_images
from flt_mol.functional.lattice import TooManyVectorsError, check_vectors
from flt_mol.functional.neighbors import NeighborPairs, neighbor_pairs, pair_lengths
from flt_mol.functional.groups import without_autocast
from flt_mol.functional.virtual_cells import UnfitSystemError
from flt_mol.models.build import build_local_basis, build_local_filter
from flt_mol.models.config import EnergyConfig, ImageConfig
from flt_mol.nn.gaussian_bias import GaussianBias
from flt_mol.nn.image_keys import ImageKeys, PairWeights
from flt_mol.nn.local import PairCorrection
from flt_mol.nn.local_filter import LocalGeometry
from flt_mol.nn.radial import log_smooth_cutoff
from flt_mol.nn.spectral import SpectralFilter, SpectralGeometry, padding_of
from flt_mol.nn.spectrum import GaussianSpectrum
from flt_mol.nn.block import BlockGeometry, FLTEncoder
from flt_mol.structures import Structures


class Geometry(nn.Module):
    """Pairs, their bases, masks and waves of a batch; and what of them is added to the embedding.

    Args:
        config: of the model.
        generator: on CPU, for initial weights.

    Attributes:
        cutoff: Å, of the pairs that are needed; None where no part looks at pairs.
    """

    def __init__(self, config: EnergyConfig, generator: torch.Generator) -> None:
        super().__init__()
        pairs = config.pairs
        self.cutoff = config.cutoff
        self.local = build_local_basis(config, generator)
        self.density = (
            build_local_filter(pairs, config.embed_dim, pairs.vectors, generator)
            if pairs is not None and pairs.density
            else None
        )
        self.correction = (
            PairCorrection(
                config.num_heads,
                pairs.cutoff,
                pairs.num_basis,
                pairs.pair_types,
                generator=generator,
            )
            if pairs is not None and pairs.correction
            else None
        )
        self.images = None if config.images is None else _images(config, config.images, generator)

    def forward(
        self, structures: Structures, positions: Tensor, encoder: FLTEncoder, x: Tensor
    ) -> tuple[Tensor, BlockGeometry]:
        """First features x (N, C), with the surroundings added, and the geometry for the blocks.

        Raises:
            ValueError: a system that is too large or whose numbers are not finite, by its sid.
        """
        geometry = BlockGeometry(waves=_waves(structures, positions, encoder))
        if encoder.rpe is not None:
            _check_finite(structures, positions)
            features = encoder.rpe(positions, structures.ptr)
            geometry = geometry._replace(position_features=features)
        if self.cutoff is None:
            return x, geometry
        pairs = self.pairs(structures, positions)
        vectors = pairs.vectors(positions, structures.cell, structures.ptr)
        numbers = structures.atomic_numbers
        if self.local is not None:
            local = self.local(pairs, vectors, len(numbers), numbers)
            x, geometry = self._with_density(x, local), geometry._replace(local=local)
        if self.correction is not None:
            weights = self.correction(pairs, pairs.groups(), vectors, numbers)
            geometry = geometry._replace(pairs=weights)
        if self.images is not None:
            x, images = self._with_images(x, structures, positions, pairs)
            geometry = geometry._replace(images=images)
        return x, geometry

    def pairs(self, structures: Structures, positions: Tensor) -> NeighborPairs:
        """Those that came with the structures, if they are for this cutoff and these positions."""
        assert self.cutoff is not None
        given = structures.pairs
        same = structures.cutoff == self.cutoff and positions is structures.positions
        if given is not None and same:
            return given
        where = structures.cell, structures.pbc, structures.ptr
        try:
            return neighbor_pairs(positions, *where, self.cutoff)
        except ValueError:
            replace(structures, positions=positions, pairs=None).with_pairs(self.cutoff)  # names it
            raise

    def _with_density(self, x: Tensor, local: LocalGeometry) -> Tensor:
        return x if self.density is None else x + self.density(x, local)

    def _with_images(
        self, x: Tensor, structures: Structures, positions: Tensor, pairs: NeighborPairs
    ) -> tuple[Tensor, PairWeights]:
        pairs = pairs.with_self(len(x))
        groups = pairs.groups()
        vectors = pairs.vectors(positions, structures.cell, structures.ptr)
        if isinstance(self.images, ImageKeys):
            return x, self.images(pairs, vectors, groups)
        assert isinstance(self.images, GaussianBias)
        numbers = structures.atomic_numbers
        with without_autocast(vectors):
            distances = pair_lengths(vectors)
            features = self.images.features(
                distances, numbers[pairs.index_i], numbers[pairs.index_j]
            )
            window = log_smooth_cutoff(distances, self.images.cutoff)
            mask = self.images.bias(features) + window[:, None]
            drawn = log_sum_over_images(mask, groups.group, len(groups.index_i))
            if self.images.density_out is not None:
                x = x + self.images.density(features, distances, pairs, len(x)).to(x.dtype)
        return x, PairWeights(groups.index_i, groups.index_j, drawn)


def check_systems(config: EnergyConfig, structures: Structures) -> None:
    """Refuse systems that are too large for a model's spectral filters, without building it.

    Raises:
        ValueError: the first system that is too large, by its sid.

    Example:
        >>> from flt_mol.models.config import SpectralConfig
        >>> chain = [[x, x, x] for x in range(0, 400, 5)]  # across the cell, so no vacuum
        >>> wide = Structures.single([29] * 80, chain, cell=400 * torch.eye(3), pbc=True)
        >>> check_systems(EnergyConfig(rpe=None, spectral=SpectralConfig()), wide)
        Traceback (most recent call last):
        ValueError: sid 0: too large for this model: what is left of it without vacuum, ...
    """
    spectral = config.spectral
    if spectral is None:
        return
    try:
        check_vectors(
            structures.cell,
            structures.pbc,
            structures.positions,
            structures.ptr,
            k_max=spectral.k_max,
            padding=padding_of(spectral.padding, spectral.sigma_max),
            max_vectors=spectral.max_vectors,
        )
    except UnfitSystemError as error:
        raise ValueError(_unfit_message(error, structures.sid)) from None


def _unfit_message(error: UnfitSystemError, sid: Sequence[int | str]) -> str:
    name = f"sid {sid[error.system]}"
    if not isinstance(error, TooManyVectorsError):
        return f"{name}: {error}"
    return (
        f"{name}: too large for this model: what is left of it without vacuum, {error.size}, has "
        f"{error.count:.1e} reciprocal vectors, at most {MOST_CANDIDATES:.1e} are looked at; "
        "skip it (--skip-bad), or train with model.spectral.max_vectors"
    )


def _check_finite(structures: Structures, positions: Tensor) -> None:
    if torch.compiler.is_compiling() or bool(positions.isfinite().all()):
        return
    row = int((~positions.isfinite().all(1)).nonzero()[0])
    b = int(structures.system[row])
    raise ValueError(f"sid {structures.sid[b]}: positions hold a number that is not finite")


def _waves(
    structures: Structures, positions: Tensor, encoder: FLTEncoder
) -> SpectralGeometry | None:
    where = positions, structures.cell, structures.pbc, structures.ptr
    filters = (block.spectral for block in encoder.blocks)
    first = next((layer for layer in filters if isinstance(layer, SpectralFilter)), None)
    try:
        return None if first is None else first.geometry(*where)
    except UnfitSystemError as error:
        raise ValueError(_unfit_message(error, structures.sid)) from None


def _images(
    config: EnergyConfig, images: ImageConfig, generator: torch.Generator
) -> ImageKeys | GaussianBias:
    if images.mask == "gaussian":
        spectrum = GaussianSpectrum(
            config.num_heads, images.num_basis, form="amplitude", generator=generator
        )
        return ImageKeys(spectrum, images.cutoff)
    return GaussianBias(
        config.num_heads,
        images.num_basis,
        images.cutoff,
        images.pair_types,
        config.embed_dim if images.density else None,
        generator,
    )
