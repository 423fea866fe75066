"""Models as folders in Hugging Face's layout: config.json, model.safetensors, a model card."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import flt_mol
from flt_mol.files import temporary_path
from flt_mol.models.energy import CONFIG_KEY, EnergyModel
from flt_mol.outputs import writing
from flt_mol.training.checkpoints import find_checkpoint, load_model, read_checkpoint
from flt_mol.training.model_card import model_card
from flt_mol.training.pretrained_file import (
    CONFIG_FILE,
    MODEL_TYPE,
    PRETRAINED_FORMAT,
    PRETRAINED_VERSION,
    WEIGHTS_FILE,
    described,
    digest,
    read_settings,
)

__all__ = ["export_checkpoint", "from_pretrained", "save_pretrained"]

CARD_FILE = "README.md"


def save_pretrained(
    model: EnergyModel,
    folder: str | Path,
    *,
    config: Mapping[str, Any] | None = None,
    metrics: Mapping[str, float] | None = None,
) -> list[Path]:
    """Write `model` as a folder to keep, or to put on a hub of models.

    model.safetensors holds all weights and buffers (random features and normalisers among them),
    config.json the model's settings, units, versions, elements seen and a checksum of the weights,
    README.md a model card to fill in. The same model gives the same bytes every time. A README.md
    that is there is left alone. Paths of files that `config` names are left out.

    Args:
        model: in any mode, on any device, of any dtype.
        folder: made if missing.
        config: plain data of the run, as checkpoints hold it.
        metrics: by name, eV.

    Returns:
        The files written.

    Raises:
        ValueError: a config.json of something else is there; weights that are not finite.
        OSError: what the system said.

    Example:
        >>> import tempfile
        >>> from flt_mol.models import EnergyConfig
        >>> model = EnergyModel(EnergyConfig(embed_dim=16, num_layers=1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     [path.name for path in save_pretrained(model, folder)]
        ...     from_pretrained(folder).config == model.config
        ['model.safetensors', 'config.json', 'README.md']
        True
    """
    from safetensors.torch import save

    folder = Path(folder)
    config_file = folder / CONFIG_FILE
    if config_file.exists() and read_settings(config_file) is None:
        raise ValueError(f"{config_file} describes something else: choose another folder")
    # Copies: tensors that share memory, or lie in it with gaps, are refused otherwise.
    weights = {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, value in model.state_dict().items()
        if name != CONFIG_KEY
    }
    for name, value in weights.items():
        if not bool(value.isfinite().all()):
            raise ValueError(
                f"{name} holds numbers that are not finite: nobody could use the model"
            )
    data = save(weights, metadata={"format": "pt"})
    settings = _settings(model, weights, data, config, metrics)
    files = {folder / WEIGHTS_FILE: data, config_file: _json(settings)}
    if not (folder / CARD_FILE).exists():
        card = model_card(folder.resolve().name, model, settings)
        files[folder / CARD_FILE] = card.encode("utf-8")
    with writing(folder):
        for path, content in files.items():
            with temporary_path(path, durable=True) as temporary:
                temporary.write_bytes(content)
    return list(files)


def from_pretrained(folder: str | Path, map_location: str | torch.device = "cpu") -> EnergyModel:
    """The model of a folder that :func:`save_pretrained` wrote, in eval mode; no network is used.

    Raises:
        ValueError: no such folder; files that are damaged, of a later format, or that do not fit
            each other, naming the file.
    """
    if not (Path(folder) / WEIGHTS_FILE).is_file():
        if (Path(folder) / CONFIG_FILE).is_file():
            find_checkpoint(Path(folder) / CONFIG_FILE)  # which says what is missing
        raise ValueError(
            f"no {WEIGHTS_FILE} in '{folder}': give a folder that save_pretrained wrote; models on "
            "a hub are downloaded first"
        )
    return load_model(Path(folder) / WEIGHTS_FILE, map_location)


def export_checkpoint(name_or_path: str | Path, folder: str | Path) -> list[Path]:
    """:func:`save_pretrained` of a checkpoint, with what it says of its run and its metrics.

    Raises:
        ValueError: as of `load_model` and `save_pretrained`.
    """
    path = find_checkpoint(name_or_path)
    content = read_checkpoint(path)
    return save_pretrained(
        load_model(path), folder, config=content.get("config"), metrics=content.get("metrics")
    )


def _settings(
    model: EnergyModel,
    weights: Mapping[str, Tensor],
    data: bytes,
    config: Mapping[str, Any] | None,
    metrics: Mapping[str, float] | None,
) -> dict[str, Any]:
    dtype = next(model.parameters()).dtype
    return {
        "architectures": [type(model).__name__],
        "model_type": MODEL_TYPE,
        "format": PRETRAINED_FORMAT,
        "format_version": PRETRAINED_VERSION,
        "flt_mol_version": flt_mol.__version__,
        "torch_version": str(torch.__version__),
        "torch_dtype": str(dtype).removeprefix("torch."),
        "units": {"energy": "eV", "length": "Å"},
        "model": asdict(model.config),
        "config": _public(config or {}),
        "metrics": {k: v for k, v in (metrics or {}).items() if math.isfinite(v)},
        **described(weights),
        "trained_on": dict(model.trained_on),
        "sha256": {WEIGHTS_FILE: digest(data)},
    }


def _public(config: Mapping[str, Any]) -> dict[str, Any]:
    """A run's settings without its model, which stands beside, and without places on a disk."""
    public = {key: value for key, value in config.items() if key not in ("model", "output")}
    if isinstance(data := public.get("data"), Mapping):
        name = data.get("name")
        public["data"] = {**data, "paths": {}, "name": None if _is_path(name) else name}
    if isinstance(finetune := public.get("finetune"), Mapping):
        start = finetune.get("checkpoint")
        public["finetune"] = {**finetune, "checkpoint": Path(start).name if start else None}
    if isinstance(rule := public.get("inherited_tag_rule"), Mapping):
        public["inherited_tag_rule"] = {**rule, "from": Path(str(rule.get("from"))).name}
    return public


def _is_path(name: Any) -> bool:
    return isinstance(name, str) and ("/" in name or "\\" in name)


def _json(settings: Mapping[str, Any]) -> bytes:
    text = json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return f"{text}\n".encode()
