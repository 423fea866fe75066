"""Settings of an energy model: what `models/NAME/model.yaml` holds, each field with its bound."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from flt_mol.files import shipped_folder
from flt_mol.nn.feature_maps import FEATURE_MAPS, RandomFeatures
from flt_mol.nn.frequencies import FREQUENCIES
from flt_mol.nn.spectrum import SPECTRA

__all__ = [
    "EnergyConfig",
    "ImageConfig",
    "PairConfig",
    "RPEConfig",
    "Seed",
    "Settings",
    "SpectralConfig",
    "explain",
    "named_config",
    "shipped_name",
]

Seed = Annotated[int, Field(ge=-(2**62), lt=2**62)]
Count = Annotated[int, Field(ge=1)]
Unsigned = Annotated[int, Field(ge=0)]
Basis = Annotated[int, Field(ge=2)]
Positive = Annotated[float, Field(gt=0)]
Length = Annotated[float, Field(gt=0, le=100)]
Share = Annotated[float, Field(ge=0, lt=1)]
_WORDS = {
    "model_type": "a mapping of its settings, {key: value}",
    "dict_type": "a mapping, {key: value}",
    "list_type": "a list, [a, b]",
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "a text",
    "bool_type": "true or false",
}


class Settings(BaseModel):
    """Base of all settings: unknown keys, other types and infinite numbers are errors."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
        use_attribute_docstrings=True,
    )


def _family(registry: Mapping[str, Any], part: str) -> BeforeValidator:
    """A family and its arguments: ``NAME`` or ``{name: NAME, …}``, completed with defaults."""

    def complete(value: Any) -> dict[str, Any]:
        given = {"name": value} if isinstance(value, str) else value
        if not isinstance(given, Mapping) or given.get("name") not in registry:
            expected = f"expected a name, or {{name: …}}, of {', '.join(registry)}"
            raise ValueError(f"model.rpe.{part} is {value!r}, {expected}")
        defaults = _arguments(registry[given["name"]], part)
        for key in given:
            if key not in defaults:
                raise ValueError(_unknown(f"model.rpe.{part}.", str(key), defaults))
        spec = {**defaults, **given}
        for key, setting in spec.items():
            if setting is inspect.Parameter.empty:
                raise ValueError(f"model.rpe.{part} '{given['name']}' needs {key}")
        return spec

    return BeforeValidator(complete)


def _arguments(family: Any, part: str) -> dict[str, Any]:
    """What a family takes beside what the model knows, with its defaults."""
    given = {"num_heads", "dim", "generator", "redraw_every"}
    if part == "frequencies":
        given.add("num_terms")  # that of the spectrum
    found: dict[str, Any] = {"name": inspect.Parameter.empty}
    for name, parameter in inspect.signature(family).parameters.items():
        if name not in given:
            default = 16 if name in ("num_terms", "num_frequencies") else parameter.default
            found[name] = list(default) if isinstance(default, tuple) else default
    return found


class RPEConfig(Settings):
    """The relative positional encoding: its spectrum g and where its frequencies come from."""

    spectrum: Annotated[dict[str, Any], _family(SPECTRA, "spectrum")] = Field(
        default={"name": "gaussian", "num_terms": 16, "sigma_min": 0.7, "sigma_max": 6.0}
    )
    """A family of `nn.SPECTRA`, as a name or as {name: NAME, …} with its arguments."""
    frequencies: Annotated[dict[str, Any], _family(FREQUENCIES, "frequencies")] = Field(
        default={"name": "gaussian"}
    )
    """A family of `nn.FREQUENCIES`, in the same way."""
    split: Literal["one_sided", "symmetric", "balanced"] = "one_sided"
    """How ρ = g/p is given to Φ and Ψ."""


