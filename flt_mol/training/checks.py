"""Settings that cannot work are refused before anything is made, each with its mend."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, get_args, get_origin, get_type_hints

import torch

from flt_mol.functional.fourier import SPLITS
from flt_mol.models.checks import check_parts
from flt_mol.models.config import ATTENTION, EnergyConfig, RPEConfig
from flt_mol.nn.spectrum import FORMS
from flt_mol.training.augmentation import ROTATIONS
from flt_mol.training.finetune_config import check_finetune, check_held_out
from flt_mol.training.losses import (
    AUXILIARY,
    DISPLACEMENT_DECAYS,
    LossConfig,
    auxiliary_weight,
    pass_weights,
)

DECAYS = ("linear", "cosine", "inverse-sqrt")
LOGGERS = ("csv", "tensorboard", "wandb")
OPTIMIZERS = ("adamw", "adam")
ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "mps")
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")

Rule = tuple[Callable[[Any], bool], str]


def _at_least(low: float) -> Rule:
    return (lambda value: value >= low), f"at least {low:g}"


def _one_of(names: tuple[str, ...]) -> Rule:
    return (lambda value: value in names), f"one of {', '.join(names)}"


_SIZE = _at_least(1)
_UNSIGNED = _at_least(0)
_WEIGHT: Rule = ((lambda value: value is None or value >= 0), "null, or at least 0")
_POSITIVE: Rule = (lambda value: value > 0), "above 0"
_BELOW_ONE: Rule = (lambda value: 0 <= value < 1), "from 0 to below 1"
_SHARE: Rule = (lambda value: 0 <= value <= 1), "from 0 to 1"
_SEED: Rule = (lambda value: -(2**63) <= value < 2**63), "a whole number of 64 bits"

_TRAINING: dict[str, Rule] = {
    "epochs": _SIZE,
    "batch_size": _SIZE,
    "batch_atoms": (
        (lambda value: value is None or value >= 1),
        "null (batch_size counts), or at least 1",
    ),
    "learning_rate": _POSITIVE,
    "optimizer": _one_of(OPTIMIZERS),
    "warmup_fraction": _SHARE,
    "warmup_steps": (
        (lambda value: value is None or value >= 0),
        "null (warmup_fraction counts), or at least 0",
    ),
    "decay": _one_of(DECAYS),
    "weight_decay": _UNSIGNED,
    "beta1": _BELOW_ONE,
    "beta2": _BELOW_ONE,
    "eps": _POSITIVE,
    "gradient_clip": _POSITIVE,
    "accumulate": _SIZE,
    "ema_decay": (
        (lambda value: value is None or 0 < value < 1),
        "null (no average), or between 0 and 1",
    ),
    "early_stop": ((lambda value: value is None or value >= 1), "null (never), or at least 1"),
    "save_minutes": _UNSIGNED,
    "loggers": (
        (lambda value: set(value) <= set(LOGGERS) and len(set(value)) == len(value)),
        f"a list, each once, of {', '.join(LOGGERS)}",
    ),
    "seed": _SEED,
    "num_workers": _UNSIGNED,
    "accelerator": _one_of(ACCELERATORS),
    "precision": _one_of(PRECISIONS),
    "devices": _SIZE,
    "nodes": _SIZE,
    "max_steps": ((lambda value: value is None or value >= 1), "null (all epochs), or at least 1"),
    "rotation": _one_of(ROTATIONS),
    "noise": _UNSIGNED,
    "interpolation": _SHARE,
}
_LOSS: dict[str, Rule] = {
    "energy_initial_weight": _WEIGHT,
    "displacement_weight": _WEIGHT,
    "displacement_decay": _one_of(DISPLACEMENT_DECAYS),
    "displacement_final_weight": _UNSIGNED,
    "pass_weights": (lambda value: _are_weights(value), "null, or numbers of at least 0"),
}
_MODEL: dict[str, Rule] = {
    "embed_dim": _SIZE,
    "num_heads": _SIZE,
    "num_layers": _SIZE,
    "recycles": _SIZE,
    "ffn_dim": _SIZE,
    "num_features": _SIZE,
    "redraw_every": (
        (lambda value: value is None or value >= 1),
        "null (never), or at least 1",
    ),
    "attention": _one_of(ATTENTION),
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


def check_run(config: Any) -> None:
    """Refuse a RunConfig that cannot work.

    Raises:
        ValueError: a value of another type or out of range, or values that exclude each other,
            with their keys and what is expected.
    """
    check_training(config.training)
    check_model(config.model)
    check_loss(config.loss, config.model.outputs, config.model.recycles)
    check_finetune(config.finetune)
    check_held_out(config.data)
    _check_moves(config)
    seed = config.model.seed + config.training.seed
    if not _SEED[0](seed):
        raise ValueError(
            f"model.seed and training.seed add up to {seed}, expected {_SEED[1]}: the sum draws "
            "the initial weights"
        )


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
    check_parts(config)
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


def check_loss(config: LossConfig, outputs: Sequence[str], num_passes: int) -> None:
    """Refuse a LossConfig that cannot work, by itself or with a model of such outputs and passes.

    An output that no loss trains is refused: its weights would never change, and processes that
    train together would wait for their gradients.

    Raises:
        ValueError: a value of another type or out of range, a weight without output, an output
            without weight, or another number of weights than passes.

    Example:
        >>> check_loss(LossConfig(displacement_weight=0.0), ["energy", "displacement"], 1)
        Traceback (most recent call last):
        ValueError: model.outputs has displacement, and loss.displacement_weight is 0: nothing
        would train it; take it out of model.outputs, or give it a weight
    """
    _check(config, _LOSS, "loss.")
    last = config.displacement_final_weight
    if last and config.displacement_decay == "none":
        raise ValueError(
            f"loss.displacement_final_weight is {last}, and loss.displacement_decay is 'none': "
            "choose linear or cosine, which lead to it, or leave it at 0"
        )
    for name in AUXILIARY:
        if auxiliary_weight(name, config, outputs) == 0 and name in outputs:
            raise ValueError(
                f"model.outputs has {name}, and loss.{name}_weight is 0: nothing would train it; "
                "take it out of model.outputs, or give it a weight"
            )
    weights = pass_weights(num_passes, config)
    if not weights[-1] > 0:
        raise ValueError(
            f"loss.pass_weights ends with {weights[-1]}, expected a last weight above 0: "
            "predictions are read from the last pass"
        )


def _check_moves(config: Any) -> None:
    """Refuse moved atoms beside targets that hold for the initial structure only."""
    training = config.training
    for key in ("noise", "interpolation"):
        value = getattr(training, key)
        if value > 0 and config.data.energy == config.data.energy_initial:
            raise ValueError(
                f"training.{key} is {value}, and data.energy, {config.data.energy}, is the energy "
                "of the initial structure, which changes as atoms move: set one of them otherwise"
            )
    for key, all_move in (("noise", training.noise > 0), ("interpolation", value == 1)):
        if all_move and "energy_initial" in config.model.outputs:
            raise ValueError(
                f"training.{key} is {getattr(training, key)}, which moves the atoms of every "
                "training system, and energy_initial, in model.outputs, is known where they were: "
                f"take it out, or set training.{key} to 0"
            )


def _are_weights(value: Any) -> bool:
    if value is None:
        return True
    if not isinstance(value, list | tuple) or not value:
        return False
    return all(_is(weight, float) and 0 <= weight < math.inf for weight in value)


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
        kinds = (kind,) if get_origin(kind) is list else get_args(kind) or (kind,)
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
