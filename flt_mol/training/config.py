"""The settings of a run: their bounds, and how yaml, named models and overrides combine."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from flt_mol.data import recipes
from flt_mol.data.tags import parse_rule
from flt_mol.files import find_shipped, shipped_folder
from flt_mol.models.checkpoint import checkpoint_config
from flt_mol.models.config import (
    Count,
    EnergyConfig,
    Positive,
    Rule,
    Seed,
    Settings,
    explain,
    merged,
    named_config,
)
from flt_mol.nn.feature_maps import FEATURE_MAPS

Unsigned = Annotated[float, Field(ge=0)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Inside = Annotated[float, Field(gt=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Text = Annotated[str, Field(min_length=1)]
Logger = Literal["csv", "tensorboard", "wandb"]


def _rule(value: str | None) -> str | None:
    if value is not None:
        parse_rule(value, "data.tag_rule")
    return value


_AsText = BeforeValidator(lambda value: str(value) if type(value) is int else value)
TagRule = Annotated[str | None, _AsText, AfterValidator(_rule)]


class DataConfig(Settings):
    """Which data set and which of its splits."""

    prefix: ClassVar[str] = "data."

    name: Text | None = None
    """Name of a folder in `datasets/`, or a path to such a folder, relative like `paths`."""
    train: str = "train"
    """Split to train on."""
    validation: str = "val_id"
    """Split whose MAE selects the best checkpoint."""
    evaluation: list[str] = Field(default=["val_id", "val_ood_ads", "val_ood_cat", "val_ood_both"])
    """Splits reported at the end and by `flt-mol evaluate`."""
    paths: dict[str, Text] = Field(default={})
    """Split → path of a file, which overrides the data set's own. Relative paths start at the run
    file's folder, on the command line at the working directory. A training file takes the place of
    `name`; without one for validation a tenth of it, or `validation_fraction`, is held out."""
    validation_fraction: Inside | None = None
    """Fraction of the training split held out at random and used instead of `validation`, also by
    `flt-mol evaluate`; null trains on the whole split."""
    validation_seed: Seed = 0
    """Of that draw, so that runs of other `training.seed` are ranked on the same systems."""
    skip_bad: bool = False
    """Whether training skips invalid records and those that lack a needed target, with a warning;
    false makes them errors."""
    energy: str = "y_relaxed"
    """Name under which the target is stored, as in `flt_mol.data.open_dataset`."""
    energy_initial: str = "y_init"
    """Name of the energy before relaxation, for models that predict it."""
    positions_relaxed: str = "pos_relaxed"
    """Name of the relaxed positions, for models that predict displacements."""
    reference: Literal["composition", "zero"] | None = None
    """"composition" is for total energies: energies of the elements, fitted by least squares to the
    training split, are kept by the model and added to what it predicts, in training, too. "zero" is
    for energies of interaction, which are 0 where parts are far from each other: the mean of the
    targets is not added. null is for adsorption energies."""
    tag_rule: TagRule = None
    """Rule by which the training structures are tagged: "oc20", "half" or a number of layers. It is
    recorded for `flt-mol predict`; null takes that of the data, or of the checkpoint that the run
    starts from."""

    tag_slab: bool = False
    """Whether structures whose tags are all 0, or layer numbers, are tagged by `tag_rule` (`oc20`
    where there is none), also by `flt-mol evaluate`."""
    adsorbate: Text | None = None
    """The adsorbate for `tag_slab`: a formula, rows of atoms (12,13) or none; null guesses."""

    def rules(self) -> list[Rule]:
        """Rules between these settings."""
        both = self.validation_fraction is not None and self.validation in self.paths
        wanted = f"null where data.paths.{self.validation} names a file"
        return [(both, "validation_fraction", wanted)]

    @model_validator(mode="after")
    def _own_training_data(self) -> Self:
        """Models of one's own data are not ranked by another data set's systems, nor evaluated."""
        if self.train in self.paths:
            self.name = None
            if self.validation not in self.paths and self.validation_fraction is None:
                self.validation_fraction = 0.1
                if not self.paths.keys().isdisjoint(self.evaluation):
                    text = f"there is no data.paths.{self.validation}: a tenth of {self.train} is"
                    warnings.warn(f"{text} held out to validate", stacklevel=1)
        return self

    @model_validator(mode="after")
    def _warn_of_unread(self) -> Self:
        read = {self.train, self.validation}
        unread = self.paths.keys() - {*read, *self.evaluation}
        for split in sorted(read):
            for near in difflib.get_close_matches(split, unread, n=1):
                hint = "" if split in self.paths else f": did you mean data.paths.{split}?"
                warnings.warn(f"data.paths.{near} is not read{hint}", stacklevel=1)
        return self


class TrainingConfig(Settings):
    """Optimiser, learning-rate schedule, batches, augmentation, devices."""

    epochs: Count = 60
    """Passes over the training split."""
    batch_size: Count = 48
    """Systems per step and process, unless `batch_atoms` is set."""
    batch_atoms: Count | None = None
    """Largest number of atoms per step and process, for systems of very different sizes; null
    counts systems."""
    learning_rate: Positive = 2e-3
    """Peak learning rate."""
    optimizer: Literal["adamw", "adam"] = "adamw"
    """Weight decay of "adam" is an L2 term of the gradient."""
    warmup_fraction: Share = 0.06
    """Fraction of all steps with linear warm-up."""
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    """Number of warm-up steps, instead of the fraction; null takes the fraction."""
    decay: Literal["linear", "cosine", "inverse-sqrt"] = "linear"
    """To 0 at the last step, except "inverse-sqrt": √(w / step) after w steps of warm-up."""
    weight_decay: Unsigned = 1e-3
    """Weight decay of the optimiser."""
    beta1: BelowOne = 0.9
    """β₁ of the optimiser."""
    beta2: BelowOne = 0.98
    """β₂ of the optimiser."""
    eps: Positive = 1e-6
    """ε of the optimiser."""
    gradient_clip: Positive | None = 5.0
    """Gradient clipping: largest norm of the gradient; null does not clip."""
    compile: bool = False
    """Whether the model is compiled by `torch.compile`, about a minute before the first step."""
    accumulate: Count = 1
    """Batches of one step, which follows the mean over all their systems."""
    ema_decay: Inside | None = None
    """β of the moving average of the weights, which is validated and saved; null uses the weights
    themselves."""
    early_stop: Count | None = None
    """Early stopping: end after so many epochs without a lower validation MAE; null runs all."""
    seed: Seed = 0
    """Seed of the order of systems, of augmentation and of all initial weights: it is added to
    `model.seed`, and seeds torch's global generator."""
    num_workers: Annotated[int, Field(ge=0)] = 0
    """Processes that load data; 0 loads in the main process."""
    accelerator: Literal["auto", "cpu", "gpu", "cuda", "mps"] = "auto"
    """Lightning's accelerator."""
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "32-true"
    """Lightning's precision; "16-mixed" is for GPUs."""
    devices: Count = 1
    """Processes that train together on this machine, each with its own device and batches."""
    nodes: Count = 1
    """Machines that train together; torchrun starts their processes."""
    max_steps: Count | None = None
    """Stop after this many steps; null runs all epochs."""
    rotation: Literal["none", "z", "full"] = "none"
    """Augmentation by random rotations and reflections: about z (slabs), or full."""
    shift_images: bool = False
    """Augmentation by random periodic images along a and b."""
    noise: Unsigned = 0.0
    """Augmentation by moving free atoms: standard deviation per axis, Å. Displacement targets
    follow; the energy before relaxation is then unknown."""
    interpolation: Share = 0.0
    """Augmentation: probability that a training system starts at a random point between initial and
    relaxed structure; targets as for `noise`."""
    save_minutes: Unsigned = 10.0
    """Minutes between writes of the file from which a killed run resumes; it is also written at the
    end of each epoch."""
    loggers: list[Logger] = Field(default=["csv", "tensorboard"])
    """Loggers; "wandb" must be installed, and is offline unless you are logged in."""


