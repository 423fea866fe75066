"""Where a checkpoint is: a file, the folder of a run or an export, a shipped model."""

from __future__ import annotations

import csv
import difflib
from pathlib import Path

from flt_mol.files import natural_key, shipped_folder
from flt_mol.outputs import counted
from flt_mol.training.pretrained_file import CONFIG_FILE, WEIGHTS_FILE

__all__ = ["RELEASED_WEIGHTS", "SWEEP_TABLE", "find_checkpoint"]

RELEASED_WEIGHTS = "weights.ckpt"
SWEEP_TABLE = "sweep.csv"
_IN_FOLDERS = ("best.ckpt", RELEASED_WEIGHTS, WEIGHTS_FILE)
_SHOWN = 8  # folders in a message


def find_checkpoint(name_or_path: str | Path) -> Path:
    """A checkpoint file by path, by folder, or by the name of a shipped model.

    Folders are those of runs (their best.ckpt) and those that `save_pretrained` wrote (their
    model.safetensors).

    Raises:
        ValueError: none of these, naming the folders inside that are some, or the shipped models
            that have weights.
    """
    path = Path(name_or_path)
    of_config = path.name == CONFIG_FILE and path.is_file()
    if path.is_file() and not of_config:
        return path
    folder = path.parent if of_config else path
    for name in (WEIGHTS_FILE,) if of_config else _IN_FOLDERS:
        if (folder / name).is_file():
            return folder / name
    if (folder / CONFIG_FILE).is_file():
        raise ValueError(
            f"{path}: there is a {CONFIG_FILE}, and no {WEIGHTS_FILE} beside it, which holds the "
            "weights: copy it there, or write both anew with flt-mol export"
        )
    models = shipped_folder("models")
    shipped = sorted(file.parent.name for file in models.glob(f"*/{RELEASED_WEIGHTS}"))
    if str(name_or_path) in shipped:
        return models / str(name_or_path) / RELEASED_WEIGHTS
    _refuse_outer_folder(path)
    if (models / str(name_or_path) / "model.yaml").is_file():
        runs = sorted(shipped_folder("configs").glob(f"*_{name_or_path}.yaml"))
        how = f" (flt-mol train {runs[0].stem})" if runs else ""
        raise ValueError(
            f"no checkpoint at '{name_or_path}': the named model of that name is shipped without "
            f"weights; train one{how}, or take one that has some: {', '.join(shipped)}"
        )
    spelt = str(name_or_path).lower().replace("_", "-")
    near = [name for name in shipped if name.lower().replace("_", "-") == spelt]
    near = near or difflib.get_close_matches(str(name_or_path), shipped, n=1, cutoff=0.8)
    meant = f"did you mean {near[0]}? Else give" if near else "give"
    raise ValueError(
        f"no checkpoint at '{name_or_path}': {meant} a .ckpt file, the folder of a run, one that "
        f"save_pretrained wrote, or a shipped model ({', '.join(shipped) or 'none has weights'})"
    )


def _refuse_outer_folder(folder: Path) -> None:
    """Name the folders with checkpoints in a folder, such as that of a sweep."""
    found = {path.parent for name in _IN_FOLDERS for path in folder.glob(f"*/{name}")}
    if not found:
        return
    ranked = [one for one in _sweep_order(folder) if one in found]
    places = [*ranked, *sorted(found - set(ranked), key=natural_key)]
    order = ", the lowest validation MAE first" if ranked else ""
    more = f" and {len(places) - _SHOWN} more" if len(places) > _SHOWN else ""
    raise ValueError(
        f"no checkpoint at '{folder}' itself, but in {counted(len(places), 'folder')} inside: give "
        f"one of them{order}: {', '.join(map(str, places[:_SHOWN]))}{more}"
    )


def _sweep_order(folder: Path) -> list[Path]:
    """The runs of a sweep as its table ranks them."""
    table = folder / SWEEP_TABLE
    if not table.is_file():
        return []
    with table.open(newline="", encoding="utf-8", errors="replace") as file:
        return [folder / (row.get("run") or "") for row in csv.DictReader(file)]
