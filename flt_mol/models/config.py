"""Settings of an energy model: what `models/NAME/model.yaml` holds, each field with its bound."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from flt_mol.files import find_shipped, nearest
from flt_mol.nn.feature_maps import FEATURE_MAPS
from flt_mol.nn.frequencies import FREQUENCIES
from flt_mol.nn.spectrum import SPECTRA

Seed = Annotated[int, Field(ge=-(2**62), lt=2**62)]
Count = Annotated[int, Field(ge=1)]
Unsigned = Annotated[int, Field(ge=0)]
Basis = Annotated[int, Field(ge=2)]
Positive = Annotated[float, Field(gt=0)]
Length = Annotated[float, Field(gt=0, le=100)]
Share = Annotated[float, Field(ge=0, lt=1)]


Rule = tuple[bool, str, str]
"""Between settings: whether it is broken, by which key, and what is expected of that."""


class Settings(BaseModel):
    """Base of all settings: unknown keys, other types and infinite numbers are errors."""

    prefix: ClassVar[str] = ""
    """Of keys, in messages."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
        use_attribute_docstrings=True,
    )

    def rules(self) -> list[Rule]:
        """Rules between these settings."""
        return []

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        for broken, key, expected in self.rules():
            if broken:
                value: Any = self
                for name in key.split("."):
                    value = getattr(value, name)
                raise ValueError(f"{self.prefix}{key} is {value}, expected {expected}")
        return self


# What the model knows itself: num_terms of the frequencies is that of the spectrum.
_KNOWN = {"num_heads", "dim", "generator", "redraw_every"}
_KNOWN_OF = {"spectrum": _KNOWN, "frequencies": _KNOWN | {"num_terms"}}


def _family(registry: Mapping[str, Any], part: str) -> BeforeValidator:
    """``NAME`` or ``{name: NAME, …}`` of a family, completed with the defaults of its arguments."""

    def complete(value: Any) -> dict[str, Any]:
        given = {"name": value} if isinstance(value, str) else value
        if not isinstance(given, Mapping) or given.get("name") not in registry:
            expected = f"expected a name, or {{name: …}}, of {', '.join(registry)}"
            raise ValueError(f"model.rpe.{part} is {value!r}, {expected}")
        defaults: dict[str, Any] = {"name": None}
        for name, parameter in inspect.signature(registry[given["name"]]).parameters.items():
            default = 16 if name in ("num_terms", "num_frequencies") else parameter.default
            if name not in _KNOWN_OF[part]:
                defaults[name] = list(default) if isinstance(default, tuple) else default
        for key in given:
            if key not in defaults:
                raise ValueError(_unknown(f"model.rpe.{part}.", str(key), defaults))
        spec = {**defaults, **given}
        for key, setting in spec.items():
            if setting is inspect.Parameter.empty:
                raise ValueError(f"model.rpe.{part} '{given['name']}' needs {key}")
        return spec

    return BeforeValidator(complete)


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
    """How ρ = g/p is divided between Φ and Ψ."""


class SpectralConfig(Settings):
    """A spectral filter in every block, see `nn.SpectralFilter`; plane waves are shared by all."""

    num_heads: Count = 4
    """H, filters per block; a divisor of embed_dim."""
    k_max: Annotated[float, Field(gt=0, le=2)] = 0.45
    """Cutoff of the spectrum, cycles/Å."""
    sigma_max: Length = 2.5
    """Largest width of a filter, Å."""
    num_basis: Count = 8
    """T, functions of the spectrum."""
    padding: Length | None = None
    """Vacuum kept in open directions, Å; null is 4 sigma_max."""
    charges: Unsigned = 0
    """Charges per atom whose interaction is added to the energies, see `nn.ChargeHead`."""

    @model_validator(mode="before")
    @classmethod
    def _without_max_vectors(cls, given: Any) -> Any:
        """Older configurations and checkpoints have it, as null."""
        if isinstance(given, Mapping) and given.get("max_vectors", 0) is None:
            return {key: value for key, value in given.items() if key != "max_vectors"}
        return given


class PairConfig(Settings):
    """Parts that act on neighbour pairs; all blocks share their basis."""

    cutoff: Length = 5.0
    """Å."""
    num_basis: Basis = 32
    """T, number of Gaussians over [0, cutoff]."""
    filter: bool = True
    """Whether each block has a `nn.LocalFilter`."""
    num_filters: Count | None = None
    """Channels of the local filters' radial sums; null is embed_dim."""
    norm: bool = True
    """Whether local filters take normalised features; false only for few blocks and recycles."""
    density: bool = True
    """Whether a local filter of the elements is added to the embedding."""
    vectors: Unsigned = 0
    """Vector channels of that density, which see directions (forces, angles); 0 for none."""
    filter_vectors: Unsigned = 0
    """Vector channels of the blocks' local filters; 0 for none."""
    vector_blocks: Count | None = None
    """Number of blocks, counted from the last, that have vector channels; null is all."""
    vector_basis: Basis = 12
    """T', number of Gaussians of the vectors."""
    vector_dropout: Share = 0.0
    """Dropout probability of lengths and products of vectors."""
    pair_types: bool = False
    """Whether distances are transformed per pair of elements."""
    correction: bool = False
    """Whether attention is corrected on pairs, see `nn.PairCorrection`."""