FORCES_WEIGHT = 30.0


class LossConfig(Settings):
    r"""Weights of the terms of the loss.

    loss = Σ_k ω_k [ |E_k − y| / s + w_init |E⁰_k − y⁰| / s₀ + w_disp(p) ‖d_k − d‖₂ ] / Σ_k ω_k
    + w_F ‖F − F*‖₂ / s, averaged over systems, for displacements over free atoms, for forces over
    free atoms whose forces F* are known. Energies are divided by the standard deviation s of their
    normaliser, and so are forces; displacements are in Å. k counts recycles, p from 0 to 1 is how
    much of the training is done; F is that of the last recycle.

    References:
        Godwin et al., ICLR 2022 (Noisy Nodes), arXiv:2106.07971: displacements as an auxiliary
        task. Shi et al., arXiv:2203.04810 (3D-Graphormer): its weight falls during training.
    """

    prefix: ClassVar[str] = "loss."

    energy_initial_weight: Unsigned | None = None
    """w_init; null is 1 for a model with the output "energy_initial"."""
    displacement_weight: Unsigned | None = None
    """w_disp at the start, per Å; null is 1 for a model with the output "displacement" (the
    auxiliary IS2RS task)."""
    forces_weight: Unsigned | None = None
    """w_F, Å; null is 30 for a model with the output "forces"."""
    displacement_decay: Literal["none", "linear", "cosine"] = "none"
    """How w_disp decays to `displacement_final_weight`."""
    displacement_final_weight: Unsigned = 0.0
    """w_disp at the last step, where it decays."""
    recycle_weights: list[Unsigned] | None = None
    """ω_k, one for each recycle of the model, relative to each other; null is 1 for the last and
    0.5 for each earlier one."""

    def rules(self) -> list[Rule]:
        """Rules between these settings."""
        unused = self.displacement_final_weight > 0 and self.displacement_decay == "none"
        wanted = "0 where loss.displacement_decay is none"
        return [(unused, "displacement_final_weight", wanted)]


