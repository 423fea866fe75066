"""The numbers and words of an EnergyConfig, each by itself."""

from __future__ import annotations

from flt_mol.functional.fourier import SPLITS
from flt_mol.models.config import ATTENTION, EnergyConfig, RPEConfig
from flt_mol.models.rules import BELOW_ONE, POSITIVE, SEED, SIZE, Rule, check_settings, one_of
from flt_mol.nn.spectrum.terms import FORMS

_MODEL: dict[str, Rule] = {
    "embed_dim": SIZE,
    "num_heads": SIZE,
    "num_layers": SIZE,
    "recycles": SIZE,
    "ffn_dim": SIZE,
    "num_features": SIZE,
    "redraw_every": (
        (lambda value: value is None or value >= 1),
        "null (never), or at least 1",
    ),
    "attention": one_of(ATTENTION),
    "dropout": BELOW_ONE,
    "seed": SEED,
}
_RPE: dict[str, Rule] = {
    "num_terms": SIZE,
    "form": one_of(FORMS),
    "sigma_min": POSITIVE,
    "sigma_max": POSITIVE,
    "num_frequencies": SIZE,
    "frequency_sigma_min": POSITIVE,
    "frequency_sigma_max": POSITIVE,
    "split": one_of(SPLITS),
}


def check_numbers(config: EnergyConfig) -> None:
    """Refuse a value of another type, or out of range.

    Raises:
        ValueError: with its key and what is expected.
    """
    check_settings(config, _MODEL, "model.")
    if config.embed_dim % config.num_heads:
        raise ValueError(
            f"model.embed_dim is {config.embed_dim}, expected a multiple of model.num_heads, "
            f"{config.num_heads}"
        )


def check_rpe(rpe: RPEConfig) -> None:
    """The same for the sampled relative positional encoding.

    Raises:
        ValueError: with its key and what is expected.
    """
    check_settings(rpe, _RPE, "model.rpe.")
    for name in ("sigma", "frequency_sigma"):
        low, high = getattr(rpe, f"{name}_min"), getattr(rpe, f"{name}_max")
        if low > high:
            raise ValueError(
                f"model.rpe.{name}_min is {low}, expected no more than model.rpe.{name}_max, {high}"
            )
