"""Overrides of a command line: paths are kept out of Hydra's grammar, the rest has to follow it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Sweep
from hydra.errors import HydraException

PATHS = "data.paths."
_KEYS = ("output", "data.name", "finetune.checkpoint")
_TOKENS = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[{}\[\](),:]|[^{}\[\](),:'"]+""")


def split_paths(overrides: Sequence[str]) -> tuple[list[str], dict[str, str | None]]:
    r"""Overrides for Hydra, and apart from them the paths, as typed.

    Hydra's grammar takes quotes, commas, brackets, = and more for its own; paths have them too.
    One pair of quotes around a path is taken off, ``null`` stands for None, and a value with an
    interpolation ``${…}`` stays Hydra's.

    Raises:
        ValueError: a mapping of paths with something else than a path.

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
            _refuse_repeated(override)
            for split, path in (found or {}).items():
                if path is None or isinstance(path, list | Mapping):
                    raise ValueError(f"{PATHS}{split} is {path!r}, expected a path")
                paths[f"{PATHS}{split}"] = str(path)
            if found is None:
                rest.append(override)
        else:
            rest.append(override)
    return rest, paths


def check_overrides(overrides: Iterable[str]) -> None:
    """Refuse what Hydra cannot read, would take for several runs, or would silently drop.

    Raises:
        ValueError: no valid override, several values, a setting of Hydra itself, or a key that is
            given twice in one mapping.

    Example:
        >>> check_overrides(["training.epochs=1,2"])
        Traceback (most recent call last):
        ValueError: 'training.epochs=1,2' gives several values, and a run takes one; a list is
        written [a,b], and text with commas in quotes
    """
    parser = OverridesParser.create()
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            reason = str(error).split("\n")[0]
            raise ValueError(
                f"'{text}' cannot be read ({reason}); expected KEY=VALUE, where a list is written "
                "[a,b], a mapping {a: 1, b: 2}, and text with any of ,:=[]{} in quotes"
            ) from None
        if not override.key_or_group:
            raise ValueError(f"'{text}' has no key; expected KEY=VALUE")
        if override.key_or_group.partition("/")[0].partition(".")[0] == "hydra":
            raise ValueError(
                f"'{text}' has no effect: of hydra, only the composing of settings is used; "
                "output=FOLDER says where a run goes"
            )
        if _has_sweep(override.value()):
            raise ValueError(
                f"'{text}' gives several values, and a run takes one; a list is written [a,b], and "
                "text with commas in quotes"
            )
        _refuse_repeated(text)


def _has_sweep(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        return any(map(_has_sweep, value))
    return isinstance(value, Sweep)


def _refuse_repeated(override: str) -> None:
    """Of a key that a mapping has twice, Hydra's parser would keep the last value only."""
    levels: list[set[str] | None] = []  # keys of the braces around; None for brackets
    key: str | None = None  # what a colon would end
    for token in _TOKENS.findall(override.partition("=")[2]):
        if token in ("{", "[", "("):
            levels.append(set() if token == "{" else None)
        elif token in ("}", "]", ")") and levels:
            levels.pop()
        elif token == ":" and key and levels and levels[-1] is not None:
            if key in levels[-1]:
                raise ValueError(f"'{override}' gives '{key}' twice: leave one of them out")
            levels[-1].add(key)
        elif key == "":
            key = token.strip()
            continue
        key = "" if token in ("{", ",") else None


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
