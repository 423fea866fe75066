"""Outputs of a fine-tuned model that its training data have no targets for are left out."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from flt_mol.models.checkpoint import checkpoint_config
from flt_mol.training.config import LossConfig, RunConfig
from flt_mol.training.losses import AUXILIARY
from flt_mol.training.run_data import TARGETS, open_split, some_have

__all__ = ["left_out_note", "without_idle_outputs"]


def without_idle_outputs(config: RunConfig) -> RunConfig:
    """A run that fine-tunes, without those outputs of its checkpoint that nothing could train.

    That are initial energies and displacements where no record of the training split holds their
    target: most files of one's own hold no relaxed positions. The heads of these outputs are not
    taken over, and settings of the loss that are about them go back to their defaults; energies
    are the same without them. Where some records hold a target the output stays, and so it does
    where energies depend on it (``model.feedback=positions``).

    It depends on the settings and the data alone, so that a run that goes on finds the same.
    """
    names = [name for name in _of_checkpoint(config) if not _is_trainable(config, name)]
    for name in names:
        outputs = [other for other in config.model.outputs if other != name]
        if name == "displacement":
            loss = LossConfig(
                energy_initial_weight=config.loss.energy_initial_weight,
                recycle_weights=config.loss.recycle_weights,
            )
        else:
            loss = config.loss.model_copy(update={"energy_initial_weight": None})
        model = config.model.model_copy(update={"outputs": outputs})
        config = config.model_copy(update={"model": model, "loss": loss})
    return config


def left_out_note(given: RunConfig, config: RunConfig) -> str | None:
    """What to say of outputs that :func:`without_idle_outputs` took out; None where there are none.

    Args:
        given: the run before.
        config: the run after.
    """
    gone = [name for name in given.model.outputs if name not in config.model.outputs]
    if not gone:
        return None
    stored = ", ".join(getattr(given.data, TARGETS[name][0]) for name in gone)
    return (
        f"no training structure holds {stored}: trained without the checkpoint's output "
        f"{', '.join(gone)}; what it says of energies stays"
    )


def _of_checkpoint(config: RunConfig) -> Iterator[str]:
    start, outputs = config.finetune.checkpoint, config.model.outputs
    if start is None or not set(AUXILIARY) & set(outputs):
        return
    theirs = checkpoint_config(start).outputs
    for name in AUXILIARY:
        moved_by = name == "displacement" and config.model.feedback == "positions"
        if name in outputs and name in theirs and not moved_by:
            yield name


def _is_trainable(config: RunConfig, name: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they come when the split is opened in earnest
        try:
            dataset: Any = open_split(config, config.data.train)
            return some_have(dataset, TARGETS[name][1])
        except (OSError, ValueError):  # likewise
            return True
