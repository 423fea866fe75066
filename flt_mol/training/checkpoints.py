"""Checkpoints: tensors and plain data in one file, written whole or not at all."""

from __future__ import annotations

import pickle
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import flt_mol
from flt_mol import resources
from flt_mol.files import temporary_path
from flt_mol.models.energy import CONFIG_KEY, EnergyModel

FORMAT = "flt_mol.checkpoint"
FORMAT_VERSION = 1
RELEASED_WEIGHTS = "weights.ckpt"
_PREFIXES = ("module.", "_orig_mod.", "model.", "ema.")


def save_checkpoint(
    path: str | Path,
    model: EnergyModel,
    config: Mapping[str, Any],
    metrics: Mapping[str, float] | None = None,
) -> Path:
    """Write `model` with the run's plain `config` and `metrics` to `path`.

    The file holds a dict of tensors and plain data (``torch.load(weights_only=True)`` reads it).
    It is written to a temporary name beside `path`, then renamed.
    """
    path = Path(path)
    content = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "flt_mol_version": flt_mol.__version__,
        "torch_version": str(torch.__version__),
        "units": {"energy": "eV", "length": "Å"},
        "config": dict(config),
        "metrics": dict(metrics or {}),
        "elements_seen": model.elements_seen.nonzero().flatten().tolist(),
        "state_dict": {k: v.detach().cpu().clone() for k, v in model.state_dict().items()},
    }
    with temporary_path(path) as temporary:
        torch.save(content, temporary)
    return path


def find_checkpoint(name_or_path: str | Path) -> Path:
    """A checkpoint file by path, by run folder (its best.ckpt), or by the name of a shipped model.

    Raises:
        ValueError: none of these, naming the shipped models that have weights.
    """
    path = Path(name_or_path)
    if path.is_file():
        return path
    if (path / "best.ckpt").is_file():
        return path / "best.ckpt"
    models = resources.folder("models")
    shipped = sorted(file.parent.name for file in models.glob(f"*/{RELEASED_WEIGHTS}"))
    if str(name_or_path) in shipped:
        return models / str(name_or_path) / RELEASED_WEIGHTS
    raise ValueError(
        f"no checkpoint at '{name_or_path}': give a .ckpt file, the folder of a run, "
        f"or a shipped model ({', '.join(shipped) or 'none has weights'})"
    )


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """The content of a checkpoint file, on CPU; a bare state dict is put under ``state_dict``.

    Raises:
        ValueError: not readable as a checkpoint, cut short, or asking for more than tensors and
            plain data; the message names the file.
    """
    path = Path(path)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected pickle protocol")
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if not zipfile.is_zipfile(path):
            raise ValueError(f"{path}: checkpoint incomplete, or not a checkpoint") from error
        raise ValueError(
            f"{path}: holds more than tensors and plain data, which is not loaded for safety's "
            f"sake; save it again without the Python objects. torch says: {error}"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise ValueError(f"{path}: checkpoint incomplete, or not a checkpoint ({error})") from error
    if not isinstance(content, Mapping):
        raise ValueError(f"{path}: holds a {type(content).__name__}, not a checkpoint")
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(content.get(key), Mapping):
            return {**content, "state_dict": content[key]}
    if content and all(isinstance(value, Tensor) for value in content.values()):
        return {"state_dict": content}
    raise ValueError(f"{path}: no 'state_dict' in it (keys: {', '.join(map(str, content))})")


def load_model(name_or_path: str | Path, map_location: str | torch.device = "cpu") -> EnergyModel:
    """The trained model of a checkpoint, in eval mode.

    Prefixes left by DDP, torch.compile and wrappers are stripped; weights of any float dtype
    become float32.

    Args:
        name_or_path: see `find_checkpoint`.
        map_location: where the model goes.

    Raises:
        ValueError: no or no whole checkpoint, or missing, extra or wrongly shaped keys, listed.
    """
    path = find_checkpoint(name_or_path)
    weights = strip_prefixes(read_checkpoint(path)["state_dict"])
    try:
        config = EnergyModel.config_of(weights)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    with torch.random.fork_rng(devices=[]):
        model = EnergyModel(config)
    problems = _differences(model.state_dict(), weights)
    if problems:
        raise ValueError(f"{path} does not fit the model it describes:\n  " + "\n  ".join(problems))
    model.load_state_dict(weights)
    return model.eval().to(map_location)


def strip_prefixes(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Drop wrappers' prefixes that every key carries, however often.

    Example:
        >>> list(strip_prefixes({"module._orig_mod.head.bias": torch.zeros(1)}))
        ['head.bias']
    """
    out = dict(weights)
    while out:
        shared = [p for p in _PREFIXES if all(key.startswith(p) for key in out)]
        if not shared:
            break
        out = {key.removeprefix(shared[0]): value for key, value in out.items()}
    return out


def _differences(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> list[str]:
    lines = [f"missing: {key}" for key in expected if key not in found]
    lines += [f"not known: {key}" for key in found if key not in expected]
    lines += [
        f"wrong shape: {key} is {tuple(found[key].shape)}, expected {tuple(value.shape)}"
        for key, value in expected.items()
        if key in found and found[key].shape != value.shape and key != CONFIG_KEY
    ]
    return lines
