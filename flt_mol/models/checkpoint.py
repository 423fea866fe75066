"""Checkpoints: tensors and plain data in one file, written completely or not at all."""

from __future__ import annotations

import hashlib
import io
import json
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from flt_mol.files import VERSION, find_shipped, foreign, readable, temporary_path
from flt_mol.models.config import EnergyConfig, explain
from flt_mol.models.energy import CONFIG_KEY, EnergyModel, add_buffers

FORMAT = "flt_mol.checkpoint"
FORMAT_VERSION = 2
WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
# Names under which tools keep weights, averaged ones first.
_STATE_DICTS = (
    *("ema_state_dict", "state_dict_ema", "model_ema", "ema_model", "ema"),
    *("state_dict", "model_state_dict", "model"),
)
_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_IN_FOLDERS = ("best.ckpt", "weights.ckpt", WEIGHTS_FILE)


def save_checkpoint(
    path: str | Path,
    model: EnergyModel,
    config: Mapping[str, Any],
    metrics: Mapping[str, float] | None = None,
    systems: Mapping[str, Any] | None = None,
) -> Path:
    """Write `model` with the run's plain `config` and `metrics` to `path`.

    The file holds a dict of tensors and plain data (``torch.load(weights_only=True)`` reads it).

    Args:
        path: missing folders are created.
        model: with the weights to predict with, averaged ones where a run averages.
        config: plain data.
        metrics: by name.
        systems: sids, ``{"trained": [...], "held_out": [...]}``.
    """
    path = Path(path)
    content: dict[str, Any] = {
        **header(model),
        "config": dict(config),
        "metrics": dict(metrics or {}),
        "state_dict": {k: v.detach().cpu().clone() for k, v in model.state_dict().items()},
    }
    if systems is not None:
        content["systems"] = dict(systems)
    written = io.BytesIO()  # torch's writer hides that a disk is full
    torch.save(content, written)
    with temporary_path(path, durable=True) as temporary:
        temporary.write_bytes(written.getbuffer())
    return path


def header(model: EnergyModel) -> dict[str, Any]:
    """Header of every model file: format, versions, units, what it was trained on."""
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
    path, name = Path(name_or_path), str(name_or_path)
    if path.name == CONFIG_FILE:
        path = path.parent
    for candidate in (path, *(path / file for file in _IN_FOLDERS)):
        if candidate.is_file():
            return candidate
    if (path / "resume.ckpt").is_file():
        raise ValueError(f"{name}: no epoch of the run has ended: give its command again")
    try:
        return find_shipped(name, "models/*/weights.ckpt")
    except ValueError as error:
        raise ValueError(f"no checkpoint at '{name}', and {error}") from None


def load_model(name_or_path: str | Path, map_location: str | torch.device = "cpu") -> EnergyModel:
    """The trained model of a checkpoint, in eval mode.

    Weights of any float dtype become float32; averaged ones (EMA) are taken where there are some.

    Args:
        name_or_path: see `find_checkpoint`.
        map_location: where the model goes.

    Raises:
        ValueError: no such device here; no or no whole checkpoint; missing, extra or wrongly
            shaped or typed keys, listed.
    """
    device = find_device(map_location)
    path = find_checkpoint(name_or_path)
    content = read_checkpoint(path)
    weights = content["state_dict"]
    with torch.random.fork_rng(devices=[]):
        model = EnergyModel(_config(path, weights))
    add_buffers(model, weights)
    if problems := misfits(model.state_dict(), weights):
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
        text = bytes(weights[CONFIG_KEY].to(torch.uint8).tolist()).decode()
        return EnergyConfig.model_validate(json.loads(text))
    except ValidationError as error:
        raise ValueError(f"{path}: {explain(error, EnergyConfig, 'model.')}") from error
    except ValueError as error:
        raise ValueError(f"{path}: its model configuration is damaged: {error}") from error