class FinetuneConfig(Settings):
    """A run that starts from the weights of another."""

    prefix: ClassVar[str] = "finetune."

    checkpoint: Text | None = None
    """A file, the folder of a run or an export, or a shipped model; relative like `data.paths`. Its
    settings are the model's defaults. null trains from scratch."""
    freeze: list[Text] = Field(default=[])
    """Patterns of names of parameters that are not trained, such as "encoder.blocks.[01].*"."""
    normalizer: Literal["refit", "keep"] = "refit"
    """"refit" shifts energies by the median error of the checkpoint on the training systems, as
    needed for other reference energies; "keep" does not. The scale is kept."""

    def rules(self) -> list[Rule]:
        """Rules between these settings."""
        none = bool(self.freeze) and self.checkpoint is None
        return [(none, "freeze", "[] without finetune.checkpoint")]


class RunConfig(Settings):
    """One run: a data set, a model, training settings and a loss."""

    data: DataConfig = Field(default_factory=DataConfig)
    """See DataConfig."""
    model: EnergyConfig = Field(default_factory=EnergyConfig)
    """See EnergyConfig; in a file also {name: NAME, …} of a named model, or NAME."""
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    """See TrainingConfig."""
    loss: LossConfig = Field(default_factory=LossConfig)
    """See LossConfig."""
    finetune: FinetuneConfig = Field(default_factory=FinetuneConfig)
    """See FinetuneConfig."""
    output: Text | None = None
    """Folder for checkpoints, logs and plots; null makes `runs/NAME`, numbered if it exists."""

    def rules(self) -> list[Rule]:
        """Rules between these settings."""
        model, training, loss = self.model, self.training, self.loss
        forces, initial = ("forces" in model.outputs, "energy_initial" in model.outputs)
        rules: list[Rule] = []
        # Weights that nothing trains would keep processes waiting for their gradients.
        for name in ("energy_initial", "displacement", "forces"):
            key, there = f"loss.{name}_weight", name in model.outputs
            weight = getattr(loss, f"{name}_weight")
            last = loss.displacement_final_weight if name == "displacement" else 0
            idle = there and weight == 0 and last == 0
            rules += [
                (bool(weight) and not there, key, f"null, or {name} in model.outputs"),
                (idle, key, f"no {name} in model.outputs, or null"),
            ]
        # Targets hold where atoms are.
        unmoved = self.data.energy == self.data.energy_initial
        less = "less, or no energy_initial in model.outputs, known where atoms were"
        for name, always in (("noise", 0), ("interpolation", 1)):
            key, value = f"training.{name}", getattr(training, name)
            rules += [
                (value > 0 and unmoved, key, "0 for an energy of the initial structure"),
                (value > 0 and forces, key, "0 where model.outputs has forces"),
                (value > 0 and value >= always and initial, key, less),
            ]
        reference, start = self.data.reference, self.finetune.checkpoint
        wanted = {"composition": "refit", "zero": start and "keep"}.get(reference or "")
        other = wanted not in (None, self.finetune.normalizer)
        learned = model.attention == "exact" and FEATURE_MAPS[model.feature_map].learned
        trains = "softmax where model.attention is exact, which trains no features"
        compiled = "false where model.outputs has forces: compilers form no second derivatives"
        weights, recycles = loss.recycle_weights, model.recycles
        odd = weights is not None and (len(weights) != recycles or not weights[-1] > 0)
        each = f"null or {recycles} (model.recycles), the last one above 0"
        return [
            *rules,
            (other, "finetune.normalizer", f"{wanted} where data.reference is {reference}"),
            (learned, "model.feature_map", trains),
            (training.compile and forces, "training.compile", compiled),
            (odd, "loss.recycle_weights", each),
        ]


