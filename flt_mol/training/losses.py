"""What training minimises: weighted errors of energies, displacements and forces."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from flt_mol.evaluation.metrics import displacement_errors, energy_errors, force_errors
from flt_mol.models.energy import Normalizer
from flt_mol.structures import Structures
from flt_mol.training.config import FORCES_WEIGHT, LossConfig

_EARLIER_RECYCLE = 0.5


class Loss(NamedTuple):
    """The loss of a batch, and the errors that it is made of.

    Args:
        total: () without unit.
        errors: name → mean error of the last recycle () and the number that it is a mean over;
            "mae" and "energy_initial_mae" (eV, systems), "displacement" (Å, free atoms),
            "forces" (‖F − F*‖₂, eV/Å, free atoms), and "loss", `total` over systems.
    """

    total: Tensor
    errors: dict[str, tuple[Tensor, float]]


def training_loss(
    outputs: Mapping[str, Tensor],
    structures: Structures,
    progress: float,
    config: LossConfig,
    normalizers: Mapping[str, Normalizer],
    moved: Tensor | None = None,
    share: Callable[[str, int], float] = lambda name, count: 1.0,
) -> Loss:
    """The loss on one batch, by the formula of `LossConfig`.

    Args:
        outputs: of the model: "energy" (B,) eV, and as far as it has them "energy_initial" (B,) eV
            and "displacement" (N, 3) Å; with K > 1 recycles also "energy_recycles" (K, B) and so
            on, of which the last is the plain one; "forces" (N, 3) eV/Å of the last alone.
        structures: the batch as the model saw it, with its targets.
        progress: p, share of the training that is done, 0 to 1.
        config: weights.
        normalizers: "energy" and, for that output, "energy_initial"; their std is s and s₀.
        moved: (B,) bool, systems whose `energy_initial` is not that of the positions shown; they
            do not count for it.
        share: of several batches or processes: name of an error, and number of systems or atoms of
            this batch that it is a mean over → factor of that mean.

    Raises:
        ValueError: a missing target, naming the sids; an output of another shape than its target.
    """
    all_systems = torch.ones(len(structures), dtype=torch.bool, device=structures.positions.device)
    energies = energy_errors(outputs, structures, "energy")
    # Name, weight, errors (K, n), and which of the n count.
    terms = [("mae", 1 / normalizers["energy"].std, energies, all_systems)]
    weight = config.energy_initial_weight
    if "energy_initial" in outputs and weight != 0:
        scale = (1.0 if weight is None else weight) / normalizers["energy_initial"].std
        errors = energy_errors(outputs, structures, "energy_initial")
        valid = all_systems if moved is None else ~moved
        terms.append(("energy_initial_mae", scale, errors, valid))
    decays = config.displacement_decay != "none"
    if "displacement" in outputs and (config.displacement_weight != 0 or decays):
        errors, _ = displacement_errors(outputs, structures)
        scale = errors.new_tensor(displacement_weight(progress, config))
        terms.append(("displacement", scale, errors, ~structures.fixed))
    if "forces" in outputs:
        weight = FORCES_WEIGHT if config.forces_weight is None else config.forces_weight
        difference, known = force_errors(outputs["forces"], structures)
        errors = torch.linalg.vector_norm(difference, dim=-1)[None]
        terms.append(("forces", weight / normalizers["energy"].std, errors, known))
    total, of_systems = torch.zeros(()), 1.0
    found: dict[str, tuple[Tensor, float]] = {}
    for name, scale, errors, valid in terms:
        count = int(valid.sum())
        factor = share(name, count)
        means = torch.where(valid, errors, 0.0).sum(-1) / max(count, 1)
        of_recycles = config.recycle_weights or [_EARLIER_RECYCLE] * (len(means) - 1) + [1.0]
        weights = means.new_tensor(of_recycles[-len(means) :])
        loss = scale * factor * (means * weights).sum() / weights.sum()
        total = total.to(loss) + loss
        found[name] = means[-1].detach(), float(count)
        if name == "mae":
            of_systems = factor
    found["loss"] = total.detach() / of_systems, float(len(structures))
    return Loss(total, found)


def displacement_weight(progress: float, config: LossConfig) -> float:
    """w_disp(p) = w₁ + (w₀ − w₁) s(p), with s = 1 ("none"), 1 − p ("linear") or ½ (1 + cos πp).

    `progress` is p from 0 to 1; w₀ and w₁ are `config`'s first (None is 1) and final weight.
    """
    first = 1.0 if config.displacement_weight is None else config.displacement_weight
    last = config.displacement_final_weight
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    rest = {"none": 1.0, "linear": 1.0 - progress, "cosine": cosine}
    return last + (first - last) * rest[config.displacement_decay]
