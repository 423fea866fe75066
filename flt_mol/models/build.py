"""From an EnergyConfig to the parts of a model; random numbers are drawn in the order of calls."""

from __future__ import annotations

import inspect
import math
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from flt_mol.functional.groups import outside
from flt_mol.functional.lattice import Floats, UnfitSystemError, checked_cells, virtual_cells
from flt_mol.functional.mesh import mesh_numbers
from flt_mol.functional.neighbors import NeighborPairs
from flt_mol.models.config import EnergyConfig, PairConfig, RPEConfig
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
)
from flt_mol.nn.spectral_filter import MAX_PRODUCTS
from flt_mol.structures import Structures
from flt_mol.structures import naming_sid as errors_with_sid


def build_encoder(config: EnergyConfig, generator: torch.Generator) -> FLTEncoder:
    """The stack of blocks, with the RPE that they share.

    Raises:
        ValueError: arguments of a family of the RPE that cannot work.
    """
    rpe = None if config.rpe is None else _rpe(config, config.rpe, generator)
    width = 0 if rpe is None else rpe.num_features
    blocks = [_block(config, index, width, generator) for index in range(config.num_layers)]
    return FLTEncoder(blocks, rpe, config.recycles)


def _rpe(config: EnergyConfig, rpe: RPEConfig, generator: torch.Generator) -> FourierRPE:
    known = {"num_heads": config.num_heads, "generator": generator}
    known["num_terms"] = rpe.spectrum.get("num_terms")
    if not rpe.frequencies.get("learned_sigma", False):
        known["redraw_every"] = config.redraw_every
    try:
        spectrum = _of_family(SPECTRA, rpe.spectrum, known)
        frequencies = _of_family(FREQUENCIES, rpe.frequencies, known)
        return FourierRPE(spectrum, frequencies, split=rpe.split)
    except (TypeError, ValueError) as error:
        raise ValueError(f"model.rpe: {error}") from error


def _of_family(registry: Any, spec: dict[str, Any], known: dict[str, Any]) -> Any:
    given = {key: value for key, value in spec.items() if key != "name"}
    family = registry[spec["name"]]
    takes = inspect.signature(family).parameters
    return family(**{key: value for key, value in known.items() if key in takes} | given)


def _block(
    config: EnergyConfig, index: int, position_dim: int, generator: torch.Generator
) -> FLTBlock:
    attention = spectral = local = None
    dropout = config.attention_dropout
    pairs, left = config.pairs, config.num_layers - index
    if config.far_blocks is None or left <= config.far_blocks:
        if config.attention != "none":
            attention = FLTAttention(
                config.embed_dim,
                config.num_heads,
                feature_map=config.feature_map,
                num_features=None if config.feature_map == "elu" else config.num_features,
                position_dim=position_dim,
                redraw_every=config.redraw_every,
                dropout=config.dropout if dropout is None else dropout,
                mode=config.attention,
                generator=generator,
            )
        if config.spectral is not None:
            settings = config.spectral.model_dump(exclude={"charges"})
            heads = settings.pop("num_heads")
            spectral = SpectralFilter(config.embed_dim, heads, **settings, generator=generator)
    if pairs is not None and pairs.filter:
        has_vectors = pairs.vector_blocks is None or left <= pairs.vector_blocks
        vectors = pairs.filter_vectors if has_vectors else 0
        local = _local_filter(pairs, config.embed_dim, vectors, generator)
    with torch.no_grad():
        for far in (attention, spectral):
            if far is not None:
                far.out.weight.mul_(config.far_scale)
    norm = pairs is None or pairs.norm
    parts: dict[str, Any] = {"spectral": spectral, "local": local, "local_norm": norm}
    return FLTBlock(attention, config.ffn_dim, config.dropout, **parts)


def _local_filter(
    pairs: PairConfig, width: int, vectors: int, generator: torch.Generator
) -> LocalFilter:
    return LocalFilter(
        width,
        pairs.num_basis,
        vectors,
        pairs.vector_basis if vectors else 0,
        generator,
        num_filters=pairs.num_filters,
        vector_dropout=pairs.vector_dropout,
    )


