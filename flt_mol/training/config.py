"""The typed schema of a run and how it is put together: yaml, named models, overrides."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flt_mol import resources
from flt_mol.models.energy import EnergyConfig


@dataclass
class DataConfig:
    """Which data set and which of its splits.

    Attributes:
        name: of a folder in `datasets/`, or a path to such a folder.
        train: split to train on.
        validation: split whose MAE picks the best checkpoint.
        evaluation: splits reported at the end and by `flt-mol evaluate`.
        paths: split → path of a file, overrides or stands for the data set's own; relative paths
            are taken from the configuration file's folder.
    """

    name: str | None = None
    train: str = "train"
    validation: str = "val_id"
    evaluation: list[str] = field(
        default_factory=lambda: ["val_id", "val_ood_ads", "val_ood_cat", "val_ood_both"]
    )
    paths: dict[str, str] = field(default_factory=dict)


@dataclass
class TrainingConfig:
    """How the weights are found: L1 loss on normalised energies, AdamW, warm-up, decay.

    Attributes:
        epochs: passes over the training split.
        batch_size: systems a step.
        learning_rate: at its peak.
        warmup_fraction: share of all steps with linearly rising rate.
        decay: "linear" or "cosine", down to 0 at the last step.
        weight_decay: of AdamW.
        beta1: of AdamW.
        beta2: of AdamW.
        eps: of AdamW.
        gradient_clip: largest norm of the gradient.
        seed: of initial weights and of the order of systems.
        num_workers: processes that load data; 0 loads in the main process.
        accelerator: Lightning's: "auto", "cpu", "gpu", "mps".
        precision: Lightning's: "32-true", "bf16-mixed".
        max_steps: stop after this many steps; None runs all epochs.
        rotation: training systems are turned and mirrored at random: "none", about "z" (slabs),
            or "full".
        shift_images: whether training systems are shown with random periodic images along a, b.
    """

    epochs: int = 60
    batch_size: int = 48
    learning_rate: float = 2e-3
    warmup_fraction: float = 0.06
    decay: str = "linear"
    weight_decay: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.98
    eps: float = 1e-6
    gradient_clip: float = 5.0
    seed: int = 0
    num_workers: int = 0
    accelerator: str = "auto"
    precision: str = "32-true"
    max_steps: int | None = None
    rotation: str = "none"
    shift_images: bool = False


@dataclass
class RunConfig:
    """One run: a data set, a model, training numbers.

    Attributes:
        data: see DataConfig.
        model: see EnergyConfig.
        training: see TrainingConfig.
        output: folder for checkpoints, logs and plots; None makes `runs/NAME`, numbered when taken.
    """

    data: DataConfig = field(default_factory=DataConfig)
    model: EnergyConfig = field(default_factory=EnergyConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    output: str | None = None


def load_run_config(name_or_path: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Compose a run from `configs/NAME.yaml` or a file of one's own, with Hydra overrides.

    Args:
        name_or_path: name in `configs/`, or path to a yaml file.
        overrides: Hydra's, as ``training.epochs=5`` or ``model=emt_performer_small``.

    Raises:
        ValueError: unknown run, unknown key (the nearest known one is named) or wrong type.
    """
    file = _find_run(name_or_path)
    _register()
    try:
        with initialize_config_dir(config_dir=str(file.parent), version_base="1.3"):
            composed = compose(config_name=file.stem, overrides=_local_paths(overrides))
        _refuse_unknown(composed)
        config = cast(RunConfig, OmegaConf.to_object(composed))
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ValueError(f"{file}: {_explain(error)}") from error
    if not isinstance(config, RunConfig):
        raise ValueError(f"{file}: its defaults must begin with 'run_schema'")
    config.data.paths = {
        split: str((file.parent / path).resolve()) for split, path in config.data.paths.items()
    }
    return config


def _find_run(name_or_path: str) -> Path:
    path = Path(name_or_path)
    if path.suffix in {".yaml", ".yml"}:
        if path.is_file():
            return path.resolve()
        raise ValueError(f"no configuration file {path}")
    folder = resources.folder("configs")
    names = sorted(file.stem for file in folder.glob("*.yaml"))
    if name_or_path in names:
        return folder / f"{name_or_path}.yaml"
    raise ValueError(
        f"no run called '{name_or_path}' in configs/ (there are: {', '.join(names)}); "
        "a file of your own is given by its path, ending in .yaml"
    )


def _register() -> None:
    """Tell Hydra the schema, and the data sets and models as groups to choose from."""
    store = ConfigStore.instance()
    store.store(name="run_schema", node=RunConfig)
    for file in sorted(resources.folder("models").glob("*/model.yaml")):
        store.store(group="model", name=file.parent.name, node=_read_model(file))
    for file in sorted(resources.folder("datasets").glob("*/dataset.yaml")):
        store.store(group="data", name=file.parent.name, node={"name": file.parent.name})


def _read_model(file: Path) -> dict[str, Any]:
    values = yaml.safe_load(file.read_text())
    try:
        EnergyConfig.from_dict(values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from error
    return cast(dict[str, Any], values)


def _local_paths(overrides: Sequence[str]) -> list[str]:
    """Paths typed on the command line are meant from the working directory."""
    out = []
    for override in overrides:
        key, equals, value = override.partition("=")
        if key.lstrip("+").startswith("data.paths.") and equals:
            override = f"++{key.lstrip('+')}='{Path(value.strip(chr(39))).resolve()}'"
        out.append(override)
    return out


def known_keys(schema: type = RunConfig) -> list[str]:
    """All dotted keys of the schema.

    Example:
        >>> known_keys()[:2]
        ['data', 'data.name']
    """
    return _keys(OmegaConf.to_container(OmegaConf.structured(schema)))


def _keys(node: Any, path: str = "") -> list[str]:
    keys: list[str] = []
    for key, value in node.items():
        keys.append(f"{path}{key}")
        if isinstance(value, dict):
            keys += _keys(value, f"{path}{key}.")
    return keys


def _refuse_unknown(composed: DictConfig) -> None:
    known = set(known_keys())
    for key in _keys(OmegaConf.to_container(composed)):
        if key not in known and not key.startswith("data.paths."):
            raise ValueError(_unknown(key))


def _unknown(key: str) -> str:
    """What to say of a key that is not in the schema: the nearest one, or those beside it."""
    parent = key.rpartition(".")[0]
    beside = {k.rpartition(".")[2]: k for k in known_keys() if k.rpartition(".")[0] == parent}
    near = difflib.get_close_matches(key.rpartition(".")[2], beside, n=1)
    hint = f"did you mean '{beside[near[0]]}'?" if near else f"known here: {', '.join(beside)}"
    return f"unknown key '{key}'; {hint}"


def _explain(error: Exception) -> str:
    """The library's message without its tail, or `_unknown` when a key was misspelt."""
    message = str(error).split("Config search path")[0].strip()
    match = re.search(r"Could not override '([^']+)'", message) or re.search(
        r"full_key: (\S+)", message
    )
    if match and match.group(1) not in known_keys():
        return _unknown(match.group(1))
    cause = str(error.__cause__ or "").split("\n")[0]
    return " ".join(f"{message} {cause}".split())
