"""Reading a checkpoint file that may be damaged, foreign, or not a checkpoint at all."""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_STATE_DICTS = ("state_dict", "model_state_dict", "model")


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """The content of a checkpoint file, on CPU; a bare state dict is put under ``state_dict``.

    A ``config`` that is no mapping is left out, and so is its part ``data`` where that does not
    say plainly what a run was trained on.

    Raises:
        ValueError: damaged, cut short, not readable as a checkpoint, or asking for more than
            tensors and plain data; the message names the file.
    """
    path = Path(path)
    _refuse_damaged(path)
    content = _load(path)
    if not isinstance(content, Mapping):
        raise ValueError(f"{path}: holds a {type(content).__name__}, not a checkpoint")
    for key in _STATE_DICTS:
        if isinstance(content.get(key), Mapping):
            whole = {**content, "state_dict": _weights(path, content[key])}
            return _with_plain_config(whole)
    if content and all(isinstance(value, Tensor) for value in content.values()):
        return {"state_dict": _weights(path, content)}
    keys = ", ".join(map(str, list(content)[:20]))
    raise ValueError(f"{path}: no 'state_dict' in it (keys: {keys})")


def _refuse_damaged(path: Path) -> None:
    """Compare the checksums, which torch.load does not."""
    try:
        with path.open("rb") as file:
            if not zipfile.is_zipfile(file):
                return
        with zipfile.ZipFile(path) as archive:
            entry = archive.testzip()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path}: checkpoint damaged ({error}); get or make it again") from error
    if entry is not None:
        name = entry.partition("/")[2] or entry  # torch puts all in a folder of the file's name
        raise ValueError(
            f"{path}: checkpoint damaged: the checksum of its entry '{name}' is wrong; "
            "get or make it again"
        )


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
            f"{path}: holds more than tensors and plain data"
            f"{f' ({named.group(1)})' if named else ''}, which is not loaded for safety's sake; "
            "save it again without the Python objects"
        ) from error
    except Exception as error:  # whatever unpickling foreign bytes comes to
        if isinstance(error, ModuleNotFoundError):
            raise ValueError(f"{path}: reading it needs '{error.name}', not installed") from error
        reason = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip().split("\n")[0]
        raise ValueError(
            f"{path}: checkpoint incomplete, or not a checkpoint ({reason or type(error).__name__})"
        ) from error


def _weights(path: Path, weights: Mapping[Any, Any]) -> dict[str, Tensor]:
    for key, value in weights.items():
        if not isinstance(key, str) or not isinstance(value, Tensor):
            raise ValueError(
                f"{path}: its state_dict holds {key!r} → {type(value).__name__}, "
                "expected a name → tensor for each"
            )
    return dict(weights)


def _with_plain_config(content: dict[str, Any]) -> dict[str, Any]:
    config = content.get("config")
    if not isinstance(config, Mapping):
        content.pop("config", None)
        return content
    content["config"] = dict(config)
    if "data" in config and not _is_data(config["data"]):
        del content["config"]["data"]
    return content


def _is_data(data: Any) -> bool:
    """Whether this can be the `data` part of a run's configuration."""
    if not isinstance(data, Mapping) or not isinstance(data.get("name"), str | None):
        return False
    paths, evaluation = data.get("paths"), data.get("evaluation")
    texts: list[Any] = []
    if paths is not None:
        if not isinstance(paths, Mapping):
            return False
        texts += [*paths, *paths.values()]
    if evaluation is not None:
        if not isinstance(evaluation, list | tuple):
            return False
        texts += evaluation
    return all(isinstance(text, str) for text in texts)
