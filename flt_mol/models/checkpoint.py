"""Checkpoints: tensors and plain data in one file, written whole or not at all."""

from __future__ import annotations

import difflib
import hashlib
import json
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from flt_mol.files import VERSION, readable, shipped_folder, temporary_path
from flt_mol.models.config import EnergyConfig, explain, shipped_name
from flt_mol.models.energy import CONFIG_KEY, EnergyModel, config_of

__all__ = [
    "CONFIG_FILE",
    "WEIGHTS_FILE",
    "checkpoint_config",
    "described",
    "find_checkpoint",
    "find_device",
    "header",
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
_STATE_DICTS = ("state_dict", "model_state_dict", "model")
_AVERAGED = ("ema_state_dict", "state_dict_ema", "model_ema", "ema_model", "ema")
_RAW = ("raw_state_dict", "current_model_state")  # the second is Lightning's
_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_COUNTER = "n_averaged"  # of torch.optim.swa_utils.AveragedModel
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
        training_state: tensors and plain data, as a ``"raw_state_dict"`` that was not averaged.
        systems: sids, ``{"trained": [...], "held_out": [...]}``.
    """
    path = Path(path)
    content: dict[str, Any] = {
        **header(model),
        "config": dict(config),
        "metrics": dict(metrics or {}),
        "state_dict": {k: v.detach().cpu().clone() for k, v in model.state_dict().items()},
    }
    if training_state is not None:
        content["training_state"] = dict(training_state)
    if systems is not None:
        content["systems"] = dict(systems)
    with temporary_path(path, durable=True) as temporary:
        torch.save(content, temporary)
    return path


def header(model: EnergyModel) -> dict[str, Any]:
    """What every file of a model says first: format, versions, units, what it was trained on."""
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "flt_mol_version": VERSION,
        "torch_version": str(torch.__version__),
        "units": {"energy": "eV", "length": "Å"},
        "elements_seen": model.elements_seen.nonzero().flatten().tolist(),
        "trained_on": dict(model.trained_on),
    }


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
    if shipped_name("models", name, "model.yaml") is not None:
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

    Weights of any float dtype become float32.

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


def read_weights(name_or_path: str | Path) -> tuple[Path, dict[str, Tensor]]:
    """The file of a checkpoint and the weights in it, on CPU; raises as `load_model`."""
    path = find_checkpoint(name_or_path)
    return path, read_checkpoint(path)["state_dict"]


def checkpoint_config(name_or_path: str | Path) -> EnergyConfig:
    """The settings of a checkpoint's model; raises as `load_model`."""
    return _config(*read_weights(name_or_path))


def _config(path: Path, weights: Mapping[str, Tensor]) -> EnergyConfig:
    try:
        return config_of(weights)
    except ValidationError as error:
        raise ValueError(f"{path}: {explain(error, EnergyConfig, 'model.')}") from error
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"{path}: its model configuration is damaged: {error}") from error


