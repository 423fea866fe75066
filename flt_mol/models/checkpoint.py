"""Checkpoints: tensors and plain data in one file, written whole or not at all."""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import pickle
import re
import warnings
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

import flt_mol
from flt_mol.files import readable, shipped_folder, temporary_path
from flt_mol.models.config import EnergyConfig, explain, shipped_name
from flt_mol.models.energy import CONFIG_KEY, EnergyModel, config_of
from flt_mol.models.weights import find_weights, misfits

__all__ = [
    "CONFIG_FILE",
    "WEIGHTS_FILE",
    "checkpoint_config",
    "export_checkpoint",
    "export_model",
    "find_checkpoint",
    "find_device",
    "load_model",
    "misfits",
    "read_checkpoint",
    "read_weights",
    "refuse_damaged",
    "save_checkpoint",
]

FORMAT = "flt_mol.checkpoint"
FORMAT_VERSION = 2
WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
_IN_FOLDERS = ("best.ckpt", "weights.ckpt", WEIGHTS_FILE)


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
    It is written to a temporary name beside `path`, flushed to the disk, then renamed.

    Args:
        path: missing folders are created.
        model: with the weights to predict with, averaged ones where a run averages.
        config: plain data.
        metrics: by name.
        training_state: tensors and plain data to resume training with, which `load_model` does not
            look at, but for a ``"raw_state_dict"`` of weights that were not averaged.
        systems: sids, ``{"trained": [...], "held_out": [...]}``.
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


def find_checkpoint(name_or_path: str | Path) -> Path:
    """A checkpoint file by path, by folder, or by the name of a shipped model.

    Folders are those of runs (their best.ckpt) and exports (their model.safetensors).

    Raises:
        ValueError: none of these, naming the shipped models that have weights.
    """
    path = Path(name_or_path)
    if path.name == CONFIG_FILE:
        path = path.parent
    if path.is_file():
        return path
    for file in _IN_FOLDERS:
        if (path / file).is_file():
            return path / file
    name = str(name_or_path)
    if (found := shipped_name("models", name, "weights.ckpt")) is not None:
        return shipped_folder("models") / found / "weights.ckpt"
    inside = sorted({str(file.parent) for x in _IN_FOLDERS for file in path.glob(f"*/{x}")})
    if inside:
        hint = f"give one of the folders inside: {', '.join(inside[:8])}"
    elif shipped_name("models", name, "model.yaml") is not None:
        hint = "the named model of that name has no weights; train it"
    else:
        shipped = sorted(x.parent.name for x in shipped_folder("models").glob("*/weights.ckpt"))
        near = difflib.get_close_matches(name, shipped, n=1)
        hint = f"did you mean {near[0]}?" if near else f"shipped models: {', '.join(shipped)}"
    raise ValueError(f"no checkpoint at '{name}': {hint}")


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
    path = find_checkpoint(name_or_path)
    content = read_checkpoint(path, averaged)
    weights = content["state_dict"]
    config = _config(path, weights)
    with torch.random.fork_rng(devices=[]):
        model = EnergyModel(config)
    problems = misfits(model.state_dict(), weights)
    if problems:
        raise ValueError(f"{path} does not fit the model it describes:\n  " + "\n  ".join(problems))
    model.load_state_dict(weights)
    model.trained_on = content["trained_on"]
    return model.eval().to(device)


def read_weights(name_or_path: str | Path, averaged: bool = True) -> tuple[Path, dict[str, Tensor]]:
    """The file of a checkpoint and the weights in it, on CPU.

    Args, Raises: as of `load_model`, but whether they fit is not looked at.
    """
    path = find_checkpoint(name_or_path)
    return path, read_checkpoint(path, averaged)["state_dict"]


def checkpoint_config(name_or_path: str | Path) -> EnergyConfig:
    """The settings of a checkpoint's model.

    Raises:
        ValueError: no or no whole checkpoint, or settings that are not usable.
    """
    return _config(*read_weights(name_or_path))


