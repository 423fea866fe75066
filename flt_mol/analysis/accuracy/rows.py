"""The rows of the accuracy table: which models, with which settings."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from torch import nn

from flt_mol.analysis.accuracy.loop import TARGETS, seeded
from flt_mol.analysis.accuracy.rivals import RIVALS
from flt_mol.models.config import EnergyConfig
from flt_mol.models.energy import EnergyModel

__all__ = ["ROWS", "Row", "build", "complete", "count_weights", "resolved"]

_WIDEST = 512


@dataclass(frozen=True)
class Row:
    """One model of the table.

    Attributes:
        label: what the table calls it.
        config: settings of `EnergyConfig`, any of them, or arguments of a rival. Of "outputs" the
            energies are those that are trained; a "seed" takes the place of the run's for what the
            model draws by it.
        rival: a name in `rivals.RIVALS`; None for our own models.
        loss: settings of `LossConfig`, beyond those of the energies.
        match: a row to whose number of weights the rival's width is fitted, from above.
    """

    label: str
    config: Mapping[str, Any] = field(default_factory=dict)
    rival: str | None = None
    loss: Mapping[str, Any] = field(default_factory=dict)
    match: str | None = None


_BASE: dict[str, Any] = {
    "embed_dim": 64,
    "num_heads": 4,
    "num_layers": 2,
    "ffn_dim": 128,
    "num_features": 64,
    "attention": "linear",
    "rpe": None,
}
_PAIRS = {"cutoff": 5.0, "num_basis": 32, "density": False}
_SPECTRAL = {"num_heads": 4, "k_max": 0.45, "sigma_max": 2.5, "num_basis": 8}
_PAPER = {"form": "weight", "num_terms": 32, "num_frequencies": 16}
_AMPLITUDE = {"form": "amplitude", "num_terms": 32, "num_frequencies": 16}
_IMAGES = {"cutoff": 5.0, "num_basis": 32}
_BOTH: dict[str, Any] = {"spectral": _SPECTRAL, "pairs": _PAIRS, "head_norm": False}
_OURS: dict[str, Any] = {
    **_BOTH,
    "num_layers": 4,
    "attention": "none",
    "far_scale": 0.1,
    "far_blocks": 1,
    "pairs": {
        **_PAIRS,
        "num_filters": 112,
        "norm": False,
        "filter_vectors": 32,
        "vector_blocks": 1,
        "vector_basis": 12,
        "vector_dropout": 0.5,
    },
}
_MOVES = {
    "displacement_weight": 1.0,
    "displacement_decay": "linear",
    "displacement_final_weight": 0.1,
}
_DISPLACED = ["energy", "energy_initial", "displacement"]


def _row(label: str, loss: Mapping[str, Any] | None = None, **changes: Any) -> Row:
    return Row(label, {**_BASE, **changes}, loss=loss or {})


def _ours(label: str, loss: Mapping[str, Any] | None = None, **changes: Any) -> Row:
    return _row(label, loss, **{**_OURS, **changes})


ROWS: dict[str, Row] = {
    "performer": _row("Performer, no positions"),
    "flt_paper": _row("FLT, the paper's form (w_t, R = 16)", rpe=_PAPER),
    "flt": _row("FLT, amplitude form (R = 16)", rpe=_AMPLITUDE),
    "exact_mask": _row("exact softmax + the same sampled mask", rpe=_AMPLITUDE, attention="exact"),
    "exact_gaussian": _row(
        "exact softmax, image keys, additive Gaussian RPE",
        attention="exact",
        images={**_IMAGES, "mask": "gaussian", "pair_types": False, "density": False},
    ),
    "exact_images": _row(
        "exact softmax, image keys, Gaussians with centres (3D-Graphormer's bias)",
        attention="exact",
        images={**_IMAGES, "mask": "centred", "density": False},
    ),
    "graphormer": _row(
        "the same + density in the embedding (3D-Graphormer's in full)",
        attention="exact",
        images={**_IMAGES, "mask": "centred"},
        head_norm=False,
    ),
    # Wide enough to have no fewer weights than ours.
    "graphormer4": _row(
        "3D-Graphormer's in full, as many blocks and weights as ours",
        attention="exact",
        images={**_IMAGES, "mask": "centred"},
        head_norm=False,
        num_layers=4,
        embed_dim=76,
        ffn_dim=152,
    ),
    "performer_spectral": _row("Performer + spectral filter", spectral=_SPECTRAL),
    "performer_pair": _row("Performer + pair filter", pairs=_PAIRS, head_norm=False),
    "performer_both": _row("Performer + both", **_BOTH),
    "exact_both": _row("exact softmax + both", attention="exact", **_BOTH),
    "ours": _ours("**ours**"),
    "ours_attention": _ours("ours + attention in the last block", attention="auto"),
    "ours_far": _ours(
        "ours + attention and spectral filters in every block", attention="auto", far_blocks=None
    ),
    "ours_no_spectral": _ours("ours without spectral filter", spectral=None),
    "ours_no_vectors": _ours("ours without vectors", pairs={**_OURS["pairs"], "filter_vectors": 0}),
    "ours_norm": _ours(
        "ours, local filters of normalised features", pairs={**_OURS["pairs"], "norm": True}
    ),
    "ours_head_norm": _ours("ours, features normalised before the read-out", head_norm=True),
    "ours_auxiliary": _ours("ours + auxiliary loss", _MOVES, outputs=_DISPLACED),
    "ours_features2": _ours("ours, 2 passes, features", recycles=2),
    "ours_features4": _ours("ours, 4 passes, features", recycles=4),
    "ours_positions2": _ours(
        "ours, 2 passes, positions", _MOVES, recycles=2, feedback="positions", outputs=_DISPLACED
    ),
    "ours_positions4": _ours(
        "ours, 4 passes, positions", _MOVES, recycles=4, feedback="positions", outputs=_DISPLACED
    ),
    "schnet64": Row("SchNet blocks, width 64", {"width": 64}, "schnet"),
    "schnet": Row("SchNet blocks, as many weights as ours", {}, "schnet", match="ours"),
    "schnet_packaged": Row(
        "SchNet as packaged, as many weights", {}, "schnet_packaged", match="ours"
    ),
    "visnet": Row("ViSNet, as many weights", {}, "visnet", match="ours"),
    # Not matched: each build of it takes seconds of symbolic algebra.
    "dimenet++": Row("DimeNet++, width 64", {"width": 64}, "dimenet++"),
}


def resolved(row: Row, targets: str, rows: Mapping[str, Row] | None = None) -> dict[str, Any]:
    """The settings of a row as plain data, with the width of a rival found and outputs named.

    Args:
        row: see there.
        targets: as in `loop.Settings`.
        rows: where to look for `row.match`; None is `ROWS`.

    Example:
        >>> resolved(ROWS["performer"], "relaxed")["outputs"]
        ['energy']
    """
    config = dict(row.config)
    if row.rival is not None:
        if row.match is not None:
            goal = (ROWS if rows is None else rows)[row.match]
            with seeded(0):
                wanted = count_weights(build(goal, resolved(goal, targets, rows)))
            config["width"] = _width(row.rival, wanted)
        return config
    first = ["energy", "energy_initial"] if targets == "joint" else ["energy"]
    config["outputs"] = first + [n for n in config.get("outputs", []) if n not in TARGETS["joint"]]
    return config


# Settings that came later, at the value that changes nothing: results from before still hold.
_LATER: dict[str, Any] = {"redraw_every": None}
_LATER_IN = {"spectral": {"max_vectors": None}}


def complete(row: Row, config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that `resolved` gave, and all others with their defaults.

    Raises:
        ValueError: unknown settings.

    Example:
        >>> complete(ROWS["performer"], {"embed_dim": 32})["readout"]
        'tags'
    """
    if row.rival is None:
        every = EnergyConfig.model_validate(config).model_dump()
        for name, later in _LATER_IN.items():
            if every[name] is not None:
                every[name] = _without(every[name], later)
        return _without(every, _LATER)
    try:
        bound = inspect.signature(RIVALS[row.rival]).bind(**config)
    except TypeError as error:
        raise ValueError(f"'{row.rival}': {error}") from error
    bound.apply_defaults()
    return dict(bound.arguments)


