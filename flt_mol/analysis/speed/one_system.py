"""One periodic system of a thousand to a million atoms: how time and memory grow with it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flt_mol.analysis.speed.lengths import PASSES, rounded
from flt_mol.analysis.speed.points import peak_rss
from flt_mol.analysis.speed.slabs import crystal
from flt_mol.analysis.timing import interleaved, peak_memory
from flt_mol.models import EnergyModel
from flt_mol.models.config import EnergyConfig
from flt_mol.nn.attention import FLTAttention
from flt_mol.nn.spectral_filter import SpectralFilter
from flt_mol.structures import Structures

__all__ = ["WHAT", "exponent", "measure", "one_system_model"]

WHAT = ("model", "attention", "attention + spectral filter", "attention + pair filter")


def exponent(
    sizes: Sequence[float], costs: Sequence[float], from_size: float = 4000
) -> float | None:
    """P of cost = c · size^p, by least squares of logarithms.

    Args:
        sizes: atoms.
        costs: seconds or bytes at each.
        from_size: smaller ones do not count.

    Returns:
        p, or None with fewer than two different sizes.

    Example:
        >>> exponent([1000, 4000, 16000], [9.0, 1.0, 8.0])
        1.5
    """
    pairs = [(n, c) for n, c in zip(sizes, costs, strict=True) if n >= from_size]
    if len({n for n, _ in pairs}) < 2:
        return None
    x, y = np.log(np.array(pairs, dtype=float)).T
    return round(float(np.polyfit(x, y, 1)[0]), 4)


def one_system_model(
    what: str, width: int = 64, blocks: int = 2, cutoff: float = 4.0, max_vectors: int | None = 256
) -> EnergyModel:
    """A small model of linear attention, with or without spectral filter and pair filter.

    Reciprocal vectors up to a fixed length grow in number with the volume, so that waves would be
    quadratic: `max_vectors` keeps them at a fixed number, at the price of a cutoff that depends on
    the cell (see `functional.reciprocal_vectors`).

    Raises:
        ValueError: `what` is not one of `WHAT`.
    """
    if what not in WHAT:
        raise ValueError(f"what is {what!r}, expected one of {', '.join(WHAT)}")
    budget = {"num_heads": 4, "max_vectors": max_vectors}
    spectral = budget if what == "model" or "spectral" in what else None
    pairs = {"cutoff": cutoff, "num_basis": 16, "density": False}
    config = {
        "embed_dim": width,
        "num_heads": 4,
        "num_layers": blocks,
        "ffn_dim": 2 * width,
        "rpe": None,
        "spectral": spectral,
        "pairs": pairs if what == "model" or "pair" in what else None,
        "readout": "sum",
    }
    return EnergyModel(EnergyConfig.from_dict(config))


def measure(
    what: str,
    atoms: int,
    passes: str = "forward",
    *,
    width: int = 64,
    blocks: int = 2,
    cutoff: float = 4.0,
    max_vectors: int | None = 256,
    rounds: int = 3,
) -> dict[str, Any]:
    """Time and memory of one pass over one crystal, in this process.

    Peak memory of the process is read before tensors are counted, which costs memory itself. It
    has the search for pairs in it; tensors have not.

    Args:
        what: see `WHAT`; "attention" is a bare layer of `FLTAttention`.
        atoms: about how many.
        passes: "forward", without gradients, by a model set to evaluation as for predictions, or
            "training", forward and backward to all weights.
        width: C.
        blocks: of the model.
        cutoff: Å, of the pair filter.
        max_vectors: of the spectral filter, None for all vectors.
        rounds: see `timing.interleaved`.

    Returns:
        ``atoms``, ``pairs``, ``vectors``; ``seconds`` of each round, and ``pair_seconds`` of the
        search for pairs; ``bytes`` of tensors, ``rss`` of the process at its peak and
        ``rss_before`` the crystal was made.
    """
    if passes not in PASSES:
        raise ValueError(f"passes is {passes!r}, expected one of {', '.join(PASSES)}")
    before = peak_rss()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        structures = crystal(atoms)
        start = time.perf_counter()
        run, counts = _prepared(what, structures, passes, width, blocks, cutoff, max_vectors)
        searched = time.perf_counter() - start
    timings = interleaved({what: run}, rounds, threads=torch.get_num_threads())
    peak = peak_rss()
    return {
        "atoms": structures.num_atoms,
        **counts,
        "seconds": rounded(timings)[what],
        "pair_seconds": round(searched, 3) if counts["pairs"] else None,
        "bytes": peak_memory(run, warm_up=False),
        "rss": peak,
        "rss_before": before,
    }


def _prepared(
    what: str,
    structures: Structures,
    passes: str,
    width: int,
    blocks: int,
    cutoff: float,
    max_vectors: int | None,
) -> tuple[Callable[[], object], dict[str, int]]:
    """What to call, and how many pairs and vectors it works on."""
    if what == "attention":
        layer = FLTAttention(width, 4, num_features=64).train(passes == "training")
        x = torch.randn(structures.num_atoms, width)
        run = _passing(lambda: layer(x, ptr=structures.ptr).sum(), list(layer.parameters()), passes)
        return run, {"pairs": 0, "vectors": 0}
    model = one_system_model(what, width, blocks, cutoff, max_vectors)
    model.train(passes == "training")
    if model.cutoff is not None:
        structures = structures.with_pairs(model.cutoff)
    found = structures.pairs
    counts = {"pairs": 0 if found is None else len(found.index_i)}
    counts["vectors"] = _vectors(model, structures)
    energy = _passing(lambda: model(structures)["energy"].sum(), list(model.parameters()), passes)
    return energy, counts


def _vectors(model: EnergyModel, structures: Structures) -> int:
    """K, without the waves."""
    from flt_mol.functional.reciprocal import reciprocal_vectors

    filters = (part for part in model.modules() if isinstance(part, SpectralFilter))
    first = next(filters, None)
    if first is None:
        return 0
    where = structures.cell, structures.pbc, structures.positions, structures.ptr
    budget = first.max_vectors
    return len(
        reciprocal_vectors(
            *where, k_max=first.k_max, padding=first.padding, max_vectors=budget
        ).integers
    )


def _passing(
    value: Callable[[], Tensor], weights: list[Tensor], passes: str
) -> Callable[[], object]:
    def forward() -> Tensor:
        with torch.no_grad():
            return value()

    if passes == "forward":
        return forward
    return lambda: torch.autograd.grad(value(), weights, allow_unused=True)
