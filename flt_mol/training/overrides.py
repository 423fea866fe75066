"""Paths among the overrides of a command line, kept out of Hydra's grammar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

PATHS = "data.paths."
_KEYS = ("output", "data.name")


def split_paths(overrides: Sequence[str]) -> tuple[list[str], dict[str, str | None]]:
    r"""Overrides for Hydra, and apart from them the paths, as typed.

    Hydra's grammar takes quotes, commas, brackets, = and more for its own; paths have them too.
    One pair of quotes around a path is taken off, ``null`` stands for None, and a value with an
    interpolation ``${…}`` stays Hydra's.

    Example:
        >>> split_paths(["training.epochs=2", "output=Jo's, 2nd=run"])
        (['training.epochs=2'], {'output': "Jo's, 2nd=run"})
    """
    rest: list[str] = []
    paths: dict[str, str | None] = {}
    for override in overrides:
        key, equals, value = override.partition("=")
        key = key.lstrip("+")
        if not equals or "${" in value:
            rest.append(override)
        elif key in _KEYS or (key.startswith(PATHS) and key != PATHS):
            paths[key] = _plain(value)
        elif key == PATHS.rstrip("."):
            found = _mapping(override)
            paths.update({f"{PATHS}{split}": str(path) for split, path in (found or {}).items()})
            if found is None:
                rest.append(override)
        else:
            rest.append(override)
    return rest, paths


def _plain(value: str) -> str | None:
    if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        return value[1:-1]
    return None if value == "null" else value


def _mapping(override: str) -> Mapping[str, Any] | None:
    """The value of ``data.paths={split: path}``; None where Hydra should say what is wrong."""
    try:
        value = OverridesParser.create().parse_override(override).value()
    except HydraException:
        return None
    if not isinstance(value, Mapping):
        return None
    # Values may be Hydra's quoted strings.
    return {str(key): getattr(path, "text", path) for key, path in value.items()}
