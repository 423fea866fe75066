"""The typed schema of a run and how it is put together: yaml, named models, overrides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args, get_type_hints

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flt_mol.data.recipes import known_name
from flt_mol.files import shipped_folder
from flt_mol.models.energy import EnergyConfig
from flt_mol.training.checks import check_run
from flt_mol.training.defaults import check_appended, check_defaults, files_of
from flt_mol.training.explaining import explain, unknown
from flt_mol.training.file_shape import check_shape
from flt_mol.training.finetune_config import FinetuneConfig
from flt_mol.training.finetune_settings import START, compose_from, find_start, starting_model
from flt_mol.training.losses import LossConfig
from flt_mol.training.overrides import PATHS, check_overrides, split_paths
from flt_mol.training.parts import null_part, set_parts, split_parts
from flt_mol.training.run_files import find_run, read_run


@dataclass
class DataConfig:
    """Which data set and which of its splits.

    Attributes:
        name: of a folder in `datasets/`, or a path to such a folder, relative as `paths`.
        train: split to train on.
        validation: split whose MAE picks the best checkpoint.
        evaluation: splits reported at the end and by `flt-mol evaluate`.
        paths: split → path of a file, overrides or stands for the data set's own; relative paths
            are taken from the configuration file's folder.
        validation_fraction: share of the training split that is held out, at random by
            `training.seed`, and takes the place of `validation`, in `flt-mol evaluate`, too; None
            trains on all of it.
        skip_bad: whether training leaves bad records out, with a warning, or refuses them; bad are
            also those that lack a target which the model's outputs or the training settings need.
        energy: name under which the target is stored, as of :func:`flt_mol.data.open_dataset`.
        energy_initial: name of the energy before relaxation, for models that predict it.
        positions_relaxed: name of the relaxed positions, for models that predict displacements.
        tag_rule: by which rule the training structures are tagged: "oc20", "half" or a number of
            layers, as of :func:`flt_mol.data.tag_slab`. Nothing is tagged by it in training: the
            checkpoints know it, and `flt-mol predict --tag-slab` tags by it. None takes that of the
            data set, or of what the run is tuned from.
    """

    name: str | None = None
    train: str = "train"
    validation: str = "val_id"
    evaluation: list[str] = field(
        default_factory=lambda: ["val_id", "val_ood_ads", "val_ood_cat", "val_ood_both"]
    )
    paths: dict[str, str] = field(default_factory=dict)
    validation_fraction: float | None = None
    skip_bad: bool = False
    energy: str = "y_relaxed"
    energy_initial: str = "y_init"
    positions_relaxed: str = "pos_relaxed"
    tag_rule: str | None = None


@dataclass
class TrainingConfig:
    """How the weights are found: optimiser, warm-up, decay; what training systems are shown as.

    Attributes:
        epochs: passes over the training split.
        batch_size: systems a step and process, unless `batch_atoms` is set.
        batch_atoms: atoms a step and process at most, for systems of very different sizes; None
            counts systems.
        learning_rate: at its peak.
        optimizer: "adamw", or "adam", whose weight decay is an L2 term of the gradient.
        warmup_fraction: share of all steps with linearly rising rate.
        warmup_steps: the number of those steps, in place of their share; None takes the share.
        decay: "linear" or "cosine", down to 0 at the last step, or "inverse-sqrt": √(w / step)
            after w steps of warm-up.
        weight_decay: of the optimiser.
        beta1: of the optimiser.
        beta2: of the optimiser.
        eps: of the optimiser.
        gradient_clip: largest norm of the gradient.
        accumulate: batches whose gradients are averaged for one step.
        ema_decay: β of the moving average of the weights, which is what is validated and saved for
            use; None takes the weights as they are.
        early_stop: end after so many epochs without a lower MAE on the validation split; None runs
            all.
        seed: of the order of systems, of how they are shown, and of all initial weights: what a
            model draws from `model.seed` it draws from ``model.seed + training.seed``, and the rest
            from torch's global generator, seeded with ``training.seed``.
        num_workers: processes that load data; 0 loads in the main process.
        accelerator: Lightning's: "auto", "cpu", "gpu", "mps".
        precision: Lightning's: "32-true", "bf16-mixed", or "16-mixed" on GPUs.
        devices: processes that train together on this machine, each on a device of its own and with
            batches of its own; see docs/train.md.
        nodes: machines that train together; torchrun starts their processes.
        max_steps: stop after this many steps; None runs all epochs.
        rotation: training systems are turned and mirrored at random: "none", about "z" (slabs),
            or "full".
        shift_images: whether training systems are shown with random periodic images along a, b.
        noise: Å along each axis, standard deviation by which free atoms of training systems are
            moved; displacements are predicted from there. Their energy before relaxation is then
            unknown, and neighbour pairs are searched in every step.
        interpolation: probability that a training system starts at a random point between initial
            and relaxed structure; otherwise as `noise`.
        save_minutes: minutes after which the point that a killed run goes on from is written anew,
            besides at ends of epochs.
        loggers: of "csv", "tensorboard", "wandb" (if installed; offline unless you are logged in).
    """

    epochs: int = 60
    batch_size: int = 48
    batch_atoms: int | None = None
    learning_rate: float = 2e-3
    optimizer: str = "adamw"
    warmup_fraction: float = 0.06
    warmup_steps: int | None = None
    decay: str = "linear"
    weight_decay: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.98
    eps: float = 1e-6
    gradient_clip: float = 5.0
    accumulate: int = 1
    ema_decay: float | None = None
    early_stop: int | None = None
    seed: int = 0
    num_workers: int = 0
    accelerator: str = "auto"
    precision: str = "32-true"
    devices: int = 1
    nodes: int = 1
    max_steps: int | None = None
    rotation: str = "none"
    shift_images: bool = False
    noise: float = 0.0
    interpolation: float = 0.0
    save_minutes: float = 10.0
    loggers: list[str] = field(default_factory=lambda: ["csv", "tensorboard"])


@dataclass
class RunConfig:
    """One run: a data set, a model, training numbers, what is lowered.

    Attributes:
        data: see DataConfig.
        model: see EnergyConfig.
        training: see TrainingConfig.
        loss: see LossConfig.
        finetune: see FinetuneConfig.
        output: folder for checkpoints, logs and plots; None makes `runs/NAME`, numbered when taken.
    """

    data: DataConfig = field(default_factory=DataConfig)
    model: EnergyConfig = field(default_factory=EnergyConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)
    output: str | None = None


def load_run_config(name_or_path: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Compose a run from `configs/NAME.yaml` or a file of one's own, with Hydra overrides.

    Args:
        name_or_path: name in `configs/`, or path to a yaml file.
        overrides: Hydra's, as ``training.epochs=5`` or ``model=emt_performer_small``. Paths in
            them are taken from the working directory, and need no quotes.

    Raises:
        ValueError: unknown run, no yaml, unknown key (the nearest known one is named), wrong type,
            or a value that cannot work.
    """
    file = find_run(name_or_path)
    content = read_run(file)
    try:
        check_shape(content, RunConfig, known_keys())
        rest, typed = split_paths(overrides)
        check_overrides(rest)
        start = find_start(file, typed)
        model = None if start is None else starting_model(start, rest)
        _register(model)
        rest, parts = split_parts(rest)
        with initialize_config_dir(config_dir=str(file.parent), version_base="1.3"):
            files = files_of(check_defaults(file.stem), file.parent)
            for other in files:
                if other != file:
                    check_shape(read_run(other), RunConfig, known_keys())
            check_appended(rest, files)
            composed = _compose(file.stem, rest, of_checkpoint=model is not None)
        set_parts(composed, parts)
        share = _share_is_given(overrides, [file, *files])
        _refuse_unknown(composed)
        config = OmegaConf.to_object(composed)
        assert isinstance(config, RunConfig)
        if start is None and START not in typed and config.finetune.checkpoint is not None:
            raise ValueError(f"give {START} in the file itself, or as {START}=PATH")
        config.finetune.checkpoint = start
        config.data = absolute(config.data, file.parent)
        _set_paths(config, typed)
        if not share and config.data.validation in config.data.paths:
            config.data.validation_fraction = None
        check_run(config)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        given = f" with {' '.join(overrides)}" if overrides else ""
        raise ValueError(f"{file}{given}: {explain(error, known_keys())}") from error
    return config


