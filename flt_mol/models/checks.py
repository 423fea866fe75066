"""Whether an EnergyConfig can work, said before anything is built."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from flt_mol.models.config import (
    ATTENTION,
    FEEDBACK,
    IMAGE_MASKS,
    OUTPUTS,
    EnergyConfig,
    ImageConfig,
    PairConfig,
    SpectralConfig,
)
from flt_mol.nn.feature_map import FEATURE_MAPS
from flt_mol.nn.heads import READOUTS

_LARGEST_CUTOFF = 100.0  # Å; pairs in condensed matter would be 400,000 per atom
_CHOICES = {
    "attention": ATTENTION,
    "readout": READOUTS,
    "feedback": FEEDBACK,
    "feature_map": tuple(FEATURE_MAPS),
}


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
        _choice(f"model.{name}", getattr(config, name), known)
    _length("model.far_scale", config.far_scale)
    _few_far_blocks(config)
    _outputs(config)
    _spectral(config)
    _pairs(config)
    _images(config)
    _together(config)


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
    _is_part("spectral", spectral, SpectralConfig)
    for name in ("num_heads", "num_basis"):
        _whole(f"model.spectral.{name}", getattr(spectral, name), 1)
    for name in ("k_max", "sigma_max"):
        _length(f"model.spectral.{name}", getattr(spectral, name))
    if spectral.padding is not None:
        _length("model.spectral.padding", spectral.padding)
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


def _pairs(config: EnergyConfig) -> None:
    pairs = config.pairs
    if pairs is None:
        return
    _is_part("pairs", pairs, PairConfig)
    _length("model.pairs.cutoff", pairs.cutoff, _LARGEST_CUTOFF)
    _whole("model.pairs.num_basis", pairs.num_basis, 2)
    for name in ("vectors", "filter_vectors"):
        _whole(f"model.pairs.{name}", getattr(pairs, name), 0)
    _whole("model.pairs.vector_basis", pairs.vector_basis, 2)
    _below_one("model.pairs.vector_dropout", pairs.vector_dropout)
    for name in ("num_filters", "vector_blocks"):
        if getattr(pairs, name) is not None:
            _whole(f"model.pairs.{name}", getattr(pairs, name), 1)
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
    _whole("model.far_blocks", config.far_blocks, 1)
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
    _is_part("images", images, ImageConfig)
    _length("model.images.cutoff", images.cutoff, _LARGEST_CUTOFF)
    _whole("model.images.num_basis", images.num_basis, 2)
    _choice("model.images.mask", images.mask, IMAGE_MASKS)
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
    if corrected and (config.attention == "none" or config.images is not None):
        raise ValueError(
            "model.pairs.correction corrects attention without image keys: set it to false, or "
            "model.attention to linear and model.images to null"
        )
    cutoffs = {part.cutoff for part in (config.images, config.pairs) if part is not None}
    if len(cutoffs) > 1:
        raise ValueError(
            f"model.images.cutoff and model.pairs.cutoff are {sorted(cutoffs)}: one list of pairs "
            "serves both, make them equal"
        )


def _is_part(name: str, value: Any, schema: type) -> None:
    if not isinstance(value, schema):
        keys = ", ".join(f.name for f in fields(schema))
        raise ValueError(f"model.{name} is {value!r}, expected null or a mapping with {keys}")


def _choice(key: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{key} is {value!r}; known: {', '.join(known)}")


def _whole(key: str, value: Any, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{key} is {value!r}, expected a whole number of at least {low}")


def _below_one(key: str, value: Any) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1:
        raise ValueError(f"{key} is {value!r}, expected at least 0 and below 1")


def _length(key: str, value: Any, high: float = math.inf) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        raise ValueError(f"{key} is {value!r}, expected a number above 0")
    if value > high:
        raise ValueError(f"{key} is {value!r}, expected at most {high:g} Å")
