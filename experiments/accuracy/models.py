"""The rows of the accuracy table: which models, with which settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from torch import nn

from common.loop import TARGETS, seeded
from common.rivals import RIVALS
from flt_mol.data.recipes import recipe
from flt_mol.models import EnergyConfig, EnergyModel
from flt_mol.structures import Structures


@dataclass(frozen=True)
class Row:
    """One model of a table.

    `config` holds settings of `EnergyConfig`, or arguments of the rival: None for those that
    `facts_of` gives. `loss` holds settings of `LossConfig`; a rival with `match` gets the smallest
    width with at least as many weights. `rate` is the learning rate, by default that of `Settings`.
    """

    label: str
    config: Mapping[str, Any] = field(default_factory=dict)
    rival: str | None = None
    loss: Mapping[str, Any] = field(default_factory=dict)
    match: str | None = None
    rate: float | None = None


_BASE: dict[str, Any] = {
    "embed_dim": 64, "num_heads": 4, "num_layers": 2, "ffn_dim": 128, "num_features": 64,
    "attention": "linear", "rpe": None,
}  # fmt: skip
_PAIRS: dict[str, Any] = {"cutoff": 5.0, "num_basis": 32, "density": False}
_SPECTRAL = {"num_heads": 4, "k_max": 0.45, "sigma_max": 2.5, "num_basis": 8}
_WIDE = {**_SPECTRAL, "k_max": 0.2, "sigma_max": 6.0}
_MACE = {"elements": None, "neighbors": None}
_IMAGES = {"cutoff": 5.0, "num_basis": 32}
_BOTH: dict[str, Any] = {"spectral": _SPECTRAL, "pairs": _PAIRS, "head_norm": False}
_OURS_PAIRS = {
    **_PAIRS, "num_filters": 112, "norm": False, "filter_vectors": 32, "vector_blocks": 1,
    "vector_basis": 12, "vector_dropout": 0.5,
}  # fmt: skip
_OURS: dict[str, Any] = {
    **_BOTH, "num_layers": 4, "attention": "none", "far_scale": 0.1, "far_blocks": 1,
    "pairs": _OURS_PAIRS,
}  # fmt: skip
_EVERY: dict[str, Any] = {**_OURS, "spectral": _WIDE, "far_blocks": None}
_V2: dict[str, Any] = {**_OURS, "spectral": {**_WIDE, "charges": 16}}
_MOVES = {
    "displacement_weight": 1.0,
    "displacement_decay": "linear",
    "displacement_final_weight": 0.1,
}
_DISPLACED = ["energy", "energy_initial", "displacement"]


def _rpe(form: str, terms: int = 32, frequencies: int = 16) -> dict[str, Any]:
    spectrum = {"name": "gaussian", "num_terms": terms, "form": form}
    return {
        "spectrum": spectrum,
        "frequencies": {"name": "gaussian", "num_frequencies": frequencies},
    }


def _row(label: str, loss: Mapping[str, Any] | None = None, **changes: Any) -> Row:
    return Row(label, {**_BASE, **changes}, loss=loss or {})


def _ours(label: str, loss: Mapping[str, Any] | None = None, **changes: Any) -> Row:
    return _row(label, loss, **{**_OURS, **changes})


def _graphormer(label: str, **changes: Any) -> Row:
    images = {**_IMAGES, "mask": "centred"}
    return _row(label, attention="exact", images=images, head_norm=False, **changes)


ROWS: dict[str, Row] = {
    "performer": _row("Performer, no positions"),
    "flt_paper": _row("FLT, the paper's form (w_t, R = 16)", rpe=_rpe("weight")),
    "flt": _row("FLT, amplitude form (R = 16)", rpe=_rpe("amplitude")),
    "exact_mask": _row(
        "exact softmax + the same sampled mask", rpe=_rpe("amplitude"), attention="exact"
    ),
    "exact_gaussian": _row(
        "exact softmax, image keys, additive Gaussian RPE", attention="exact",
        images={**_IMAGES, "mask": "gaussian", "pair_types": False, "density": False},
    ),
    "exact_images": _row(
        "exact softmax, image keys, Gaussians with centres (3D-Graphormer's bias)",
        attention="exact", images={**_IMAGES, "mask": "centred", "density": False},
    ),
    "graphormer": _graphormer("the same + density in the embedding (3D-Graphormer in full)"),
    "graphormer4": _graphormer(
        "3D-Graphormer in full, as many blocks and weights as ours",
        num_layers=4, embed_dim=76, ffn_dim=152,
    ),
    "performer_spectral": _row("Performer + spectral filter", spectral=_SPECTRAL),
    "performer_pair": _row("Performer + pair filter", pairs=_PAIRS, head_norm=False),
    "performer_both": _row("Performer + both", **_BOTH),
    "exact_both": _row("exact softmax + both", attention="exact", **_BOTH),
    "ours": _ours("**ours** (flt-small)"),
    "ours_attention": _ours("ours + attention in the last block", attention="auto"),
    "ours_far": _ours(
        "ours + attention and spectral filters in every block", attention="auto", far_blocks=None
    ),
    "ours_spectral": _ours("ours + spectral filters in every block", far_blocks=None),
    "ours_attention_every": _ours(
        "ours + attention in every block, no spectral filter", attention="auto", spectral=None,
        far_blocks=None,
    ),
    "wide": _row("spectral filters of width 6 Å in every block", **_EVERY),
    "wide_attention": _row(
        "the same + linear attention in every block", **{**_EVERY, "attention": "linear"}
    ),
    "v2": _row("**flt-small-v2**: a filter of width 6 Å in the last block, charges", **_V2),
    "v2_no_charges": _row("flt-small-v2 without charges", **{**_V2, "spectral": _WIDE}),
    "v2_attention": _row(
        "flt-small-v2 + linear attention in the last block", **{**_V2, "attention": "linear"}
    ),
    "refine": _row(
        "flt-small-refine: flt-small-v2, 4 recycles, positions", _MOVES,
        **{**_V2, "recycles": 4, "feedback": "positions", "outputs": _DISPLACED},
    ),
    "v2_flt": _row(
        "flt-small-v2 + FLT attention in the last block",
        **{**_V2, "attention": "linear", "rpe": _rpe("amplitude", 8, 8)},
    ),
    "ours_no_spectral": _ours("ours without spectral filter", spectral=None),
    "ours_no_vectors": _ours("ours without vectors", pairs={**_OURS_PAIRS, "filter_vectors": 0}),
    "ours_norm": _ours(
        "ours, local filters of normalised features", pairs={**_OURS_PAIRS, "norm": True}
    ),
    "ours_head_norm": _ours("ours, features normalised before the read-out", head_norm=True),
    "ours_auxiliary": _ours("ours + auxiliary loss", _MOVES, outputs=_DISPLACED),
    "ours_features2": _ours("ours, 2 recycles, features", recycles=2),
    "ours_features4": _ours("ours, 4 recycles, features", recycles=4),
    "ours_positions2": _ours(
        "ours, 2 recycles, positions", _MOVES, recycles=2, feedback="positions", outputs=_DISPLACED
    ),
    "ours_positions4": _ours(
        "ours, 4 recycles, positions", _MOVES, recycles=4, feedback="positions", outputs=_DISPLACED
    ),
    "schnet64": Row("SchNet blocks, width 64", {"width": 64}, "schnet"),
    "schnet": Row("SchNet blocks, as many weights as ours", {}, "schnet", match="ours"),
    "schnet_packaged": Row(
        "SchNet as packaged, as many weights", {}, "schnet_packaged", match="ours"
    ),
    "painn": Row("PaiNN, as many weights", {}, "painn", match="ours", rate=2e-3),
    "visnet": Row("ViSNet, as many weights", {}, "visnet", match="ours", rate=4e-3),
    "mace": Row("MACE, as many weights", _MACE, "mace", match="ours", rate=4e-3),
    "mace_scalars": Row(
        "MACE, scalars", {**_MACE, "vectors": False}, "mace", match="ours", rate=4e-3
    ),
    "mace_pairs": Row(
        "MACE, scalars, ν = 2", {**_MACE, "vectors": False, "correlation": 2}, "mace",
        match="ours", rate=1.6e-2,
    ),
    # Not matched: each build of it takes seconds of symbolic algebra.
    "dimenet++": Row("DimeNet++, width 64", {"width": 64}, "dimenet++"),
}  # fmt: skip


def installed(name: str) -> bool:
    """Whether a row has the package that it needs; says so if not."""
    rival = ROWS[name].rival
    package = RIVALS[rival].package if rival else None
    if package is None or find_spec(package) is not None:
        return True
    print(f"row {name} is skipped: {package} is not installed", flush=True)
    return False


@lru_cache
def facts_of(data: str) -> dict[str, Any]:
    """The elements of a data set, and pairs within 5 Å per atom of its first 200 systems."""
    found = recipe(data)
    train = found.open("train")
    first = Structures.cat([train[i] for i in range(min(200, len(train)))]).with_pairs(5.0)
    assert first.pairs is not None
    neighbors = len(first.pairs.index_i) / first.num_atoms
    return {"elements": tuple(found.metadata["elements"]), "neighbors": round(neighbors, 1)}


def resolved(row: Row, targets: str, data: str, rows: Mapping[str, Row] = ROWS) -> dict[str, Any]:
    """The settings of a row, with the width of a rival and the outputs filled in."""
    config = dict(row.config)
    if row.rival is not None:
        given = {k: facts_of(data)[k] if v is None else v for k, v in config.items()}
        if row.match is not None:
            goal = rows[row.match]
            wanted = count_weights(build(goal, resolved(goal, targets, data, rows)))
            given["width"] = _width(row.rival, wanted, **given)
        return given
    first = ["energy", "energy_initial"] if targets == "joint" else ["energy"]
    config["outputs"] = first + [n for n in config.get("outputs", []) if n not in TARGETS["joint"]]
    return config


def build(row: Row, config: Mapping[str, Any], seed: int = 0) -> nn.Module:
    """The model of a row with resolved settings, from torch's global random numbers."""
    if row.rival is not None:
        return RIVALS[row.rival](**config)
    return EnergyModel(EnergyConfig.model_validate({"seed": seed, **config}))


def count_weights(model: nn.Module) -> int:
    """Parameters without tables of elements, most of whose rows no data set reaches."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    return sum(p.numel() for p in model.parameters()) - sum(t.weight.numel() for t in tables)


@lru_cache
def _width(rival: str, wanted: int, **given: Any) -> int:
    """The smallest width with at least so many weights; even, or a multiple of 4 for ViSNet."""
    step = 4 if rival == "visnet" else 2
    low, high = 1, 512 // step
    while low < high:
        middle = (low + high) // 2
        with seeded(0):
            enough = count_weights(RIVALS[rival](step * middle, **given)) >= wanted
        low, high = (low, middle) if enough else (middle + 1, high)
    return step * low
