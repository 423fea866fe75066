"""Checkpoints: tensors and plain data in one file, written whole or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import flt_mol
from flt_mol.files import temporary_path
from flt_mol.models.checks import check_model
from flt_mol.models.energy import CONFIG_KEY, EnergyConfig, EnergyModel
from flt_mol.training.checkpoint_file import FORMAT, FORMAT_VERSION, read_checkpoint
from flt_mol.training.devices import find_device
from flt_mol.training.finding import find_checkpoint
from flt_mol.training.weight_names import strip_prefixes

__all__ = [
    "checkpoint_config",
    "find_checkpoint",
    "load_model",
    "misfits",
    "read_checkpoint",
    "read_weights",
    "save_checkpoint",
    "strip_prefixes",
]


def save_checkpoint(
    path: str | Path,
    model: EnergyModel,
    config: Mapping[str, Any],
    metrics: Mapping[str, float] | None = None,
    training_state: Mapping[str, Any] | None = None,
    systems: Mapping[str, Any] | None = None,
) -> Path:
    """Write `model` with the run's plain `config` and `metrics` to `path`.

    The file holds a dict of tensors and plain data (``torch.load(weights_only=True)`` reads it).
    It is written to a temporary name beside `path`, brought to the disk, then renamed.

    Args:
        path: missing folders are made.
        model: with the weights to predict with, averaged ones where a run averages.
        config: plain data.
        metrics: by name.
        training_state: tensors and plain data to go on training with, which `load_model` does not
            look at, but for a ``"raw_state_dict"`` of weights that were not averaged.
        systems: which ones were trained on and held out, as
            :func:`~flt_mol.training.seen.systems_seen` gives it.
    """
    path = Path(path)
    content: dict[str, Any] = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "flt_mol_version": flt_mol.__version__,
        "torch_version": str(torch.__version__),
        "units": {"energy": "eV", "length": "Å"},
        "config": dict(config),
        "metrics": dict(metrics or {}),
        "elements_seen": model.elements_seen.nonzero().flatten().tolist(),
        "trained_on": dict(model.trained_on),
        "state_dict": {k: v.detach().cpu().clone() for k, v in model.state_dict().items()},
    }
    if training_state is not None:
        content["training_state"] = dict(training_state)
    if systems is not None:
        content["systems"] = dict(systems)
    with temporary_path(path, durable=True) as temporary:
        torch.save(content, temporary)
    return path


def load_model(
    name_or_path: str | Path,
    map_location: str | torch.device = "cpu",
    averaged: bool = True,
) -> EnergyModel:
    """The trained model of a checkpoint, in eval mode.

    Prefixes left by DDP, torch.compile, weight averaging and wrappers are stripped; weights of any
    float dtype become float32.

    Args:
        name_or_path: see `find_checkpoint`.
        map_location: where the model goes.
        averaged: whether averaged weights (EMA) are taken where the file has both.

    Raises:
        ValueError: no such device here; no or no whole checkpoint; missing, extra or wrongly
            shaped or typed keys, listed.
    """
    device = find_device(map_location)
    path, content = _read(name_or_path, averaged)
    weights = content["state_dict"]
    model = _build(path, weights)
    model.trained_on = content.get("trained_on", {})
    problems = misfits(model.state_dict(), weights)
    if problems:
        raise ValueError(f"{path} does not fit the model it describes:\n  " + "\n  ".join(problems))
    model.load_state_dict(weights)
    return model.eval().to(device)


def read_weights(name_or_path: str | Path, averaged: bool = True) -> tuple[Path, dict[str, Tensor]]:
    """The file of a checkpoint and the weights in it, on CPU, by the names they have today.

    Args, Raises: as of `load_model`, but whether they fit is not looked at.
    """
    path, content = _read(name_or_path, averaged)
    return path, content["state_dict"]


def _read(name_or_path: str | Path, averaged: bool) -> tuple[Path, dict[str, Any]]:
    path = find_checkpoint(name_or_path)
    content = read_checkpoint(path, averaged)
    return path, content


def checkpoint_config(name_or_path: str | Path) -> EnergyConfig:
    """The settings of a checkpoint's model.

    Raises:
        ValueError: no or no whole checkpoint, or settings that are not usable.
    """
    return _settings(*read_weights(name_or_path))


def _settings(path: Path, weights: Mapping[str, Tensor]) -> EnergyConfig:
    try:
        text = weights.get(CONFIG_KEY)
        if text is not None and (text.dim() != 1 or text.is_complex()):
            raise TypeError
        config = EnergyModel.config_of(weights)
        check_model(config)
        _refuse_oversized(config, weights)
    except (ValueError, TypeError, AttributeError, KeyError, RuntimeError) as error:
        raise _not_usable(path, error) from error
    return config


def _build(path: Path, weights: Mapping[str, Tensor]) -> EnergyModel:
    """The model that the weights describe, its own weights not loaded yet."""
    config = _settings(path, weights)
    try:
        with torch.random.fork_rng(devices=[]):
            return EnergyModel(config)
    except (ValueError, TypeError, AttributeError, KeyError, RuntimeError) as error:
        raise _not_usable(path, error) from error


def _not_usable(path: Path, error: Exception) -> ValueError:
    reason = error if isinstance(error, ValueError) else "it is garbled"
    return ValueError(f"{path}: its model configuration is not usable: {reason}")


def _refuse_oversized(config: EnergyConfig, weights: Mapping[str, Tensor]) -> None:
    """A damaged size must not ask for all memory; small excesses are listed key by key later."""
    there = sum(value.numel() for value in weights.values())
    width, pairs, spectral, images = config.embed_dim, config.pairs, config.spectral, config.images
    far, near = 0, 2 * width * config.ffn_dim
    if config.attention != "none":
        far += 4 * width**2 + config.num_features
    if spectral is not None:
        far += 2 * width**2 + spectral.num_heads * spectral.num_basis
    needed = far * _at_most(config.far_blocks, config.num_layers)
    if pairs is not None:
        filters = width if pairs.num_filters is None else pairs.num_filters
        per_filter = 2 * width * (width + filters) + pairs.num_basis * filters
        near += pairs.filter * per_filter
        vectors = pairs.filter_vectors * _at_most(pairs.vector_blocks, config.num_layers)
        needed += pairs.filter * vectors * width
        needed += pairs.density * (per_filter + pairs.vectors * (width + pairs.vector_basis))
    if images is not None:
        needed += images.num_basis * (images.num_basis if images.mask == "centred" else 1)
    needed += config.num_layers * near
    if config.rpe is not None:
        needed += config.rpe.num_terms * config.num_heads + config.rpe.num_frequencies
    if needed > 4 * there + 1_000_000:
        raise ValueError(f"it takes at least {needed} weights, and the file holds {there}")


def _at_most(some: int | None, blocks: int) -> int:
    return blocks if some is None else min(some, blocks)


def misfits(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> list[str]:
    """What keeps weights `found` from being those `expected`, a line for each name.

    Example:
        >>> misfits({"a": torch.zeros(2), "b": torch.zeros(1)}, {"a": torch.zeros(3)})
        ['missing: b', 'wrong shape: a is (3,), expected (2,)']
    """
    lines = [f"missing: {key}" for key in expected if key not in found]
    lines += [f"not known: {key}" for key in found if key not in expected]
    for key, value in expected.items():
        if key not in found or key == CONFIG_KEY:
            continue
        if found[key].shape != value.shape:
            shapes = f"{tuple(found[key].shape)}, expected {tuple(value.shape)}"
            lines.append(f"wrong shape: {key} is {shapes}")
        elif not _converts(found[key].dtype, value.dtype):
            lines.append(f"wrong type: {key} is {found[key].dtype}, expected {value.dtype}")
    return lines


def _converts(found: torch.dtype, expected: torch.dtype) -> bool:
    return found.is_floating_point == expected.is_floating_point and not found.is_complex
