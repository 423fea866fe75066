"""The model of a run that fine-tunes: the checkpoint's, with what the run itself sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import yaml
from hydra import compose
from hydra.errors import HydraException
from omegaconf import DictConfig

from flt_mol.models.energy import EnergyConfig
from flt_mol.training.checkpoints import checkpoint_config, find_checkpoint
from flt_mol.training.finetune_config import FinetuneConfig

__all__ = ["START", "absolute_start", "compose_from", "find_start", "starting_model"]

START = "finetune.checkpoint"


def find_start(file: Path, typed: Mapping[str, str | None]) -> str | None:
    """The checkpoint of a run: its absolute path, or the name of a shipped model; None without.

    Args:
        file: the run's yaml file; a path in it is taken from its folder.
        typed: paths of the command line, taken from the working directory; they come first.

    Raises:
        ValueError: no checkpoint there.
    """
    if START in typed:
        return _absolute(typed[START], Path.cwd())
    section = (yaml.safe_load(file.read_text(encoding="utf-8")) or {}).get("finetune")
    value = section.get("checkpoint") if isinstance(section, Mapping) else None
    return _absolute(value, file.parent)


def absolute_start(config: FinetuneConfig, base: Path) -> FinetuneConfig:
    """`config` with a relative path taken from `base`.

    Raises:
        ValueError: no checkpoint there.
    """
    return replace(config, checkpoint=_absolute(config.checkpoint, base))


def _absolute(value: str | None, base: Path) -> str | None:
    if value is None:
        return None
    if not str(value).strip():
        raise ValueError(f"{START} is empty, expected a checkpoint, or null")
    path = base / str(value)
    if path.exists():
        find_checkpoint(path)
        return str(path.resolve())
    found = find_checkpoint(value)
    return str(found.resolve()) if Path(value).exists() else str(value)


def starting_model(checkpoint: str, overrides: Sequence[str]) -> EnergyConfig:
    """The settings of a checkpoint's model.

    Raises:
        ValueError: no whole checkpoint, or an override that chooses another model.
    """
    for override in overrides:
        if override.lstrip("+").startswith("model="):
            raise ValueError(
                f"'{override}' chooses another model than the checkpoint's, {checkpoint}: leave it "
                "out; single settings are changed with model.KEY=VALUE"
            )
    return checkpoint_config(checkpoint)


def compose_from(name: str, overrides: Sequence[str]) -> DictConfig:
    """Compose a run whose schema has the checkpoint's model: what `model` its defaults name is not.

    Settings under `model` in the file itself stay, as they do when a run's config.yaml is trained
    again.
    """
    try:
        return compose(config_name=name, overrides=[*overrides, "~model"])
    except HydraException as error:
        if "Could not delete 'model" not in str(error):
            raise
    return compose(config_name=name, overrides=list(overrides))