def _without(settings: dict[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in settings.items() if k not in later or v != later[k]}


def build(row: Row, config: Mapping[str, Any], seed: int = 0) -> nn.Module:
    """The model of a row with settings that `resolved` gave, from torch's global random numbers.

    Raises:
        ValueError: settings that the model refuses.
        ImportError: a rival's package is missing.
    """
    if row.rival is not None:
        return RIVALS[row.rival](**config)
    return EnergyModel(EnergyConfig.model_validate({"seed": seed, **config}))


def count_weights(model: nn.Module) -> int:
    """Parameters without tables of elements, most of whose rows no data set reaches.

    Example:
        >>> count_weights(nn.Sequential(nn.Embedding(119, 8), nn.Linear(8, 1)))
        9
    """
    tables = sum(
        module.weight.numel() for module in model.modules() if isinstance(module, nn.Embedding)
    )
    return sum(p.numel() for p in model.parameters()) - tables


@lru_cache
def _width(rival: str, wanted: int) -> int:
    """The smallest width that gives a rival at least so many weights; even, or 4k for ViSNet."""
    step = 4 if rival == "visnet" else 2
    low, high = 1, _WIDEST // step
    while low < high:
        middle = (low + high) // 2
        with seeded(0):
            enough = count_weights(RIVALS[rival](step * middle)) >= wanted
        low, high = (low, middle) if enough else (middle + 1, high)
    return step * low
