"""Reading model.safetensors and the config.json beside it, as `save_pretrained` writes them."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flt_mol.compressed import packing
from flt_mol.models.energy import CONFIG_KEY
from flt_mol.training.weight_names import strip_prefixes

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
PRETRAINED_FORMAT = "flt_mol.pretrained"
PRETRAINED_VERSION = 1
MODEL_TYPE = "flt_mol"

KEYS = (
    "architectures",
    "config",
    "elements_seen",
    "flt_mol_version",
    "format",
    "format_version",
    "metrics",
    "model",
    "model_type",
    "normalizer",
    "sha256",
    "torch_dtype",
    "torch_version",
    "trained_on",
    "units",
)
_OF_OTHERS = ("transformers_version",)  # and whatever begins with _


def read_pretrained(path: Path) -> dict[str, Any]:
    """The content of a safetensors file: ``state_dict``, and what config.json beside it says.

    Of settings in both, those of config.json count: people edit them there.

    Raises:
        ValueError: a file that is damaged, cut short, or not what config.json describes; a
            config.json that is no json, of a later format, or with unknown keys. Names the file.
    """
    data = _bytes(path)
    refuse_foreign(path, data[:32])
    weights = _tensors(path, data)
    config_file = path.with_name(CONFIG_FILE)
    settings = read_settings(config_file)
    if settings is None:
        if not any(key.endswith(CONFIG_KEY) for key in weights):
            raise ValueError(f"{path}: {_without_settings(config_file)}")
        return {"state_dict": weights}
    _refuse_other_weights(path, data, settings)
    weights = strip_prefixes(weights)
    text = json.dumps(settings["model"], sort_keys=True).encode()
    weights[CONFIG_KEY] = torch.tensor(list(text), dtype=torch.uint8)
    _refuse_contradictions(path, settings, weights)
    kept = {"config", "metrics", "units", "elements_seen", "trained_on"}
    kept |= {"flt_mol_version", "torch_version"}
    return {**{key: settings[key] for key in settings if key in kept}, "state_dict": weights}


def _without_settings(config_file: Path) -> str:
    if config_file.is_file():
        told = f"the {CONFIG_FILE} beside it is not one of flt_mol (no format {PRETRAINED_FORMAT})"
    else:
        told = f"there is no {CONFIG_FILE} beside it"
    return (
        f"{told}, and the weights alone do not say which model they are of: put the {CONFIG_FILE} "
        "that save_pretrained, or flt-mol export, wrote with them into the same folder"
    )


def read_settings(path: Path) -> dict[str, Any] | None:
    """A config.json of ours; None where there is none, or one of another library.

    Raises:
        ValueError: as of :func:`read_pretrained`.
    """
    if not path.is_file():
        return None
    try:
        settings = json.loads(_bytes(path))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: this is no valid json: {error}") from error
    if not isinstance(settings, dict) or settings.get("format") != PRETRAINED_FORMAT:
        return None
    version = settings.get("format_version")
    if not isinstance(version, int) or version > PRETRAINED_VERSION:
        raise ValueError(
            f"{path}: written by flt_mol {settings.get('flt_mol_version')} in format {version}, "
            f"and this version reads up to {PRETRAINED_VERSION}: install that version or a later "
            "one"
        )
    for key in settings:
        if key not in KEYS and key not in _OF_OTHERS and not key.startswith("_"):
            near = difflib.get_close_matches(key, KEYS, n=1)
            mend = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(KEYS)}"
            raise ValueError(f"{path}: unknown key '{key}'; {mend}")
    if not isinstance(settings.get("model"), dict):
        raise ValueError(f"{path}: no 'model' in it, a mapping of the model's settings")
    return settings


def refuse_foreign(path: Path, head: bytes) -> None:
    """Refuse what stands in a checkpoint's place: something compressed, a pointer, a web page.

    Args:
        path: of the file.
        head: its first 32 bytes; torch's own files are zip archives.

    Raises:
        ValueError: naming the file and the kind.
    """
    if head.startswith(b"version https://git-lfs"):
        raise ValueError(f"{path} is a git-lfs pointer, not the weights: `git lfs pull` gets them")
    if head.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        raise ValueError(f"{path} is a web page or XML, no checkpoint: the download went wrong")
    kind = packing(head)
    if kind not in (None, "zip"):
        raise ValueError(f"{path} is compressed ({kind}): unpack it first")


def described(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """What config.json repeats of the weights, for people: elements seen, and normalisers in eV."""
    seen = weights.get("elements_seen", torch.zeros(0))
    names = {"energy": "normalizer", "energy_initial": "normalizer_initial"}
    return {
        "elements_seen": seen.nonzero().flatten().tolist(),
        "normalizer": {
            output: {part: float(weights[f"{name}.{part}"]) for part in ("mean", "std")}
            for output, name in names.items()
            if all(_is_number(weights.get(f"{name}.{part}")) for part in ("mean", "std"))
        },
    }


def _is_number(value: Tensor | None) -> bool:
    return value is not None and value.numel() == 1 and not value.is_complex()


def digest(data: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from error


def _tensors(path: Path, data: bytes) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(data)
    except (SafetensorError, ValueError, KeyError, RuntimeError, OverflowError) as error:
        raise ValueError(
            f"{path}: checkpoint incomplete, or not a safetensors file ({error})"
        ) from error


def _refuse_other_weights(path: Path, data: bytes, settings: Mapping[str, Any]) -> None:
    """The format itself has no checksums."""
    stated = settings.get("sha256")
    stated = stated.get(path.name) if isinstance(stated, Mapping) else None
    if stated is not None and stated != digest(data):
        raise ValueError(
            f"{path}: checkpoint damaged: its SHA-256 is not the one in {CONFIG_FILE}; get it "
            f"again, or take 'sha256' out of {CONFIG_FILE} if it was changed on purpose"
        )


def _refuse_contradictions(
    path: Path, settings: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> None:
    for key, held in described(weights).items():
        if key in settings and settings[key] != held:
            raise ValueError(
                f"{path.with_name(CONFIG_FILE)}: {key} is {settings[key]}, and the weights hold "
                f"{held}: it only repeats what they hold, so put that back, or leave it out"
            )