class Geometry(nn.Module):
    """Pairs, their bases, masks and plane waves of a batch, and what they add to the embedding."""

    def __init__(self, config: EnergyConfig, generator: torch.Generator) -> None:
        super().__init__()
        pairs, images, heads = config.pairs, config.images, config.num_heads
        self.needs, self.cutoff = needs_of(config), config.cutoff
        self.local = self.density = self.correction = None
        self.images: ImageKeys | GaussianBias | None = None
        if pairs is not None:
            basis = pairs.cutoff, pairs.num_basis
            if pairs.filter or pairs.density or "displacement" in config.outputs:
                directed = pairs.vector_basis if pairs.vectors or pairs.filter_vectors else 0
                self.local = LocalBasis(*basis, directed, pairs.pair_types, generator)
            if pairs.density:
                self.density = _local_filter(pairs, config.embed_dim, pairs.vectors, generator)
            if pairs.correction:
                self.correction = PairCorrection(heads, *basis, pairs.pair_types, generator)
        if images is not None and images.mask == "gaussian":
            spectrum = GaussianSpectrum(heads, images.num_basis, generator=generator)
            self.images = ImageKeys(spectrum, images.cutoff)
        elif images is not None:
            sizes = heads, images.num_basis, images.cutoff, images.pair_types
            width = config.embed_dim if images.density else None
            self.images = GaussianBias(*sizes, width, generator)

    def forward(
        self, structures: Structures, encoder: FLTEncoder, x: Tensor
    ) -> tuple[Tensor, BlockGeometry]:
        """First features x (N, C), with the surroundings added, and the geometry for the blocks.

        Raises as `prepare_batch`.
        """
        if not self.needs.met_by(structures):
            run = outside(prepare_batch) if torch.compiler.is_compiling() else prepare_batch
            structures = run(self.needs, structures)
        numbers, ptr = structures.atomic_numbers, structures.ptr
        where = structures.positions, structures.cell, structures.pbc, ptr
        found: dict[str, Any] = {}
        filters = (block.spectral for block in encoder.blocks)
        first = next((layer for layer in filters if isinstance(layer, SpectralFilter)), None)
        if first is not None:
            found["plane_waves"] = first.geometry(*where, structures.reciprocal)
        if encoder.rpe is not None:
            finite = structures.positions.isfinite().all(1)
            if not torch.compiler.is_compiling() and not bool(finite.all()):
                system = int(structures.system[(~finite).nonzero()[0]])
                raise UnfitSystemError(system, "positions hold a number that is not finite")
            found["position_features"] = encoder.rpe(structures.positions, ptr)
        if self.cutoff is None:
            return x, BlockGeometry(**found)
        pairs = cast(NeighborPairs, structures.pairs)
        vectors = pairs.vectors(structures.positions, structures.cell, ptr)
        if self.local is not None:
            found["local"] = self.local(pairs, vectors, numbers)
            if self.density is not None:
                x = x + self.density(x, found["local"])
        if self.correction is not None:
            found["pairs"] = self.correction(pairs, vectors, numbers)
        if self.images is not None:
            x, found["images"] = self._with_images(x, structures, pairs)
        return x, BlockGeometry(**found)

    def _with_images(
        self, x: Tensor, structures: Structures, pairs: NeighborPairs
    ) -> tuple[Tensor, PairWeights]:
        pairs = pairs.with_self(len(x))
        vectors = pairs.vectors(structures.positions, structures.cell, structures.ptr)
        if not isinstance(self.images, GaussianBias):
            assert self.images is not None
            return x, self.images(pairs, vectors)
        keys, density = self.images(pairs, vectors, structures.atomic_numbers)
        return x if density is None else x + density.to(x.dtype), keys