class SpectralConfig(Settings):
    """A spectral filter in every block, see `nn.SpectralFilter`; plane waves are shared by all."""

    num_heads: Count = 4
    """H, filters per block; a divisor of embed_dim."""
    k_max: Annotated[float, Field(gt=0, le=2)] = 0.45
    """cycles/Å, cutoff of the spectrum."""
    sigma_max: Length = 2.5
    """Å, the width a filter may have."""
    num_basis: Count = 8
    """T, functions of the spectrum."""
    padding: Length | None = None
    """Å of vacuum kept in open directions; null is 4 sigma_max."""
    max_vectors: Count | None = None
    """At most so many plane waves per system, the longest ones, which bounds time and memory in
    large cells but makes supercells differ; null is all up to k_max."""

    @model_validator(mode="after")
    def _has_room(self) -> Self:
        least = 1 / (math.pi * self.sigma_max)
        if self.k_max < least:
            wanted = f"at least 1/(π sigma_max), {least:.3f}"
            raise ValueError(f"model.spectral.k_max is {self.k_max}, expected {wanted}")
        return self


class PairConfig(Settings):
    """What is learned on neighbour pairs; the basis is shared by all blocks."""

    cutoff: Length = 5.0
    """Å."""
    num_basis: Basis = 32
    """T, Gaussians over [0, cutoff]."""
    filter: bool = True
    """Whether each block has a `nn.LocalFilter`."""
    num_filters: Count | None = None
    """Channels of its radial sums; null is embed_dim."""
    norm: bool = True
    """Whether it takes normalised features; false for few blocks and recycles only."""
    density: bool = True
    """Whether a local filter of the elements is added to the embedding."""
    vectors: Unsigned = 0
    """Vector channels of that density, where forces show; 0 for none."""
    filter_vectors: Unsigned = 0
    """Vector channels of the blocks' local filters; 0 for none."""
    vector_blocks: Count | None = None
    """How many blocks have them, the last ones; null is all."""
    vector_basis: Basis = 12
    """T', Gaussians of the vectors."""
    vector_dropout: Share = 0.0
    """Probability, on lengths and products of vectors."""
    pair_types: bool = False
    """Whether distances are transformed per pair of elements."""
    correction: bool = False
    """Whether attention is corrected on pairs, see `nn.PairCorrection`."""

    @model_validator(mode="after")
    def _have_a_place(self) -> Self:
        for name, part in (("vectors", "density"), ("filter_vectors", "filter")):
            if getattr(self, name) and not getattr(self, part):
                wanted = f"0 where model.pairs.{part}, which would hold them, is false"
                raise ValueError(f"model.pairs.{name} is {getattr(self, name)}, expected {wanted}")
        return self


class ImageConfig(Settings):
    """Exact attention whose keys are periodic images, as 3D-Graphormer's; quadratic."""

    cutoff: Length = 5.0
    """Å."""
    num_basis: Basis = 32
    """Gaussians of the mask."""
    mask: Literal["gaussian", "centred"] = "centred"
    """Zero-centred widths as of an RPE's spectrum, or Gaussians with centres and a small net per
    head (3D-Graphormer's bias)."""
    pair_types: bool = True
    """Whether distances are transformed per pair of elements; "gaussian" refuses it."""
    density: bool = True
    """Whether the sum of an atom's Gaussians is added to its embedding, as 3D-Graphormer does;
    "gaussian" refuses it."""

    @model_validator(mode="after")
    def _gaussian_is_plain(self) -> Self:
        for name in ("pair_types", "density") if self.mask == "gaussian" else ():
            if getattr(self, name):
                raise ValueError(f"model.images.{name} is true, expected false with mask gaussian")
        return self


