"""A training step of IS2RE: forward and backward of whole models on slabs, taking turns.

Pairs are made beforehand, as loaders make them in their workers. The loss is the sum of what a
model predicts; gradients go to all weights. Numbers below 1e-38 count as 0, but for one row:
Gaussians of distances without an end, as of PyG, are slow with them on many CPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flt_mol.analysis.accuracy.loop import without_denormals
from flt_mol.analysis.accuracy.rivals import SchNetPackaged
from flt_mol.analysis.speed.dense_graphormer import DenseGraphormer
from flt_mol.analysis.speed.lengths import installed_package, rounded
from flt_mol.analysis.speed.points import out_of_memory
from flt_mol.analysis.speed.slabs import slabs
from flt_mol.analysis.timing import interleaved, on_threads, peak_memory
from flt_mol.models import EnergyModel, named_config
from flt_mol.models.config import EnergyConfig
from flt_mol.structures import Structures

__all__ = ["MODELS", "OURS", "Shape", "build_model", "measure", "our_config"]


class Shape(NamedTuple):
    """What the models share: width C, heads H, blocks, hidden width, cutoff in Å."""

    width: int = 256
    heads: int = 8
    blocks: int = 6
    ffn: int = 512
    cutoff: float = 6.0


def our_config(shape: Shape) -> EnergyConfig:
    """Blocks of linear attention, spectral filter and pair filter per channel."""
    return EnergyConfig.model_validate(
        {
            **_sizes(shape),
            "rpe": None,
            "spectral": {"num_heads": shape.heads},
            "pairs": {"cutoff": shape.cutoff, "filter": True, "density": False},
        }
    )


def _graphormer(shape: Shape) -> EnergyModel:
    """graphormer3d-exact of this shape, with images, one pass, energies only."""
    images = {**named_config("graphormer3d-exact").model_dump()["images"], "cutoff": shape.cutoff}
    config = {"rpe": None, "attention": "exact", "images": images}
    return EnergyModel(EnergyConfig.model_validate({**_sizes(shape), **config}))


def _sizes(shape: Shape) -> dict[str, Any]:
    return {"embed_dim": shape.width, "num_heads": shape.heads, "num_layers": shape.blocks,
            "ffn_dim": shape.ffn}  # fmt: skip


def _schnet(shape: Shape) -> nn.Module:
    return SchNetPackaged(shape.width, shape.cutoff, shape.blocks, 50)


OURS, DENSE, AS_IT_COMES = "ours", "3D-Graphormer, dense", "SchNet (PyG), denormals kept"
MODELS: dict[str, Callable[[Shape], nn.Module]] = {
    OURS: lambda shape: EnergyModel(our_config(shape)),
    "graphormer3d-exact": _graphormer,
    DENSE: lambda shape: DenseGraphormer(_graphormer(shape)),
    "SchNet (PyG)": _schnet,
    AS_IT_COMES: _schnet,
    "flt-small": lambda _: EnergyModel(named_config("flt-small")),
    "flt-base": lambda _: EnergyModel(named_config("flt-base")),
}


def build_model(name: str, shape: Shape) -> nn.Module:
    """A model of `MODELS`, untrained; "flt-small" and "flt-base" have their own shapes."""
    return MODELS[name](shape).train()


def measure(
    names: list[str] | None = None,
    *,
    num_slabs: int = 32,
    dense_slabs: int = 8,
    layers: int | None = None,
    shape: dict[str, Any] | None = None,
    rounds: int = 5,
) -> dict[str, Any]:
    """Seconds of a step, bytes, atoms and weights of each model.

    Args:
        names: of `MODELS`; None for all. What is not installed is left out.
        num_slabs: of a batch.
        dense_slabs: of the batch of the dense model, which takes most memory.
        layers: of slabs, see `slabs`.
        shape: fields of `Shape` other than the default's.
        rounds: see `timing.interleaved`.
    """
    chosen = list(MODELS) if names is None else names
    left_out = [n for n in chosen if "PyG" in n and not installed_package("torch_geometric")]
    present = [name for name in chosen if name not in left_out]
    threads, sizes = torch.get_num_threads(), Shape(**(shape or {}))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        models = {name: build_model(name, sizes) for name in present}
    counts = {name: min(dense_slabs, num_slabs) if name == DENSE else num_slabs for name in present}
    batches = {name: slabs(count, layers) for name, count in counts.items()}
    steps = {
        name: step(model, batches[name], flush=name != AS_IT_COMES)
        for name, model in models.items()
    }
    held, stopped = {}, []
    with on_threads(threads):
        for name in present:
            try:
                held[name] = peak_memory(steps[name])
            except (MemoryError, RuntimeError) as error:
                if not out_of_memory(error):
                    raise
                stopped.append(name)
    timed = {name: run for name, run in steps.items() if name in held}
    return {
        "seconds": rounded(interleaved(timed, rounds, threads=threads)),
        "bytes": held,
        "atoms": {name: batch.num_atoms for name, batch in batches.items()},
        "slabs": counts,
        "weights": {n: sum(p.numel() for p in model.parameters()) for n, model in models.items()},
        "stopped": stopped,
        "left_out": left_out,
    }


def step(model: nn.Module, batch: Structures, *, flush: bool = True) -> Callable[[], object]:
    """A function that goes forward and backward once; `flush`: numbers below 1e-38 count as 0."""
    cutoff: Any = model.cutoff
    if cutoff is not None:
        batch = batch.with_pairs(cutoff)
    weights = [p for p in model.parameters() if p.requires_grad]

    def run() -> tuple[Tensor | None, ...]:
        with without_denormals() if flush else nullcontext():
            out = model(batch)
            loss = out["energy"].sum()
            if "displacement" in out:
                loss = loss + out["displacement"].square().sum()
            return torch.autograd.grad(loss, weights, allow_unused=True)

    return run