class Needs(NamedTuple):
    """What a model needs of a batch beside its fields: see `Structures`; None for nothing."""

    cutoff: float | None
    reciprocal: dict[str, Any] | None

    def met_by(self, structures: Structures) -> bool:
        """Whether the batch has it."""
        if self.cutoff is not None and structures.cutoff != self.cutoff:
            return False
        if self.reciprocal is None:
            return True
        # Vectors made before say nothing about derivatives by the cell.
        lattice, constant = structures.reciprocal, not structures.cell.requires_grad
        found = structures.reciprocal_settings == self.reciprocal
        return lattice is not None and found and (constant or lattice.cell.requires_grad)


def needs_of(config: EnergyConfig) -> Needs:
    """Those of a model of this configuration."""
    if (spectral := config.spectral) is None:
        return Needs(config.cutoff, None)
    padding = 4 * spectral.sigma_max if spectral.padding is None else spectral.padding
    settings = {"k_max": spectral.k_max, "padding": padding, "max_products": MAX_PRODUCTS}
    return Needs(config.cutoff, settings)


def prepare_batch(needs: Needs, structures: Structures) -> Structures:
    """The batch with the pairs and reciprocal vectors that a model needs, where they are missing.

    Raises:
        ValueError: a system that is too large or whose numbers are not finite, by its sid.
    """
    if needs.cutoff is not None and structures.cutoff != needs.cutoff:
        structures = structures.with_pairs(needs.cutoff)
    if needs.reciprocal is not None and not needs.met_by(structures):
        structures = structures.with_reciprocal(**needs.reciprocal)
    return structures


def naming_sid(structures: Structures) -> AbstractContextManager[None]:
    """As `flt_mol.structures.naming_sid`; graphs do not name any."""
    return nullcontext() if torch.compiler.is_compiling() else errors_with_sid(structures)


def check_systems(
    config: EnergyConfig, structures: Structures, device: torch.device | str = "cpu"
) -> None:
    """Refuse systems whose energy does not fit the memory of a device, without building a model.

    Raises:
        ValueError: the first system that is too large, by its sid, with the need and the limit; or
            one that has a singular cell.
    """
    needs = needs_of(config)
    padding = needs.cutoff if needs.reciprocal is None else needs.reciprocal["padding"]
    if padding is None:
        return
    where = structures.positions, structures.ptr
    with naming_sid(structures):
        lattice = checked_cells(structures.cell, structures.pbc, *where)
        cells = virtual_cells(*lattice, *where, padding=padding).cell
        limit = memory_at_hand(torch.device(device))
        for b, atoms in enumerate(structures.natoms.tolist()):
            if (need := memory_needed(config, atoms, cells[b])) > limit:
                raise UnfitSystemError(
                    b,
                    f"too large: {atoms} atoms in {abs(np.linalg.det(cells[b])):.3g} Å³ need "
                    f"about {need / 1e9:.1f} GB of memory, and {limit / 1e9:.1f} GB are there",
                )


def memory_at_hand(device: torch.device) -> float:
    """Bytes: a GPU's free memory, and all of a computer's."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def memory_needed(config: EnergyConfig, atoms: int, cell: Floats) -> float:
    """About how many bytes one system takes, not trained on. Measured on bulk.

    Forces keep what energies are made of until these are differentiated: five times as much.
    """
    numbers = atoms * (12.0 * config.embed_dim + 4 * config.ffn_dim)
    if config.cutoff is not None:
        density, pairs = atoms / abs(np.linalg.det(cell)), config.pairs
        basis = 0 if pairs is None else pairs.num_basis + 2 * pairs.vector_basis
        numbers += atoms * density * 4 / 3 * math.pi * config.cutoff**3 * (14 + max(46, basis))
    if (spectral := config.spectral) is not None:
        lengths = np.linalg.norm(cell, axis=1).tolist()
        numbers += mesh_numbers(lengths, spectral.k_max, config.embed_dim, spectral.num_basis)
    return (20 if "forces" in config.outputs else 4) * numbers
