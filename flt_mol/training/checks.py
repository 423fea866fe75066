"""Settings that cannot work are refused before anything is made, each with its mend."""

from __future__ import annotations

import difflib
import math
import warnings
from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import Any, cast, get_type_hints

import torch

from flt_mol.data.tags import parse_rule
from flt_mol.models.checks import check_model
from flt_mol.models.config import EnergyConfig
from flt_mol.models.rules import (
    BELOW_ONE,
    POSITIVE,
    SEED,
    SIZE,
    UNSIGNED,
    Rule,
    check_settings,
    is_kind,
    one_of,
)
from flt_mol.nn.feature_map import FEATURE_MAPS
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

_WEIGHT: Rule = ((lambda value: value is None or value >= 0), "null, or at least 0")
_SHARE: Rule = (lambda value: 0 <= value <= 1), "from 0 to 1"

_TRAINING: dict[str, Rule] = {
    "epochs": SIZE,
    "batch_size": SIZE,
    "batch_atoms": (
        (lambda value: value is None or value >= 1),
        "null (batch_size counts), or at least 1",
    ),
    "learning_rate": POSITIVE,
    "optimizer": one_of(OPTIMIZERS),
    "warmup_fraction": _SHARE,
    "warmup_steps": (
        (lambda value: value is None or value >= 0),
        "null (warmup_fraction counts), or at least 0",
    ),
    "decay": one_of(DECAYS),
    "weight_decay": UNSIGNED,
    "beta1": BELOW_ONE,
    "beta2": BELOW_ONE,
    "eps": POSITIVE,
    "gradient_clip": POSITIVE,
    "accumulate": SIZE,
    "ema_decay": (
        (lambda value: value is None or 0 < value < 1),
        "null (no average), or between 0 and 1",
    ),
    "early_stop": ((lambda value: value is None or value >= 1), "null (never), or at least 1"),
    "save_minutes": UNSIGNED,
    "loggers": (
        (lambda value: set(value) <= set(LOGGERS) and len(set(value)) == len(value)),
        f"a list, each once, of {', '.join(LOGGERS)}",
    ),
    "seed": SEED,
    "num_workers": UNSIGNED,
    "accelerator": one_of(ACCELERATORS),
    "precision": one_of(PRECISIONS),
    "devices": SIZE,
    "nodes": SIZE,
    "max_steps": ((lambda value: value is None or value >= 1), "null (all epochs), or at least 1"),
    "rotation": one_of(ROTATIONS),
    "noise": UNSIGNED,
    "interpolation": _SHARE,
}
_LOSS: dict[str, Rule] = {
    "energy_initial_weight": _WEIGHT,
    "displacement_weight": _WEIGHT,
    "displacement_decay": one_of(DISPLACEMENT_DECAYS),
    "displacement_final_weight": UNSIGNED,
    "pass_weights": (lambda value: _are_weights(value), "null, or numbers of at least 0"),
}


def check_run(config: Any) -> None:
    """Refuse a RunConfig that cannot work.

    Raises:
        ValueError: a value of another type or out of range, or values that exclude each other,
            with their keys and what is expected.
    """
    for key, kind in get_type_hints(type(config)).items():
        part = getattr(config, key)
        if is_dataclass(kind) and not isinstance(part, cast(type, kind)):
            name = getattr(kind, "__name__", "")
            raise ValueError(f"{key} is a {type(part).__name__}, expected a {name}: {name}(…)")
    check_data(config.data)
    check_training(config.training)
    check_model(config.model)
    check_loss(config.loss, config.model.outputs, config.model.recycles)
    check_finetune(config.finetune)
    check_held_out(config.data)
    _check_moves(config)
    _check_feature_map(config.model)
    seed = config.model.seed + config.training.seed
    if not SEED[0](seed):
        raise ValueError(
            f"model.seed and training.seed add up to {seed}, expected {SEED[1]}: the sum draws "
            "the initial weights"
        )


def check_data(config: Any) -> None:
    """Refuse a DataConfig that cannot work.

    Raises:
        ValueError: a value of another type, with its key and what is expected.

    Warns:
        UserWarning: a path that nothing reads, under a name much like that of a split that is read
            from the data set: a slip of the pen would train or validate on something else.
    """
    check_settings(config, {}, "data.")
    if not isinstance(config.evaluation, list) or not all(
        is_kind(x, str) for x in config.evaluation
    ):
        raise ValueError(f"data.evaluation is {config.evaluation!r}, expected a list of splits")
    if config.tag_rule is not None:
        parse_rule(config.tag_rule, "data.tag_rule")
    read = [config.train] if config.validation_fraction else [config.train, config.validation]
    idle = [name for name in config.paths if name not in (*read, *config.evaluation)]
    for split in read if config.name is not None else []:
        near = [] if split in config.paths else difflib.get_close_matches(split, idle, n=1)
        if near:
            warnings.warn(
                f"data.paths.{near[0]} is not read: '{split}' of {config.name} is; "
                f"did you mean data.paths.{split}?",
                stacklevel=1,  # one place, so that checking twice tells once
            )


def check_training(config: Any) -> None:
    """Refuse a TrainingConfig that cannot work.

    Raises:
        ValueError: a value of another type or out of range, with its key and what is expected.
    """
    check_settings(config, _TRAINING, "training.")


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
    check_settings(config, _LOSS, "loss.")
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


def _check_feature_map(model: EnergyConfig) -> None:
    """Refuse weights that nothing trains: processes would wait for their gradients."""
    if model.attention == "exact" and FEATURE_MAPS[model.feature_map].learned:
        raise ValueError(
            f"model.feature_map is '{model.feature_map}' and model.attention 'exact', which takes "
            "no features: nothing would train its weights; set attention to linear, or feature_map "
            "to softmax"
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
    return all(is_kind(weight, float) and 0 <= weight < math.inf for weight in value)


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