class ImageConfig(Settings):
    """Exact attention whose keys are periodic images, as in 3D-Graphormer; quadratic."""

    cutoff: Length = 5.0
    """Å."""
    num_basis: Basis = 32
    """Number of Gaussians of the mask."""
    mask: Literal["gaussian", "centred"] = "centred"
    """"gaussian": zero-centred Gaussians, as an RPE has; "centred": Gaussians with centres and a
    small network per head (3D-Graphormer's bias)."""
    pair_types: bool = True
    """Whether distances are transformed per pair of elements; not for mask "gaussian"."""
    density: bool = True
    """Whether the sum of an atom's Gaussians is added to its embedding, as in 3D-Graphormer;
    not for mask "gaussian"."""


class EnergyConfig(Settings):
    """Every hyper-parameter of an EnergyModel."""

    prefix: ClassVar[str] = "model."

    embed_dim: Count = 64
    """C, width of the atoms' features."""
    num_heads: Count = 4
    """H, attention heads."""
    num_layers: Count = 3
    """Blocks in the stack."""
    recycles: Count = 1
    """How often the stack is applied, each time to its own output; every recycle is read out."""
    ffn_dim: Count = 128
    """Hidden width of the feed-forward networks."""
    num_features: Count = 64
    """M, random features per head."""
    redraw_every: Count | None = None
    """Training steps after which random features, and sampled frequencies whose σ is not learned,
    are resampled; null keeps them."""
    attention: Literal["linear", "exact", "auto", "none"] = "linear"
    """Form of attention: "exact" is quadratic softmax with the parameters of "linear", "auto" takes
    the faster of both by size."""
    dropout: Share = 0.0
    """Dropout probability of the outputs of attention and feed-forward networks."""
    attention_dropout: Share | None = None
    """The same of attention alone, on attended values; null is `dropout`."""
    rpe: RPEConfig | None = Field(default_factory=RPEConfig)
    """The sampled relative positional encoding; null for a Performer without positions."""
    seed: Seed = 0
    """Seed of random features, frequencies and most weights; the embedding, feed-forward networks
    and heads use torch's global generator. A run adds `training.seed`."""
    far_scale: Positive = 1.0
    """Factor of the initial output weights of what sees all atoms, attention and spectral filters;
    below 1, local filters dominate at first."""
    far_blocks: Count | None = None
    """Number of blocks, counted from the last, with attention and spectral filters; null is all."""
    feature_map: Literal[tuple(FEATURE_MAPS)] = "softmax"  # type: ignore[valid-type]
    """φ of linear attention, a name in `nn.FEATURE_MAPS`."""
    spectral: SpectralConfig | None = None
    """Spectral filters, or null."""
    pairs: PairConfig | None = None
    """Parts that act on neighbour pairs, or null."""
    images: ImageConfig | None = None
    """Exact attention over periodic images, or null."""
    readout: Literal["tags", "sum", "mean"] = "tags"
    """Over atoms: sum weighted per tag, plain sum (extensive), or mean (intensive)."""
    head_norm: bool = True
    """Whether heads normalise features first; without it they see densities."""
    outputs: list[Literal["energy", "energy_initial", "displacement", "forces"]] = Field(
        default=["energy"]
    )
    """What the model gives, "energy" among them; "displacement" needs pairs. With "forces", −∂E/∂r,
    the energy is that of the positions shown, not after relaxation."""
    feedback: Literal["features", "positions"] = "features"
    """What a recycle passes to the next: "features", or also "positions" moved by the predicted
    displacement, which needs more than one recycle."""

    @property
    def cutoff(self) -> float | None:
        """Å within which pairs are needed; None where no part looks at pairs."""
        return max((x.cutoff for x in (self.pairs, self.images) if x is not None), default=None)

    def rules(self) -> list[Rule]:
        """Rules between these settings."""
        return _rules(self) + _rules_of_pairs(self) + _rules_of_images(self)


