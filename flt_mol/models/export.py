"""Exported models: folders in Hugging Face's layout."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ase.data import chemical_symbols
from safetensors.torch import save

from flt_mol.files import shipped_folder, temporary_path
from flt_mol.models.checkpoint import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    described,
    find_checkpoint,
    header,
    load_model,
    read_checkpoint,
)
from flt_mol.models.energy import EnergyModel


def export_checkpoint(name_or_path: str | Path, folder: str | Path) -> list[Path]:
    """`export_model` of a checkpoint, with what it says of its run and its metrics.

    Raises as `load_model` and `export_model`.
    """
    path = find_checkpoint(name_or_path)
    content, model = read_checkpoint(path), load_model(path)
    licence = "mit" if shipped_folder("models") in path.parents else None
    return export_model(model, folder, content["config"], content["metrics"], licence)


def export_model(
    model: EnergyModel,
    folder: str | Path,
    config: Mapping[str, Any] | None = None,
    metrics: Mapping[str, float] | None = None,
    licence: str | None = None,
) -> list[Path]:
    """Write `model` as a folder in Hugging Face's layout, which `load_model` reads; its files.

    model.safetensors holds weights, buffers and the model's settings; config.json describes them,
    with a checksum; README.md is a model card, kept if it is there. The same model gives the same
    bytes. Paths that `config` names are not written.

    Args:
        model: in any mode, on any device, of any dtype.
        folder: created if missing.
        config: plain data of the run, as checkpoints hold it.
        metrics: by name, eV.
        licence: of the weights, as "mit"; without it the card leaves it open.

    Raises:
        ValueError: weights that are not finite, or a config.json of something else there.
    """
    folder = Path(folder)
    if (folder / CONFIG_FILE).exists() and not described(folder / CONFIG_FILE):
        raise ValueError(f"{folder / CONFIG_FILE} describes something else: give another folder")
    # Copies: tensors that share memory, or lie in it with gaps, are refused otherwise.
    weights = {k: v.detach().cpu().clone().contiguous() for k, v in model.state_dict().items()}
    for name, value in weights.items():
        if not bool(value.isfinite().all()):
            raise ValueError(f"{name} holds numbers that are not finite")
    data = save(weights, metadata={"format": "pt"})
    settings = {
        **header(model),
        "model_type": "flt_mol",
        "model": model.config.model_dump(),
        "config": _without_paths(config or {}),
        "metrics": {k: v for k, v in (metrics or {}).items() if math.isfinite(v)},
        "normalizer": {
            name: {"mean": float(part.mean), "std": float(part.std)}
            for name, part in model.normalizers.items()
        },
        "sha256": {WEIGHTS_FILE: hashlib.sha256(data).hexdigest()},
    }
    text = json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    files = {folder / WEIGHTS_FILE: data, folder / CONFIG_FILE: f"{text}\n".encode()}
    if not (folder / "README.md").exists():
        files[folder / "README.md"] = _card(folder.resolve().name, settings, licence).encode()
    for path, content in files.items():
        with temporary_path(path, durable=True) as temporary:
            temporary.write_bytes(content)
    return list(files)


def _without_paths(config: Mapping[str, Any]) -> dict[str, Any]:
    """A run's settings without its model, which stands beside, and without places on a disk."""
    public = {key: value for key, value in config.items() if key not in ("model", "output")}
    if isinstance(data := public.get("data"), Mapping):
        is_path = "/" in (data.get("name") or "")
        public["data"] = {**data, "paths": {}, "name": None if is_path else data.get("name")}
    if isinstance(tuned := public.get("finetune"), Mapping) and (start := tuned.get("checkpoint")):
        public["finetune"] = {**tuned, "checkpoint": Path(str(start)).name}
    return public


def _card(name: str, settings: Mapping[str, Any], licence: str | None) -> str:
    blank, found, metrics = "*to be filled in*", settings["config"], settings["metrics"]
    data, base = (found.get(part) or {} for part in ("data", "finetune"))
    source, base, trained = data.get("name"), base.get("checkpoint"), settings["trained_on"]
    head = {"library_name": "flt_mol", "license": licence, "base_model": base}
    head |= {"datasets": source and f"[{source}]", "tags": "[chemistry, materials, catalysis]"}
    lines = "\n".join(f"{key}: {value}" for key, value in head.items() if value)
    elements = ", ".join(chemical_symbols[z] for z in settings["elements_seen"]) or "none noted"
    shown = sorted(set(metrics) - {"epoch", "step", "train/gradient_norm", "train/loss"})
    measured = ", ".join(f"{key} {metrics[key]:.4f}" for key in shown)
    count, target = trained.get("systems", "?"), data.get("energy", blank)
    return f"""---
{lines}
---

# {name}

Predicts the {" and ".join(settings["model"]["outputs"])} of adsorption systems from the initial
structure, in eV and Å. To use it, install flt_mol {settings["flt_mol_version"]} (`pip install .` in
its repository): `flt-mol predict {name} slab.traj`, `flt_mol.predict(atoms, "{name}")`.

- Data: {source or blank}, {count} systems, target {target}
- Base model: {base or "none"}
- Metrics, validated on {data.get("validation", blank)}: {measured or blank}
- Elements seen: {elements}; for others energies are extrapolated
- Licence: {licence or blank}
- Limits: {blank}
"""