def read_checkpoint(path: str | Path, averaged: bool = True) -> dict[str, Any]:
    """The content of a checkpoint file, on CPU, the model's weights by name in ``state_dict``.

    Weights are found under the names that tools give them, or bare; names of wrappers (DDP,
    torch.compile, averages, modules that hold the model) are stripped. ``config``, ``metrics``,
    ``trained_on`` and ``systems`` are mappings, empty where there are none.

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
    content = _load_export(path) if exported else _load(path)
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
        found["state_dict"] = _find_weights(content, averaged)
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
    except Exception as error:  # anything that foreign bytes come to
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
            raise ValueError(f"{path}: checkpoint incomplete, or none") from error
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        found = named.group(1) if named else "Python objects"
        raise ValueError(f"{path}: holds {found}: only tensors and plain data load") from error
    except Exception as error:  # anything that unpickling foreign bytes comes to
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise ValueError(f"{path}: checkpoint incomplete, or none ({reason})") from error


def _find_weights(content: Mapping[str, Any], averaged: bool) -> dict[str, Tensor]:
    """Of one model under its own names: under a key that tools use, or bare."""
    keys = (*_AVERAGED, *_STATE_DICTS) if averaged else (*_RAW, *_STATE_DICTS, *_AVERAGED)
    found = {**dict(content.get("training_state") or {}), **content}
    candidates = [found[key] for key in keys if isinstance(found.get(key), Mapping)]
    weighty = [one for one in candidates if any(str(x).endswith(CONFIG_KEY) for x in one)]
    return _of_model((weighty or candidates or [content])[0], averaged)


def _of_model(weights: Mapping[str, Any], averaged: bool) -> dict[str, Tensor]:
    for key, value in weights.items():
        if not isinstance(key, str) or not isinstance(value, Tensor):
            raise ValueError(f"holds {key!r}, a {type(value).__name__}, expected weights by name")
    ends = [key for key in weights if f".{key}".endswith(f".{CONFIG_KEY}")]
    roots = every = [key.removesuffix(CONFIG_KEY) for key in ends]
    if len(every) > 1:
        roots = [root for root in every if _is_average(root, weights) == averaged]
    if not every:
        raise ValueError(f"no weights that carry a model configuration ('{CONFIG_KEY}')")
    if len(roots) != 1:
        names = ", ".join(f"'{root}'" for root in every)
        raise ValueError(f"weights of {len(every)} models, with the prefixes {names}; save one")
    root = roots[0]
    # A model at the top does not own what belongs to one below it.
    deeper = tuple(other for other in every if other != root and other.startswith(root))
    out: dict[str, Tensor] = {}
    for key, value in weights.items():
        if key.startswith(root) and not key.startswith(deeper) and not key.endswith(_COUNTER):
            parts = [part for part in key.removeprefix(root).split(".") if part not in _WRAPPERS]
            out[".".join(parts)] = value
    return out


def _is_average(root: str, weights: Mapping[str, Any]) -> bool:
    words = {"ema", "swa", "avg", "average", "averaged"}
    counter = root.removesuffix("module.") + _COUNTER
    return counter in weights or not words.isdisjoint(re.split(r"[._]", root.lower()))


def misfits(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> list[str]:
    """What keeps weights `found` from being those `expected`, a line for each name."""
    lines = [f"missing: {key}" for key in expected if key not in found]
    lines += [f"not known: {key}" for key in found if key not in expected]
    for key, want in expected.items():
        if key not in found or key == CONFIG_KEY:
            continue
        have = found[key]
        if have.shape != want.shape:
            shapes = f"{tuple(have.shape)}, expected {tuple(want.shape)}"
            lines.append(f"wrong shape: {key} is {shapes}")
        elif have.is_floating_point() != want.is_floating_point() or have.is_complex():
            lines.append(f"wrong type: {key} is {have.dtype}, expected {want.dtype}")
    return lines


def find_device(name: str | torch.device) -> torch.device:
    """The device of that name, ready to use.

    Raises:
        ValueError: no such device, or none here.
    """
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        reason = str(error).split("\n")[0]
        raise ValueError(f"device '{name}' cannot be used here ({reason}); try cpu") from error
    return device


def described(path: Path) -> dict[str, Any]:
    """A config.json of ours; empty if there is none, or one of another library."""
    try:
        settings = json.loads(path.read_bytes()) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not readable as json: {error}") from error
    ours = isinstance(settings, dict) and settings.get("format") == FORMAT
    return settings if ours else {}


def _load_export(path: Path) -> dict[str, Any]:
    from safetensors.torch import load

    with readable(path):
        data = path.read_bytes()
    try:
        weights = load(data)
    except Exception as error:  # anything that foreign bytes come to
        raise ValueError(f"{path}: incomplete, or not a safetensors file ({error})") from error
    beside = path.with_name(CONFIG_FILE)
    settings = described(beside)
    stated = settings.get("sha256", {}).get(path.name)
    if stated is not None and stated != hashlib.sha256(data).hexdigest():
        raise ValueError(f"{path}: checkpoint damaged: not the SHA-256 of {CONFIG_FILE}")
    if settings and CONFIG_KEY in weights and settings["model"] != config_of(weights).model_dump():
        raise ValueError(f"{beside}: 'model' is not what the weights hold; it only repeats that")
    return {**settings, "state_dict": weights}
