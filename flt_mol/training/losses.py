"""What training lowers: errors of energies and displacements, weighted, on every pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flt_mol.structures import missing_for, relaxed_displacement
from flt_mol.models.normalizer import Normalizer
from flt_mol.structures import Structures
from flt_mol.training.config import LossConfig

DISPLACEMENT_DECAYS = ("none", "linear", "cosine")
AUXILIARY = ("energy_initial", "displacement")
EARLIER_PASS = 0.5
"""Weight of each pass before the last one, of weight 1, unless `recycle_weights` says more."""

_LACKING = {
    "energy": ("relaxed energy", "y_relaxed", "the energy loss"),
    "energy_initial": ("energy before relaxation", "y_init", "the output energy_initial"),
    "positions_relaxed": ("relaxed positions", "pos_relaxed", "the output displacement"),
}
_MENDS = {
    "energy": "",
    "energy_initial": ", or take energy_initial out of model.outputs",
    "positions_relaxed": ", or take displacement out of model.outputs",
}


class Part(NamedTuple):
    """One mean error of a batch, of the last pass: () in eV or Å, detached; over so many."""

    value: Tensor
    over: int


class Loss(NamedTuple):
    """What is lowered, () without unit; and the errors that it is made of, by name.

    `over` is the number of systems that `total` counts for: with several processes their mean
    number, since it is the mean of totals that is lowered.
    """

    total: Tensor
    parts: dict[str, Part]
    over: float


def training_loss(
    outputs: Mapping[str, Tensor],
    structures: Structures,
    progress: float,
    config: LossConfig,
    normalizers: Mapping[str, Normalizer],
    moved: Tensor | None = None,
    shared: Callable[[Tensor], Tensor] | None = None,
) -> Loss:
    """The loss of :class:`LossConfig` on one batch.

    Args:
        outputs: of the model: "energy" (B,) eV, and as far as it has them "energy_initial" (B,) eV
            and "displacement" (N, 3) Å; with several passes also "energy_recycles" (K, B), and so
            on, of which the last is the plain one.
        structures: the batch as the model saw it, with its targets.
        progress: share of the training that is done, 0 to 1.
        config: weights.
        normalizers: "energy" and, for that output, "energy_initial".
        moved: (B,) bool, systems whose energy before relaxation is not that of the positions that
            were shown; it is left out for them.
        shared: of several processes: how many systems or atoms (1,) one has → factor (1,) of its
            mean, see :func:`flt_mol.training.processes.shares`; None for a process alone.

    Returns:
        total, and the parts "mae" (eV), "energy_initial_mae" (eV) and "displacement" (Å).

    Raises:
        ValueError: a weight without its output, weights of another number of passes, or a missing
            target, naming the sids.

    Example:
        >>> one = Structures.single([1], [[0, 0, 0]], energy=1.0)
        >>> outputs = {"energy": torch.tensor([1.5])}
        >>> training_loss(outputs, one, 0.0, LossConfig(), {"energy": Normalizer()}).total
        tensor(0.5000)
    """
    per_pass = _of_energies(outputs, "energy", needed(structures, "energy"), None)
    factor: Tensor | float = _factor(len(structures), per_pass, shared)
    total = factor * _over_passes(per_pass, config) / normalizers["energy"].std
    over = len(structures) / float(factor)
    parts = {"mae": Part(per_pass[-1].detach(), len(structures))}
    if (weight := auxiliary_weight("energy_initial", config, outputs)) > 0:
        target = needed(structures, "energy_initial")
        shown = None if moved is None else ~moved
        per_pass = _of_energies(outputs, "energy_initial", target, shown)
        spread = normalizers["energy_initial"].std
        count = len(structures) if shown is None else int(shown.sum())
        factor = weight * _factor(count, per_pass, shared)
        total = total + factor * _over_passes(per_pass, config) / spread
        parts["energy_initial_mae"] = Part(per_pass[-1].detach(), count)
    if auxiliary_weight("displacement", config, outputs) > 0:
        per_pass, count = _of_displacements(outputs, structures)
        factor = displacement_weight(progress, config) * _factor(count, per_pass, shared)
        total = total + factor * _over_passes(per_pass, config)
        parts["displacement"] = Part(per_pass[-1].detach(), count)
    return Loss(total, parts, over)


def _factor(count: int, like: Tensor, shared: Callable[[Tensor], Tensor] | None) -> Tensor | float:
    if shared is None:
        return 1.0
    return shared(torch.tensor([count], device=like.device))[0]


def auxiliary_weight(
    name: str, config: LossConfig, outputs: Mapping[str, Tensor] | Sequence[str]
) -> float:
    """The weight of "energy_initial" or "displacement", the largest over training; 0: not asked.

    Raises:
        ValueError: a weight is set, and the model has no such output.

    Example:
        >>> auxiliary_weight("displacement", LossConfig(), ["energy", "displacement"])
        1.0
    """
    weight: float | None = getattr(config, f"{name}_weight")
    if weight and name not in outputs:
        raise ValueError(
            f"loss.{name}_weight is {weight:g}, and the model has no output {name}: add it to "
            f"model.outputs, or set loss.{name}_weight=null"
        )
    if weight is None:
        weight = float(name in outputs)
    if name == "displacement" and weight == 0 and config.displacement_decay != "none":
        return config.displacement_final_weight if name in outputs else 0.0
    return weight


def displacement_weight(progress: float, config: LossConfig) -> float:
    """w_disp(p) = w₁ + (w₀ − w₁) s(p), with s = 1 − p ("linear") or ½ (1 + cos πp) ("cosine").

    Args:
        progress: p, 0 to 1.
        config: w₀ its `displacement_weight` (None is 1), w₁ its `displacement_final_weight`.

    Raises:
        ValueError: unknown decay.

    Example:
        >>> config = LossConfig(displacement_weight=3.0, displacement_decay="linear")
        >>> displacement_weight(0.5, config)
        1.5
    """
    first = 1.0 if config.displacement_weight is None else config.displacement_weight
    if config.displacement_decay == "none":
        return first
    if config.displacement_decay == "linear":
        share = 1.0 - progress
    elif config.displacement_decay == "cosine":
        share = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        known = ", ".join(DISPLACEMENT_DECAYS)
        raise ValueError(
            f"loss.displacement_decay is '{config.displacement_decay}'; known: {known}"
        )
    last = config.displacement_final_weight
    return last + (first - last) * share


def pass_weights(count: int, config: LossConfig) -> list[float]:
    """The weights ω_k of `count` passes.

    Raises:
        ValueError: another number of them is given.

    Example:
        >>> pass_weights(3, LossConfig())
        [0.5, 0.5, 1.0]
    """
    if config.recycle_weights is None:
        return [EARLIER_PASS] * (count - 1) + [1.0]
    if len(config.recycle_weights) != count:
        raise ValueError(
            f"loss.recycle_weights has {len(config.recycle_weights)} weights, and the model makes "
            f"{count} pass{'es' if count > 1 else ''} (model.recycles): give one for each, or null"
        )
    return list(config.recycle_weights)


def passes(outputs: Mapping[str, Tensor], name: str) -> Tensor:
    """(K, …): an output on every pass; K = 1 for a model that makes only one."""
    every = outputs.get(f"{name}_recycles")
    return outputs[name][None] if every is None else every


def needed(structures: Structures, field: str) -> Tensor:
    """The target `field` of all systems.

    Raises:
        ValueError: it is missing; names the sids and the mend.
    """
    value: Tensor | None = getattr(structures, field)
    if value is None:
        name, stored, user = _LACKING[field]
        which = missing_for(structures.sid)
        raise ValueError(
            f"there are no targets for {user}: no {name} for {which}; give it as {stored}, leave "
            f"those systems out{_MENDS[field]}"
        )
    return value


def distances(predicted: Tensor, target: Tensor) -> Tensor:
    """‖d̂ − d‖₂ over the last axis, in at least float32; its gradient is 0 where it is 0."""
    difference = (predicted - target).to(torch.promote_types(predicted.dtype, torch.float32))
    norm: Tensor = torch.linalg.vector_norm(difference, dim=-1)
    return norm


def _of_energies(
    outputs: Mapping[str, Tensor], name: str, target: Tensor, valid: Tensor | None
) -> Tensor:
    """(K,) mean absolute errors, eV, over the systems that are `valid`."""
    every = passes(outputs, name)
    _check_shape(every, name, target.shape)
    errors = (every - target.to(every.dtype)).abs()
    if valid is not None:
        return _mean_of(errors, valid)
    return torch.stack([of_pass.mean() for of_pass in errors])


def _of_displacements(outputs: Mapping[str, Tensor], structures: Structures) -> tuple[Tensor, int]:
    """(K,) mean distances, Å, over free atoms, and how many of these there are."""
    needed(structures, "positions_relaxed")
    every = passes(outputs, "displacement")
    free = ~structures.fixed
    target = relaxed_displacement(structures).to(every.dtype)
    _check_shape(every, "displacement", target.shape)
    return _mean_of(distances(every, target), free), int(free.sum())


def _check_shape(every: Tensor, name: str, expected: torch.Size) -> None:
    """Refuse what would broadcast: (B, 1) beside (B,) is B × B errors."""
    if every.shape[1:] != expected:
        raise ValueError(
            f"the output {name!r} has shape {tuple(every.shape[1:])}, expected {tuple(expected)}: "
            "one number for each system, or three for each atom"
        )


def _mean_of(values: Tensor, valid: Tensor) -> Tensor:
    """(K,) means of (K, n) over the valid ones; 0 where there are none."""
    inside = torch.where(valid, values, torch.zeros_like(values))
    return inside.sum(-1) / valid.sum().clamp(min=1)


def _over_passes(per_pass: Tensor, config: LossConfig) -> Tensor:
    weights = pass_weights(len(per_pass), config)
    if len(weights) == 1:
        return per_pass[0]
    return (per_pass * per_pass.new_tensor(weights)).sum() / sum(weights)
