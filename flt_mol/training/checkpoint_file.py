"""Reading a checkpoint file that may be damaged, foreign, or not a checkpoint at all."""

from __future__ import annotations

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
from torch import Tensor

from flt_mol.models.energy import CONFIG_KEY
from flt_mol.training.pretrained_file import read_pretrained, refuse_foreign
from flt_mol.training.weight_names import model_weights

FORMAT = "flt_mol.checkpoint"
FORMAT_VERSION = 1

_STATE_DICTS = ("state_dict", "model_state_dict", "model")
_AVERAGED = ("ema_state_dict", "state_dict_ema", "model_ema", "ema_model", "ema")
_RAW = ("raw_state_dict", "current_model_state")  # the second is Lightning's


def read_checkpoint(path: str | Path, averaged: bool = True) -> dict[str, Any]:
    """The content of a checkpoint file, on CPU, the model's weights by name in ``state_dict``.

    Weights are found under the names that tools give them, or bare, and wrappers' names are taken
    off (:func:`~flt_mol.training.weight_names.model_weights`). A ``config`` that is no mapping is
    left out, and so is its part ``data`` where that does not say plainly what a run was trained on,
    and whatever in ``trained_on`` is no finite number by its name.

    Args:
        path: a file; of a folder that `save_pretrained` wrote, its ``model.safetensors``.
        averaged: whether averaged weights (EMA) are taken where the file has both.

    Raises:
        ValueError: damaged, cut short, not readable as a checkpoint, of a later format, or asking
            for more than tensors and plain data; the message names the file.
    """
    path = Path(path)
    if path.suffix.lower() == ".safetensors":
        content: Any = read_pretrained(path)
    else:
        refuse_damaged(path)
        content = _load(path)
    if not isinstance(content, Mapping):
        raise ValueError(f"{path}: holds a {type(content).__name__}, not a checkpoint")
    _refuse_later(path, content)
    found = _find_weights(path, content, averaged)
    if content and all(isinstance(value, Tensor) for value in content.values()):
        return {"state_dict": found}
    return _with_plain_config({**content, "state_dict": found})


def _refuse_later(path: Path, content: Mapping[str, Any]) -> None:
    version = content.get("format_version")
    if content.get("format") == FORMAT and isinstance(version, int) and version > FORMAT_VERSION:
        raise ValueError(
            f"{path}: written by flt_mol {content.get('flt_mol_version')} in format {version}, and "
            f"this version reads up to {FORMAT_VERSION}: install that version or a later one"
        )


def _find_weights(path: Path, content: Mapping[str, Any], averaged: bool) -> dict[str, Tensor]:
    """The weights meant. An average that leaves out what is not averaged has it from the others."""
    try:
        raw = _mapping(content, _STATE_DICTS)
        if not averaged:
            training = content.get("training_state")
            before = _mapping(content, _RAW) or _mapping(
                training if isinstance(training, Mapping) else {}, _RAW
            )
            raw = raw if before is None else before
        found = {} if raw is None else model_weights(_weights(path, raw), averaged)
        average = _mapping(content, _AVERAGED)
        if average is not None and (averaged or not found):
            average = _mapping(average, (*_STATE_DICTS, "module")) or average
            if average and all(isinstance(value, Tensor) for value in average.values()):
                over = model_weights(_weights(path, average))
                found = over if CONFIG_KEY in over else {**found, **over}
        if not found and content and all(isinstance(x, Tensor) for x in content.values()):
            found = model_weights(_weights(path, content), averaged)
    except ValueError as error:
        text = str(error)
        raise ValueError(text if str(path) in text else f"{path}: {text}") from None
    if not found:
        keys = ", ".join(map(str, list(content)[:20]))
        raise ValueError(f"{path}: no 'state_dict' in it (keys: {keys})")
    return found


def _mapping(content: Mapping[str, Any], keys: tuple[str, ...]) -> Mapping[Any, Any] | None:
    return next((content[key] for key in keys if isinstance(content.get(key), Mapping)), None)


def refuse_damaged(path: Path) -> None:
    """Compare the checksums, which torch.load does not."""
    try:
        with path.open("rb") as file:
            head = file.read(32)
            packed = zipfile.is_zipfile(file)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from error
    refuse_foreign(path, head)
    if not packed:
        return
    try:
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
    content["trained_on"] = _finite(content.get("trained_on"))
    config = content.get("config")
    if not isinstance(config, Mapping):
        content.pop("config", None)
        return content
    content["config"] = dict(config)
    if "data" in config and not is_data(config["data"]):
        del content["config"]["data"]
    return content


def _finite(numbers: Any) -> dict[str, float]:
    return {
        name: value
        for name, value in (numbers.items() if isinstance(numbers, Mapping) else ())
        if isinstance(name, str)
        and isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
    }


def is_data(data: Any) -> bool:
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
