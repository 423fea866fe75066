"""Settings that cannot work are refused before anything is made, each with its mend."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import torch

from flt_mol.functional.fourier import SPLITS
from flt_mol.models.energy import EnergyConfig, RPEConfig
from flt_mol.nn.attend import MODES
from flt_mol.nn.spectrum import FORMS
from flt_mol.training.augmentation import ROTATIONS

DECAYS = ("linear", "cosine")
ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "mps")
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")

Rule = tuple[Callable[[Any], bool], str]


def _at_least(low: float) -> Rule:
    return (lambda value: value >= low), f"at least {low:g}"


def _one_of(names: tuple[str, ...]) -> Rule:
    return (lambda value: value in names), f"one of {', '.join(names)}"


_SIZE = _at_least(1)
_POSITIVE: Rule = (lambda value: value > 0), "above 0"
_BELOW_ONE: Rule = (lambda value: 0 <= value < 1), "from 0 to below 1"
_SEED: Rule = (lambda value: -(2**63) <= value < 2**63), "a whole number of 64 bits"

_TRAINING: dict[str, Rule] = {
    "epochs": _SIZE,
    "batch_size": _SIZE,
    "batch_atoms": (
        (lambda value: value is None or value >= 1),
        "null (batch_size counts), or at least 1",
    ),
    "learning_rate": _POSITIVE,
    "warmup_fraction": ((lambda value: 0 <= value <= 1), "from 0 to 1"),
    "decay": _one_of(DECAYS),
    "weight_decay": _at_least(0),
    "beta1": _BELOW_ONE,
    "beta2": _BELOW_ONE,
    "eps": _POSITIVE,
    "gradient_clip": _POSITIVE,
    "seed": _SEED,
    "num_workers": _at_least(0),
    "accelerator": _one_of(ACCELERATORS),
    "precision": _one_of(PRECISIONS),
    "max_steps": ((lambda value: value is None or value >= 1), "null (all epochs), or at least 1"),
    "rotation": _one_of(ROTATIONS),
}
_MODEL: dict[str, Rule] = {
    "embed_dim": _SIZE,
    "num_heads": _SIZE,
    "num_layers": _SIZE,
    "recycles": _SIZE,
    "ffn_dim": _SIZE,
    "num_features": _SIZE,
    "attention": _one_of(MODES),
    "dropout": _BELOW_ONE,
    "seed": _SEED,
}
_RPE: dict[str, Rule] = {
    "num_terms": _SIZE,
    "form": _one_of(FORMS),
    "sigma_min": _POSITIVE,
    "sigma_max": _POSITIVE,
    "num_frequencies": _SIZE,
    "frequency_sigma_min": _POSITIVE,
    "frequency_sigma_max": _POSITIVE,
    "split": _one_of(SPLITS),
}


def check_training(config: Any) -> None:
    """Refuse a TrainingConfig that cannot work.

    Raises:
        ValueError: a value of another type or out of range, with its key and what is expected.
    """
    _check(config, _TRAINING, "training.")


def check_model(config: EnergyConfig) -> None:
    """Refuse an EnergyConfig that cannot work.

    Raises:
        ValueError: a value of another type or out of range, with its key and what is expected.

    Example:
        >>> check_model(EnergyConfig(embed_dim=10, num_heads=4))
        Traceback (most recent call last):
        ValueError: model.embed_dim is 10, expected a multiple of model.num_heads, 4
    """
    _check(config, _MODEL, "model.")
    if config.embed_dim % config.num_heads:
        raise ValueError(
            f"model.embed_dim is {config.embed_dim}, expected a multiple of model.num_heads, "
            f"{config.num_heads}"
        )
    rpe = config.rpe
    if rpe is None:
        return
    if not isinstance(rpe, RPEConfig):
        raise ValueError(f"model.rpe is {rpe!r}, expected null or a mapping of its settings")
    _check(rpe, _RPE, "model.rpe.")
    for name in ("sigma", "frequency_sigma"):
        low, high = getattr(rpe, f"{name}_min"), getattr(rpe, f"{name}_max")
        if low > high:
            raise ValueError(
                f"model.rpe.{name}_min is {low}, expected no more than model.rpe.{name}_max, {high}"
            )


def check_accelerator(name: str) -> None:
    """Refuse an accelerator that this machine, or this build of torch, does not have.

    Raises:
        ValueError: naming those there are.
    """
    have = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    have["gpu"] = any(have.values())
    if not have.get(name, True):
        there = ", ".join(["auto", "cpu", *(key for key, found in have.items() if found)])
        raise ValueError(
            f"training.accelerator is '{name}', and torch finds none here; there are: {there}"
        )


def _check(config: Any, rules: dict[str, Rule], prefix: str) -> None:
    for key, kind in get_type_hints(type(config)).items():
        value = getattr(config, key)
        kinds = get_args(kind) or (kind,)
        if kinds[0] in (int, float, str, bool) and not any(_is(value, k) for k in kinds):
            raise ValueError(f"{prefix}{key} is {value!r}, expected {_name(kinds)}")
        fits, expected = rules.get(key, (None, ""))
        infinite = isinstance(value, float) and not math.isfinite(value)
        if infinite or (fits is not None and not fits(value)):
            raise ValueError(f"{prefix}{key} is {value!r}, expected {expected}")


def _is(value: Any, kind: type) -> bool:
    """An int is a float; a bool is only a bool."""
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def _name(kinds: tuple[type, ...]) -> str:
    words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    return " or ".join(words.get(kind, "null") for kind in kinds)
