"""The page of all settings of a run, from their classes: docs/settings.md."""

from __future__ import annotations

import inspect
import json
from typing import get_args

from flt_mol.models.config import Settings
from flt_mol.training.config import RunConfig

HEAD = """\
# Settings of a run

Every key of `flt-mol train`, with its default: in a run's yaml file, nested by its dots, or on the
command line as `KEY=VALUE`. Runs in `configs/` and models in `models/` set some of them;
`flt-mol train NAME --print-config` prints all settings of a run. [How to use them](train.md).

This page is generated: `python scripts/settings_page.py > docs/settings.md`.
"""


def parts_of(schema: type[Settings], prefix: str = "") -> list[tuple[str, type[Settings]]]:
    """Classes of settings with the prefixes of their keys, in order."""
    found = [(prefix, schema)]
    for name, field in schema.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, Settings):
                found += parts_of(kind, f"{prefix}{name}.")
    return found


def table(prefix: str, schema: type[Settings]) -> str:
    """A markdown table of one class."""
    lines = ["| key | default | |", "|---|---|---|"]
    defaults = schema()
    for name, field in schema.model_fields.items():
        default = getattr(defaults, name)
        shown = f"`{json.dumps(default)}`" if not isinstance(default, Settings) else "below"
        text = " ".join((field.description or "").split()).replace("|", r"\|")
        lines.append(f"| `{prefix}{name}` | {shown} | {text} |")
    return "\n".join(lines)


def settings_page() -> str:
    """The whole page."""
    parts = [HEAD.rstrip()]
    for prefix, schema in parts_of(RunConfig):
        if prefix:
            parts.append(f"## {prefix.rstrip('.')}")
            parts.append(" ".join((inspect.getdoc(schema) or "").split("\n\n")[0].split()))
        parts.append(table(prefix, schema))
    return "\n\n".join(parts)


if __name__ == "__main__":
    print(settings_page())