def _config(path: Path, weights: Mapping[str, Tensor]) -> EnergyConfig:
    try:
        return config_of(weights)
    except ValidationError as error:
        raise ValueError(f"{path}: {explain(error, EnergyConfig, 'model.')}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read_checkpoint(path: str | Path, averaged: bool = True) -> dict[str, Any]:
    """The content of a checkpoint file, on CPU, the model's weights by name in ``state_dict``.

    Weights are found under the names that tools give them, or bare, and wrappers' names are
    stripped. Of files of this library ``config``, ``metrics``, ``trained_on`` and ``systems`` are
    mappings, empty where there are none.

    Args:
        path: a file; of an exported folder, its ``model.safetensors``.
        averaged: whether averaged weights (EMA) are taken where the file has both.

    Raises:
        ValueError: damaged, cut short, not readable as a checkpoint, of a later format, or asking
            for more than tensors and plain data; the message names the file.
    """
    path = Path(path)
    refuse_damaged(path)
    exported = path.suffix.lower() == ".safetensors"
    content = _read_export(path) if exported else _load(path)
    if not isinstance(content, Mapping):
        raise ValueError(f"{path}: holds a {type(content).__name__}, not a checkpoint")
    ours = content.get("format") == FORMAT
    if ours and content["format_version"] > FORMAT_VERSION:
        raise ValueError(
            f"{path}: format {content['format_version']}, written by flt_mol "
            f"{content.get('flt_mol_version')}; this version reads up to {FORMAT_VERSION}"
        )
    found = dict(content) if ours else {}
    for key in ("config", "metrics", "trained_on", "systems"):
        found[key] = dict(found.get(key) or {})
    try:
        found["state_dict"] = find_weights(content, averaged)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return found


def refuse_damaged(path: Path) -> None:
    """Refuse what is not a checkpoint at first sight, and wrong checksums, which torch ignores.

    Raises:
        ValueError: a git-lfs pointer, a web page, a file that is damaged or cannot be read.
    """
    with readable(path), path.open("rb") as file:
        head = file.read(32)
        packed = zipfile.is_zipfile(file)
    if head.startswith(b"version https://git-lfs"):
        raise ValueError(f"{path} is a git-lfs pointer, not the weights: `git lfs pull` gets them")
    if head.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        raise ValueError(f"{path} is a web page, not a checkpoint: the download went wrong")
    if not packed:
        return
    try:
        with zipfile.ZipFile(path) as archive:
            entry = archive.testzip()
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path}: checkpoint damaged ({error})") from error
    if entry is not None:
        raise ValueError(f"{path}: checkpoint damaged: wrong checksum of its entry '{entry}'")


def _load(path: Path) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected pickle protocol")
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if not zipfile.is_zipfile(path):
            raise ValueError(f"{path}: checkpoint incomplete, or not a checkpoint") from error
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        raise ValueError(
            f"{path}: holds more than tensors and plain data ({named.group(1) if named else '?'}), "
            "which is not loaded for safety; save it again without the Python objects"
        ) from error
    except Exception as error:  # anything that unpickling foreign bytes comes to
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise ValueError(
            f"{path}: checkpoint incomplete, or not a checkpoint ({reason})"
        ) from error


def find_device(name: str | torch.device) -> torch.device:
    """The device of that name, ready to use.

    Raises:
        ValueError: no such device, or none here.

    Example:
        >>> find_device("cpu")
        device(type='cpu')
    """
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        reason = str(error).split("\n")[0]
        raise ValueError(f"device '{name}' cannot be used here ({reason}); try cpu") from error
    return device


def export_checkpoint(name_or_path: str | Path, folder: str | Path) -> list[Path]:
    """:func:`export_model` of a checkpoint, with what it says of its run and its metrics.

    Raises:
        ValueError: as of `load_model` and `export_model`.
    """
    path = find_checkpoint(name_or_path)
    content = read_checkpoint(path)
    return export_model(load_model(path), folder, content["config"], content["metrics"])