def load_run_config(name_or_path: str, overrides: Sequence[str] = ()) -> RunConfig:
    """A run from `configs/NAME.yaml` or your own file, with overrides.

    Settings of a named model (``model: {name: flt-small}``) or of ``finetune.checkpoint`` come
    first, then the file's, then the overrides. Relative paths in the file are taken from its
    folder, those of overrides from the working directory.

    Args:
        name_or_path: name in `configs/`, or path to a yaml file.
        overrides: ``KEY=VALUE`` with dots in keys and yaml values, as ``training.epochs=5`` or
            ``model=emt-small``, which replaces the file's model. Paths need no quotes.

    Raises:
        ValueError: unknown run, not yaml, unknown key (the nearest known one is named), wrong type,
            or a value that cannot work.
    """
    file = find_run(name_or_path)
    try:
        content = absolute_paths(_read(file), file.parent)
        typed: dict[str, Any] = {}
        for text in overrides:
            _override(typed, text)
        chosen = typed["model"].get("name") if isinstance(typed.get("model"), dict) else None
        if chosen is not None:
            content.pop("model", None)
        content = merged(content, typed)
        # A validation file takes the place of the share that a shipped run holds out.
        shipped = file.parent == shipped_folder("configs")
        asked = any(text.startswith("data.validation_fraction") for text in overrides)
        data = content.get("data") if shipped and not asked else None
        if isinstance(data, dict) and data.get("validation") in (data.get("paths") or {}):
            data["validation_fraction"] = None
        _resolve_model(content, chosen)
        return RunConfig.model_validate(content)
    except ValidationError as error:
        reason = explain(error, RunConfig)
    except (ValueError, OmegaConfBaseException) as error:
        reason = str(error).split("\n")[0]
    given = f" with {' '.join(overrides)}" if overrides else ""
    raise ValueError(f"{file}{given}: {reason}")


def find_run(name_or_path: str) -> Path:
    """The file of a run: by name in `configs/`, where "-" and "_" are alike, or by path.

    Raises:
        ValueError: neither, naming the nearest one, or all.
    """
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml"):
        if path.is_file():
            return path.resolve()
        raise ValueError(f"no configuration file {path}")
    return find_shipped(name_or_path, "configs/*.yaml")


