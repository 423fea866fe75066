"""From an EnergyConfig to the parts of a model; random numbers are drawn in the order of calls."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from flt_mol.functional.groups import without_autocast
from flt_mol.functional.images import log_sum_over_images
from flt_mol.functional.lattice import UnfitSystemError
from flt_mol.functional.neighbors import NeighborPairs, neighbor_pairs, pair_lengths
from flt_mol.functional.reciprocal import check_vectors
from flt_mol.models.config import EnergyConfig, ImageConfig, PairConfig, RPEConfig
from flt_mol.nn import (
    FREQUENCIES,
    SPECTRA,
    BlockGeometry,
    FLTAttention,
    FLTBlock,
    FLTEncoder,
    FourierRPE,
    GaussianBias,
    GaussianSpectrum,
    ImageKeys,
    LocalBasis,
    LocalFilter,
    PairCorrection,
    PairWeights,
    SpectralFilter,
    SpectralGeometry,
)
from flt_mol.nn.radial import log_smooth_cutoff
from flt_mol.structures import Structures

__all__ = ["Geometry", "build_encoder", "build_rpe", "check_systems"]


def build_encoder(config: EnergyConfig, generator: torch.Generator) -> FLTEncoder:
    """The stack of blocks, with the RPE that they share."""
    rpe = None if config.rpe is None else build_rpe(config, config.rpe, generator)
    width = 0 if rpe is None else rpe.num_features
    blocks = [_block(config, index, width, generator) for index in range(config.num_layers)]
    return FLTEncoder(blocks, rpe, config.recycles)


def build_rpe(config: EnergyConfig, rpe: RPEConfig, generator: torch.Generator) -> FourierRPE:
    """The relative positional encoding of a model.

    Raises:
        ValueError: arguments of a family that cannot work.
    """
    known = {"num_heads": config.num_heads, "generator": generator}
    try:
        spectrum = _of_family(SPECTRA, rpe.spectrum, known)
        known["num_terms"] = rpe.spectrum.get("num_terms")
        if not rpe.frequencies.get("learned_sigma", False):
            known["redraw_every"] = config.redraw_every
        frequencies = _of_family(FREQUENCIES, rpe.frequencies, known)
        return FourierRPE(spectrum, frequencies, split=rpe.split)
    except (TypeError, ValueError) as error:
        raise ValueError(f"model.rpe: {error}") from error


def _of_family(registry: Any, spec: dict[str, Any], known: dict[str, Any]) -> Any:
    family = registry[spec["name"]]
    takes = inspect.signature(family).parameters
    arguments = {key: value for key, value in known.items() if key in takes}
    return family(**arguments, **{key: value for key, value in spec.items() if key != "name"})


def _local_basis(config: EnergyConfig, generator: torch.Generator) -> LocalBasis | None:
    """Of local filters and the displacement head; None where there are none."""
    pairs = config.pairs
    if pairs is None or not (pairs.filter or pairs.density or "displacement" in config.outputs):
        return None
    vector_basis = pairs.vector_basis if pairs.vectors or pairs.filter_vectors else 0
    return LocalBasis(pairs.cutoff, pairs.num_basis, vector_basis, pairs.pair_types, generator)


def _local_filter(
    pairs: PairConfig, embed_dim: int, vectors: int, generator: torch.Generator
) -> LocalFilter:
    """One local filter on the shared basis, with so many vector channels."""
    return LocalFilter(
        embed_dim,
        pairs.num_basis,
        vectors,
        pairs.vector_basis if vectors else 0,
        generator,
        num_filters=pairs.num_filters,
        vector_dropout=pairs.vector_dropout,
    )


def _block(
    config: EnergyConfig, index: int, position_dim: int, generator: torch.Generator
) -> FLTBlock:
    attention = spectral = local = None
    pairs, left = config.pairs, config.num_layers - index
    if config.far_blocks is None or left <= config.far_blocks:
        attention = _attention(config, position_dim, generator)
        spectral = _spectral(config, generator)
    if pairs is not None and pairs.filter:
        has_vectors = pairs.vector_blocks is None or left <= pairs.vector_blocks
        vectors = pairs.filter_vectors if has_vectors else 0
        local = _local_filter(pairs, config.embed_dim, vectors, generator)
    if config.far_scale != 1:
        with torch.no_grad():
            for far in (attention, spectral):
                if far is not None:
                    far.out.weight.mul_(config.far_scale)
    return FLTBlock(
        attention,
        config.ffn_dim,
        config.dropout,
        spectral=spectral,
        local=local,
        local_norm=pairs is None or pairs.norm,
    )


def _attention(
    config: EnergyConfig, position_dim: int, generator: torch.Generator
) -> FLTAttention | None:
    if config.attention == "none":
        return None
    return FLTAttention(
        config.embed_dim,
        config.num_heads,
        feature_map=config.feature_map,
        num_features=None if config.feature_map == "elu" else config.num_features,
        position_dim=position_dim,
        redraw_every=config.redraw_every,
        dropout=config.dropout,
        mode=config.attention,
        generator=generator,
    )


def _spectral(config: EnergyConfig, generator: torch.Generator) -> SpectralFilter | None:
    if config.spectral is None:
        return None
    settings = config.spectral.model_dump()
    heads = settings.pop("num_heads")
    return SpectralFilter(config.embed_dim, heads, **settings, generator=generator)


class Geometry(nn.Module):
    """Pairs, their bases, masks and waves of a batch, and what they add to the embedding."""

    def __init__(self, config: EnergyConfig, generator: torch.Generator) -> None:
        super().__init__()
        pairs = config.pairs
        self.cutoff = config.cutoff
        self.local = _local_basis(config, generator)
        self.density = self.correction = None
        if pairs is not None and pairs.density:
            self.density = _local_filter(pairs, config.embed_dim, pairs.vectors, generator)
        if pairs is not None and pairs.correction:
            settings = pairs.cutoff, pairs.num_basis, pairs.pair_types
            self.correction = PairCorrection(config.num_heads, *settings, generator=generator)
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
            geometry = geometry._replace(local=local)
            if self.density is not None:
                x = x + self.density(x, local)
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
            padding=4 * spectral.sigma_max if spectral.padding is None else spectral.padding,
            max_vectors=spectral.max_vectors,
        )
    except UnfitSystemError as error:
        raise ValueError(f"sid {structures.sid[error.system]}: {error.reason}") from None


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
        raise ValueError(f"sid {structures.sid[error.system]}: {error.reason}") from None


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
