"""The part of a run's configuration that says where its weights come from, and its checks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

NORMALIZER = ("refit", "keep")


@dataclass
class FinetuneConfig:
    """A run that starts from the weights of another.

    Attributes:
        checkpoint: a file, the folder of a run or an export, or a shipped model, relative as
            `data.paths`; None trains from the beginning. The model's settings are then the
            checkpoint's, unless the run's own file or the command line changes some.
        freeze: patterns of names of parameters that stay as they are, as "embedding.*" or
            "encoder.blocks.[01].*"; dropout acts on frozen parts as on others.
        normalizer: "refit" shifts energies by a constant, the median of what the checkpoint is off
            by on the training systems, which other references need; "keep" does not. The scale, and
            what the head says in it, stay.
    """

    checkpoint: str | None = None
    freeze: list[str] = field(default_factory=list)
    normalizer: str = "refit"


def check_finetune(config: FinetuneConfig) -> None:
    """Refuse what cannot work.

    Raises:
        ValueError: a key's value, and what is expected.

    Example:
        >>> check_finetune(FinetuneConfig(normalizer="shift"))
        Traceback (most recent call last):
        ValueError: finetune.normalizer is 'shift', expected one of refit, keep
    """
    if config.normalizer not in NORMALIZER:
        raise ValueError(
            f"finetune.normalizer is {config.normalizer!r}, expected one of {', '.join(NORMALIZER)}"
        )
    patterns = config.freeze
    if not isinstance(patterns, list) or not all(isinstance(x, str) and x for x in patterns):
        raise ValueError(f"finetune.freeze is {patterns!r}, expected a list of patterns of names")
    if patterns and config.checkpoint is None:
        raise ValueError(
            f"finetune.freeze is {patterns} and there is no finetune.checkpoint: it would keep "
            "random weights; give a checkpoint, or leave it out"
        )


def check_held_out(data: Any) -> None:
    """Refuse a share of the training split that is none, or a validation file beside it.

    Args:
        data: a DataConfig.

    Raises:
        ValueError: the key's value, and what is expected.
    """
    share = data.validation_fraction
    if share is None:
        return
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1:
        raise ValueError(f"data.validation_fraction is {share!r}, expected null, or within 0 and 1")
    if data.validation in data.paths:
        raise ValueError(
            f"data.validation_fraction is {share} and data.paths.{data.validation} names a file: "
            "leave one of them out (data.validation_fraction=null takes the file)"
        )
