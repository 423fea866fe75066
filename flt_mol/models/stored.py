"""Weights describe themselves: a bare state dict is enough to build the model again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from flt_mol.models.config import EnergyConfig
from flt_mol.models.idle import without_idle

__all__ = ["CONFIG_KEY", "add_config", "drop_config", "stored_config"]

CONFIG_KEY = "config_json"


def add_config(model: Any, weights: Any, prefix: str, metadata: Any) -> None:
    """Hook of `state_dict`: the model's configuration as JSON, in a tensor of bytes."""
    text = json.dumps(asdict(model.config), sort_keys=True).encode()
    weights[f"{prefix}{CONFIG_KEY}"] = torch.tensor(list(text), dtype=torch.uint8)


def drop_config(model: Any, weights: Any, prefix: str, *rest: Any) -> None:
    """Hook before `load_state_dict`: the configuration is no weight."""
    weights.pop(f"{prefix}{CONFIG_KEY}", None)


def stored_config(weights: Mapping[str, Tensor]) -> EnergyConfig:
    """The configuration in a state dict, without settings that had no effect.

    Raises:
        ValueError: it carries none.
    """
    if CONFIG_KEY not in weights:
        raise ValueError(f"these weights carry no model configuration ('{CONFIG_KEY}')")
    text = bytes(weights[CONFIG_KEY].to(torch.uint8).tolist()).decode()
    return without_idle(EnergyConfig.from_dict(json.loads(text)))
