"""From an EnergyConfig to the parts of a model."""

from __future__ import annotations

import torch

from flt_mol.models.config import EnergyConfig, PairConfig, RPEConfig, SpectralConfig
from flt_mol.nn.attention import FLTAttention
from flt_mol.nn.frequencies import GaussianFrequencies
from flt_mol.nn.local_filter import LocalBasis, LocalFilter
from flt_mol.nn.rpe import FourierRPE
from flt_mol.nn.spectral_filter import SpectralFilter
from flt_mol.nn.spectrum import GaussianSpectrum
from flt_mol.nn.transformer import FLTBlock, FLTEncoder


def build_encoder(config: EnergyConfig, generator: torch.Generator) -> FLTEncoder:
    """The stack of blocks; random numbers are drawn in order of the blocks."""
    rpe = None if config.rpe is None else _rpe(config, config.rpe, generator)
    width = 0 if rpe is None else rpe.num_features
    blocks = [_block(config, index, width, generator) for index in range(config.num_layers)]
    return FLTEncoder(blocks, rpe, config.recycles)


def build_local_basis(config: EnergyConfig, generator: torch.Generator) -> LocalBasis | None:
    """Of local filters and the displacement head; None where there are none."""
    pairs = config.pairs
    if pairs is None or not (pairs.filter or pairs.density or "displacement" in config.outputs):
        return None
    vector_basis = pairs.vector_basis if pairs.vectors or pairs.filter_vectors else 0
    return LocalBasis(pairs.cutoff, pairs.num_basis, vector_basis, pairs.pair_types, generator)


def build_local_filter(
    config: PairConfig, embed_dim: int, vectors: int, generator: torch.Generator
) -> LocalFilter:
    """One local filter on the shared basis, with so many vector channels."""
    return LocalFilter(
        embed_dim,
        config.num_basis,
        vectors,
        config.vector_basis if vectors else 0,
        generator,
        num_filters=config.num_filters,
        vector_dropout=config.vector_dropout,
    )


def _block(
    config: EnergyConfig, index: int, position_dim: int, generator: torch.Generator
) -> FLTBlock:
    attention = spectral = local = None
    pairs, left = config.pairs, config.num_layers - index
    if _among_last(config.far_blocks, left):
        if config.attention != "none":
            attention = _attention(config, position_dim, generator)
        if config.spectral is not None:
            spectral = _spectral(config, config.spectral, generator)
    if pairs is not None and pairs.filter:
        vectors = pairs.filter_vectors if _among_last(pairs.vector_blocks, left) else 0
        local = build_local_filter(pairs, config.embed_dim, vectors, generator)
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


def _among_last(some: int | None, left: int) -> bool:
    return some is None or left <= some


def _spectral(
    config: EnergyConfig, spectral: SpectralConfig, generator: torch.Generator
) -> SpectralFilter:
    return SpectralFilter(
        config.embed_dim,
        spectral.num_heads,
        k_max=spectral.k_max,
        sigma_max=spectral.sigma_max,
        num_basis=spectral.num_basis,
        padding=spectral.padding,
        max_vectors=spectral.max_vectors,
        generator=generator,
    )


def _attention(config: EnergyConfig, position_dim: int, generator: torch.Generator) -> FLTAttention:
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


def _rpe(config: EnergyConfig, rpe: RPEConfig, generator: torch.Generator) -> FourierRPE:
    spectrum = GaussianSpectrum(
        config.num_heads,
        rpe.num_terms,
        form=rpe.form,
        sigma_min=rpe.sigma_min,
        sigma_max=rpe.sigma_max,
        generator=generator,
    )
    frequencies = GaussianFrequencies(
        rpe.num_frequencies,
        sigma=(rpe.frequency_sigma_min, rpe.frequency_sigma_max),
        learned_sigma=rpe.learned_sigma,
        redraw_every=None if rpe.learned_sigma else config.redraw_every,
        generator=generator,
    )
    return FourierRPE(spectrum, frequencies, split=rpe.split)