class EnergyConfig(Settings):
    """Every hyper-parameter of an EnergyModel."""

    embed_dim: Count = 64
    """C, width of the atoms' features."""
    num_heads: Count = 4
    """H."""
    num_layers: Count = 3
    """Blocks in the stack."""
    recycles: Count = 1
    """How often the stack is applied, each time to its own output; every time is read out."""
    ffn_dim: Count = 128
    """Hidden width of the feed-forward nets."""
    num_features: Count = 64
    """M, random features per head."""
    redraw_every: Count | None = None
    """Training steps after which random features, and sampled frequencies whose σ is not learned,
    are resampled; null never does."""
    attention: Literal["linear", "exact", "auto", "none"] = "linear"
    """Its form: "exact" is the quadratic twin of "linear" with the same parameters, "auto" the
    faster of both by size."""
    dropout: Share = 0.0
    """Probability, on the outputs of attention and feed-forward nets."""
    rpe: RPEConfig | None = Field(default_factory=RPEConfig)
    """The sampled relative positional encoding; null for a Performer without positions."""
    seed: Seed = 0
    """Of random features, frequencies and most weights; the embedding, feed-forward nets and heads
    take torch's global random numbers. A run adds `training.seed`."""
    far_scale: Positive = 1.0
    """Of the initial weights with which attention and spectral filters are added to features; below
    1, local sums come first."""
    far_blocks: Count | None = None
    """How many blocks have attention and spectral filters, the last ones; null is all."""
    feature_map: Literal[tuple(FEATURE_MAPS)] = "softmax"  # type: ignore[valid-type]
    """φ of linear attention, a name in `nn.FEATURE_MAPS`."""
    spectral: SpectralConfig | None = None
    """Spectral filters, or null."""
    pairs: PairConfig | None = None
    """What is learned on neighbour pairs, or null."""
    images: ImageConfig | None = None
    """Exact attention over periodic images, or null."""
    readout: Literal["tags", "sum", "mean"] = "tags"
    """Σ over atoms: weighted per tag, plain (extensive), or their mean (intensive)."""
    head_norm: bool = True
    """Whether heads normalise features first; without it they read off densities."""
    outputs: list[Literal["energy", "energy_initial", "displacement"]] = Field(default=["energy"])
    """Heads to build, "energy" among them; "displacement" needs pairs."""
    feedback: Literal["features", "positions"] = "features"
    """What a recycle hands to the next: "features", or also "positions", moved by the displacement
    predicted so far, which needs more than one recycle."""

    @property
    def cutoff(self) -> float | None:
        """Å within which pairs are needed; None where no part looks at pairs."""
        return max((x.cutoff for x in (self.pairs, self.images) if x is not None), default=None)

    @model_validator(mode="after")
    def _widths(self) -> Self:
        if self.embed_dim % self.num_heads:
            raise _unfit(self, "embed_dim", f"a multiple of model.num_heads, {self.num_heads}")
        if self.spectral is not None and self.embed_dim % self.spectral.num_heads:
            wanted = f"a divisor of model.embed_dim, {self.embed_dim}"
            raise _unfit(self, "spectral.num_heads", wanted)
        kind = FEATURE_MAPS[self.feature_map]
        several = kind.per_direction if issubclass(kind, RandomFeatures) else 1
        if self.attention != "none" and self.num_features % several:
            wanted = f"an even number: '{self.feature_map}' takes every direction both ways"
            raise _unfit(self, "num_features", wanted)
        return self

    @model_validator(mode="after")
    def _outputs(self) -> Self:
        outputs = self.outputs
        if "energy" not in outputs or len(set(outputs)) != len(outputs):
            raise _unfit(self, "outputs", "a list of different outputs with energy")
        if "displacement" in outputs and self.pairs is None:
            raise _unfit(self, "outputs", "no displacement, or model.pairs, of which it is made")
        if self.feedback == "positions":
            if "displacement" not in outputs:
                raise _unfit(self, "feedback", "features, or displacement in model.outputs")
            if self.recycles == 1:
                raise _unfit(self, "feedback", "features where model.recycles is 1")
        return self

    @model_validator(mode="after")
    def _blocks(self) -> Self:
        counts = {"far_blocks": self.far_blocks}
        if self.pairs is not None:
            counts["pairs.vector_blocks"] = self.pairs.vector_blocks
        for key, count in counts.items():
            if count is not None and count > self.num_layers:
                wanted = f"null or at most model.num_layers, {self.num_layers}"
                raise _unfit(self, key, wanted)
        if (self.far_blocks or self.num_layers) < self.num_layers and not self._filters:
            raise _unfit(self, "far_blocks", "null where there is no model.pairs with filter")
        return self

    @model_validator(mode="after")
    def _attention(self) -> Self:
        if self.attention == "auto" and not FEATURE_MAPS[self.feature_map].estimates_softmax:
            wanted = "linear: its feature_map does not estimate the softmax of small systems"
            raise _unfit(self, "attention", wanted)
        if self.attention == "none":
            if self.rpe is not None:
                raise _unfit(self, "attention", "another one, or model.rpe null")
            if self.spectral is None and not self._filters:
                raise _unfit(self, "attention", "model.spectral, or model.pairs with filter")
        return self

    @model_validator(mode="after")
    def _pairs_and_images(self) -> Self:
        pairs, images = self.pairs, self.images
        if images is not None:
            if self.attention != "exact":
                raise _unfit(self, "attention", "exact, which model.images needs")
            if self.rpe is not None:
                raise ValueError("model.images and model.rpe are both set: one gives the positions")
            if pairs is not None and pairs.cutoff != images.cutoff:
                raise _unfit(self, "images.cutoff", f"model.pairs.cutoff, {pairs.cutoff}")
        if pairs is None:
            return self
        used = pairs.filter or pairs.density or pairs.correction
        if not used and "displacement" not in self.outputs:
            raise ValueError("model.pairs has no use: set filter, density or correction, or null")
        if pairs.correction and (images is not None or self.attention in ("none", "auto")):
            wanted = "false: only linear or exact attention without images is corrected"
            raise _unfit(self, "pairs.correction", wanted)
        return self

    @property
    def _filters(self) -> bool:
        return self.pairs is not None and self.pairs.filter