def export_model(
    model: EnergyModel,
    folder: str | Path,
    config: Mapping[str, Any] | None = None,
    metrics: Mapping[str, float] | None = None,
) -> list[Path]:
    """Write `model` as a folder in Hugging Face's layout, which `load_model` reads.

    model.safetensors holds all weights and buffers (random features and normalisers among them)
    and the model's settings; config.json describes them, with a checksum; README.md is a model card
    to fill in. The same model gives the same bytes. A README.md that is there is left alone. Paths
    of files that `config` names are left out.

    Args:
        model: in any mode, on any device, of any dtype.
        folder: created if missing.
        config: plain data of the run, as checkpoints hold it.
        metrics: by name, eV.

    Returns:
        The files written.

    Raises:
        ValueError: weights that are not finite, or a config.json of something else there.
    """
    from safetensors.torch import save

    folder = Path(folder)
    if (folder / CONFIG_FILE).exists() and not _described(folder / CONFIG_FILE):
        raise ValueError(f"{folder / CONFIG_FILE} describes something else: give another folder")
    # Copies: tensors that share memory, or lie in it with gaps, are refused otherwise.
    weights = {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, value in model.state_dict().items()
    }
    for name, value in weights.items():
        if not bool(value.isfinite().all()):
            raise ValueError(f"{name} holds numbers that are not finite")
    data = save(weights, metadata={"format": "pt"})
    settings = {
        "architectures": [type(model).__name__],
        "model_type": "flt_mol",
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "flt_mol_version": flt_mol.__version__,
        "torch_version": str(torch.__version__),
        "units": {"energy": "eV", "length": "Å"},
        "model": model.config.model_dump(),
        "config": _public(config or {}),
        "metrics": {k: v for k, v in (metrics or {}).items() if math.isfinite(v)},
        "elements_seen": model.elements_seen.nonzero().flatten().tolist(),
        "normalizer": {
            name: {"mean": float(part.mean), "std": float(part.std)}
            for name, part in model.normalizers.items()
        },
        "trained_on": dict(model.trained_on),
        "sha256": {WEIGHTS_FILE: hashlib.sha256(data).hexdigest()},
    }
    text = json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    files = {folder / WEIGHTS_FILE: data, folder / CONFIG_FILE: f"{text}\n".encode()}
    if not (folder / "README.md").exists():
        files[folder / "README.md"] = _card(folder.resolve().name, model, settings).encode()
    for path, content in files.items():
        with temporary_path(path, durable=True) as temporary:
            temporary.write_bytes(content)
    return list(files)


def _public(config: Mapping[str, Any]) -> dict[str, Any]:
    """A run's settings without its model, which stands beside, and without places on a disk."""
    public = {key: value for key, value in config.items() if key not in ("model", "output")}
    if isinstance(data := public.get("data"), Mapping):
        is_path = "/" in (data.get("name") or "")
        public["data"] = {**data, "paths": {}, "name": None if is_path else data.get("name")}
    for part, key in (("finetune", "checkpoint"), ("inherited_tag_rule", "from")):
        if isinstance(values := public.get(part), Mapping) and values.get(key):
            public[part] = {**values, key: Path(str(values[key])).name}
    return public


def _described(path: Path) -> dict[str, Any]:
    """A config.json of ours; empty if there is none, or one of another library."""
    if not path.is_file():
        return {}
    try:
        with readable(path):
            settings = json.loads(path.read_bytes())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid json: {error}") from error
    ours = isinstance(settings, dict) and settings.get("format") == FORMAT
    return settings if ours else {}


def _read_export(path: Path) -> dict[str, Any]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    with readable(path):
        data = path.read_bytes()
    try:
        weights = load(data)
    except (SafetensorError, ValueError, KeyError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{path}: incomplete, or not a safetensors file ({error})") from error
    beside = path.with_name(CONFIG_FILE)
    settings = _described(beside)
    stated = settings.get("sha256", {}).get(path.name)
    if stated is not None and stated != hashlib.sha256(data).hexdigest():
        raise ValueError(f"{path}: checkpoint damaged: not the SHA-256 of {CONFIG_FILE}")
    if settings and CONFIG_KEY in weights and settings["model"] != config_of(weights).model_dump():
        raise ValueError(f"{beside}: 'model' is not what the weights hold; it only repeats that")
    return {**settings, "state_dict": weights}


def _card(name: str, model: EnergyModel, settings: Mapping[str, Any]) -> str:
    from ase.data import chemical_symbols

    data = settings["config"].get("data")
    source = f"`{data['name']}`." if data and data.get("name") else "*To be filled in.*"
    elements = ", ".join(chemical_symbols[z] for z in settings["elements_seen"])
    rows = [f"| {key} | {value:.4f} |" for key, value in sorted(settings["metrics"].items())]
    measured = ["| | |", "|---|---:|", *rows] if rows else ["*To be filled in.*"]
    return f"""\
---
library_name: flt_mol
tags: [flt_mol, chemistry, materials, catalysis, adsorption-energy]
---

# {name}

Predicts {", ".join(model.config.outputs).replace("_", " ")} of adsorption systems from the initial
structure: flt_mol {settings["flt_mol_version"]}, {sum(p.numel() for p in model.parameters()):,}
parameters; energies in eV, lengths in Å.

```python
import flt_mol
from ase.io import read

print(flt_mol.predict(read("slab.traj", ":"), "{name}"))  # eV; the path of this folder
```

## Trained on

{source} Elements seen: {elements or "none noted"}; for others energies are extrapolated.

## Measured

{chr(10).join(measured)}

## Limits, licence

*To be filled in: what the model should not be used for, and the licence of the weights.*
"""