def run_name(name_or_path: str) -> str:
    """What a run is called: its file, or, where that is a run's config.yaml, that run's folder.

    Examples:
        >>> run_name("emt-small"), run_name("runs/mine.yaml"), run_name("runs/mine/config.yaml")
        ('emt_small', 'mine', 'mine')
    """
    path = Path(name_or_path)
    if path.name == "config.yaml":
        return path.resolve().parent.name
    return path.stem if path.suffix in (".yaml", ".yml") else find_run(name_or_path).stem


def run_yaml(config: RunConfig) -> str:
    """The run as a complete yaml file that `flt-mol train` takes."""
    settings = config.model_dump()
    output = settings.pop("output")
    if output is not None:
        settings["output"] = str(Path(output).absolute())
    return yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)


def _read(file: Path) -> dict[str, Any]:
    try:
        content = OmegaConf.to_container(OmegaConf.load(file), resolve=True)
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"not readable as yaml: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ValueError("holds no mapping of keys to values; see configs/ for examples")
    return {str(key): value for key, value in content.items()}


def _override(typed: dict[str, Any], text: str) -> None:
    """Set what ``KEY=VALUE`` says; paths are taken as they are, but for quotes around them."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ValueError(f"'{text}' is not an override, expected KEY=VALUE")
    paths = "data.paths."
    if key.startswith(paths) or key in ("output", "data.name", "finetune.checkpoint"):
        quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
        parsed: Any = value[1:-1] if quoted else None if value == "null" else value
    else:
        try:
            parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"x={value}"]), resolve=True)
        except yaml.YAMLError as error:
            raise ValueError(f"'{text}' is not readable: a list is [a,b], a text quoted") from error
        parsed = parsed["x"]
    keys = [*paths.split(".")[:2], key[len(paths) :]] if key.startswith(paths) else key.split(".")
    for part in reversed(keys):
        parsed = {part: parsed}
    if isinstance(parsed.get("model"), str):
        typed.pop("model", None)
    typed.update(merged(typed, absolute_paths(parsed, Path.cwd(), of_file=False)))


def absolute_paths(content: dict[str, Any], base: Path, of_file: bool = True) -> dict[str, Any]:
    """The plain data of a run, with relative paths taken from `base`; `output` only `of_file`."""
    for part in ("model", "data"):  # a bare string means {name: …}
        if isinstance(content.get(part), str):
            content[part] = {"name": content[part]}
    data, finetune = content.get("data"), content.get("finetune")
    if isinstance(data, dict):
        if isinstance(paths := data.get("paths"), dict):
            data["paths"] = {k: str((base / v).resolve()) if v else v for k, v in paths.items()}
        if isinstance(name := data.get("name"), str):
            folders = [folder for folder in (base / name, Path(name)) if folder.is_dir()]
            known = name.replace("-", "_")
            own = str(folders[0].resolve() if folders else name)
            data["name"] = known if known in recipes.names() else own
    start = finetune.get("checkpoint") if isinstance(finetune, dict) else None
    if isinstance(start, str) and start and (base / start).exists():
        content["finetune"]["checkpoint"] = str((base / start).resolve())
    if of_file and isinstance(output := content.get("output"), str) and output:
        content["output"] = str((base / output).resolve())
    return content


def _resolve_model(content: dict[str, Any], chosen: str | None) -> None:
    """Put what a checkpoint or a named model has beneath the settings of the model."""
    model, finetune = content.get("model", {}), content.get("finetune")
    if not isinstance(model, dict):
        return  # refused by its type
    name = model.pop("name", None)
    start = finetune.get("checkpoint") if isinstance(finetune, dict) else None
    if start is not None:
        if chosen is not None:
            raise ValueError(f"model is {chosen}, expected none beside finetune.checkpoint={start}")
        config = checkpoint_config(str(start))
    else:
        config = EnergyConfig() if name is None else named_config(str(name))
    content["model"] = merged(config.model_dump(), model)
