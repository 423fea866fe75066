"""Whether an EnergyConfig can work, said before anything is built."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from flt_mol.models.config import (
    ATTENTION,
    FEEDBACK,
    IMAGE_MASKS,
    OUTPUTS,
    PARTS,
    EnergyConfig,
    SpectralConfig,
)
from flt_mol.models.idle import refuse_idle
from flt_mol.models.numbers import check_numbers, check_rpe
from flt_mol.models.rules import check_below_one, check_choice, check_length, check_whole
from flt_mol.nn.feature_map import FEATURE_MAPS, RandomFeatures
from flt_mol.nn.heads import READOUTS

_LARGEST_CUTOFF = 100.0  # Å; pairs in condensed matter would be 400,000 per atom
_MOST_WAVES = 100_000  # of a usual system, where a step on a CPU takes minutes
_SLAB, _MOLECULE = 3000.0, 5.0  # Å³, Å: volume of a usual cell of a slab, width of a molecule
_CHOICES = {
    "attention": ATTENTION,
    "readout": READOUTS,
    "feedback": FEEDBACK,
    "feature_map": tuple(FEATURE_MAPS),
}


def check_model(config: EnergyConfig) -> None:
    """Refuse an EnergyConfig that cannot work.

    Raises:
        ValueError: something else than one, or a value of another type, out of range or without
            effect, with its key and what is expected.

    Example:
        >>> check_model(EnergyConfig(embed_dim=10, num_heads=4))
        Traceback (most recent call last):
        ValueError: model.embed_dim is 10, expected a multiple of model.num_heads, 4
    """
    if not isinstance(config, EnergyConfig):
        raise ValueError(f"expected an EnergyConfig, got a {type(config).__name__}{_mend(config)}")
    check_numbers(config)
    check_parts(config)


def check_parts(config: EnergyConfig) -> None:
    """Refuse parts of a model that do not work, or do not go together.

    Raises:
        ValueError: naming the key, as ``model.pairs.cutoff``, its value and what is expected.

    Example:
        >>> check_parts(EnergyConfig(outputs=["energy", "displacement"]))
        Traceback (most recent call last):
        ValueError: model.outputs has 'displacement', which is made of vectors between neighbours:
        set model.pairs, or take it out
    """
    for name, known in _CHOICES.items():
        check_choice(f"model.{name}", getattr(config, name), known)
    check_length("model.far_scale", config.far_scale)
    for name, schema in PARTS.items():
        if getattr(config, name) is not None:
            _is_part(name, getattr(config, name), schema)
    _few_far_blocks(config)
    _outputs(config)
    if config.rpe is not None:
        check_rpe(config.rpe)
    _spectral(config)
    _pairs(config)
    _images(config)
    _together(config)
    refuse_idle(config)


def _outputs(config: EnergyConfig) -> None:
    outputs = config.outputs
    if not isinstance(outputs, list) or len(set(map(str, outputs))) != len(outputs):
        raise ValueError(f"model.outputs is {outputs!r}, expected a list of different outputs")
    for name in outputs:
        if name not in OUTPUTS:
            raise ValueError(f"model.outputs has {name!r}; known: {', '.join(OUTPUTS)}")
    if "energy" not in outputs:
        raise ValueError(f"model.outputs is {outputs}, expected 'energy' among them")
    if "displacement" in outputs and config.pairs is None:
        raise ValueError(
            "model.outputs has 'displacement', which is made of vectors between neighbours: set "
            "model.pairs, or take it out"
        )
    if config.feedback == "positions" and "displacement" not in outputs:
        raise ValueError(
            "model.feedback is 'positions', which moves atoms by the predicted displacement: add "
            "'displacement' to model.outputs"
        )


def _spectral(config: EnergyConfig) -> None:
    spectral = config.spectral
    if spectral is None:
        return
    for name in ("num_heads", "num_basis"):
        check_whole(f"model.spectral.{name}", getattr(spectral, name), 1)
    for name in ("k_max", "sigma_max"):
        check_length(f"model.spectral.{name}", getattr(spectral, name))
    if spectral.padding is not None:
        check_length("model.spectral.padding", spectral.padding)
    if spectral.max_vectors is not None:
        check_whole("model.spectral.max_vectors", spectral.max_vectors, 1)
    if config.embed_dim % spectral.num_heads:
        raise ValueError(
            f"model.spectral.num_heads is {spectral.num_heads}, expected a divisor of "
            f"model.embed_dim, {config.embed_dim}"
        )
    if spectral.k_max * spectral.sigma_max * math.pi < 1:
        raise ValueError(
            f"model.spectral.k_max is {spectral.k_max}, which leaves no room for a function of "
            f"width 1/(2π·sigma_max): expected at least {1 / (math.pi * spectral.sigma_max):.3f}"
        )
    _few_waves(spectral)


def _few_waves(spectral: SpectralConfig) -> None:
    """Refuse what has too many waves for any usual system: mostly a digit is off."""
    padding = 4 * spectral.sigma_max if spectral.padding is None else spectral.padding
    # Products, which become infinite where powers raise an OverflowError.
    size = _MOLECULE + padding
    volume = max(_SLAB, size * size * size)
    waves = 4 / 3 * math.pi * spectral.k_max * spectral.k_max * spectral.k_max * volume
    if not waves <= _MOST_WAVES:
        raise ValueError(
            f"model.spectral.k_max is {spectral.k_max:g} 1/Å, with {padding:g} Å of padding: "
            f"{waves:,.0f} waves in a usual system (a slab's cell of {_SLAB:g} Å³, a molecule of "
            f"{_MOLECULE:g} Å), expected at most {_MOST_WAVES:,}; usual are k_max of 0.2 to 1 1/Å "
            "and padding, or 4 sigma_max, of 5 to 20 Å"
        )


def _pairs(config: EnergyConfig) -> None:
    pairs = config.pairs
    if pairs is None:
        return
    check_length("model.pairs.cutoff", pairs.cutoff, _LARGEST_CUTOFF)
    check_whole("model.pairs.num_basis", pairs.num_basis, 2)
    for name in ("vectors", "filter_vectors"):
        check_whole(f"model.pairs.{name}", getattr(pairs, name), 0)
    check_whole("model.pairs.vector_basis", pairs.vector_basis, 2)
    check_below_one("model.pairs.vector_dropout", pairs.vector_dropout)
    for name in ("num_filters", "vector_blocks"):
        if getattr(pairs, name) is not None:
            check_whole(f"model.pairs.{name}", getattr(pairs, name), 1)
    for name in ("filter", "norm", "density", "pair_types", "correction"):
        value = getattr(pairs, name)
        if not isinstance(value, bool):
            raise ValueError(f"model.pairs.{name} is {value!r}, expected true or false")
    used = pairs.filter or pairs.density or pairs.correction
    if not used and "displacement" not in config.outputs:
        raise ValueError(
            "model.pairs has neither filter nor density nor correction, and no output needs it: "
            "set one, or model.pairs to null"
        )
    for name, part in (("vectors", "density"), ("filter_vectors", "filter")):
        count = getattr(pairs, name)
        if count and not getattr(pairs, part):
            raise ValueError(
                f"model.pairs.{name} is {count} and model.pairs.{part} false, which would hold "
                f"them: set {part} to true, or {name} to 0"
            )


def _few_far_blocks(config: EnergyConfig) -> None:
    if config.far_blocks is None:
        return
    check_whole("model.far_blocks", config.far_blocks, 1)
    local = config.pairs is not None and config.pairs.filter
    if config.far_blocks < config.num_layers and not local:
        raise ValueError(
            f"model.far_blocks is {config.far_blocks} of {config.num_layers} blocks, and the "
            "others would be empty: set model.pairs with filter, or far_blocks to null"
        )


def _images(config: EnergyConfig) -> None:
    images = config.images
    if images is None:
        return
    check_length("model.images.cutoff", images.cutoff, _LARGEST_CUTOFF)
    check_whole("model.images.num_basis", images.num_basis, 2)
    check_choice("model.images.mask", images.mask, IMAGE_MASKS)
    for name in ("pair_types", "density"):
        value = getattr(images, name)
        if not isinstance(value, bool):
            raise ValueError(f"model.images.{name} is {value!r}, expected true or false")
    if config.attention != "exact":
        raise ValueError(
            f"model.images makes keys of periodic images, for exact attention: model.attention is "
            f"'{config.attention}', expected 'exact'"
        )
    if config.rpe is not None:
        raise ValueError("model.images and model.rpe are both set: one of them gives the positions")


def _together(config: EnergyConfig) -> None:
    kind = FEATURE_MAPS[config.feature_map]
    several = kind.per_direction if issubclass(kind, RandomFeatures) else 1
    if config.attention != "none" and config.num_features % several:
        raise ValueError(
            f"model.num_features is {config.num_features}, and model.feature_map "
            f"'{config.feature_map}' takes every direction both ways: expected an even number"
        )
    if config.attention == "auto" and not FEATURE_MAPS[config.feature_map].estimates_softmax:
        raise ValueError(
            f"model.attention is 'auto' and model.feature_map '{config.feature_map}', which does "
            "not estimate the softmax that small systems would get: set attention to linear"
        )
    if config.attention == "none":
        if config.rpe is not None:
            raise ValueError("model.rpe is set and model.attention is 'none': set rpe to null")
        if config.spectral is None and not (config.pairs is not None and config.pairs.filter):
            raise ValueError(
                "model.attention is 'none' and there is no filter: set model.spectral, or "
                "model.pairs with filter"
            )
    corrected = config.pairs is not None and config.pairs.correction
    if corrected and (config.attention in ("none", "auto") or config.images is not None):
        raise ValueError(
            "model.pairs.correction corrects attention that is linear or exact, without image "
            f"keys, and model.attention is '{config.attention}': set correction to false, or "
            "model.attention to linear and model.images to null"
        )
    cutoffs = {part.cutoff for part in (config.images, config.pairs) if part is not None}
    if len(cutoffs) > 1:
        raise ValueError(
            f"model.images.cutoff and model.pairs.cutoff are {sorted(cutoffs)}: one list of pairs "
            "serves both, make them equal"
        )


def _is_part(name: str, value: Any, schema: type) -> None:
    if isinstance(value, schema):
        return
    if isinstance(value, Mapping):
        raise ValueError(
            f"model.{name} is a {type(value).__name__}, expected {schema.__name__}(…), or "
            "EnergyConfig.from_dict for a whole configuration of mappings"
        )
    keys = ", ".join(f.name for f in fields(schema))
    raise ValueError(f"model.{name} is {value!r}, expected null or a mapping with {keys}")


def _mend(value: Any) -> str:
    if isinstance(value, str):
        return (
            f": EnergyModel(flt_mol.models.named_config('{value}')) is a named model, untrained, "
            f"and flt_mol.load_model('{value}') a trained one"
        )
    return ": EnergyConfig.from_dict makes one of it" if isinstance(value, Mapping) else ""
