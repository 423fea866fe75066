"""Settings that ask for something which the rest of a model would never give."""

from __future__ import annotations

from dataclasses import replace

from flt_mol.models.config import EnergyConfig

_CENTRED_ONLY = ("pair_types", "density")


def refuse_idle(config: EnergyConfig) -> None:
    """Refuse settings without effect.

    Modifiers of a part that is switched off are no such settings: who leaves out a part to see what
    it brings need not clear up after it.

    Raises:
        ValueError: the key, what it asks for, why it would not come, and what to set.

    Example:
        >>> refuse_idle(EnergyConfig(num_layers=2, far_blocks=3))
        Traceback (most recent call last):
        ValueError: model.far_blocks is 3, the last ones of model.num_layers, which is 2: expected
        at most 2, or null for all
    """
    for key, value in _block_counts(config).items():
        if value is not None and value > config.num_layers:
            raise ValueError(
                f"model.{key} is {value}, the last ones of model.num_layers, which is "
                f"{config.num_layers}: expected at most {config.num_layers}, or null for all"
            )
    if config.feedback == "positions" and config.recycles == 1:
        raise ValueError(
            "model.feedback is 'positions', which moves atoms between passes, and model.recycles "
            "is 1: set it to 2 or more, or feedback to features"
        )
    images = config.images
    if images is not None and images.mask == "gaussian":
        asked = [name for name in _CENTRED_ONLY if getattr(images, name)]
        if asked:
            raise ValueError(
                f"model.images.{asked[0]} is true, and model.images.mask is 'gaussian', which has "
                f"no such part: set {' and '.join(asked)} to false, or mask to centred"
            )


def without_idle(config: EnergyConfig) -> EnergyConfig:
    """The same model without settings that `refuse_idle` refuses: weights of before they were.

    Example:
        >>> without_idle(EnergyConfig(num_layers=2, far_blocks=3)).far_blocks is None
        True
    """
    far, vectors = (value or 0 for value in _block_counts(config).values())
    if far > config.num_layers:
        config = replace(config, far_blocks=None)
    if config.pairs is not None and vectors > config.num_layers:
        config = replace(config, pairs=replace(config.pairs, vector_blocks=None))
    if config.recycles == 1:
        config = replace(config, feedback="features")
    if config.images is not None and config.images.mask == "gaussian":
        images = replace(config.images, pair_types=False, density=False)
        config = replace(config, images=images)
    return config


def _block_counts(config: EnergyConfig) -> dict[str, int | None]:
    vectors = None if config.pairs is None else config.pairs.vector_blocks
    return {"far_blocks": config.far_blocks, "pairs.vector_blocks": vectors}