def _share_is_given(overrides: Sequence[str], files: Sequence[Path]) -> bool:
    """Whether `data.validation_fraction` was asked for, and is not just what a shipped run has."""
    shipped = shipped_folder("configs").resolve()
    own = [read_run(file).get("data") for file in files if file.parent.resolve() != shipped]
    return any("validation_fraction" in given for given in [*overrides, *own] if given)


def _compose(name: str, overrides: list[str], of_checkpoint: bool) -> DictConfig:
    try:
        if of_checkpoint:
            return compose_from(name, overrides)
        return compose(config_name=name, overrides=overrides)
    except AssertionError:  # omegaconf's, of a setting inside of what is null
        raise ValueError(null_part(overrides)) from None


def absolute(data: DataConfig, base: Path) -> DataConfig:
    """`data` with relative paths, of files and of a data set's folder, taken from `base`."""
    paths = {split: str((base / path).resolve()) for split, path in data.paths.items()}
    name = data.name
    if name is not None and known_name(name) is None:
        for folder in (base / name, Path(name)):
            if folder.is_dir():
                name = str(folder.resolve())
                break
    return replace(data, name=name, paths=paths)


def _set_paths(config: RunConfig, typed: Mapping[str, str | None]) -> None:
    for key, value in typed.items():
        if key == "output":
            config.output = value
        elif key == "data.name":
            config.data.name = value
        elif key != START:
            if not value:
                raise ValueError(f"{key} is empty, expected a file or folder of records")
            config.data.paths[key.removeprefix(PATHS)] = value
    config.data = absolute(config.data, Path.cwd())


def _register(model: EnergyConfig | None) -> None:
    """Tell Hydra the schema, and the data sets and models as groups to choose from.

    Args:
        model: of a checkpoint, whose settings are then those of a run that names no others.
    """
    store = ConfigStore.instance()
    store.store(name="run_schema", node=RunConfig if model is None else RunConfig(model=model))
    for file in sorted(shipped_folder("models").glob("*/model.yaml")):
        store.store(group="model", name=file.parent.name, node=_read_model(file))
    for file in sorted(shipped_folder("datasets").glob("*/dataset.yaml")):
        store.store(group="data", name=file.parent.name, node={"name": file.parent.name})


def _read_model(file: Path) -> dict[str, Any]:
    values = yaml.safe_load(file.read_text())
    try:
        EnergyConfig.from_dict(values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from error
    return cast(dict[str, Any], values)


def known_keys(schema: type = RunConfig) -> list[str]:
    """All dotted keys of the schema.

    Example:
        >>> known_keys()[:2]
        ['data', 'data.name']
    """
    keys: list[str] = []
    for name, kind in get_type_hints(schema).items():
        keys.append(name)
        # Parts that are null by default have settings all the same.
        for part in get_args(kind) or (kind,):
            if isinstance(part, type) and is_dataclass(part):
                keys += [f"{name}.{key}" for key in known_keys(part)]
    return keys


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
        if key not in known and not key.startswith(PATHS):
            raise ValueError(unknown(key, known_keys()))
