"""Named models, before any training: the configurations in `models/`."""

from __future__ import annotations

from flt_mol.files import shipped_folder
from flt_mol.models.config import EnergyConfig

__all__ = ["named_config"]


def named_config(name: str) -> EnergyConfig:
    """The configuration of a named model, anew with each call: ``EnergyModel`` of it is untrained.

    Weights of those that are shipped with some come by :func:`flt_mol.load_model`.

    Args:
        name: of a folder in `models/`, as "flt-small".

    Raises:
        ValueError: an unknown name, with the known ones; or a file that was made unusable.

    Example:
        >>> config = named_config("flt-small")
        >>> config.embed_dim, config.pairs.cutoff, config.outputs
        (64, 5.0, ['energy', 'displacement'])
    """
    import yaml  # models need torch and numpy only, to be built into other nets

    files = {file.parent.name: file for file in shipped_folder("models").glob("*/model.yaml")}
    if name not in files:
        raise ValueError(f"no model called '{name}'; known: {', '.join(sorted(files))}")
    try:
        return EnergyConfig.from_dict(yaml.safe_load(files[name].read_text(encoding="utf-8")))
    except (TypeError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{files[name]}: {error}") from error
