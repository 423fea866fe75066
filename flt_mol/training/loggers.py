"""Where the numbers of a run go: CSV, TensorBoard, Weights & Biases."""

from __future__ import annotations

import csv
import importlib.util
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

__all__ = ["make_loggers"]


def make_loggers(names: Sequence[str], folder: Path, resume: Path | None = None) -> list[Logger]:
    """Loggers that write to `folder`/logs; of a run that goes on they keep what came before.

    Args:
        names: of "csv", "tensorboard", "wandb".
        folder: of the run.
        resume: the point that the run goes on from; later numbers are dropped, they come again.

    Raises:
        ValueError: "wandb", which is not installed.
    """
    step = None if resume is None else _step(resume)
    made: list[Logger] = []
    for name in names:
        if name == "csv":
            made.append(_csv(folder, step))
        elif name == "tensorboard":
            made.append(
                TensorBoardLogger(folder, name="logs", version="tensorboard", purge_step=step)
            )
        else:
            made.append(_wandb(folder))
    return made


def _step(resume: Path) -> int:
    content: dict[str, Any] = torch.load(resume, map_location="cpu", weights_only=True, mmap=True)
    return int(content["global_step"])


def _csv(folder: Path, step: int | None) -> CSVLogger:
    logger = CSVLogger(folder, name="logs", version="csv")
    file = Path(logger.log_dir) / "metrics.csv"
    rows: list[dict[str, str]] = []
    if step is not None and file.exists():
        with file.open(newline="", encoding="utf-8") as lines:
            rows = [row for row in csv.DictReader(lines) if _is_before(row.get("step"), step)]
    with warnings.catch_warnings():
        # Its file is begun anew, with the rows that are kept.
        warnings.filterwarnings("ignore", message="Experiment logs directory")
        experiment = logger.experiment
    for row in rows:
        values = {k: float(v) for k, v in row.items() if k not in ("step", "epoch") and v}
        epoch = {"epoch": int(float(row["epoch"]))} if row.get("epoch") else {}
        experiment.log_metrics({**values, **epoch}, int(row["step"]))
    logger.save()
    return logger


def _is_before(written: str | None, step: int) -> bool:
    # Lightning counts from 0: step s is logged once s + 1 are done. The last line may be cut short.
    return written is not None and written.isdigit() and int(written) < step


def _wandb(folder: Path) -> Logger:
    if importlib.util.find_spec("wandb") is None:
        raise ValueError(
            "training.loggers has wandb, which is not installed: pip install wandb, or take it out"
        )
    from lightning.pytorch.loggers import WandbLogger

    return WandbLogger(name=folder.name, save_dir=str(folder / "logs"), project="flt_mol")