def _rules(model: EnergyConfig) -> list[Rule]:
    width, heads, outputs = model.embed_dim, model.num_heads, model.outputs
    different = "energy" in outputs and len(set(outputs)) == len(outputs)
    moving = "displacement" in outputs
    local = model.pairs is not None and model.pairs.filter
    seen = any(x is not None for x in (model.rpe, model.spectral, model.pairs, model.images))
    rules = [
        (width % heads != 0, "embed_dim", f"a multiple of model.num_heads, {heads}"),
        (not different, "outputs", "a list of different outputs with energy"),
        (moving and model.pairs is None, "outputs", "no displacement where model.pairs is null"),
        ("forces" in outputs and not seen, "outputs", "no forces where energies see no positions"),
    ]
    if model.spectral is not None and model.spectral.charges:
        rules += [
            # Their interaction grows with the system.
            (model.readout == "mean", "spectral.charges", "0 where model.readout is mean"),
            (not local, "spectral.charges", "0 without model.pairs with filter"),
        ]
    if model.feedback == "positions":
        rules += [
            ("forces" in outputs, "feedback", "features where model.outputs has forces"),
            (not moving, "feedback", "features where model.outputs has no displacement"),
            (model.recycles == 1, "feedback", "features where model.recycles is 1"),
        ]
    if model.attention == "none":
        parts = "model.spectral, or model.pairs with filter"
        rules += [
            (model.rpe is not None, "attention", "another one, or model.rpe null"),
            (not local and model.spectral is None, "attention", parts),
        ]
    return rules


def _rules_of_pairs(model: EnergyConfig) -> list[Rule]:
    pairs, layers, far = model.pairs, model.num_layers, model.far_blocks or 0
    most = f"null or at most model.num_layers, {layers}"
    rules = [(far > layers, "far_blocks", most)]
    if pairs is None:
        return rules
    used = pairs.filter or pairs.density or pairs.correction or "displacement" in model.outputs
    plain = model.images is None and model.attention in ("linear", "exact")
    corrected = "false: only linear or exact attention without images is corrected"
    homeless = pairs.vectors > 0 and not pairs.density
    unfiltered = pairs.filter_vectors > 0 and not pairs.filter
    return [
        *rules,
        ((pairs.vector_blocks or 0) > layers, "pairs.vector_blocks", most),
        (homeless, "pairs.vectors", "0 where model.pairs.density is false"),
        (unfiltered, "pairs.filter_vectors", "0 where model.pairs.filter is false"),
        (not used, "pairs", "null, or one of filter, density and correction"),
        (pairs.correction and not plain, "pairs.correction", corrected),
    ]


def _rules_of_images(model: EnergyConfig) -> list[Rule]:
    if (images := model.images) is None:
        return []
    gaussian = images.mask == "gaussian"
    return [
        (gaussian and images.pair_types, "images.pair_types", "false with mask gaussian"),
        (gaussian and images.density, "images.density", "false with mask gaussian"),
        (model.attention != "exact", "attention", "exact, which model.images needs"),
        (model.rpe is not None, "images", "null where model.rpe is not: one gives the positions"),
    ]


def named_config(name: str) -> EnergyConfig:
    """The configuration of a named model: ``EnergyModel`` of it is untrained.

    Args:
        name: of a folder in `models/`, as "flt-small".

    Raises:
        ValueError: an unknown name, with the known ones.

    Examples:
        >>> config = named_config("flt-small")
        >>> config.embed_dim, config.pairs.cutoff, config.outputs
        (64, 5.0, ['energy', 'displacement'])
    """
    import yaml

    file = find_shipped(name, "models/*/model.yaml")
    try:
        return EnergyConfig.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))
    except ValidationError as error:
        raise ValueError(f"{file}: {explain(error, EnergyConfig, 'model.')}") from error


def merged(base: Any, over: Any) -> Any:
    """`over` on `base`, key by key; of two families (``{name: …}``) the later one replaces."""
    if not isinstance(base, Mapping) or not isinstance(over, Mapping):
        return over
    family = "name" in over and "name" in base and "paths" not in {*base, *over}
    if family and over["name"] != base["name"]:
        return over
    return {**base, **{key: merged(base.get(key), value) for key, value in over.items()}}


def explain(error: ValidationError, schema: type[Settings], prefix: str = "") -> str:
    """The first problem in one line: the key, its value, what is expected."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    *outer, last = (str(part) for part in first["loc"]) if first["loc"] else ("",)
    path = prefix + "".join(f"{part}." for part in outer)
    if first["type"] == "extra_forbidden":
        for name in outer:
            kind = schema.model_fields[name].annotation
            kinds = (x for x in (kind, *get_args(kind)) if isinstance(x, type))
            schema = next(x for x in kinds if issubclass(x, Settings))
        return _unknown(path, last, schema.model_fields)
    expected = first["msg"].removeprefix("Input should be ")
    if first["type"] in ("model_type", "dict_type"):
        expected = "a mapping, {key: value}"
    shown = "null" if first["input"] is None else repr(first["input"])
    return f"{path}{last} is {shown}, expected {expected}"


def _unknown(path: str, key: str, known: Iterable[str]) -> str:
    return f"unknown key '{path}{key}': {nearest(key, known, path)}"
