"""Fine-tuning in one call: a checkpoint and a file of structures with energies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from flt_mol.data.tags import Surface
from flt_mol.training.config import RunConfig, load_run_config
from flt_mol.training.run import TrainingResult, closing_lines, train

__all__ = ["finetune"]


def finetune(
    checkpoint: str | Path,
    structures: str | Path,
    validation: str | Path | None = None,
    *,
    freeze: Sequence[str] = (),
    normalizer: str = "refit",
    energy: str = "y_relaxed",
    validation_fraction: float = 0.2,
    tag_rule: Surface | None = None,
    outputs: Sequence[str] | None = None,
    output: str | Path | None = None,
    console: Console | None = None,
    **training: Any,
) -> TrainingResult:
    """Train a checkpoint's model further on structures of one's own; `configs/finetune.yaml`.

    Args:
        checkpoint: a file, the folder of a run or an export, or a shipped model.
        structures: a file or folder of records with energies, as
            :func:`flt_mol.data.open_dataset` reads them.
        validation: another one, by which the epoch is chosen; None holds some structures out.
        freeze: see :class:`~flt_mol.training.config.FinetuneConfig`.
        normalizer: see there, too.
        energy: name of the stored target, eV; "calculator" for the energy that ASE's files hold.
        validation_fraction: share that is held out where there is no `validation`.
        tag_rule: by which rule of :func:`flt_mol.data.tag_slab` the structures are tagged, for
            later predictions with ``--tag-slab``; None takes the checkpoint's.
        outputs: of the model, as ``["energy"]``; None takes the checkpoint's, without those that no
            structure has a target for.
        output: folder of the run; None makes ``runs/finetune``, numbered when taken.
        console: where progress goes.
        **training: settings of :class:`~flt_mol.training.config.TrainingConfig`, as ``epochs=50``.

    Raises:
        ValueError: as of :func:`flt_mol.training.run.train`, or an unknown setting.
    """
    paths = [f"finetune.checkpoint={checkpoint}", f"data.paths.train={structures}"]
    if validation is not None:
        paths.append(f"data.paths.val={validation}")
    config = load_run_config("finetune", paths)
    rule = None if tag_rule is None else str(tag_rule)
    values = config.model_dump()
    values["data"] |= {"energy": energy, "tag_rule": rule}
    if validation is None:
        values["data"]["validation_fraction"] = validation_fraction
    values["training"] |= training
    values["finetune"] |= {"freeze": list(freeze), "normalizer": normalizer}
    if outputs is not None:
        values["model"]["outputs"] = list(outputs)
    values["output"] = None if output is None else str(output)
    config = RunConfig.model_validate(values)
    console = console or Console()
    result = train(config, "finetune", console)
    for line in closing_lines(config, result.best)[1:] if not result.was_finished else ():
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return result
