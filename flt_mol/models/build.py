"""From an EnergyConfig to the parts of a model; random numbers are drawn in the order of calls."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from flt_mol.models.config import EnergyConfig, PairConfig, RPEConfig
from flt_mol.nn.attention import FLTAttention
from flt_mol.nn.frequencies import FREQUENCIES
from flt_mol.nn.local_filter import LocalBasis, LocalFilter
from flt_mol.nn.rpe import FourierRPE
from flt_mol.nn.spectral import SpectralFilter
from flt_mol.nn.spectrum import SPECTRA
from flt_mol.nn.block import FLTBlock, FLTEncoder

__all__ = ["build_encoder", "build_local_basis", "build_local_filter", "build_rpe"]


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


def build_local_basis(config: EnergyConfig, generator: torch.Generator) -> LocalBasis | None:
    """Of local filters and the displacement head; None where there are none."""
    pairs = config.pairs
    if pairs is None or not (pairs.filter or pairs.density or "displacement" in config.outputs):
        return None
    vector_basis = pairs.vector_basis if pairs.vectors or pairs.filter_vectors else 0
    return LocalBasis(pairs.cutoff, pairs.num_basis, vector_basis, pairs.pair_types, generator)


def build_local_filter(
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
