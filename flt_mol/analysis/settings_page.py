"""The page of all settings of a run, out of the schema: docs/settings.md."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

from flt_mol.training.config import RunConfig

__all__ = ["settings_page"]

_HEAD = """\
# Settings of a run

Every key of `flt-mol train`, with its default: in a run's yaml file, nested by its dots, or on the
command line as `KEY=VALUE`. Runs in `configs/` and models in `models/` set some of them;
`flt-mol train NAME --print-config` shows what a run ends up with. [How to use them](train.md).

This page is made of the schema: `python scripts/settings_page.py > docs/settings.md`.
"""
_ENTRY = re.compile(r"^ {4}(\w+): (.*?)(?=^ {4}\w+: |\Z)", flags=re.MULTILINE | re.DOTALL)


def settings_page() -> str:
    """Markdown: a table for each part of the schema, keys as they are typed."""
    parts = [_HEAD.rstrip("\n"), _table("", RunConfig, RunConfig(), whole=False)]
    parts += [text for prefix, schema in _schemas("", RunConfig) for text in _part(prefix, schema)]
    return "\n\n".join(parts) + "\n"


def _schemas(prefix: str, schema: type) -> Iterator[tuple[str, type]]:
    """Parts that have settings of their own, in order, also those that are null by default."""
    for name, kind in get_type_hints(schema).items():
        for part in get_args(kind) or (kind,):
            if isinstance(part, type) and is_dataclass(part):
                yield f"{prefix}{name}.", part
                yield from _schemas(f"{prefix}{name}.", part)


def _part(prefix: str, schema: Any) -> list[str]:
    return [f"## {prefix.rstrip('.')}", _first_line(schema), _table(prefix, schema, schema())]


def _first_line(schema: type) -> str:
    text = (inspect.getdoc(schema) or "").split("\n\n")[0]
    return text.replace("\n", " ")


def _table(prefix: str, schema: Any, defaults: Any, whole: bool = True) -> str:
    told = _described(schema)
    lines = ["| key | default | |", "|---|---|---|"]
    for one in fields(schema):
        default = getattr(defaults, one.name)
        if is_dataclass(default) and not whole:
            continue
        shown = "[below](#" + f"{prefix}{one.name}".replace(".", "") + ")"
        if not is_dataclass(default):
            shown = f"`{_yaml(default)}`"
        lines.append(f"| `{prefix}{one.name}` | {shown} | {told[one.name]} |")
    return "\n".join(lines)


def _described(schema: type) -> dict[str, str]:
    """What the docstring says of each field."""
    text = (inspect.getdoc(schema) or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    told = {name: " ".join(words.split()) for name, words in _ENTRY.findall(text)}
    return {name: _plain(words) for name, words in told.items()}


def _plain(words: str) -> str:
    """Markdown of a docstring's words."""
    words = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", words).replace("``", "`")
    return words.replace("|", r"\|").replace("None", "null")


def _yaml(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, list):
        return f"[{', '.join(map(_yaml, value))}]"
    return str(value) if value != {} else "{}"
