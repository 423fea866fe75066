"""Our energy models in fairchem-core 1.x, the former ocpmodels: importing this registers "flt"."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from flt_mol.models import EnergyConfig, EnergyModel, named_config
from flt_mol.models.checkpoint import load_model
from flt_mol.models.config import explain, merged
from flt_mol.structures import Structures

_OUTPUTS = ("energy", "forces")


class FLT(nn.Module):
    r"""An `EnergyModel` as a model of fairchem-core: ``model: {name: flt, config: flt-small}``.

    Without an import of this module the name is ``flt_mol.integrations.ocp.FLT``. For the trainers
    "ocp", "energy" and "forces"; not a part of "hydra".

    **Normalisers.** Their trainer compares outputs with (y − m) / s and predicts s · output + m,
    m and s of its ``transforms: normalizer``; ours has E = μ + σ ŷ, ŷ of the network. Given m and
    s, `normalizer`, a new model takes μ = m, σ = s, one of a checkpoint keeps its own, and outputs
    are (E − m) / s, which is ŷ in a new model: the trainer predicts E, and so do the weights in
    flt_mol. Without `normalizer` m = 0 and s = 1, for a trainer that has none; a new model then
    gives ŷ and trains with any, but its weights alone predict (E − m) / s; beside `checkpoint` the
    trainer's is needed.

    Args:
        config: a named model, whose settings come first; None for those of `EnergyConfig`.
        checkpoint: a trained model instead, as of `load_model`: file, folder or shipped name.
        normalizer: by output, "energy" or "forces", their ``{mean: m, stdev: s}``, or rmsd: s.
        otf_graph: their switch, without effect: the model searches pairs itself.
        settings: of `EnergyConfig`; of these ``outputs: [energy, forces]`` adds forces.

    Raises:
        ValueError: no such model or checkpoint, settings that cannot work or beside a checkpoint,
            a normaliser without numbers, or none beside a checkpoint.
    """

    def __init__(
        self,
        config: str | None = None,
        checkpoint: str | None = None,
        normalizer: Mapping[str, Mapping[str, float]] | None = None,
        otf_graph: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.scales = {name: _scale(name, given) for name, given in (normalizer or {}).items()}
        if checkpoint is None:
            self.model = EnergyModel(_settings(config, settings))
            mean, std = self.scales.get("energy", (0.0, 1.0))
            self.model.normalizer.mean.fill_(mean)
            self.model.normalizer.std.fill_(std)
        elif config is not None or settings:
            key = next(iter(settings), "config")
            raise ValueError(f"model.{key} beside model.checkpoint={checkpoint}: it has its own")
        elif normalizer is None:
            wanted = "that of the trainer's transforms, or {} for a trainer without one"
            raise ValueError(f"model.normalizer is missing beside model.checkpoint: give {wanted}")
        else:
            self.model = load_model(checkpoint)
        if (head := self.model.displacement_head) is not None:
            head.requires_grad_(False)  # processes would wait for its gradients

    def forward(self, data: Any) -> dict[str, Tensor]:
        """A batch of B systems with N atoms to ``"energy"`` (B,) and perhaps ``"forces"`` (N, 3).

        In units of `normalizer`, else eV and eV/Å. Elements in training are recorded as seen.

        Raises:
            ValueError: as of `structures_of` and `EnergyModel.forward`.
        """
        structures = structures_of(data)
        found = self.model(structures)
        if self.training:
            self.model.elements_seen[structures.atomic_numbers] = True
        out = {}
        for name in _OUTPUTS:
            if name in found:
                mean, std = self.scales.get(name, (0.0, 1.0))
                out[name] = (found[name] - mean) / std
        return out


def structures_of(data: Any) -> Structures:
    """A batch of fairchem-core's data sets as `Structures`, on its device.

    Args:
        data: a PyG `Batch` with natoms (B,), pos, atomic_numbers and cell. Missing tags and fixed
            are 0, missing pbc is True, as in OC20, and missing sids are counted.

    Raises:
        ValueError: fields whose shapes do not fit.
    """
    natoms, numbers = data.natoms, data.atomic_numbers.long()
    systems = len(natoms)

    def of_atoms(name: str) -> Tensor:
        return data[name].reshape(-1) if name in data else torch.zeros_like(numbers)

    pbc = data.pbc if "pbc" in data else natoms.new_ones(3)
    sids = data.sid if "sid" in data else range(systems)
    return Structures(
        atomic_numbers=numbers,
        positions=data.pos,
        cell=data.cell.reshape(-1, 3, 3),
        pbc=pbc.bool().reshape(-1, 3).expand(systems, 3),
        tags=of_atoms("tags").long(),
        fixed=of_atoms("fixed").bool(),
        ptr=nn.functional.pad(natoms.cumsum(0), (1, 0)),
        sid=tuple(sids.tolist() if isinstance(sids, Tensor) else sids),
    )


def _settings(name: str | None, given: Mapping[str, Any]) -> EnergyConfig:
    config = EnergyConfig() if name is None else named_config(name)
    base = config.model_dump()
    base["outputs"] = [output for output in config.outputs if output in _OUTPUTS]
    try:
        return EnergyConfig.model_validate(merged(base, given))
    except ValidationError as error:
        raise ValueError(explain(error, EnergyConfig, "model.")) from error


def _scale(name: str, given: Mapping[str, float]) -> tuple[float, float]:
    mean, std = given.get("mean"), given.get("rmsd", given.get("stdev"))
    if name not in _OUTPUTS or mean is None or not std:
        wanted = "numbers of energy or forces, {mean: m, stdev: s}"
        raise ValueError(f"model.normalizer.{name} is {dict(given)}, expected {wanted}")
    return float(mean), float(std)


if find_spec("fairchem") and find_spec("fairchem.core"):
    from fairchem.core.common.registry import registry

    registry.register_model("flt")(FLT)