def _unfit(config: EnergyConfig, key: str, wanted: str) -> ValueError:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return ValueError(f"model.{key} is {value}, expected {wanted}")


def shipped_name(kind: str, name: str, file: str) -> str | None:
    """The folder of that name in the shipped ``models`` or ``datasets``; "-" and "_" are alike."""
    names = [path.parent.name for path in shipped_folder(kind).glob(f"*/{file}")]
    alike = {x.replace("_", "-"): x for x in names}
    return name if name in names else alike.get(name.replace("_", "-"))


def named_config(name: str) -> EnergyConfig:
    """The configuration of a named model: ``EnergyModel`` of it is untrained.

    Args:
        name: of a folder in `models/`, as "flt-small".

    Raises:
        ValueError: an unknown name, with the known ones; or a file that was made unusable.

    Example:
        >>> config = named_config("flt-small")
        >>> config.embed_dim, config.pairs.cutoff, config.outputs
        (64, 5.0, ['energy', 'displacement'])
    """
    import yaml

    folder = shipped_folder("models")
    found = shipped_name("models", name, "model.yaml")
    if found is None:
        known = ", ".join(sorted(file.parent.name for file in folder.glob("*/model.yaml")))
        raise ValueError(f"no model called '{name}'; known: {known}")
    file = folder / found / "model.yaml"
    try:
        return EnergyConfig.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))
    except ValidationError as error:
        raise ValueError(f"{file}: {explain(error, EnergyConfig, 'model.')}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{file}: not valid yaml: {error}") from error


def explain(error: ValidationError, schema: type[Settings], prefix: str = "") -> str:
    """The first problem in one line: the key, its value, what is expected.

    Example:
        >>> try: EnergyConfig.model_validate({"dropuot": 0.1})
        ... except ValidationError as error: explain(error, EnergyConfig, "model.")
        "unknown key 'model.dropuot'; did you mean 'model.dropout'?"
    """
    first = error.errors(include_url=False)[0]
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    *outer, last = (str(part) for part in first["loc"]) if first["loc"] else ("",)
    path = prefix + "".join(f"{part}." for part in outer)
    if first["type"] == "extra_forbidden":
        for name in outer:
            schema = _part(schema, name)
        return _unknown(path, last, schema.model_fields)
    expected = _WORDS.get(first["type"], first["msg"].removeprefix("Input should be "))
    for long, short in (("greater than", "above"), ("less than", "below")):
        most = {"above": "at least", "below": "at most"}[short]
        expected = expected.replace(f"{long} or equal to", most).replace(long, short)
    shown = "null" if first["input"] is None else repr(first["input"])
    return f"{path}{last} is {shown}, expected {expected}"


def _part(schema: type[Settings], name: str) -> type[Settings]:
    kind = schema.model_fields[name].annotation
    parts = [x for x in (kind, *get_args(kind)) if isinstance(x, type) and issubclass(x, Settings)]
    return parts[0]


def _unknown(path: str, key: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean '{path}{near[0]}'?" if near else f"known here: {', '.join(known)}"
    return f"unknown key '{path}{key}'; {hint}"