def read_checkpoint(name_or_path: str | Path) -> dict[str, Any]:
    """The content of a checkpoint file, on CPU, the model's weights by name in ``state_dict``.

    Weights are found under the names that tools give them, averaged ones (EMA) first, or bare;
    names of wrappers (DDP, torch.compile, modules that hold the model) are stripped. ``config``,
    ``metrics``, ``trained_on`` and ``systems`` are mappings, empty where there are none.

    Args:
        name_or_path: see `find_checkpoint`.

    Raises:
        ValueError: damaged, not a checkpoint, of a later format, or asking for more than tensors
            and plain data; the message names the file.
    """
    path = find_checkpoint(name_or_path)
    refuse_damaged(path)
    content = _load_export(path) if path.suffix.lower() == ".safetensors" else _load(path)
    if not isinstance(content, Mapping):
        raise ValueError(f"{path}: holds a {type(content).__name__}, not a checkpoint")
    ours = content.get("format") == FORMAT
    version = content.get("format_version")
    if ours and version not in range(1, FORMAT_VERSION + 1):
        raise ValueError(f"{path}: format {version}, this flt_mol reads up to {FORMAT_VERSION}")
    found = dict(content) if ours else {}
    try:
        for key in ("config", "metrics", "trained_on", "systems"):
            found[key] = dict(found.get(key) or {})
        found["state_dict"] = _find_weights(content)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    return found


def refuse_damaged(path: Path) -> None:
    """ValueError for a file that cannot be read, is of another kind at first sight, or damaged.

    Checksums are compared, too: torch ignores them.
    """
    with readable(path), path.open("rb") as file:
        packed = zipfile.is_zipfile(file)
    if text := foreign(path):
        raise ValueError(f"{path} is not a checkpoint: {text}")
    if packed:
        try:
            with zipfile.ZipFile(path) as archive:
                wrong = archive.testzip()
        except Exception as error:  # anything that foreign bytes come to
            raise ValueError(f"{path}: checkpoint damaged ({error})") from error
        if wrong is not None:
            raise ValueError(f"{path}: checkpoint damaged: wrong checksum of its entry '{wrong}'")


def _load(path: Path) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected pickle protocol")
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # anything that unpickling foreign bytes comes to
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        reason = f"holds {named[1]}: only tensors and plain data load" if named else None
        raise ValueError(f"{path}: {reason or 'incomplete, or not a checkpoint'}") from error


def _find_weights(content: Mapping[str, Any]) -> dict[str, Tensor]:
    for weights in (*(content.get(key) for key in _STATE_DICTS), content):
        if not isinstance(weights, Mapping):
            continue
        ends = [key for key in weights if f".{key}".endswith(f".{CONFIG_KEY}")]
        roots = [key.removesuffix(CONFIG_KEY) for key in ends]
        if len(roots) > 1:
            raise ValueError(f"weights of several models, with the prefixes {roots}; save one")
        if roots:
            return _without_wrappers(weights, roots[0])
    raise ValueError(f"no weights that carry a model configuration ('{CONFIG_KEY}')")


def _without_wrappers(weights: Mapping[str, Any], root: str) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for key, value in weights.items():
        if not key.startswith(root):
            continue
        if not isinstance(value, Tensor):
            raise ValueError(f"'{key}' is a {type(value).__name__}, expected a tensor")
        parts = key.removeprefix(root).split(".")
        out[".".join(part for part in parts if part not in _WRAPPERS)] = value
    return out


def misfits(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> list[str]:
    """Differences between weights `found` and `expected`, a line for each name."""
    lines = [f"missing: {key}" for key in expected if key not in found]
    lines += [f"not known: {key}" for key in found if key not in expected]
    for key, want in expected.items():
        have = want if key == CONFIG_KEY else found.get(key, want)
        floats = have.is_floating_point() == want.is_floating_point() and not have.is_complex()
        if have.shape != want.shape or not floats:
            shown = (f"{tuple(x.shape)} of {x.dtype}" for x in (have, want))
            lines.append(f"{key} is {next(shown)}, expected {next(shown)}")
    return lines


def find_device(name: str | torch.device) -> torch.device:
    """The device of that name, ready to use; ValueError where there is none."""
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
    settings = described(path.with_name(CONFIG_FILE))
    stated = settings.get("sha256", {}).get(path.name)
    if stated is not None and stated != hashlib.sha256(data).hexdigest():
        raise ValueError(f"{path}: checkpoint damaged: not the SHA-256 of {CONFIG_FILE}")
    return {**settings, "state_dict": weights}
